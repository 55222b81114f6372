"""`blockdraft evaluate`, as a user types it: one process, two, and mistakes."""

import json
import os
import subprocess
import sys

import pytest

from blockdraft.drafters import save_drafter
from blockdraft.targets import load_target

from commands import blockdraft
from tiny import tiny_drafter

FEW = ["--num-prompts", "2", "--max-new-tokens", "12", "--num-traces", "0", "--draft-temperatures", "1"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "mine"
    save_drafter(tiny_drafter("dflash", load_target("pocket")), folder)
    return folder


def run(*arguments, processes=1):
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [
        sys.executable,
        "-m",
        *(launcher if processes > 1 else []),
        "blockdraft",
        "evaluate",
        *map(str, arguments),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def records(folder):
    lines = [json.loads(line) for file in (folder / "records").iterdir() for line in file.read_text().splitlines()]
    keys = ("prompt", "drafter", "rule", "draft_temperature")
    return {tuple(line[key] for key in keys): [turn["tokens"] for turn in line["turns"]] for line in lines}


@pytest.mark.slow
def test_two_processes_find_what_one_finds(drafter, tmp_path):
    rules = ["--rules", "token", "block"]  # several values after one option
    one = run("--drafter", drafter, "--out", tmp_path / "one", *FEW, *rules, "--json")
    assert one.returncode == 0, one.stderr
    two = run("--drafter", f"it={drafter}", "--out", tmp_path / "two", *FEW, *rules, processes=2)
    assert two.returncode == 0, two.stderr
    assert sorted(file.name for file in (tmp_path / "two" / "records").iterdir()) == ["0.jsonl", "1.jsonl"]
    found = records(tmp_path / "two")
    assert {(p, d and "mine", *how): tokens for (p, d, *how), tokens in found.items()} == records(tmp_path / "one")
    results = json.loads(one.stdout)
    assert [(each["drafter"], each["rule"], each["choice"]) for each in results["averages"]] == [
        ("mine", rule, choice) for rule in ("token", "block") for choice in ("paper", "one-hot")
    ]
    assert two.stdout.count("speed-up") == 1  # only the first process prints
    lengths = [json.loads((tmp_path / name / "results.json").read_text())["averages"] for name in ("one", "two")]
    for ours, theirs in zip(*lengths, strict=True):
        assert ours["acceptance_length"] == theirs["acceptance_length"]
        assert ours["predicted_length"]["value"] == pytest.approx(theirs["predicted_length"]["value"])


def test_argmax_drafts_may_be_left_out(drafter, tmp_path):
    least = ["--num-prompts", "1", "--num-decoded", "1", "--tasks", "pocket-math", "--rules", "block", *FEW[2:]]
    ended = blockdraft("evaluate", "--drafter", drafter, "--out", tmp_path, *least, "--no-argmax-drafts", "--json")
    assert ended.code == 0, ended.err
    assert [each["choice"] for each in json.loads(ended.out)["averages"]] == ["paper"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "blok"], "'blok' is not one of 'greedy', 'token', 'block'"),
        (["--tasks", "gsm8"], "did you mean 'gsm8k'"),
        (["--temperature", "0"], "must be above 0"),
        (["--checkpoint", "first"], "a best and a last checkpoint, not 'first'"),
        (["--device", "banana"], "device 'banana' cannot be used"),
        (["--tasks", "gsm8k", "--prompts", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(drafter, tmp_path, arguments, message):
    ended = blockdraft("evaluate", "--drafter", drafter, "--out", tmp_path / "out", *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_a_folder_that_is_no_drafter(tmp_path):
    ended = blockdraft("evaluate", "--drafter", tmp_path, "--out", tmp_path / "out")
    assert ended.code == 2
    assert str(tmp_path) in ended.err
