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

from blockdraft.pocket.arithmetic import LARGEST, OPERATIONS, Event, Story, parse_answer
from blockdraft.pocket.corpus import FAMILIES, examples, heldout, prompts, split_of
from blockdraft.pocket.dice import Dice
from blockdraft.pocket.functions import code_of, parses

EVERY = pytest.mark.parametrize("family", FAMILIES)

DIGEST = "f36c066ad131cea4"
"""Of the first conversations. Whoever changes the corpus must rebuild the model, and then this."""


def take(family, count, split="train", seed=1):
    return list(islice(examples(family, split, seed), count))


def digest():
    text = repr([take(family, 50, split) for family in FAMILIES for split in ("train", "heldout")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_corpus_is_the_one_the_model_was_built_on():
    assert digest() == DIGEST


def test_another_process_with_another_hash_seed_draws_the_same():
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", "import test_corpus; print(test_corpus.digest())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest()


@EVERY
def test_a_seed_is_a_stream_of_its_own(family):
    assert take(family, 20) == take(family, 20)
    assert take(family, 20) == take(family, 40)[:20]
    assert {each.prompt for each in take(family, 20)} != {each.prompt for each in take(family, 20, seed=2)}
    assert len({each.id for each in take(family, 20)}) == 20
    assert list(islice(prompts(family, "train", 1), 20)) == [each.prompt for each in take(family, 20)]


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


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown family 'maths'; known: math, code, chat"):
        next(examples("maths", "train", 1))
    with pytest.raises(ValueError, match="unknown split 'test'; known: train, heldout"):
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
        exec(each.answer, names)
        assert each.answer.count("assert ") >= 3
        assert re.search(r"def (\w+)", each.response).group(1) in each.prompt


def test_a_wrong_function_fails_its_checks():
    each = next(each for each in take("code", 200) if "def square(" in each.response)
    with pytest.raises(AssertionError):
        exec("def square(x):\n    return x + x\n" + each.answer)


@EVERY
def test_responses_are_long_enough_for_blocks(family, tokenizer):
    lengths = [len(tokenizer.encode(each.response).ids) for each in take(family, 500)]
    assert sum(30 <= length <= 200 for length in lengths) >= 0.98 * len(lengths)


@EVERY
def test_responses_hardly_ever_repeat(family):
    sample = take(family, 3000)
    assert len({each.response for each in sample}) > 0.9 * len(sample)


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
        solutions.add(story.solution("[So|Then] {name} has {value} nuts."))
    assert len(solutions) > 10
