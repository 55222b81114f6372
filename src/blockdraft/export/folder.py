"""Export folders: they appear whole, and replace only their like."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockdraft.drafters import CheckpointError
from blockdraft.files import sync


@contextmanager
def new_folder(folder: Path, like: frozenset[str], *, force: bool) -> Iterator[Path]:
    """A folder to fill, which then takes its place in one go.

    Args:
        folder: where it goes. One that holds anything is refused, unless it may be replaced.
        like: names of the files of such a folder; nothing else is ever removed.
        force: replace a folder that holds only such files.
    """
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there and not force:
        raise CheckpointError(f"{folder} is not empty; --force replaces an export that is there")
    if there - like:
        raise CheckpointError(
            f"{folder} holds more than an export ({', '.join(sorted(there - like)[:3])}); choose another"
        )
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
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
