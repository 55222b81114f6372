"""`blockdraft data regenerate`, `inspect` and `train` as a user types them: a whole story, then mistakes."""

import json

import pytest

from commands import blockdraft


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Prompts and data made by the commands of the guide, smaller."""
    folder = tmp_path_factory.mktemp("story")
    for line in (
        "data prompts --from pocket --num 24 --out p.jsonl",
        "data regenerate --target pocket --prompts p.jsonl --out d --shard-size 10 --max-new-tokens 60",
    ):
        done = blockdraft(*line.split(), cwd=folder)
        assert done.code == 0, done.err
    assert "rows" in done.out
    assert "tokens/s" in done.err
    return folder


@pytest.mark.slow
def test_from_prompts_to_a_drafter(story):
    shown = blockdraft("data", "inspect", "d", "--samples", 1, cwd=story)
    assert shown.code == 0, shown.err
    assert shown.err.startswith("checking texts: 0/1")
    assert "<|im_start|>user" in shown.out
    assert "as sampled at temperature 1 over the whole vocabulary" in shown.out
    small = ["data.path=d", "data.num_heldout=4", "batch.num_anchors=16", "optimizer.max_steps=3"]
    trained = blockdraft("train", "pocket-dflash-bv", *small, "--out", "run", "--json", cwd=story)
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)["step"] == 3
    line = "data regenerate --target pocket --prompts p.jsonl --out d --shard-size 9"
    again = blockdraft(*line.split(), cwd=story)
    assert again.code == 2
    assert "shard_size 10 there, 9 here" in again.err


@pytest.mark.slow
def test_prompts_answered_twice_are_shown_and_held_out_together(story):
    line = "data regenerate --target pocket --prompts p.jsonl --limit 5 --num-responses 2 --out twice"
    made = blockdraft(*line.split(), "--max-new-tokens", 30, cwd=story)
    assert made.code == 0, made.err
    shown = blockdraft("data", "inspect", "twice", "--no-check", "--samples", 0, cwd=story)
    assert "5 prompts, each answered 2 times" in shown.out
    small = ["data.path=twice", "data.num_heldout=1", "batch.num_anchors=16", "optimizer.max_steps=1"]
    small += ["logging.heldout_blocks=8", "logging.decode_prompts=1"]
    trained = blockdraft("train", "pocket-dflash-bv", *small, "--out", "run-twice", cwd=story)
    assert trained.code == 0, trained.err
    num_heldout = int(trained.out.split("token accuracy, on ")[1].split()[0])
    assert num_heldout >= 2
    assert "decoding 1 of their prompts" in trained.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data regenerate --target pocket --prompts no.jsonl --out x", "cannot read no.jsonl"),
        ("data regenerate --target pocket --prompts p.jsonl --out p.jsonl", "p.jsonl"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --server http://localhost:99999", "not a server"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --engine server", "--server"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --max-length 5000", "reads texts of up to 1024"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --num-responses 2 --temperature 0", "are the same"),
        ("data inspect nothing", "is not a data folder"),
        ("train pocket-dflash-bv", "set data.path"),
        ("train pocket-dflash-bv data.path=nothing", "is not a data folder"),
        ("train pocket-dflash-bv data.path=d runtime.device=banana", "device 'banana' cannot be used"),
        ("train pocket-dflash-bv data.path=d --device banana", "device 'banana' cannot be used"),
        ("demo --quick --drafter x --device banana", "device 'banana' cannot be used"),
        ("train pocket-dflash-bv data.path=d data.num_heldout=4 --out p.jsonl", "p.jsonl"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message_and_exit_code_2(story, arguments, message):
    done = blockdraft(*arguments.split(), cwd=story)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
