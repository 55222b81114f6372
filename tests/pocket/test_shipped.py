"""The weights that are shipped: small, loadable, and as good as their page says."""

import json

import pytest

from blockdraft.decoding import generate
from blockdraft.pocket.arithmetic import parse_answer
from blockdraft.pocket.corpus import heldout
from blockdraft.targets import load_target
from blockdraft.targets.loading import POCKET_FOLDER


@pytest.fixture(scope="module")
def pocket():
    return load_target("pocket")


def test_the_weights_take_at_most_8_megabytes():
    assert (POCKET_FOLDER / "model.safetensors").stat().st_size <= 8_000_000


def test_it_is_a_target_with_a_mask_token(pocket):
    assert pocket.tokenizer.convert_ids_to_tokens(pocket.mask_token_id) == "<|mask|>"
    assert pocket.decode(list(pocket.eos_ids), skip_special_tokens=False) == "<|im_end|>"
    assert len(pocket.feature_layers(3)) == 3


def test_greedy_answers_to_simple_held_out_problems(pocket):
    """As many right as the quality file promises, less what twenty problems can miss by chance."""
    simple = [example for example in heldout("math", 100) if example.difficulty == 1][:20]
    promised = json.loads((POCKET_FOLDER / "quality.json").read_text())["math_exact_answers_by_steps"]["1"]
    right = 0
    for example in simple:
        text = generate(pocket, None, example.prompt, rule="greedy", max_new_tokens=200).text
        right += str(parse_answer(text)) == example.answer
    assert right / len(simple) >= promised - 0.3
