"""Rows of other people's data sets: what becomes a prompt, and the reason when nothing does."""

import pytest
from blockdraft.data.layouts import ROLES, to_prompt

from blockdraft.data.prompts import Dropped, Prompt


def said(*pairs):
    return [{"role": role, "content": text} for role, text in pairs]


def shared(*pairs):
    return [{"from": role, "value": text} for role, text in pairs]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"turns": ["Hi", "And?"]}, Prompt("f-0", ("Hi", "And?"))),
        ({"turns": ["Hi"], "id": "x", "source": "s", "system": "Be kind."}, Prompt("x", ("Hi",), "Be kind.", "s")),
        ({"prompt": "Hi", "id": 7}, Prompt("7", ("Hi",))),
        ({"prompt": " Hi\n", "id": None, "source": None, "system": ""}, Prompt("f-0", (" Hi\n",))),
        (
            {"messages": said(("system", "Be kind."), ("user", "Hi"), ("assistant", "Ho"), ("user", "And?"))},
            Prompt("f-0", ("Hi", "And?"), "Be kind."),
        ),
        ({"conversations": shared(("human", "Hi"), ("gpt", "Ho"))}, Prompt("f-0", ("Hi",))),
        ({"conversations": shared(("system", ""), ("human", "Hi"))}, Prompt("f-0", ("Hi",))),
        ({"conversations": said(("Human", "Hi"), ("model", None))}, Prompt("f-0", ("Hi",))),
        ({"conversations": shared(("human", "Hi")), "system": "Be kind."}, Prompt("f-0", ("Hi",), "Be kind.")),
        ({"prompt": "Hi", "messages": said(("user", "Ho")), "turns": 1}, Prompt("f-0", ("Ho",))),
        ({"messages": None, "conversations": shared(("human", "Hi"))}, Prompt("f-0", ("Hi",))),
        ({"messages": said(("user", "Hi"), ("assistant", "a"), ("assistant", "b"))}, Prompt("f-0", ("Hi",))),
    ],
)
def test_a_prompt(row, prompt):
    assert to_prompt(row, "f-0") == prompt


@pytest.mark.parametrize("role", ROLES)
def test_every_role_name(role):
    before = [] if ROLES[role] != "assistant" else [("user", "first")]
    prompt = to_prompt({"conversations": shared(*before, (role, "this"), ("user", "last"))}, "f-0")
    expected = {
        "user": Dropped("two user messages in a row"),
        "assistant": Prompt("f-0", ("first", "last")),
        "system": Prompt("f-0", ("last",), "this"),
    }
    assert prompt == expected[ROLES[role]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("Hi", "not an object"),
        ({"question": "Hi"}, "unknown layout: none of messages, conversations, turns, prompt"),
        ({"turns": []}, "no user message"),
        ({"messages": []}, "no user message"),
        ({"messages": said(("system", "Be kind."))}, "no user message"),
        ({"turns": ["Hi", "  "]}, "user message is empty"),
        ({"turns": "Hi"}, "turns is not a list"),
        ({"conversations": {"from": ["human"], "value": ["Hi"]}}, "conversations is not a list"),
        ({"prompt": 3}, "user message is not text"),
        ({"prompt": "\udc00"}, "user message is not valid Unicode"),
        ({"messages": said(("user", [{"type": "text", "text": "Hi"}]))}, "user message is not text"),
        ({"messages": said(("user", None))}, "user message is not text"),
        ({"messages": said(("user", "Hi"), ("tool", "x"))}, "unknown role 'tool'"),
        ({"messages": said(("user", "Hi"), (3, "x"))}, "unknown role 3"),
        ({"messages": [{"content": "Hi"}]}, "a message without a role"),
        ({"messages": ["Hi"]}, "a message is not an object"),
        ({"messages": said(("assistant", "Hi"), ("user", "Ho"))}, "the assistant speaks first"),
        ({"messages": said(("user", "Hi"), ("user", "Ho"))}, "two user messages in a row"),
        ({"messages": said(("user", "Hi"), ("system", "x"))}, "system message in mid-conversation"),
        ({"messages": said(("system", "x"), ("user", "Hi")), "system": "y"}, "more than one system message"),
        ({"messages": said(("system", ["x"]), ("user", "Hi"))}, "system message is not text"),
        ({"prompt": "Hi", "id": ["x"]}, "id is not text"),
        ({"prompt": "Hi", "id": True}, "id is not text"),
        ({"prompt": "Hi", "source": {"x": 1}}, "source is not text"),
    ],
)
def test_a_reason(row, reason):
    assert to_prompt(row, "f-0") == Dropped(reason)
