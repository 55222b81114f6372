"""Files and folders that appear whole or not at all, and that one process writes at a time."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from blockdraft.errors import BlockdraftError

UNFINISHED = ".unfinished"


class FolderInUseError(BlockdraftError):
    """Another process is writing into the folder."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file to; on leaving, it is synced to disk and takes the place of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on leaving, it is synced to disk and takes the place of ``folder``."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        if folder.is_dir():
            shutil.rmtree(folder)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync(folder.parent)


def write_json(values: Any, path: Path, *, indent: int | None = 2) -> None:
    """Write plain values as JSON, whole or not at all."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(values, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def complete_lines(path: Path, *, truncate: bool = False) -> list[bytes]:
    """Read the lines of a file that is appended to, leaving out a last one that a crash cut short.

    With ``truncate`` that rest is also cut off the file, so that the next line starts where it should.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if truncate and whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder, and needs no such call
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left behind; only the process that holds the folder's lock may do so."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, or raise `FolderInUseError` if another process has it; a process that dies lets go."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUseError(
            f"another process is writing into {folder}; wait until it has finished, or choose another folder with --out"
        ) from None
    try:
        yield
    finally:
        lock.release()
