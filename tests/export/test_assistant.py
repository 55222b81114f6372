"""A drafter inside transformers' own generate: the target's text, our hidden states, and our acceptance."""

import pytest
import torch
from transformers.generation import utils as generation

from blockdraft.decoding import generate
from blockdraft.errors import BlockdraftError
from blockdraft.export import as_assistant
from blockdraft.targets import load_target
from blockdraft.verification import law

from tiny import FAMILIES, overfit, tiny_drafter, tiny_target

PROMPT = [7, 8, 9, 21]
OTHERS = [each for each in FAMILIES if each != "qwen3"]


@pytest.fixture(scope="module", params=["pocket", pytest.param("smollm2", marks=pytest.mark.slow)])
def built_in(request):
    """A built-in target, a prompt, and a drafter that knows its greedy answer by heart."""
    target = load_target(request.param)
    prompt = target.render([{"role": "user", "content": "What is a river?"}])
    answer = generate(target, None, prompt, rule="greedy", max_new_tokens=24).tokens
    drafter = tiny_drafter("dflash", target)
    return target, overfit(drafter, target, prompt + answer, len(prompt), num_steps=40, rate=3e-3), prompt


def decode(target, drafter, prompt, num_tokens, **options):
    """New tokens of transformers, and its verification rounds, the prefill's pass not counted."""
    calls = []
    hook = target.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        out = target.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), top_k=0, top_p=1.0,
            assistant_model=as_assistant(drafter), speculation_type="dflash", max_new_tokens=num_tokens, pad_token_id=1,
            **options,
        )  # fmt: skip
    finally:
        hook.remove()
    return out[0, len(prompt) :].tolist(), len(calls) - 1


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_greedy_text_and_rounds_are_ours(family):
    target = tiny_target(family, dtype=torch.float32)
    text = generate(target, None, PROMPT, rule="greedy", max_new_tokens=24).tokens
    drafter = overfit(tiny_drafter("dflash", target), target, PROMPT + text, len(PROMPT), num_steps=60, rate=3e-3)
    ours = generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=24)
    tokens, num_rounds = decode(target, drafter, PROMPT, 24, do_sample=False)
    assert tokens == ours.tokens == text
    assert num_rounds == len(ours.rounds) < 16  # so some proposals were accepted


def test_greedy_text_of_built_in_targets(built_in):
    target, drafter, prompt = built_in
    ours = generate(target, drafter, prompt, rule="greedy", max_new_tokens=24)
    tokens, num_rounds = decode(target, drafter, prompt, 24, do_sample=False)
    assert tokens == ours.tokens
    assert num_rounds == len(ours.rounds)
    assert num_rounds < len(ours.tokens) / (1.5 if target.name == "pocket" else 1.0)  # so some proposals were accepted


@pytest.mark.parametrize("family", FAMILIES)
def test_its_hidden_states_are_those_we_draft_from(family, monkeypatch):
    """Every round's q in transformers against `Drafter.propose` after the same tokens."""
    target = tiny_target(family, dtype=torch.float32)
    drafter, seen = tiny_drafter("dflash", target), []

    def watch(candidates, logits, length, *others, original=generation._speculative_sampling, **options):
        seen.append((candidates[0, :-length].tolist(), logits.softmax(-1)))
        return original(candidates, logits, length, *others, **options)

    monkeypatch.setattr(generation, "_speculative_sampling", watch)
    torch.manual_seed(0)
    decode(target, drafter, PROMPT, 20, do_sample=True)
    assert len(seen) > 5
    for text, probs in seen:
        cache = drafter.new_cache(64)
        features = target.forward(torch.tensor([text[:-1]]), layers=drafter.config.target_layers).features
        drafter.extend(cache, features)
        torch.testing.assert_close(probs, drafter.propose(cache, text[-1], target, 1.0).probs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_sampled_blocks_are_accepted_as_under_our_token_rule(built_in, monkeypatch):
    """Accepted tokens of all rounds against their exact expectation given p, q and the drafted tokens."""
    target, drafter, prompt = built_in
    total, expected, variance = 0.0, 0.0, 0.0

    def watch(candidates, logits, length, target_logits, *others, original=generation._speculative_sampling, **options):
        nonlocal total, expected, variance
        p, q = (each.double().softmax(-1) for each in (target_logits, logits))
        accept, _ = law("token", p, q, candidates[:, -length:])
        steps = torch.arange(length + 1, dtype=torch.float64)
        mean = float(accept[0] @ steps)
        kept, num_accepted = original(candidates, logits, length, target_logits, *others, **options)
        total, expected = total + float(num_accepted), expected + mean
        variance += float(accept[0] @ steps.square()) - mean**2
        return kept, num_accepted

    monkeypatch.setattr(generation, "_speculative_sampling", watch)
    for seed in range(8):
        torch.manual_seed(seed)
        decode(target, drafter, prompt, 24, do_sample=True)
    assert expected > (10 if target.name == "pocket" else 5)  # smollm2's drafter has learnt less in its 40 steps
    assert abs(total - expected) / variance**0.5 < 4


def test_padding_in_front_changes_nothing():
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter("dflash", target)
    texts = []
    for num_pads in (0, 3):
        mask = torch.tensor([[0] * num_pads + [1] * len(PROMPT)])
        out = target.model.generate(
            torch.tensor([[1] * num_pads + PROMPT]), attention_mask=mask, assistant_model=as_assistant(drafter),
            speculation_type="dflash", max_new_tokens=16, do_sample=False, pad_token_id=1,
        )  # fmt: skip
        texts.append(out[0, mask.shape[1] :].tolist())
    assert texts[0] == texts[1] == generate(target, None, PROMPT, rule="greedy", max_new_tokens=16).tokens


def test_it_shares_the_drafters_weights_and_takes_the_targets_dtype():
    target = tiny_target(dtype=torch.bfloat16)
    drafter = tiny_drafter("dflash", target)
    assistant = as_assistant(drafter)
    assert assistant.drafter.fc.weight is drafter.fc.weight
    assert (assistant.device, assistant.dtype) == (target.device, torch.bfloat16)
    assert len(decode(target, drafter, PROMPT, 8, do_sample=False)[0]) <= 8


def test_drafters_that_transformers_cannot_run_are_refused():
    target = tiny_target(dtype=torch.float32)
    with pytest.raises(BlockdraftError, match="has no Markov head"):
        as_assistant(tiny_drafter("dspark", target))
    with pytest.raises(BlockdraftError, match="transformers discards slot 0"):
        as_assistant(tiny_drafter("dflash", target, slot_layout="next_token"))
