"""A reader never sees half a file, and two writers never share a folder."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict

from blockdraft.errors import BlockdraftError, first_line, is_out_of_memory
from blockdraft.files import (
    DiskSpaceError,
    FolderInUseError,
    atomic_folder,
    atomic_write,
    exclusive,
    naming_write_errors,
    read_json,
    read_model,
    refuse_full_disk,
    sha256,
)


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


# Reading what somebody else may have changed


class Sizes(BaseModel):
    model_config = ConfigDict(extra="forbid")

    width: int


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is damaged: it is empty"),
        (b"{", "is damaged: it is not JSON: Expecting property name"),
        (b"\xff", "is damaged: it is not UTF-8 text"),
        (b"[" * 100_000, "is damaged: it is nested too deeply"),
        (b'{"width": NaN}', "is damaged: NaN is not a number"),
        (b'{"width": 1, "width": 2}', "is damaged: the key 'width' appears twice"),
        (b'{"width": "\\ud800"}', "is damaged: it holds half of a character"),
        (b'{"\\udc00": 1}', "is damaged: it holds half of a character"),
        (b"[]", "is damaged: Input should be"),
        (b'{"width": "x"}', "is damaged: width: Input should be a valid integer"),
        (b'{"width": 1, "depth": 2}', "is damaged: depth: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_file_is_named_in_one_line_with_the_advice(tmp_path, content, reason):
    path = tmp_path / "sizes.json"
    path.write_bytes(content)
    with pytest.raises(BlockdraftError) as caught:
        read_model(path, Sizes, BlockdraftError, "make it anew")
    assert str(caught.value).startswith(f"{path} {reason}")
    assert str(caught.value).endswith("; make it anew")
    assert "\n" not in str(caught.value)


def test_a_good_file_is_read(tmp_path):
    (tmp_path / "sizes.json").write_text('{"width": 3}')
    assert read_model(tmp_path / "sizes.json", Sizes, BlockdraftError) == Sizes(width=3)
    assert read_json(tmp_path / "sizes.json", BlockdraftError) == {"width": 3}
    (tmp_path / "pair.json").write_text('"\\ud83d\\ude42 \\u001b"')
    assert read_json(tmp_path / "pair.json", BlockdraftError) == "🙂 \x1b"


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_pipes_devices_and_folders_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("pipe", "Not a regular"),
        ("endless", "Not a regular"),
        ("folder", "Is a dir"),
        ("x", "No such"),
    ):
        with pytest.raises(BlockdraftError, match=f"{name} cannot be read: {reason}"):
            read_json(tmp_path / name, BlockdraftError)
        with pytest.raises(OSError, match=reason):
            sha256(tmp_path / name)


# Disks


def test_a_stage_that_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
    refuse_full_disk(tmp_path / "not" / "there", 3 * 2**30, "the features")
    with pytest.raises(DiskSpaceError, match=r"the features need about 4\.0 GiB in .*, and the disk has 3\.0 GiB left"):
        refuse_full_disk(tmp_path / "not" / "there", 4 * 2**30, "the features")


@pytest.mark.parametrize(
    ("said", "code"),
    [("I/O error: No space left on device (os error 28)", errno.ENOSPC), ("file write failed", errno.EIO)],
)
def test_what_libraries_say_of_a_full_disk_becomes_an_error_of_the_system(tmp_path, said, code):
    with pytest.raises(OSError) as caught, naming_write_errors(tmp_path / "weights"):  # noqa: PT011
        raise RuntimeError(said)
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "weights"))


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"), naming_write_errors(tmp_path):
        raise RuntimeError("a bug")


def test_errors_of_others_in_one_line():
    assert first_line(ValueError("\nwrong width\nand more")) == "wrong width"
    assert first_line(KeyError("vocab")) == "KeyError: 'vocab'"
    assert first_line(TypeError()) == "TypeError"
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
