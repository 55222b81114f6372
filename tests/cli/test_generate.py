"""The command as a user types it: what it prints, and what a mistake looks like."""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch

from blockdraft import targets
from blockdraft.drafters import save_drafter

from commands import blockdraft
from tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = tiny_target(dtype=torch.float32)
    root = tmp_path_factory.mktemp("models")
    target.save(root / "target")
    save_drafter(tiny_drafter("dflash", target), root / "drafter")
    return root


def run(*arguments):
    """Exit code, stdout and stderr of ``blockdraft generate``."""
    ended = blockdraft("generate", *arguments)
    return ended.code, ended.out, ended.err


def test_text_and_a_closing_line(folders):
    code, out, _ = run("--target", folders / "target", "--max-new-tokens", 12, "w7 w8")
    assert code == 0
    text, closing = out.strip().rsplit("\n", 1)
    assert all(word.startswith("w") or word in ("user", "assistant") for word in text.split())
    assert closing.startswith("[no drafter]")
    assert "tokens/s" in closing
    assert "\x1b" not in out  # plain when stdout is no terminal


def test_what_a_last_block_adds_beyond_the_budget_is_not_shown(folders):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--seed", 3, "w7 w8"]
    for budget in range(1, 12):
        code, out, _ = run(*arguments, "--max-new-tokens", budget)
        assert code == 0
        assert len(out.strip().rsplit("\n", 1)[0].split()) <= budget


def test_compare_shows_both_rules(folders):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--max-new-tokens", 12, "w7"]
    code, out, _ = run(*arguments, "--compare")
    assert code == 0
    assert out.count("per verification") == 2
    assert "[token, 4 proposals]" in out
    assert "[block, 4 proposals]" in out


def test_json_holds_every_round(folders):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--max-new-tokens", 12, "--json"]
    code, out, _ = run(*arguments, "--rule", "token", "w7")
    assert code == 0
    result = json.loads(out)["token"]
    assert len(result["tokens"]) <= 12
    assert {"drafted", "accepted", "next_token", "seconds"} == set(result["rounds"][0])


def test_fewer_proposals(folders):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--max-new-tokens", 12, "w7"]
    result = json.loads(run(*arguments, "--num-proposals", 2, "--json")[1])["block"]
    assert result["num_proposals"] == 2
    assert max(len(each["drafted"]) for each in result["rounds"]) == 2
    assert "[block, 2 proposals]" in run(*arguments, "--num-proposals", 2)[1]
    assert "[block, 4 proposals]" in run(*arguments)[1]


@pytest.mark.slow  # rounds are timed twice, two seconds each
def test_the_number_of_proposals_by_itself(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--max-new-tokens", 12, "w7"]
    code, out, err = run(*arguments, "--num-proposals", "auto", "--json")
    assert code == 0, err
    assert 1 <= json.loads(out)["block"]["num_proposals"] <= 4
    (kept,) = (tmp_path / "blockdraft" / "costs").iterdir()
    best_at_three = {"draft": [0, 0, 0, 0, 0], "verify": [1, 9, 9, 1e-3, 9], "rest": [0, 0, 0, 0, 0]}
    kept.write_text(json.dumps(best_at_three))  # what was measured before is not measured again
    assert "[block, 3 proposals]" in run(*arguments, "--num-proposals", "auto")[1]
    assert "[block, up to 4 proposals]" in run(*arguments, "--num-proposals", "adaptive")[1]
    rounds = json.loads(run(*arguments, "--num-proposals", "adaptive", "--json")[1])["block"]["rounds"]
    assert {len(each["drafted"]) for each in rounds} == {3}
    kept.write_text("{")
    assert run(*arguments, "--num-proposals", "auto")[0] == 0
    assert set(json.loads(kept.read_text())) == set(best_at_three)


def test_raw_text_is_continued_and_chat_text_is_answered(folders):
    arguments = ["--target", folders / "target", "--max-new-tokens", 3, "--json", "w7 w8"]
    prompts = [json.loads(run(*arguments, *flag)[1])["block"]["prompt"] for flag in ([], ["--raw"])]
    assert prompts == [[3, 7, 8, 4], [7, 8]]


def test_device_and_dtype_are_those_of_the_target(folders):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--device", "cpu", "w7"]
    seen = []
    original = targets.load_target

    def load(*args, **kwargs):
        seen.append(original(*args, **kwargs))
        return seen[-1]

    with mock.patch("blockdraft.targets.load_target", load):
        assert run(*arguments, "--dtype", "bfloat16", "--max-new-tokens", 4)[0] == 0
        assert run(*arguments, "--max-new-tokens", 4)[0] == 0
    assert [(each.device.type, each.dtype) for each in seen] == [("cpu", torch.bfloat16), ("cpu", torch.float32)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "blok", "w7"], "'blok' is not one of 'greedy', 'token', 'block'"),
        (["--compare", "w7"], "nothing to compare without --drafter"),
        (["--max-new-tokens", "0", "w7"], "max-new-tokens"),
        (["--temperature", "-1", "w7"], "temperature"),
        (["--tempeature", "1", "w7"], "No such option"),
        (["--target", "./nowhere", "w7"], "no such folder"),
        (["--drafter", "./nowhere", "w7"], "./nowhere: no such folder"),
        ([], "Missing argument"),
        (["--temperature", "0", "w7"], "choose the rule greedy, or a temperature above 0"),
        (["--rule", "greedy", "--temperature", "1", "w7"], "leave the temperature out"),
        (["--max-new-tokens", "600", "w7"], "reads at most 512 tokens"),
        (["--device", "banana", "w7"], "device 'banana' cannot be used"),
        ([""], "the prompt is empty"),
        (["--num-proposals", "3", "w7"], "nothing is proposed without --drafter"),
        (["--num-proposals", "some", "--drafter", "x", "w7"], "'some' is neither a number"),
        (["--num-proposals", "0", "--drafter", "x", "w7"], "'0' is neither a number"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(folders, arguments, message):
    if "--target" not in arguments:
        arguments = ["--target", folders / "target", *arguments]
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "blockdraft", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"
