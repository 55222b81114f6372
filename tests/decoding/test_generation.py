"""The decode loop is lossless: against transformers, against itself, and by enumeration."""

import functools

import pytest
import torch

from blockdraft.decoding import generate
from blockdraft.drafters import Anchors, Proposal
from blockdraft.targets import Sampling
from blockdraft.verification import law
from blockdraft.verification.reference import enumerate_round, joint_law

from tiny import EOS, FAMILIES, overfit, tiny_drafter, tiny_target

PROMPT = [7, 3, 9, 30, 12]
DRAFTERS = [("dflash", {}), ("dspark", {}), ("dspark", {"markov_head": "rnn"})]
IDS = ["dflash", "dspark", "dspark-rnn"]


def without_end(**options):
    """A target that never ends by itself."""
    return tiny_target(eos=None, tokenizer=False, mask_token_id=2, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_autoregressive_greedy_text_is_that_of_transformers(family):
    target = tiny_target(family)
    ours = generate(target, None, PROMPT, rule="greedy", max_new_tokens=40)
    theirs = target.model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, pad_token_id=1, attention_mask=torch.ones(1, 5)
    )
    assert ours.tokens == theirs[0, 5:].tolist()
    assert all(r.accepted == 0 and r.drafted == [] for r in ours.rounds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "changes"), DRAFTERS, ids=IDS)
def test_greedy_speculative_text_is_the_greedy_text(family, kind, changes):
    target = without_end(family=family)
    drafter = tiny_drafter(kind, target, **changes)
    for prompt in (PROMPT, [5], list(range(5, 35))):
        plain = generate(target, None, prompt, rule="greedy", max_new_tokens=50)
        fast = generate(target, drafter, prompt, rule="greedy", max_new_tokens=50)
        assert fast.tokens == plain.tokens
        assert len(fast.tokens) == 50


class Oracle:
    """A drafter that knows the continuation, right up to a mistake at a chosen place of every block."""

    def __init__(self, drafter, path, wrong_at=None):
        self.config, self.path, self.wrong_at = drafter.config, path, wrong_at
        self.new_cache, self.extend = drafter.new_cache, drafter.extend

    def propose(self, cache, anchor, *_):
        tokens = (self.path[cache.length + 1 :] + [5] * 4)[:4]
        assert anchor == self.path[cache.length]
        if self.wrong_at is not None:
            tokens[self.wrong_at] = (tokens[self.wrong_at] + 1) % 40
        tokens = torch.tensor([tokens])
        return Proposal(tokens, torch.nn.functional.one_hot(tokens, 40).float())


def oracle(target, max_new_tokens, wrong_at=None):
    plain = generate(target, None, PROMPT, rule="greedy", max_new_tokens=max_new_tokens)
    return Oracle(tiny_drafter("dflash", target), PROMPT + plain.tokens, wrong_at), plain


@pytest.mark.parametrize(("wrong_at", "length"), [(None, 5), (0, 1), (2, 3), (3, 4)])
def test_counting(wrong_at, length):
    """Retained tokens per call: accepted ones and the correction or bonus, without the prefill token."""
    target = without_end()
    drafter, plain = oracle(target, 61, wrong_at)
    out = generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=41)
    assert out.tokens == plain.tokens[:41]
    assert {r.accepted for r in out.rounds} == {length - 1}
    assert out.acceptance_length == length
    assert len(out.rounds) == -(-40 // length)


def test_the_budget_crops_the_text_and_not_the_count():
    target = without_end()
    drafter, plain = oracle(target, 40)
    out = generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=8)
    assert out.tokens == plain.tokens[:8]
    assert [len(r.tokens) for r in out.rounds] == [5, 5]
    assert generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=1).rounds == []


def test_an_end_token_inside_a_block_ends_the_text_there():
    """Wherever the end falls, as an accepted token or as a correction, nothing follows it."""
    target = without_end()
    drafter, plain = oracle(target, 40)
    how = set()
    for end in set(plain.tokens[1:12]) - {plain.tokens[0]}:
        target.eos_ids = frozenset([end])
        out = generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=40)
        assert out.tokens == plain.tokens[: plain.tokens.index(end) + 1]
        last = out.rounds[-1]
        assert last.tokens[-1] == end
        assert (last.next_token is None) == (last.accepted > 0 and last.drafted[last.accepted - 1] == end)
        how.add(last.next_token is None)
    assert how == {True, False}


def models_after(target, drafter, prompt, anchor, temperature=1.0, draft_temperature=1.0):
    """Target and drafter as functions of the tokens after the anchor."""

    @functools.cache
    def target_law(prefix):
        ids = torch.tensor([[*prompt, anchor, *prefix]])
        return Sampling(temperature).probs(target.logits(target.forward(ids).hidden[:, -1]))[0].double()

    @functools.cache
    def draft_probs_of(prefix):
        features = target.forward(torch.tensor([[*prompt, anchor]]), layers=drafter.config.target_layers).features
        position = torch.tensor([len(prompt)])
        hidden = drafter(features, torch.tensor([anchor]), Anchors.of(torch.zeros_like(position), position), target)
        logits, k = target.logits(hidden), len(prefix)
        path = torch.tensor([[anchor, *prefix]])
        markov = drafter.markov(hidden[:, : k + 1], path)
        if markov is not None:
            logits = logits[:, : k + 1] + markov[0] @ markov[1].T
        return (logits[0, k].float() / draft_temperature).softmax(-1).double().detach()

    return target_law, draft_probs_of


@pytest.mark.parametrize(("kind", "changes"), DRAFTERS, ids=IDS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_exact_law_of_a_round_is_the_targets(rule, kind, changes):
    """The models' own conditionals, at another draft temperature, enumerated over every block."""
    target = without_end(vocab_size=4)
    drafter = tiny_drafter(kind, target, num_proposals=3, **changes)
    p, q = models_after(target, drafter, [3, 0, 1], 3, draft_temperature=0.7)
    emitted = enumerate_round(functools.partial(law, rule), p, q, 4, 3)
    torch.testing.assert_close(emitted.law, emitted.target, atol=1e-6, rtol=0)
    assert float(emitted.survival[0]) > 0.05


@pytest.mark.parametrize(("kind", "changes"), DRAFTERS[:2], ids=IDS[:2])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_texts_follow_the_targets_law(rule, kind, changes):
    """Joint frequencies of the first three tokens of `generate` over many seeds: chi-square at the 1e-6 level."""
    target = without_end(vocab_size=4, dtype=torch.float32)
    drafter = tiny_drafter(kind, target, num_proposals=3, num_layers=1, **changes)
    prompt, num_runs = [3, 0, 1], 500

    @functools.cache
    def model(prefix):
        hidden = target.forward(torch.tensor([[*prompt, *prefix]])).hidden[:, -1]
        return (target.logits(hidden) / 1.3).softmax(-1)[0].double()

    expected = joint_law(model, 4, 3).flatten() * num_runs
    runs = (
        generate(target, drafter, prompt, rule=rule, temperature=1.3, draft_temperature=0.8, max_new_tokens=3, seed=s)
        for s in range(num_runs)
    )
    cells = torch.tensor([t[0] * 16 + t[1] * 4 + t[2] for t in (run.tokens for run in runs)])
    observed = torch.bincount(cells, minlength=64).double()
    common = expected >= 5
    rest = (observed[~common].sum() - expected[~common].sum()) ** 2 / expected[~common].sum().clamp(min=1)
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum() + rest
    degrees = int(common.sum())
    assert float(chi_square) < degrees + 5 * (2 * degrees) ** 0.5 + 12


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.8)])
def test_truncated_sampling_never_leaves_its_support(top_k, top_p):
    target = without_end(vocab_size=12)
    drafter = tiny_drafter("dflash", target)
    out = generate(target, drafter, PROMPT[:2], top_k=top_k, top_p=top_p, max_new_tokens=40, seed=3)
    sampling = Sampling(1.0, top_k, top_p)
    for i, token in enumerate(out.tokens):
        hidden = target.forward(torch.tensor([PROMPT[:2] + out.tokens[:i]])).hidden[:, -1]
        assert sampling.probs(target.logits(hidden))[0, token] > 0


def test_truncation_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert Sampling(top_k=2).probs(logits)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampling(top_p=0.5).probs(logits)[0].tolist() == pytest.approx([1, 0, 0, 0])
    assert Sampling(top_p=0.79).probs(logits)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampling(temperature=0).probs(logits)[0].tolist() == [1, 0, 0, 0]


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    target = without_end()
    drafter = tiny_drafter("dspark", target)
    first, second, other = (generate(target, drafter, PROMPT, max_new_tokens=40, seed=s).tokens for s in (1, 1, 2))
    assert first == second != other


def test_messages_text_and_several_turns():
    target = tiny_target()
    turns = [
        {"role": "user", "content": "w7 w8"},
        {"role": "assistant", "content": "w9"},
        {"role": "user", "content": "w10"},
    ]
    out = generate(target, None, turns, max_new_tokens=5)
    assert target.decode(out.prompt) == "user w7 w8 assistant w9 user w10 assistant"
    assert out.text == target.decode(out.tokens)
    assert generate(target, None, "w7", max_new_tokens=2).prompt == target.render([{"role": "user", "content": "w7"}])


def test_rounds_are_reported_as_they_come():
    target = without_end()
    drafter = tiny_drafter("dflash", target)
    seen = []
    out = generate(target, drafter, PROMPT, max_new_tokens=20, on_round=seen.append)
    assert seen[1:] == out.rounds
    assert [t for r in seen for t in r.tokens][:20] == out.tokens
    assert all(set(r.seconds) == {"draft", "verify", "rest"} for r in out.rounds)
    assert out.seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"rule": "blok"}, "unknown verification rule"),
        ({"prompt": []}, "the prompt is empty"),
    ],
)
def test_bad_input_is_named(options, message):
    target = without_end()
    with pytest.raises(ValueError, match=message):
        generate(target, None, **({"prompt": PROMPT} | options))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_drafter_overfitted_to_one_text_has_whole_blocks_accepted(kind):
    """Train on the target's greedy text, decode it again: the gate that masks, slots and labels line up."""
    target = without_end(dtype=torch.float32)
    drafter = tiny_drafter(kind, target, num_layers=2)
    text = PROMPT + generate(target, None, PROMPT, rule="greedy", max_new_tokens=41).tokens
    overfit(drafter, target, text, len(PROMPT), num_steps=150, rate=3e-3)
    out = generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=36)
    assert out.tokens == text[5:41]
    assert out.acceptance_length == 5
    assert EOS not in target.eos_ids
