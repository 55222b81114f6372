"""Rows as data sets write them, made into prompts: three layouts, many role names."""

from collections.abc import Mapping
from typing import Any

from blockdraft.data.prompts import Dropped, Prompt

LAYOUTS = ("messages", "conversations", "turns", "prompt")
"""The keys that hold a conversation; of several in a row the first here counts."""

KEYS = (*LAYOUTS, "id", "system", "source")
"""All keys that are read; others are passed over."""

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


def to_prompt(row: object, default_id: str) -> Prompt | Dropped:
    """A prompt of one row, or the reason why it is none.

    ``{"turns": [text, ...]}`` and ``{"prompt": text}`` hold the user's messages;
    ``{"messages": [{"role", "content"}, ...]}`` and ``{"conversations": [{"from", "value"}, ...]}``
    whole conversations. ``id``, ``system`` and ``source`` may stand beside them.
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
    """The user's messages, and the system messages."""
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
    """As `_conversation`. Only what the assistant can answer again in order is a prompt: no row that it opens,
    and none where the user speaks twice in a row."""
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
