"""`blockdraft demo --quick`: which drafter, which prompts, and two answers to each that take turns."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from blockdraft import demo
from blockdraft.cli import generate as verb
from blockdraft.decoding import Generation, Round, RoundCosts, generate
from blockdraft.demo import NothingShippedError, QuickAnswer, answer_twice, best_shipped, quick_prompts
from blockdraft.drafters import SHIPPED, save_drafter
from blockdraft.evaluation.candidates import MeasuredLengths
from blockdraft.evaluation.results import Interval

from commands import blockdraft
from tiny import tiny_drafter, tiny_target

COSTS = RoundCosts((0.0, 1.0, 9.0, 9.0, 9.0), (1.0,) * 5, (0.0,) * 5)
"""Of rounds that are worth one proposal."""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A target and a drafter's folder that the quick demo takes for pocket and for a shipped drafter."""
    target = tiny_target(dtype=torch.float32)
    save_drafter(tiny_drafter("dflash", target), tmp_path / "drafter")
    monkeypatch.setattr("blockdraft.targets.load_target", lambda _name, **_where: target)
    monkeypatch.setattr(demo, "quick_prompts", lambda _: ["w7 w8", "w9"])
    monkeypatch.setattr(verb.Show, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr("blockdraft.decoding.round_costs", lambda *_: COSTS)
    monkeypatch.setitem(demo.SIZES, "pocket", SimpleNamespace(threads=None))
    return target, tmp_path / "drafter"


def lengths(rule, choice, length):
    def one(x):
        return Interval(value=x, low=x, high=x)

    return MeasuredLengths(
        rule=rule, choice=choice, draft_temperature=1.0, predicted_length=one(length), acceptance_length=one(4.0),
        speedup=one(1.0),
    )  # fmt: skip


def record(name, target="pocket", *rows):
    return SimpleNamespace(name=name, target=target, measured=SimpleNamespace(lengths=list(rows)) if rows else None)


def test_the_longest_drafter_of_the_target_is_taken(monkeypatch):
    found = [
        record("unmeasured"),
        record("slow", "pocket", lengths("block", "paper", 1.5), lengths("greedy", "paper", 9.0)),
        record("fast", "pocket", lengths("block", "paper", 1.2), lengths("block", "best", 2.5)),
        record("one-hot", "pocket", lengths("block", "paper", 1.0), lengths("block", "one-hot", 7.0)),
        record("another target's", "smollm2", lengths("block", "paper", 8.0)),
    ]
    monkeypatch.setattr(demo, "shipped_drafters", lambda: found)
    assert best_shipped("pocket").name == "fast"
    assert best_shipped("smollm2").name == "another target's"
    del found[1:]
    assert best_shipped("pocket").name == "unmeasured"
    with pytest.raises(NothingShippedError, match="no drafter for smollm2"):
        best_shipped("smollm2")


def test_answers_are_those_of_generate_and_their_speeds_are_pooled(tiny):
    target, folder = tiny
    del folder
    drafter = tiny_drafter("dflash", target)
    seen, rounds = [], []
    answers = answer_twice(
        target, drafter, ["w7 w8", "w9"], max_new_tokens=9, seed=4, on_prompt=seen.append, on_round=rounds.append,
        on_answer=seen.append,
    )  # fmt: skip
    assert seen == ["w7 w8", answers[0], "w9", answers[1]]
    for number, answer in enumerate(answers):
        for small, found in ((drafter, answer.drafted), (None, answer.alone)):
            options = {"temperature": demo.QUICK_TEMPERATURE, "max_new_tokens": 9, "seed": 4 + number}
            assert found.tokens == generate(target, small, answer.prompt, **options).tokens
    assert len(rounds) == sum(1 + len(each.drafted.rounds) for each in answers)
    adaptive = answer_twice(target, drafter, ["w7 w8"], costs=COSTS, max_new_tokens=9, seed=4)
    assert {len(each.drafted) for each in adaptive[0].drafted.rounds} == {1}


def test_the_speed_up_is_that_of_all_tokens_over_all_seconds():
    def took(tokens, seconds):
        return Generation([1], list(range(tokens)), rounds=[Round([1], 1, 2, {"verify": seconds})])

    answers = [QuickAnswer("a", took(30, 1.0), took(10, 1.0)), QuickAnswer("b", took(10, 3.0), took(30, 1.0))]
    assert answers[0].speedup == 3.0
    assert demo.speedup(answers) == (40 / 4) / (40 / 2)


def test_pocket_is_asked_of_every_family_and_other_targets_plain_questions():
    asked = quick_prompts("pocket")
    assert len(asked) == len(set(asked)) == 4
    assert quick_prompts("smollm2") == list(demo.QUESTIONS)
    assert "What is a river?" in asked


def test_plain_text_in_a_pipe(tiny):
    ended = blockdraft("demo", "--quick", "--drafter", tiny[1])
    assert ended.code == 0, ended.err
    assert "\x1b" not in ended.out
    assert ended.out.count("tokens per call") == 3
    assert ended.out.count("w7 w8") >= 1
    assert ended.out.splitlines()[-1].startswith("All together: ")


def test_colours_and_what_they_mean_on_a_terminal(tiny):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    verb.Show(console, silent=False).run("pocket", str(tiny[1]))
    for code, words in ((32, "accepted"), (33, "corrected"), (36, "added after a whole block")):
        assert f"\x1b[{code}m{words}\x1b[0m" in file.getvalue()
    assert file.getvalue().count("\x1b[33m") > 1


def test_json(tiny):
    found = json.loads(blockdraft("demo", "--quick", "--drafter", tiny[1], "--json").out)
    assert [each["prompt"] for each in found["answers"]] == ["w7 w8", "w9"]
    assert {"tokens", "rounds", "acceptance_length"} <= set(found["answers"][0]["drafted"])
    assert found["speedup"] > 0


def test_without_a_shipped_drafter_it_is_one_line(monkeypatch):
    for name in list(SHIPPED):
        monkeypatch.delitem(SHIPPED, name)
    ended = blockdraft("demo", "--quick")
    assert ended.code == 2
    assert ended.err.startswith("error: no drafter for pocket comes with this installation")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--out", "x"], "writes nothing"),
        (["--drafter", "x"], "add --quick"),
        (["--target", "x"], "not one of"),
    ],
)
def test_mistakes(arguments, message):
    ended = blockdraft("demo", *arguments)
    assert ended.code == 2
    assert message in ended.err
