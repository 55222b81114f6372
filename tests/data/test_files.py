"""Prompts on disk: what is read back, what is refused, what a crash leaves."""

import gzip
import json

import pytest

from blockdraft.data import Prompt, PromptError, read_prompts, write_prompts
from blockdraft.data.files import parse_rows

ROWS = [Prompt("a", ("Grüße\u2028 you", "and?")), Prompt("b", ("Hi",), system="Be kind.", source="x")]


def test_written_prompts_are_read_back(tmp_path):
    path = tmp_path / "new" / "prompts.jsonl"
    write_prompts({path: ROWS})
    assert read_prompts(path) == ROWS
    assert path.read_bytes().count(b"\n") == 2
    assert "Grüße" in path.read_text("utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench"])
def test_evaluation_files_are_read(name, real_prompts):
    path = real_prompts / f"{name}.jsonl"
    prompts = read_prompts(path)
    assert len(prompts) == len(path.read_bytes().splitlines())
    assert all(len(prompt.turns) == (2 if name == "mt-bench" else 1) for prompt in prompts)


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
