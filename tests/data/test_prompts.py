"""Prompts: what one is, which rows of data sets become one, and what files of them hold."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.data import Prompt, PromptError, read_prompts, write_prompts
from blockdraft.data.prompts import ROLES, Dropped, parse_rows, to_prompt

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


# Rows of data sets


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


# Files

ROWS = [Prompt("a", ("Grüße\u2028 you", "and?")), Prompt("b", ("Hi",), system="Be kind.", source="x")]


def test_written_prompts_are_read_back(tmp_path):
    path = tmp_path / "new" / "prompts.jsonl"
    write_prompts({path: ROWS})
    assert read_prompts(path) == ROWS
    assert path.read_bytes().count(b"\n") == 2
    assert "Grüße" in path.read_text("utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "a", "turns": ["Hi"]}\n\n{"id": "b", "turns": ["Hi"]\n', "line 3: broken JSON: Expecting"),
        (b'{"id": "a", "turns": ["Hi"]}\n{"id": "b", "turn": ["Hi"]}\n', "line 2: unknown key 'turn'; did you mean"),
        (b'{"id": "a", "turns": ["Hi"]}\n{"id": "a", "turns": ["Ho"]}\n', "line 2: the id 'a' is taken"),
        (b'{"id": "a", "turns": ["\xff"]}\n', "line 1: not UTF-8 text"),
        (b'[{"id": "a", "turns": ["Hi"]},\n{"id": "b"}]', "row 1: no key 'turns'"),
        (b'\n[{"id": "a"},\n{"id": ]', "line 3: broken JSON"),
        (b'{"id": ' + b"[" * 100_000, "line 1: JSON that is nested too deeply"),
        (b'{"id": "a", "turns": ["Hi"], "source": ' + b"9" * 5000 + b"}", "line 1: JSON that cannot be read: Exceeds"),
        (
            '{"id": "a", "turns": ["Grüße"]}'.encode("utf-16"),
            "line 1: not UTF-8 text. Prompts are read from JSON lines",
        ),
        (b"PAR1\x15\x04\xff", "line 1: not UTF-8 text"),
        (b"\n \n", "no prompts in it"),
        (b"", "no prompts in it"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(content, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_missing_file_and_half_an_archive_are_errors(tmp_path):
    with pytest.raises(PromptError, match=r"cannot read .*nowhere.jsonl: No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    half = tmp_path / "half.jsonl.gz"
    half.write_bytes(gzip.compress(b'{"id": "a", "turns": ["Hi"]}\n')[:-6])
    with pytest.raises(PromptError, match=r"cannot read .*half.jsonl.gz: .*end-of-stream"):
        read_prompts(half)
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(b"{}")[:10] + b"\xff" * 20)
    with pytest.raises(PromptError, match=r"cannot read .*damaged.jsonl.gz: .*decompressing"):
        read_prompts(damaged)
    plain = tmp_path / "plain.gz"
    plain.write_bytes(b"{}")
    with pytest.raises(PromptError, match=r"cannot read .*plain.gz: Not a gzipped file"):
        read_prompts(plain)


def test_lines_arrays_archives_and_a_byte_order_mark(tmp_path):
    values = [1, {"a": "x\u2028y"}]
    lines = "\n".join(map(json.dumps, values)).encode()
    for name, content in {
        "a.jsonl": lines,
        "b.jsonl": b"\xef\xbb\xbf\r\n" + lines.replace(b"\n", b"\r\n"),
        "c.json": json.dumps(values, indent=1).encode(),
        "d.jsonl.gz": gzip.compress(lines),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert [row for _, row in parse_rows(tmp_path / name)] == values
    assert [where for where, _ in parse_rows(tmp_path / "b.jsonl")] == ["line 2", "line 3"]


def test_other_content_is_replaced_only_by_force(tmp_path):
    kept, held = tmp_path / "p.jsonl", tmp_path / "p.heldout.jsonl"
    write_prompts({kept: ROWS[:1], held: ROWS[1:]})
    write_prompts({kept: ROWS[:1], held: ROWS[1:]})  # the same again is no conflict
    with pytest.raises(PromptError, match=r"p.heldout.jsonl exists with other content; --force"):
        write_prompts({kept: ROWS[:1], held: ROWS})
    with pytest.raises(PromptError, match="left over from an earlier choice"):
        write_prompts({kept: ROWS[:1], held: []})
    with pytest.raises(PromptError, match="other content"):
        write_prompts({tmp_path / "q.jsonl": ROWS, kept: ROWS})
    assert not (tmp_path / "q.jsonl").exists()  # all are checked before one is written
    assert read_prompts(kept) == ROWS[:1]
    write_prompts({kept: ROWS, held: []}, force=True)
    assert read_prompts(kept) == ROWS
    assert not held.exists()


def test_a_folder_in_the_way(tmp_path):
    with pytest.raises(PromptError, match="is a folder; name a file"):
        write_prompts({tmp_path: ROWS}, force=True)
    (tmp_path / "file").touch()
    with pytest.raises(PromptError, match=r"cannot write .*file.*"):
        write_prompts({tmp_path / "file" / "p.jsonl": ROWS})


def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path):
    """Devices never end: reading one would fill the memory."""
    with pytest.raises(PromptError, match="cannot read /dev/zero: it is neither a file nor a pipe"):
        read_prompts("/dev/zero")
    with pytest.raises(PromptError, match="/dev/full is not a regular file; name another"):
        write_prompts({Path("/dev/full"): ROWS})
    with pytest.raises(PromptError, match=r"cannot read .*: Is a directory"):
        read_prompts(tmp_path)


def test_a_pipe_is_read():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        stream.write(b'{"id": "a", "turns": ["Hi"]}\n')
    try:
        assert read_prompts(f"/dev/fd/{reader}") == [Prompt("a", ("Hi",))]
    finally:
        os.close(reader)
