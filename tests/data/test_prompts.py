"""A prompt holds text and nothing else, and survives JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.data import Prompt

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
PROMPTS = st.builds(
    Prompt, TEXTS, st.lists(TEXTS, min_size=1).map(tuple), system=st.none() | TEXTS, source=st.none() | TEXTS
)


@settings(deadline=None)
@given(PROMPTS)
def test_json_and_back(prompt):
    assert Prompt.from_dict(json.loads(json.dumps(prompt.to_dict()))) == prompt


def test_what_is_none_is_left_out():
    assert Prompt("a", ("Hi",)).to_dict() == {"id": "a", "turns": ["Hi"]}
    assert list(Prompt("a", ("Hi",), "Be kind.", "x").to_dict()) == ["id", "turns", "system", "source"]


def test_characters_count_every_message():
    assert Prompt("a", ("four", "to"), system="!").num_chars == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"id": "a", "turns": []}, "no user message"),
        ({"id": "a", "turns": ["Hi", " \n"]}, "user message is empty"),
        ({"id": "a", "turns": [["Hi"]]}, "user message is not text"),
        ({"id": "a", "turns": ["\ud800"]}, "user message is not valid Unicode"),
        ({"id": "a", "turns": "Hi"}, "turns is not a list"),
        ({"id": "", "turns": ["Hi"]}, "id is empty"),
        ({"id": 3, "turns": ["Hi"]}, "id is not text"),
        ({"id": "a", "turns": ["Hi"], "system": ""}, "system message is empty"),
        ({"id": "a", "turns": ["Hi"], "source": 3}, "source is not text"),
        ({"id": "a", "turns": ["Hi"], "sytem": "x"}, "unknown key 'sytem'; did you mean 'system'?"),
        ({"id": "a", "messages": []}, "unknown key 'messages'; known: "),
        ({"turns": ["Hi"]}, "no key 'id'"),
        (["Hi"], "not an object"),
    ],
)
def test_anything_else_is_an_error(values, message):
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        Prompt.from_dict(values)
