"""The corpus is reproducible, split cleanly, right in what it says, and not a lookup table."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

import pytest

from blockdraft.pocket.corpus import FAMILIES, CorpusError, examples, heldout, prompts, split_of
from blockdraft.pocket.corpus.arithmetic import LARGEST, NUMBER_WORDS, OPERATIONS, Event, Story, parse_answer
from blockdraft.pocket.corpus.dice import Dice
from blockdraft.pocket.corpus.functions import code_of, fulfils, parses

EVERY = pytest.mark.parametrize("family", FAMILIES)

DIGEST = "858c2d6687867c6d"
"""Of the first conversations. Whoever changes the corpus must rebuild the model, and then this."""


def take(family, count, split="train", seed=1):
    return list(islice(examples(family, split, seed), count))


def digest():
    text = repr([take(family, 50, split) for family in FAMILIES for split in ("train", "heldout")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_corpus_is_the_one_the_model_was_built_on():
    assert digest() == DIGEST


def test_another_process_with_another_hash_seed_draws_the_same():
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", "import test_corpus; print(test_corpus.digest())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest()


@EVERY
def test_a_seed_is_a_stream_of_its_own(family):
    assert take(family, 20) == take(family, 20)
    assert take(family, 20) == take(family, 40)[:20]
    assert {each.prompt for each in take(family, 20)} != {each.prompt for each in take(family, 20, seed=2)}
    assert len({each.id for each in take(family, 20)}) == 20


@EVERY
def test_no_prompt_is_in_both_splits(family):
    train = {each.prompt for each in take(family, 3000)}
    held_out = {each.prompt for each in take(family, 300, "heldout")}
    assert not train & held_out
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in held_out} == {"heldout"}


@EVERY
def test_the_evaluation_list_is_fixed_and_without_repeats(family):
    listed = heldout(family, 100)
    assert len({each.prompt for each in listed}) == len(listed) == 100
    assert heldout(family, 30) == listed[:30]
    assert {each.family for each in listed} == {family}


def test_a_kind_is_a_part_of_the_evaluation_list():
    listed = heldout("chat", 10, "definition")
    assert {each.kind for each in listed} == {"definition"}
    assert len({each.prompt for each in listed}) == len(listed) == 10
    assert listed[0] in heldout("chat", 100)


def test_prompts_mix_families_and_turns():
    drawn = list(islice(prompts(0), 1000))
    assert drawn[:50] == list(islice(prompts(0), 50)) != list(islice(prompts(1), 50))
    families = Counter(each.family for each in drawn)
    assert families["chat"] > families["math"] > 200 < families["code"]
    assert 50 < sum(len(each.turns) == 2 for each in drawn) < 150
    assert {split_of(turn) for each in drawn for turn in each.turns} == {"train"}
    assert len({each.id for each in drawn}) == len(drawn)
    assert {each.family for each in islice(prompts(3, "code"), 50)} == {"code"}


def test_unknown_names_are_refused():
    with pytest.raises(CorpusError, match="unknown family 'maths'; known: math, code, chat"):
        next(examples("maths", "train", 1))
    with pytest.raises(CorpusError, match="unknown family 'maths'"):
        next(prompts(0, "maths"))
    with pytest.raises(CorpusError, match="unknown split 'test'; known: train, heldout"):
        next(examples("math", "test", 1))


def test_math_answers_follow_from_the_working():
    """Every equation holds, the chain starts from numbers of the prompt, the last result is the answer."""
    for each in take("math", 1000):
        equations = re.findall(r"\d[\d +*/-]* = [\d +*/=-]*\d", each.response)
        assert len(equations) == each.difficulty
        for equation in equations:
            assert len({evaluate(side) for side in equation.split(" = ")}) == 1, equation
        assert parse_answer(each.response) == int(each.answer) == evaluate(equations[-1].split(" = ")[-1])
        numbers = set(re.findall(r"\d+", each.prompt))
        numbers |= {str(value) for value, word in enumerate(NUMBER_WORDS, start=2) if word in each.prompt}
        if each.kind == "two people":
            numbers |= {"2"} if "twice" in each.prompt else set()
        assert set(re.findall(r"\d+", equations[0].split(" = ")[0])) <= numbers, each
        assert max(int(n) for n in re.findall(r"\d+", each.response)) <= LARGEST
        assert each.response.endswith(f"\nAnswer: {each.answer}")


def evaluate(side):
    """A sum of products, left to right, without Python's own evaluator."""
    total, sign = 0, "+"
    for term in re.findall(r"[+-]|[^+-]+", side):
        if term in "+-":
            sign = term
            continue
        first, *rest = re.findall(r"\d+|[*/]", term)
        value = int(first)
        for symbol, number in zip(rest[::2], rest[1::2], strict=True):
            assert symbol == "*" or value % int(number) == 0
            value = OPERATIONS[symbol](value, int(number))
        total = OPERATIONS[sign](total, value)
    return total


def test_math_covers_all_steps_and_operations():
    sample = take("math", 600)
    assert set(Counter(each.difficulty for each in sample)) == {1, 2, 3}
    for symbol in OPERATIONS:
        assert sum(f" {symbol} " in each.response for each in sample) > 30


@pytest.mark.parametrize(
    ("text", "answer"), [("So 4.\nAnswer: 42", 42), ("Answer: 7\n", 7), ("Answer: 7\nmore", None), ("42", None)]
)
def test_parse_answer(text, answer):
    assert parse_answer(text) == answer


def test_every_function_does_what_was_asked():
    """Runs each function against results that come from the task's definition, not from the function."""
    for each in take("code", 800):
        assert parses(each.response)
        names = {}
        exec(code_of(each.response), names)
        name = re.search(r"def (\w+)", each.response).group(1)
        exec(each.answer, names | {"function": names[name]})
        assert each.answer.count("assert ") >= 3
        assert "`" not in each.prompt or f"`{name}" in each.prompt


REVERSE = "```python\ndef reverse(text):\n    return {}\n```"
CHECKS = "assert function('ab') == 'ba'"


@pytest.mark.parametrize(
    ("prompt", "response", "verdict"),
    [
        ("Reverse a text.", REVERSE.format("text[::-1]"), True),
        ("Write `reverse(text)`.", REVERSE.format("text[::-1]"), True),
        ("Write `mirror(text)`.", REVERSE.format("text[::-1]"), False),
        ("Reverse a text.", REVERSE.format("text"), False),
        ("Reverse a text.", REVERSE.format("text["), False),
        ("Reverse a text.", "text[::-1]", False),
    ],
)
def test_fulfils(prompt, response, verdict):
    assert fulfils(prompt, response, CHECKS) is verdict


def test_a_function_that_does_not_end_fails():
    assert not fulfils(
        "Loop.", "```python\ndef loop(x):\n    while True:\n        pass\n```", "function(1)", seconds=0.5
    )


@EVERY
def test_responses_are_long_enough_for_blocks(family, tokenizer):
    lengths = [len(tokenizer.encode(each.response).ids) for each in take(family, 500)]
    assert max(lengths) <= 200
    assert sum(length >= 25 for length in lengths) >= 0.75 * len(lengths)


@EVERY
def test_responses_hardly_ever_repeat(family):
    sample = take(family, 3000)
    assert len({each.response for each in sample}) > 0.85 * len(sample)


@pytest.mark.parametrize("family", ["code", "chat"])
def test_a_prompt_that_repeats_is_answered_in_several_ways(family):
    answers = defaultdict(list)
    for each in take(family, 5000):
        answers[each.prompt].append(each.response)
    repeated = [given for given in answers.values() if len(given) > 1]
    assert len(repeated) > 50
    assert sum(len(set(given)) for given in repeated) > 0.8 * sum(map(len, repeated))


def test_a_math_problem_is_solved_in_several_ways():
    solutions = set()
    for seed in range(20):
        story = Story(Dice(seed), 30, "{name} has 30 nuts.", {"name": "Mia"})
        story.apply("+", 12, Event("Mia finds {number} more.", "[we add {number}|{number} are added]"))
        draft = story.finish("How many nuts has {name}?", "[So|Then] {name} has {value} nuts.", "nuts")
        assert (draft.answer, draft.difficulty, draft.kind) == ("42", 1, "nuts")
        solutions.add(draft.response)
    assert len(solutions) > 10
