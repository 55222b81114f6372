"""``blockdraft doctor`` as a user types it."""

import json
import re

import pytest
import torch

from blockdraft.data import Prompt, write_prompts
from blockdraft.drafters import save_drafter

from commands import blockdraft
from patients import patient, put, target, zlab
from runs import make_data, train
from tiny import tiny_drafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("doctor")
    target().save(folder / "target")
    small = tiny_drafter("dflash", target(), num_layers=1)
    patient(folder / "good", small, zlab)
    patient(folder / "bad", small, zlab, put("dflash_config.mask_token_id", 1000))
    make_data(folder / "data", num=6)
    return folder


def test_a_table_and_exit_code_0_whatever_is_found(folders):
    ended = blockdraft("doctor", "bad", "--target", "./target", "--no-measure", cwd=folders)
    assert ended.code == 0
    words = " ".join(ended.out.split())
    for part in ("wrong", "mask token", "what to do", "bad: 1 wrong, 0 warnings"):
        assert part in words, ended.out
    assert (
        "good: nothing is wrong"
        in blockdraft("doctor", "good", "--target", "./target", "--no-measure", cwd=folders).out
    )


def test_strict_is_exit_code_2_and_one_line(folders):
    ended = blockdraft("doctor", "bad", "--target", "./target", "--no-measure", "--strict", cwd=folders)
    assert ended.code == 2
    assert ended.err.startswith("examining the drafter: 0/1")  # a sign of life, once a minute from then on
    assert ended.err.count("error:") == 1
    assert ended.err.splitlines()[-1].startswith("error:")
    assert "error: bad: mask token: dflash_config.mask_token_id is 1000" in ended.err
    assert blockdraft("doctor", "good", "--target", "./target", "--no-measure", "--strict", cwd=folders).code == 0


@pytest.mark.slow
def test_measured_on_texts_of_the_spot_and_of_a_data_folder(folders):
    """Random weights draft nothing, and the doctor says so on either kind of texts."""
    sizes = ("--texts", 2, "--max-new-tokens", 8, "--json")
    on_the_spot = json.loads(blockdraft("doctor", "good", "--target", "./target", *sizes, cwd=folders).out)
    assert on_the_spot["texts"] == "2 texts sampled from ./target at temperature 1"
    assert {each["field"] for each in on_the_spot["measured"]} >= {"slot convention", "layer ids", "mask token"}
    given = ("--data", "data", *sizes)
    of_the_data = json.loads(blockdraft("doctor", "good", "--target", "./target", *given, cwd=folders).out)
    assert of_the_data["texts"] == "2 texts of data"
    assert [each["level"] for each in of_the_data["findings"] if each["check"] == "data"] == ["ok"]


@pytest.mark.slow
def test_measured_on_answers_to_prompts_of_a_file(folders, monkeypatch):
    asked = []
    render = type(target()).render
    monkeypatch.setattr(
        type(target()), "render", lambda self, messages: asked.append(messages) or render(self, messages)
    )
    write_prompts({folders / "prompts.jsonl": [Prompt("a", ("w5 w6", "w7")), Prompt("b", ("w8",))]})
    sizes = ("--texts", 2, "--max-new-tokens", 8, "--json")
    ended = blockdraft("doctor", "good", "--target", "./target", "--prompts", "prompts.jsonl", *sizes, cwd=folders)
    assert ended.code == 0
    assert {messages[0]["content"] for messages in asked} == {"w5 w6", "w8"}


def test_a_shipped_drafter_names_its_own_target():
    ended = blockdraft("doctor", "pocket-dflash-ce", "--no-measure", "--strict")
    assert ended.code == 0
    assert "pocket-dflash-ce: nothing is wrong" in ended.out


@pytest.mark.slow
def test_a_run_names_its_own_target(folders, tmp_path):
    train(folders / "data", tmp_path / "run", "optimizer.max_steps=1", "data.num_heldout=2")
    ended = blockdraft("doctor", tmp_path / "run", "--no-measure")
    assert ended.code == 2  # the run was trained for a model in memory, which has no name to load it by
    assert "tiny qwen3" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["good"], "does not say which target it is for"),
        (["nowhere", "--target", "./target"], "nowhere: no such folder"),
        (["target", "--target", "./target"], ""),
        (["good", "--target", "./nowhere"], "no such folder"),
        (["good", "--target", "./target", "--data", "nowhere"], "nowhere"),
        (["good", "--target", "./target", "--texts", "1"], "--texts"),
        (["good", "--target", "./target", "--prompts", "nowhere"], "nowhere"),
        (["good", "--target", "./target", "--data", "data", "--prompts", "prompts.jsonl"], "give one of the two"),
    ],
)
def test_mistakes(folders, arguments, message):
    ended = blockdraft("doctor", *arguments, "--no-measure", cwd=folders)
    if message:
        assert ended.code == 2
        assert message in ended.err
    else:  # somebody's model is examined too, and found to be no drafter
        assert ended.code == 0
        assert "no drafter that is known" in " ".join(ended.out.split()) or "is this the folder" in ended.out
    assert "Traceback" not in ended.err


def test_texts_longer_than_the_context_are_refused(folders):
    ended = blockdraft("doctor", "good", "--target", "./target", "--max-new-tokens", 600, cwd=folders)
    assert ended.code == 2
    assert "reads at most 512 tokens" in ended.err
    fits = int(re.search(r"--max-new-tokens to at most (\d+)", ended.err)[1])
    assert 400 < fits < 512


def test_what_is_no_json_is_said_in_a_line(folders, tmp_path):
    save_drafter(tiny_drafter("dflash", target()), tmp_path / "p")
    (tmp_path / "p" / "config.json").write_text("{")
    ended = blockdraft("doctor", tmp_path / "p", "--target", folders / "target")
    assert ended.code == 2
    assert "is not JSON" in ended.err
