"""The weights that are shipped: small, loadable, and as good as their page says."""

import json

import pytest

from blockdraft.decoding import generate
from blockdraft.pocket import MODEL_FOLDER, heldout
from blockdraft.pocket.corpus.arithmetic import parse_answer
from blockdraft.pocket.corpus.functions import fulfils
from blockdraft.pocket.corpus.knowledge import is_right
from blockdraft.targets import load_target

QUALITY = json.loads((MODEL_FOLDER / "quality.json").read_text())


@pytest.fixture(scope="module")
def pocket():
    return load_target("pocket")


def ask(pocket, prompt):
    return generate(pocket, None, prompt, rule="greedy", max_new_tokens=200).text


def test_the_weights_take_at_most_24_megabytes():
    assert (MODEL_FOLDER / "model.safetensors").stat().st_size <= 24_000_000


def test_it_is_a_deep_target_with_a_mask_token(pocket):
    assert pocket.tokenizer.convert_ids_to_tokens(pocket.mask_token_id) == "<|mask|>"
    assert pocket.decode(list(pocket.eos_ids), skip_special_tokens=False) == "<|im_end|>"
    assert pocket.num_layers >= 16
    assert len(pocket.feature_layers(3)) == 3


def test_the_quality_file_keeps_its_promises():
    steps = QUALITY["math_exact_answers_by_steps"]
    assert steps["1"] == 1.0
    assert min(steps.values()) >= 0.98
    assert QUALITY["code_that_parses"] == 1.0
    assert QUALITY["code_that_passes_its_tests"] >= 0.98
    least = {"definition": 0.9, "definitions": 0.95, "comparison": 0.95, "fact": 0.8, "unknown": 0.7}
    assert {kind: QUALITY["chat_right_by_kind"][kind] >= share for kind, share in least.items()} == dict.fromkeys(
        least, True
    )


@pytest.mark.slow
def test_greedy_answers_to_held_out_prompts(pocket):
    """As many right as the quality file promises, less what a dozen prompts can miss by chance."""
    problems = [example for example in heldout("math", 60) if example.difficulty == 1][:12]
    assert sum(str(parse_answer(ask(pocket, each.prompt))) == each.answer for each in problems) >= 10
    functions = heldout("code", 6)
    assert sum(fulfils(each.prompt, ask(pocket, each.prompt), each.answer) for each in functions) >= 5
    definitions = heldout("chat", 12, "definition")
    assert sum(is_right(each.answer, ask(pocket, each.prompt)) for each in definitions) >= 10


@pytest.mark.parametrize(
    ("prompt", "needed"),
    [
        ("What is a river?", "flows to a lake or the sea"),
        ("what is a river", "flows to a lake or the sea"),
        ("What is a river, and what is a lake?", "flows to a lake or the sea;has land on all sides"),
        ("Tell me about rivers.", "flows to a lake or the sea"),
        ("What is speculative decoding?", "lets a small model guess and a large one check"),
        ("What is a drafter?", "proposes the next tokens"),
        ("How many legs has a spider?", "eight legs"),
        ("What is the capital of France?", "Paris"),
        ("What is the opposite of hot?", "cold"),
        ("Who are you?", "pocket"),
        ("Thanks", "welcome|pleasure|help"),
        ("What is 3 + 4?", "Answer: 7"),
        ("Tom has 3 apples and buys 4 more. How many apples does he have?", "Answer: 7"),
    ],
)
def test_what_a_person_would_ask_first(pocket, prompt, needed):
    assert is_right(needed, ask(pocket, prompt))
