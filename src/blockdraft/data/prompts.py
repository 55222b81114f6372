"""Read and write prompts, the user's side of conversations, from our own files and other people's data sets."""

import gzip
import json
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self, cast

from blockdraft.errors import BlockdraftError
from blockdraft.files import atomic_write


class PromptError(BlockdraftError):
    """Prompts cannot be read, chosen or written; the message says why."""


@dataclass(frozen=True)
class Prompt:
    """Holds the user's messages of one conversation. The assistant's are not kept: the target writes its own.

    id: a name that is unique within a file.
    turns: the user's messages, in order; there is at least one, and none is blank.
    system: the system message that the conversation starts with.
    source: where the prompt came from, such as the name of a data set.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("no user message")
        for text in self.turns:
            _check_text(text, "user message")
        _check_text(self.id, "id")
        for what, optional in (("system message", self.system), ("source", self.source)):
            if optional is not None:
                _check_text(optional, what)

    @property
    def opening(self) -> list[dict[str, str]]:
        """Give the system message, if there is one, and the first turn, as `generate` takes them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.turns[0]}]

    @property
    def num_chars(self) -> int:
        """Give the number of characters in all messages, the system message included."""
        return sum(map(len, self.turns)) + len(self.system or "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, leaving out what is None."""
        values = asdict(self) | {"turns": list(self.turns)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Make a prompt of what `to_dict` returned; an unknown or missing key is a ``ValueError``."""
        if not isinstance(values, Mapping):
            raise ValueError("not an object")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                raise ValueError(
                    f"unknown key {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {known}")
                )
        missing = [name for name in ("id", "turns") if name not in values]
        if missing:
            raise ValueError(f"no key {missing[0]!r}")
        if not isinstance(values["turns"], list):
            raise ValueError("turns is not a list")
        return cls(**{**values, "turns": tuple(values["turns"])})


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} is not text")
    if not text.strip():
        raise ValueError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid Unicode") from None  # a lone surrogate: no file can hold it


# Rows of data sets: three layouts, many role names

LAYOUTS = ("messages", "conversations", "turns", "prompt")
"""The keys that may hold a conversation; if a row has several, the first in this order counts."""

KEYS = (*LAYOUTS, "id", "system", "source")
"""All keys that are read; others are ignored."""

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}


@dataclass(frozen=True)
class Dropped:
    """Stands for a row that is not used, with the reason; equal reasons are counted together."""

    reason: str


def to_prompt(row: object, default_id: str) -> Prompt | Dropped:
    """Make a prompt of one row, or say why it cannot be one.

    ``{"turns": [text, ...]}`` and ``{"prompt": text}`` hold the user's messages;
    ``{"messages": [{"role", "content"}, ...]}`` and ``{"conversations": [{"from", "value"}, ...]}``
    hold whole conversations. ``id``, ``system`` and ``source`` may stand beside them.
    """
    try:
        if not isinstance(row, Mapping):
            raise ValueError("not an object")
        turns, systems = _conversation(row)
        if row.get("system"):
            systems = [row["system"], *(text for text in systems if text != row["system"])]
        if len(systems) > 1:
            raise ValueError("more than one system message")
        return Prompt(
            id=_id(row, default_id),
            turns=tuple(turns),
            system=systems[0] if systems else None,
            source=row.get("source") or None,
        )
    except ValueError as error:
        return Dropped(str(error))


def _conversation(row: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the user's messages and the system messages of a row."""
    layout = next((key for key in LAYOUTS if row.get(key) is not None), None)
    if layout is None:
        raise ValueError(f"unknown layout: none of {', '.join(LAYOUTS)}")
    value = row[layout]
    if layout == "prompt":
        return [value], []
    if not isinstance(value, list):
        raise ValueError(f"{layout} is not a list")
    return (value, []) if layout == "turns" else _from_messages(value)


def _from_messages(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the user's and the system messages of a conversation, if it could be held again in the same order.

    That excludes conversations that the assistant opens, and those where the user speaks twice in a row.
    """
    turns: list[Any] = []
    systems: list[Any] = []
    before = "system"
    for message in messages:
        role, text = _role_and_text(message)
        if role == "system" and before != "system":
            raise ValueError("system message in mid-conversation")
        if role == "assistant" and before == "system":
            raise ValueError("the assistant speaks first")
        if role == "user" and before == "user":
            raise ValueError("two user messages in a row")
        if role == "user":
            turns.append(text)
        if role == "system" and text not in ("", None):
            systems.append(text)
        before = role
    return turns, systems


def _role_and_text(message: object) -> tuple[str, object]:
    if not isinstance(message, Mapping):
        raise ValueError("a message is not an object")
    name = message.get("role") or message.get("from")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"unknown role {name!r:.40}" if name else "a message without a role")
    text = message.get("content")
    return role, message.get("value") if text is None else text


def _id(row: Mapping[str, Any], default: str) -> Any:
    value = row.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return default if value is None or value == "" else value


# Files: JSON lines in UTF-8, written whole or not at all


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a file that ``blockdraft data prompts`` wrote, or any other with the same keys.

    Each row has ``id`` and ``turns``, and may have ``system`` and ``source``. Any other key,
    an id that occurs twice, or a file without rows is a `PromptError`.
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
        raise PromptError(
            f"{path}: no prompts in it; write one JSON object to a line, with the user's messages in turns"
        )
    return list(found.values())


def write_prompts(files: Mapping[Path, Sequence[Prompt]], *, force: bool = False) -> None:
    """Write all of the files, or none of them.

    A file that exists with other content is kept, and nothing is written, unless ``force`` is set.
    For an empty list no file is written: one that exists must be left over from an earlier choice.
    """
    contents = {path: _encode(prompts) for path, prompts in files.items()}
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise PromptError(f"{path} is a folder; name a file to write")
            if path.exists() and not path.is_file():
                raise PromptError(f"{path} is not a regular file; name another to write")
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
    """Yield the rows of a JSON-lines file or a JSON array, gzipped or not, each with its place, such as ``line 3``.

    Blank lines are skipped. Broken JSON is a `PromptError` that names the line.
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
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)):
        raise PromptError(f"cannot read {path}: it is neither a file nor a pipe")  # /dev/zero would never end
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _first_line(stream: IO[bytes]) -> tuple[int, bytes]:
    """Return the number of the first line that is not blank, and the line without a byte order mark."""
    number, line = 1, stream.readline().removeprefix(b"\xef\xbb\xbf")
    while line and not line.strip():
        number, line = number + 1, stream.readline()
    return number, line


def _parse(text: bytes, path: Path, number: int) -> object:
    """Parse JSON that starts on this line."""
    try:
        return json.loads(text.decode().rstrip())  # a line break would count as one more line
    except UnicodeDecodeError as error:
        at = number + text.count(b"\n", 0, error.start)
        raise PromptError(
            f"{path}, line {at}: not UTF-8 text. Prompts are read from JSON lines in UTF-8 (convert the file, for "
            "example with iconv), and Parquet files by naming their folder"
        ) from error
    except json.JSONDecodeError as error:
        raise PromptError(f"{path}, line {number + error.lineno - 1}: broken JSON: {error.msg}") from error
    except RecursionError as error:
        raise PromptError(f"{path}, line {number}: JSON that is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise PromptError(f"{path}, line {number}: JSON that cannot be read: {error}") from error
