"""What a prompt is: the user's side of a conversation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Self

from blockdraft.errors import BlockdraftError


class PromptError(BlockdraftError):
    """Prompts that cannot be read, chosen or written, with the reason."""


@dataclass(frozen=True)
class Prompt:
    """The user's messages of one conversation. The assistant's are not kept: the target writes its own.

    id: unique within a file.
    turns: the user's messages, in order; at least one, none of them blank.
    system: the system message that the conversation starts with.
    source: where it came from, such as the name of a data set.
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
    def num_chars(self) -> int:
        """Characters of all messages, the system message included."""
        return sum(map(len, self.turns)) + len(self.system or "")

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is None is left out."""
        values = asdict(self) | {"turns": list(self.turns)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The inverse of `to_dict`, strict: an unknown or missing key is a ``ValueError``."""
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


@dataclass(frozen=True)
class Dropped:
    """A row that is not used, and why; equal reasons are counted together."""

    reason: str


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} is not text")
    if not text.strip():
        raise ValueError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid Unicode") from None  # a lone surrogate: no file can hold it
