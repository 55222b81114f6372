"""Write files and folders that appear whole or not at all, one process at a time, and read them strictly.

Whatever another process, another version or an editor may have left in a file's place is an error that names the file:
`read_json` and `read_model` are how every JSON file of ours is read. `Provenance` says which versions wrote it.
"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from blockdraft.errors import BlockdraftError

UNFINISHED = ".unfinished"

Model = TypeVar("Model", bound=BaseModel)


class FolderInUseError(BlockdraftError):
    """Another process is writing into the folder."""


class DiskSpaceError(BlockdraftError):
    """A stage would need more room on the disk than there is."""


# Reading


def read_bytes(path: Path) -> bytes:
    """Read a regular file; an ``OSError`` for anything else, since a pipe may wait forever and a device never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if path.is_dir() else "Not a regular file", str(path))
    return path.read_bytes()


def parse_json(content: bytes) -> Any:
    """Parse JSON; a ``ValueError`` says in one line what is wrong with it.

    That includes what Python would take: NaN and infinity, a key that appears twice, nesting without end, and half of a
    character, which could not be written or shown again.
    """
    try:
        text = content.decode()
        values = json.loads(text, parse_constant=_no_number, object_pairs_hook=_single_keys)
        if "\\u" in text:
            json.dumps(values, ensure_ascii=False).encode()
        return values
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a character, a lone surrogate") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}" if content.strip() else "it is empty") from error


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return values


def read_json(path: Path, mistake: type[BlockdraftError], advice: str = "") -> Any:
    """Read a JSON file; a ``mistake`` that names the file and the reason if that cannot be done.

    advice: what to do about it, appended to the message.
    """
    try:
        return parse_json(read_bytes(path))
    except OSError as error:
        raise mistake(f"{path} cannot be read: {error.strerror}{advice and f'; {advice}'}") from error
    except ValueError as error:
        raise mistake(f"{path} is damaged: {error}{advice and f'; {advice}'}") from error


def read_model(path: Path, kind: type[Model], mistake: type[BlockdraftError], advice: str = "") -> Model:
    """Read a JSON file into its model, as strictly as that is; a ``mistake`` names the file, the key and the reason."""
    values = read_json(path, mistake, advice)
    try:
        return kind.model_validate(values)
    except (ValidationError, RecursionError) as error:
        raise mistake(f"{path} is damaged: {explain(error)}{advice and f'; {advice}'}") from error


def explain(error: Exception) -> str:
    """Say the first mistake of a validation in one line: where in the file it is, and what is wrong."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    first = error.errors(include_url=False)[0]
    said = str(first["msg"]).removeprefix("Value error, ")
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), said]))


# Writing


def refuse_full_disk(folder: Path, num_bytes: int, what: str) -> None:
    """Raise if the disk that holds a folder, there or to be made, has less free space than a stage is known to need."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise DiskSpaceError(
            f"{what} need about {size_in_words(num_bytes)} in {folder}, and the disk has {size_in_words(free)} left; "
            "make room, or choose another folder"
        )


def size_in_words(num_bytes: int) -> str:
    """Return a number of bytes as ``1.5 GiB``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 2**10:,.1f} KiB"


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


@contextmanager
def naming_write_errors(path: Path) -> Iterator[None]:
    """Turn what libraries raise where the disk is full or not writable into an ``OSError`` that names the path.

    safetensors, tokenizers and PyTorch have errors of their own, which hold the system's words.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found:
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        if "write failed" in str(error) or "failed writing" in str(error):
            raise OSError(errno.EIO, "Writing failed; the disk may be full", str(path)) from error
        raise


def write_json(values: Any, path: Path, *, indent: int | None = 2) -> None:
    """Write plain values as JSON, whole or not at all."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(values, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def complete_lines(path: Path, *, truncate: bool = False) -> list[bytes]:
    """Read the lines of a file that is appended to, leaving out a last one that a crash cut short.

    With ``truncate`` that rest is also cut off the file, so that the next line starts where it should.
    """
    content = read_bytes(path)
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
    """Return the SHA-256 checksum of a regular file, in hexadecimal digits."""
    if not path.is_file():
        read_bytes(path)  # says what is there instead
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what killed writers left of one file or of all in a folder; only the process that holds its lock may."""
    for path in folder.glob(f"{name}*{UNFINISHED}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def exclusive(folder: Path, *, seconds: float = 0) -> Iterator[None]:
    """Hold a folder's lock, or raise `FolderInUseError` if another process has it; a process that dies lets go.

    seconds: how long to wait for the other process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=seconds)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUseError(
            f"another process is writing into {folder}; wait until it has finished, or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Yield whether this process alone holds a lock file, which stays; a process that dies lets go of it.

    Whoever holds it must look whether the work is done already: another may have held it a moment before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


# What every artefact says of its making


class Provenance(BaseModel):
    """Holds the versions of blockdraft, its main dependencies and Python, and the git revision if there is one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    blockdraft: str
    torch: str
    transformers: str
    python: str
    git: str | None = None

    @classmethod
    def here(cls) -> "Provenance":
        """Return the provenance of what this process makes."""
        return cls(
            blockdraft=package_version("blockdraft"),
            torch=package_version("torch"),
            transformers=package_version("transformers"),
            python=platform.python_version(),
            git=git_revision(),
        )


def package_version(name: str) -> str:
    """Return the version of an installed package, or ``unknown``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def git_revision() -> str | None:
    """Return the revision of the checkout that this package runs from; None if it is installed."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
