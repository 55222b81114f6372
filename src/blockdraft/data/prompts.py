"""Prompts: the user's side of conversations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """The user messages of a conversation; the target writes the assistant's."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str | None = None
