"""The decode loop is lossless: against transformers, against itself, and by enumeration."""

import copy
import functools
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft.decoding import DecodingError, generate, room
from blockdraft.drafters import Anchors, Proposal, save_drafter
from blockdraft.targets import Sampling, UnsupportedTargetError
from blockdraft.verification import law
from blockdraft.verification.reference import enumerate_round, joint_law

from tiny import EOS, FAMILIES, overfit, tiny_drafter, tiny_model, tiny_target

PROMPT = [7, 3, 9, 30, 12]
DRAFTERS = [("dflash", {}), ("dspark", {}), ("dspark", {"markov_head": "rnn"})]
IDS = ["dflash", "dspark", "dspark-rnn"]
ZERO = {"temperature": 0.0}


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


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_fewer_proposals_than_trained_leave_the_greedy_text_as_it_is(kind):
    target = without_end()
    drafter = tiny_drafter(kind, target)
    plain = generate(target, None, PROMPT, rule="greedy", max_new_tokens=30)
    overfit(drafter, target, PROMPT + plain.tokens, len(PROMPT), num_steps=30, rate=5e-3)
    for num in (1, 2, 4):
        out = generate(target, drafter, PROMPT, rule="greedy", max_new_tokens=30, num_proposals=num)
        assert out.tokens == plain.tokens
        assert {len(r.drafted) for r in out.rounds} == {num}
        assert out.acceptance_length > 1


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_exact_law_of_a_round_with_fewer_proposals_is_the_targets(rule, kind):
    """Drafts of 2 tokens by a drafter of 4, as `propose` gives their probabilities, enumerated over every block."""
    target = without_end(vocab_size=4)
    drafter = tiny_drafter(kind, target)
    prompt, anchor = [3, 0, 1], 3
    p, _ = models_after(target, drafter, prompt, anchor)
    cache = drafter.new_cache(20)
    drafter.extend(cache, target.forward(torch.tensor([prompt]), layers=drafter.config.target_layers).features)
    laws = {}
    for seed in range(60):  # the first position's law, and the second's after each first token
        block = drafter.propose(cache, anchor, target, 3.0, torch.Generator().manual_seed(seed), num_proposals=2)
        laws[()] = block.probs[0, 0].double()
        laws[int(block.tokens[0, 0]),] = block.probs[0, 1].double()
    assert len(laws) == 5
    emitted = enumerate_round(functools.partial(law, rule), p, laws.__getitem__, 4, 2)
    torch.testing.assert_close(emitted.law, emitted.target, atol=1e-6, rtol=0)


def test_a_number_of_proposals_that_cannot_be_is_refused():
    target = without_end()
    drafter = tiny_drafter("dflash", target)
    for num in (0, 5):
        with pytest.raises(DecodingError, match=f"between 1 and 4, the most that .* it is {num}"):
            generate(target, drafter, PROMPT, num_proposals=num)
    with pytest.raises(DecodingError, match="and there is none; leave it out"):
        generate(target, None, PROMPT, num_proposals=2)


class Oracle:
    """A drafter that knows the continuation, right up to a mistake at a chosen place of every block."""

    def __init__(self, drafter, path, wrong_at=None):
        self.config, self.path, self.wrong_at = drafter.config, path, wrong_at
        self.new_cache, self.extend = drafter.new_cache, drafter.extend

    def predict(self, cache, anchor, *_):
        assert anchor == self.path[cache.length]
        return torch.tensor(self.path[cache.length + 1 :] + [5] * 4)[None, :4]

    def draft(self, hidden, *_):
        tokens = hidden.clone()
        if self.wrong_at is not None:
            tokens[0, self.wrong_at] = (tokens[0, self.wrong_at] + 1) % 40
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


@pytest.mark.slow
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


def test_a_prompt_is_a_user_message_or_messages_or_raw_text_or_token_ids():
    target = tiny_target()
    turns = [
        {"role": "user", "content": "w7 w8"},
        {"role": "assistant", "content": "w9"},
        {"role": "user", "content": "w10"},
    ]
    out = generate(target, None, turns, max_new_tokens=5)
    assert target.decode(out.prompt) == "user w7 w8 assistant w9 user w10 assistant"
    assert out.text == target.decode(out.tokens)
    prompts = {"w7": "user w7 assistant", "user": "user user assistant"}
    for prompt, rendered in prompts.items():
        assert target.decode(generate(target, None, prompt, max_new_tokens=2).prompt) == rendered
        assert target.decode(generate(target, None, prompt, raw=True, max_new_tokens=2).prompt) == prompt
    ids = [7, 8, 9]
    for same in (ids, tuple(ids), np.array(ids).tolist(), list(np.array(ids)), torch.tensor(ids)):
        assert generate(target, None, same, max_new_tokens=2).prompt == ids


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
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be a finite number and not negative"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": float("inf")}, "temperature must be a finite number"),
        ({"temperature": 1e-30}, "too small to divide by"),
        ({"draft_temperature": float("nan")}, "draft_temperature must be a finite number"),
        ({"temperature": 0.0}, "choose the rule greedy, or a temperature above 0"),
        ({"temperature": 0, "rule": "token"}, "nothing to sample for the rule token"),
        ({"rule": "greedy", "temperature": 1.0}, "leave the temperature out"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"rule": "blok"}, "unknown verification rule 'blok'; known: greedy, token, block"),
        ({"seed": 2**64}, "the seed must fit into 64 bits"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "  ", "raw": True}, "the prompt has no tokens"),
        ({"prompt": [5, 40]}, "token id 40 is not one of the 40"),
        ({"prompt": [5, -1]}, "token id -1"),
        ({"prompt": [True, False]}, "a prompt is a text, a list of messages or a list of token ids"),
        ({"prompt": [5, {"role": "user", "content": "w7"}]}, "never a mixture"),
        ({"prompt": [{"role": "user"}]}, 'a message needs "role" and "content"'),
        ({"prompt": [{"role": "user", "content": "w7 \udc80"}]}, "not valid Unicode at character 3"),
        ({"prompt": [5], "raw": True}, "only a text can be raw"),
    ],
)
def test_bad_input_is_named(options, message):
    target = tiny_target()
    with pytest.raises(DecodingError, match=re.escape(message)):
        generate(target, None, **({"prompt": PROMPT} | options))


def test_greedy_needs_no_temperature_and_takes_zero():
    target = without_end()
    texts = [generate(target, None, PROMPT, rule="greedy", max_new_tokens=9, **each).tokens for each in ({}, ZERO)]
    assert texts[0] == texts[1]
    sampled = [generate(target, None, PROMPT, max_new_tokens=9, **each).tokens for each in ({}, {"temperature": 1.0})]
    assert sampled[0] == sampled[1] != texts[0]


def test_a_target_without_a_template_takes_raw_text_and_token_ids():
    target = tiny_target()
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = None
    with pytest.raises(DecodingError, match="has no chat template; give the prompt as raw text, or as token ids"):
        generate(target, None, "w7")
    assert generate(target, None, "w7", raw=True, max_new_tokens=2).prompt == [7]


def test_what_a_chat_template_refuses_is_said_in_its_words():
    target = tiny_target()
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DecodingError, match="refuses these messages: roles must alternate"):
        generate(target, None, "w7")


@pytest.mark.parametrize("kind", [None, "dflash", "dspark"])
def test_a_text_fits_into_the_context_exactly_or_is_refused(kind):
    """At the limit nothing reads beyond it; one token more is refused, and the error says what would fit."""
    target = without_end(max_position_embeddings=64)
    drafter = None if kind is None else tiny_drafter(kind, target)
    block = 0 if drafter is None else drafter.config.num_proposals
    assert room(target, drafter, len(PROMPT)) == 64 - len(PROMPT) - block
    reach = []
    forward = target.forward
    target.forward = lambda ids, cache, layers, **options: (
        reach.append(cache.length + ids.shape[1]),
        forward(ids, cache, layers, **options),
    )[1]
    for num_prompt in (len(PROMPT), 64 - block - 1):
        prompt = (PROMPT * 13)[:num_prompt]
        fits = 64 - num_prompt - block
        assert len(generate(target, drafter, prompt, max_new_tokens=fits).tokens) == fits
        with pytest.raises(DecodingError, match=f"reads at most 64 tokens; .* max_new_tokens to at most {fits},"):
            generate(target, drafter, prompt, max_new_tokens=fits + 1)
    assert max(reach) <= 64
    with pytest.raises(DecodingError, match=r"make 67: shorten the prompt$"):
        generate(target, drafter, [*(PROMPT * 13)[: 64 - block], 5, 5], max_new_tokens=1)


def test_weights_that_give_nan_are_an_error_and_no_text():
    target = without_end()
    target.head[3, 2] = torch.nan
    with pytest.raises(DecodingError, match="computes NaN: its weights are damaged"):
        generate(target, None, PROMPT, rule="greedy")


@pytest.mark.parametrize("kind", ["dflash", pytest.param("dspark", marks=pytest.mark.slow)])
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


def test_a_plain_transformers_model_and_a_folder_will_do(tmp_path):
    """One line for those who have both already; the model keeps its gradients."""
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter("dflash", target)
    save_drafter(drafter, tmp_path / "drafter")
    target.save(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    expected = generate(target, drafter, "w7 w8", max_new_tokens=12, seed=3)
    out = generate(model, tmp_path / "drafter", "w7 w8", max_new_tokens=12, seed=3)
    assert (out.tokens, out.text) == (expected.tokens, expected.text)
    assert all(parameter.requires_grad for parameter in model.parameters())
    by_name = generate(str(tmp_path / "target"), str(tmp_path / "drafter"), "w7 w8", max_new_tokens=12, seed=3)
    assert by_name.tokens == expected.tokens
    given = generate(target.model, drafter, "w7 w8", tokenizer=target.tokenizer, max_new_tokens=12, seed=3)
    assert given.tokens == expected.tokens
    nameless = tiny_model()
    assert generate(nameless, None, PROMPT, max_new_tokens=4).text is None
    with pytest.raises(DecodingError, match="no chat template"):
        generate(nameless, None, "w7")
    nameless.name_or_path = "./nowhere"
    with pytest.raises(UnsupportedTargetError, match="give it as tokenizer"):
        generate(nameless, None, "w7")
