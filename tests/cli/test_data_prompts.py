"""``blockdraft data prompts`` as a user types it: files, summary, exit codes."""

import json

import pytest

from blockdraft.data import read_prompts

from commands import blockdraft


@pytest.fixture
def chats(tmp_path):
    """Thirty different questions, one of them twice, a tool's row and a row of something else."""
    rows = [{"turns": [f"What is {index}?"], "source": "x"} for index in range(30)]
    rows += [{"prompt": "what is  3?"}, {"conversations": [{"from": "tool", "value": "x"}]}, {"question": "?"}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Exit code, stdout and stderr of ``blockdraft data prompts``, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        ended = blockdraft("data", "prompts", *arguments)
        return ended.code, ended.out, ended.err

    return call


def test_a_file_and_the_table(chats, run, tmp_path):
    code, out, err = run("--from", chats, "--out", "p.jsonl", "--num", 10, "--heldout", 5)
    assert code == 0
    assert out == ""
    lines = [" ".join(line.split()) for line in err.splitlines()]
    assert lines == [
        "rows what became of them",
        "33 read",
        "10 kept in p.jsonl",
        "5 held out in p.heldout.jsonl",
        "15 dropped: more than asked for",
        "1 dropped: same text as another",
        "1 dropped: unknown layout: none of messages, conversations, turns, prompt",
        "1 dropped: unknown role 'tool'",
    ]
    kept, heldout = read_prompts(tmp_path / "p.jsonl"), read_prompts(tmp_path / "p.heldout.jsonl")
    assert (len(kept), len(heldout)) == (10, 5)
    assert not {prompt.turns for prompt in kept} & {prompt.turns for prompt in heldout}
    assert kept[0].id.startswith("chats-")


def test_json_on_stdout(chats, run):
    code, out, err = run("--from", chats, "--out", "p.jsonl", "--heldout", 5, "--heldout-out", "dev/h.jsonl", "--json")
    assert code == 0
    assert err == ""
    summary = json.loads(out)
    assert summary["read"] == summary["kept"] + summary["heldout"] + sum(summary["dropped"].values()) == 33
    assert summary["dropped"]["unknown role 'tool'"] == 1
    assert (summary["out"], summary["heldout_out"]) == ("p.jsonl", "dev/h.jsonl")
    assert len(read_prompts(summary["heldout_out"])) == 5


def test_fewer_than_asked_for_is_said(chats, run):
    code, out, err = run("--from", chats, "--out", "p.jsonl", "--num", 99, "--json")
    assert code == 0
    assert json.loads(out)["kept"] == 30
    assert err == "note: 99 were asked for, 30 is all there is\n"


def test_pocket(run, tmp_path):
    assert run("--from", "pocket", "--num", 20, "--heldout", 5, "--seed", 1, "--out", "a.jsonl")[0] == 0
    assert run("--from", "pocket", "--num", 40, "--heldout", 5, "--seed", 1, "--out", "b.jsonl")[0] == 0
    small, large = read_prompts("a.jsonl"), read_prompts("b.jsonl")
    assert large[:20] == small
    assert read_prompts("a.heldout.jsonl") == read_prompts("b.heldout.jsonl")
    assert run("--from", "pocket", "--num", 9, "--family", "code", "--out", "c.jsonl")[0] == 0
    assert {prompt.source for prompt in read_prompts(tmp_path / "c.jsonl")} == {"pocket/code"}


def test_its_own_output_goes_through_unchanged(chats, run, tmp_path):
    run("--from", chats, "--out", "p.jsonl", "--num", 10)
    assert run("--from", "p.jsonl", "--out", "q.jsonl")[0] == 0
    assert (tmp_path / "q.jsonl").read_bytes() == (tmp_path / "p.jsonl").read_bytes()


def test_other_files_are_replaced_only_by_force(chats, run, tmp_path):
    command = ["--from", chats, "--out", "p.jsonl", "--num", 10]
    run(*command, "--heldout", 5)
    before = (tmp_path / "p.jsonl").read_bytes()
    assert run(*command, "--heldout", 5)[0] == 0  # the same again
    code, _, err = run(*command, "--heldout", 5, "--seed", 1)
    assert code == 2
    assert "p.jsonl exists with other content; --force replaces it" in err
    assert (tmp_path / "p.jsonl").read_bytes() == before
    assert run(*command, "--force")[0] == 0
    assert not (tmp_path / "p.heldout.jsonl").exists()  # its prompts may be among the kept ones now


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "p.jsonl"], "Missing option '--from'"),
        (["--from", "chats.jsonl"], "Missing option '--out'"),
        (["--from", "nowhere.jsonl", "--out", "p.jsonl"], "nowhere.jsonl: no such file or folder"),
        (["--from", "pokcet", "--out", "p.jsonl"], "did you mean pocket?"),
        (["--from", "broken.jsonl", "--out", "p.jsonl"], "broken.jsonl, line 2: broken JSON"),
        (["--from", "pocket", "--out", "p.jsonl"], "never ends; say how many"),
        (["--from", "pocket", "--num", "3", "--family", "poetry", "--out", "p.jsonl"], "known: math, code, chat"),
        (["--from", "pocket", "--num", "3", "--split", "test", "--out", "p.jsonl"], "only data sets have splits"),
        (["--from", "chats.jsonl", "--split", "test", "--out", "p.jsonl"], "has no splits"),
        (["--from", "chats.jsonl", "--family", "math", "--out", "p.jsonl"], "only pocket has families"),
        (["--from", "chats.jsonl", "--num", "0", "--out", "p.jsonl"], "--num"),
        (["--from", "chats.jsonl", "--heldout", "40", "--out", "p.jsonl"], "no prompt is left to keep of 33 rows"),
        (["--from", "chats.jsonl", "--heldout-out", "h.jsonl", "--out", "p.jsonl"], "nothing is held out"),
        (["--from", "chats.jsonl", "--heldout", "1", "--heldout-out", "p.jsonl", "--out", "p.jsonl"], "kept prompts"),
        (["--from", "chats.jsonl", "--out", "./chats.jsonl", "--force"], "is the file to read from"),
        (
            ["--from", "chats.jsonl", "--min-chars", "9", "--max-chars", "8", "--out", "p.jsonl"],
            "more than --max-chars",
        ),
        (["--from", "chats.jsonl", "--out", "folder"], "folder is a folder; name a file"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, message, chats, run, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"turns": ["Hi"]}\n{"turns": \n')
    (tmp_path / "folder").mkdir()
    before = chats.read_bytes()
    code, out, err = run(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err + out
    assert chats.read_bytes() == before
    assert not (tmp_path / "p.jsonl").exists()
