"""A reader never sees half a file, and two writers never share a folder."""

import os
import subprocess
import sys

import pytest

from blockdraft.files import FolderInUseError, atomic_folder, atomic_write, exclusive


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "deep" / "file"
    for content in ("old", "new"):
        with atomic_write(path) as unfinished:
            unfinished.write_text(content)
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("when", ["writing", "syncing"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, when):
    path = tmp_path / "file"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    if when == "syncing":
        monkeypatch.setattr(os, "fsync", full)

    def write():
        with atomic_write(path) as unfinished:
            unfinished.write_text("new")
            if when == "writing":
                full(None)

    with pytest.raises(OSError, match="No space"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_keeps_other_processes_out_and_is_let_go(tmp_path):
    code = (
        "import sys, pathlib; from blockdraft.files import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])): print('ours')"
    )

    def another():
        return subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)

    with exclusive(tmp_path):
        refused = another()
        assert refused.stdout == ""
        assert "another process is writing into" in refused.stderr
        with pytest.raises(FolderInUseError), exclusive(tmp_path):
            pass
    assert another().stdout == "ours\n"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "checkpoint"
    for content in ("old", "new"):
        with atomic_folder(folder) as unfinished:
            (unfinished / "weights").write_text(content)
            assert not folder.exists() or (folder / "weights").read_text() == "old"
        assert (folder / "weights").read_text() == content

    def fail():
        with atomic_folder(folder) as unfinished:
            (unfinished / "weights").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert (folder / "weights").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]
