"""Prompts on disk: JSON lines, UTF-8, written whole or not at all."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, cast

from blockdraft.data.prompts import Prompt, PromptError
from blockdraft.files import atomic_write


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file that ``blockdraft data prompts`` wrote, or of any with the same keys.

    A row has ``id`` and ``turns``, and may have ``system`` and ``source``. Anything
    else, an id that comes twice, or no rows at all is a `PromptError`.
    """
    path = Path(path)
    found: dict[str, Prompt] = {}
    for where, row in parse_rows(path):
        try:
            prompt = Prompt.from_dict(row)
        except ValueError as error:
            raise PromptError(
                f"{path}, {where}: {error}; `blockdraft data prompts --from {path}` reads other layouts"
            ) from error
        if prompt.id in found:
            raise PromptError(f"{path}, {where}: the id {prompt.id!r} is taken by an earlier row; ids must differ")
        found[prompt.id] = prompt
    if not found:
        raise PromptError(f"{path}: no prompts in it")
    return list(found.values())


def write_prompts(files: Mapping[Path, Sequence[Prompt]], *, force: bool = False) -> None:
    """Write each file, after a look at all of them.

    A file that is there with other content stays, and nothing is written, unless ``force``.
    No prompts mean no file: one that is there would be left over from an earlier choice.
    """
    contents = {path: _encode(prompts) for path, prompts in files.items()}
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise PromptError(f"{path} is a folder; name a file to write")
            if path.exists() and not force and path.read_bytes() != content:
                left_over = "" if content else " It is left over from an earlier choice: nothing is held out now."
                raise PromptError(f"{path} exists with other content; --force replaces it.{left_over}")
        for path, content in contents.items():
            if content:
                with atomic_write(path) as unfinished:
                    unfinished.write_bytes(content)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise PromptError(f"cannot write {error.filename}: {error.strerror}") from error


def parse_rows(path: Path) -> Iterator[tuple[str, object]]:
    """The rows of a JSON-lines file or a JSON array, gzipped or not, each with its place (``line 3``).

    Blank lines are skipped. JSON that is broken is an error that names its line.
    """
    try:
        with _opened(path) as stream:
            number, start = _first_line(stream)
            if start.lstrip().startswith(b"["):
                array = _parse(start + stream.read(), path, number)
                yield from ((f"row {index}", row) for index, row in enumerate(cast(list[object], array)))
                return
            for at, line in enumerate(chain([start], stream), number):
                if line.strip():
                    yield f"line {at}", _parse(line, path, at)
    except (OSError, EOFError, zlib.error) as error:  # the latter two: a gzip file that stops early or is damaged
        raise PromptError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _encode(prompts: Sequence[Prompt]) -> bytes:
    return "".join(json.dumps(prompt.to_dict(), ensure_ascii=False) + "\n" for prompt in prompts).encode()


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _first_line(stream: IO[bytes]) -> tuple[int, bytes]:
    """The first line that is not blank, without a byte order mark, and its number."""
    number, line = 1, stream.readline().removeprefix(b"\xef\xbb\xbf")
    while line and not line.strip():
        number, line = number + 1, stream.readline()
    return number, line


def _parse(text: bytes, path: Path, number: int) -> object:
    """JSON that starts on this line."""
    try:
        return json.loads(text.decode().rstrip())  # a line break would count as one more line
    except UnicodeDecodeError as error:
        at = number + text.count(b"\n", 0, error.start)
        raise PromptError(
            f"{path}, line {at}: not UTF-8 text; JSON lines are read from a file, parquet from its folder"
        ) from error
    except json.JSONDecodeError as error:
        raise PromptError(f"{path}, line {number + error.lineno - 1}: broken JSON: {error.msg}") from error
    except RecursionError as error:
        raise PromptError(f"{path}, line {number}: JSON that is nested too deeply") from error
