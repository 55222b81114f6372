"""The built-in targets, end to end: greedy speculative text is greedy text, whatever the drafter."""

import functools

import pytest
import torch

from blockdraft.decoding import generate
from blockdraft.drafters import SHIPPED, DrafterConfig, build_drafter, load_drafter
from blockdraft.targets import BUILT_IN, Target, load_target

from tiny import overfit

SLOW = pytest.mark.slow  # smollm2 takes seconds to load alone


@functools.cache
def built_in(name) -> Target:
    return load_target(name)


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW if each == "smollm2" else ()) for each in BUILT_IN])
def test_greedy_text_is_that_of_transformers_with_and_without_a_drafter(name):
    target = built_in(name)
    ids = target.render([{"role": "user", "content": "What is a river?"}])
    tokens = torch.tensor([ids])
    theirs = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=20)
    plain = generate(target, None, ids, rule="greedy", max_new_tokens=20)
    assert plain.tokens == theirs[0, len(ids) :].tolist()
    torch.manual_seed(0)
    for kind in ("dflash", "dspark"):
        config = DrafterConfig.for_target(kind, target, num_layers=1, num_proposals=5, num_features=2)
        drafter = build_drafter(config).eval()
        assert generate(target, drafter, ids, rule="greedy", max_new_tokens=20).tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "num_steps"), [("pocket", "dflash", 150), ("pocket", "dspark", 40), ("smollm2", "dspark", 25)]
)
def test_greedy_text_is_the_same_with_a_drafter_that_was_trained(name, kind, num_steps):
    """Trained on the answer to one question, asked that one and another: blocks are kept and cut, no token changes."""
    target, num = built_in(name), 40 if name == "pocket" else 20
    known, other = (
        target.render([{"role": "user", "content": question}])
        for question in ("What is a river?", "Tom has 3 apples and buys 4 more. How many apples does he have?")
    )
    plain = {str(ids): generate(target, None, ids, rule="greedy", max_new_tokens=num).tokens for ids in (known, other)}
    torch.manual_seed(0)
    drafter = build_drafter(DrafterConfig.for_target(kind, target, num_layers=1, num_proposals=4, num_features=2))
    overfit(drafter, target, known + plain[str(known)], len(known), num_steps=num_steps, rate=3e-3)
    lengths = []
    for ids in (known, other):
        out = generate(target, drafter, ids, rule="greedy", max_new_tokens=num)
        assert out.tokens == plain[str(ids)]
        lengths.append(out.acceptance_length)
    assert lengths[0] > 2
    assert lengths[0] > lengths[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_drafter_drafts_for_its_target(name):
    target = built_in(name.split("-")[0])
    ids = target.render(
        [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}]
    )
    plain = generate(target, None, ids, rule="greedy", max_new_tokens=32)
    out = generate(target, load_drafter(name, target), ids, rule="greedy", max_new_tokens=32)
    assert out.tokens == plain.tokens
    assert out.acceptance_length > 1.4


@pytest.mark.slow
def test_smollm2_can_be_written_as_an_ordinary_folder(tmp_path):
    target = built_in("smollm2")
    target.save(tmp_path)
    again = load_target(tmp_path, mask_token_id=target.mask_token_id)
    tokens = torch.tensor([[1, 50, 60, 70]])
    torch.testing.assert_close(again.forward(tokens).hidden, target.forward(tokens).hidden)
    assert again.eos_ids == target.eos_ids
    assert again.render([{"role": "user", "content": "Hi"}]) == target.render([{"role": "user", "content": "Hi"}])
