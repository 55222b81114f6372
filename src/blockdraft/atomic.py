"""Files and folders that appear whole or not at all, and that one process writes at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file to, which then takes the place of ``path`` in one go, synced to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def whole_lines(path: Path, *, mend: bool = False) -> list[bytes]:
    """The lines of a file that is appended to; one that a crash cut short is left out, and cut off if asked for."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed left unfinished; for the one who holds the lock."""
    for unfinished in folder.glob("*.unfinished"):
        unfinished.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock; False if another process has it. A process that dies lets go of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
