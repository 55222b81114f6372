"""`blockdraft data regenerate`, `inspect` and `train` as a user types them: a whole story, then mistakes."""

import json
import subprocess
import sys

import pytest


def blockdraft(*arguments, cwd):
    command = [sys.executable, "-m", "blockdraft", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=None)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Prompts and data made by the commands of the guide, smaller."""
    folder = tmp_path_factory.mktemp("story")
    for line in (
        "data prompts --from pocket --num 24 --out p.jsonl",
        "data regenerate --target pocket --prompts p.jsonl --out d --shard-size 10 --max-new-tokens 60",
    ):
        done = blockdraft(*line.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    assert "rows" in done.stdout
    assert "tokens/s" in done.stderr
    return folder


def test_from_prompts_to_a_drafter(story):
    shown = blockdraft("data", "inspect", "d", "--samples", 1, cwd=story)
    assert shown.returncode == 0, shown.stderr
    assert "<|im_start|>user" in shown.stdout
    assert "as sampled at temperature 1 over the whole vocabulary" in shown.stdout
    small = ["data.path=d", "data.num_heldout=4", "batch.num_anchors=16", "optimizer.max_steps=3"]
    trained = blockdraft("train", "pocket-dflash-bv", *small, "--out", "run", "--json", cwd=story)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["step"] == 3
    line = "data regenerate --target pocket --prompts p.jsonl --out d --shard-size 9"
    again = blockdraft(*line.split(), cwd=story)
    assert again.returncode == 2
    assert "shard_size 10 there, 9 here" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data regenerate --target pocket --prompts no.jsonl --out x", "cannot read no.jsonl"),
        ("data regenerate --target pocket --prompts p.jsonl --out p.jsonl", "p.jsonl"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --server http://localhost:99999", "not a server"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --engine server", "--server"),
        ("data regenerate --target pocket --prompts p.jsonl --out x --max-length 5000", "reads texts of up to 1024"),
        ("data inspect nothing", "is not a data folder"),
        ("train pocket-dflash-bv", "set data.path"),
        ("train pocket-dflash-bv data.path=nothing", "is not a data folder"),
        ("train pocket-dflash-bv data.path=d runtime.device=banana", "device 'banana' cannot be used"),
        ("train pocket-dflash-bv data.path=d data.num_heldout=4 --out p.jsonl", "p.jsonl"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message_and_exit_code_2(story, arguments, message):
    done = blockdraft(*arguments.split(), cwd=story)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
