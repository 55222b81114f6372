"""A drafter over a part D of the vocabulary, against the same drafter over all of it with q = 0 outside D."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from test_fused import leaves_of, plain_logits, problem, with_leaves

from blockdraft.losses import (
    OUTSIDE,
    ReducedTarget,
    block_scores,
    block_statistics,
    fused_linear_objective,
    objective,
    restrict_labels,
    restrict_target,
)
from blockdraft.losses.reference import reference_loss, reference_scores
from blockdraft.verification import law
from blockdraft.verification.reference import enumerate_round

from batches import OBJECTIVES, ONE_EACH, batch
from toys import chance, toy

EACH = pytest.mark.parametrize(("name", "options"), ONE_EACH)
NO_FLOORS = {"summand_floor": None, "length_floor": None, "ramp_floor": None}
SAMPLED = [("bv", {"estimator": "sampled", "beta": beta} | NO_FLOORS) for beta in (0.0, 0.37, 1.0)]
"""Scores that are zero at a label outside D, in the log."""
VOCAB_SIZE = 7
DRAFT_IDS = torch.tensor([5, 0, 3, 6])


def whole(draft, vocab_size=VOCAB_SIZE, draft_ids=DRAFT_IDS):
    """Draft logits over D as logits over the whole vocabulary, -inf outside of it."""
    return torch.full((*draft.shape[:-1], vocab_size), -math.inf, dtype=draft.dtype).index_copy(-1, draft_ids, draft)


def normaliser(target, temperature=1.0, draft_ids=DRAFT_IDS):
    place = {int(token): index for index, token in enumerate(draft_ids)}
    argmax = [place.get(int(token), OUTSIDE) for token in target.argmax(-1).flatten()]
    return ReducedTarget(
        (target / temperature).logsumexp(-1), torch.tensor(argmax).view(target.shape[:-1]), temperature
    )


class Reduced:
    """A batch over the whole vocabulary with a drafter over D, and both ways to look at it."""

    def __init__(self, temperature=1.0, dtype=torch.float64, num_blocks=8, spread=1.0, seed=4, **options):
        data = batch(num_blocks, vocab_size=VOCAB_SIZE, spread=spread, seed=seed, **options)
        self.tokens, self.target = data.labels, data.target.to(dtype)
        self.draft = data.draft[..., : len(DRAFT_IDS)].to(dtype).requires_grad_()
        self.labels, self.valid = restrict_labels(data.labels, data.valid, DRAFT_IDS, VOCAB_SIZE)
        self.reduced = normaliser(self.target, temperature)

    def arguments(self):
        return self.draft, self.target[..., DRAFT_IDS], self.labels, self.valid

    def whole_arguments(self):
        return whole(self.draft), self.target, self.tokens, self.valid


def test_the_batch_of_these_tests_has_every_kind_of_block():
    data = Reduced()
    outside = data.labels == OUTSIDE
    lengths = data.valid.sum(-1)
    assert outside[:, 0].any()
    assert outside[:, 1:].any()
    assert (~outside.any(-1) & (lengths > 2)).any()
    assert (lengths == 0).any()
    mass = data.target.softmax(-1)[..., DRAFT_IDS].sum(-1)
    assert float(mass.min()) < 0.5


@pytest.mark.parametrize(("name", "options"), OBJECTIVES + SAMPLED)
def test_values_and_gradients_are_those_of_the_whole_vocabulary(name, options):
    data = Reduced(temperature=0.7)
    value = objective(name, temperature=0.7, **options)(*data.arguments(), reduced=data.reduced)
    expected = reference_loss(name, *data.whole_arguments(), temperature=0.7, **options)
    torch.testing.assert_close(value.loss, expected, atol=1e-12, rtol=1e-10)
    got, want = (torch.autograd.grad(loss, data.draft)[0] for loss in (value.loss, expected))
    assert float(want.abs().max()) > 1e-3
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


@EACH
def test_a_reduced_vocabulary_that_is_the_whole_one_changes_nothing(name, options):
    data = batch().leaf()
    reduced = normaliser(data.target, draft_ids=torch.arange(6))
    obj = objective(name, **options)
    plain, other = obj(*data.arguments()), obj(*data.arguments(), reduced=reduced)
    torch.testing.assert_close(other.per_block, plain.per_block)
    got, want = (torch.autograd.grad(value.loss, data.draft)[0] for value in (other, plain))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


@EACH
def test_fused_equals_plain(name, options):
    obj, data = objective(name, **options), problem(num_blocks=7, vocab_size=37)
    draft_ids = torch.randperm(37)[:11]
    data["labels"], data["valid"] = restrict_labels(data["labels"], data["valid"], draft_ids, 37)
    assert (data["labels"] == OUTSIDE).any()
    reduced = restrict_target(data["target_hidden"], data["target_head"], draft_ids)
    data["target_head"] = data["target_head"][draft_ids]
    data["draft_head"], data["markov"] = data["draft_head"][:11], (data["markov"][0], data["markov"][1][:11])
    fast, slow = with_leaves(data), with_leaves(data)
    value = fused_linear_objective(obj, **fast, chunk_blocks=2, reduced=reduced)
    expected = obj(*plain_logits(slow), slow["labels"], slow["valid"], reduced=reduced)
    torch.testing.assert_close(value.per_block, expected.per_block.detach())
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-11, rtol=1e-9)
    stats = block_statistics(*(x.detach() for x in plain_logits(data)), data["labels"], data["valid"], reduced=reduced)
    for rule in ("greedy", "token", "block"):
        torch.testing.assert_close(value.stats.retention(rule), stats.retention(rule))
    torch.testing.assert_close(value.stats.token_accuracy, stats.token_accuracy)
    torch.testing.assert_close(value.stats.argmax_agreement, stats.argmax_agreement)


def test_scores_are_those_of_the_definition():
    data = Reduced()
    log_sampled, log_integrated = block_scores(*data.arguments(), reduced=data.reduced)
    draft, target, tokens, valid = data.whole_arguments()
    for n, length in enumerate(valid.sum(-1).tolist()):
        if length == 0:
            continue
        p, q = (list(logits[n, :length].detach().softmax(-1)) for logits in (target, draft))
        sampled, integrated = reference_scores(p, q, tokens[n, :length].tolist())
        torch.testing.assert_close(log_sampled[n, :length].detach().exp(), torch.stack(sampled))
        torch.testing.assert_close(log_integrated[n, :length].detach().exp(), torch.stack(integrated))


def in_part(case, draft_ids):
    """The toy with a drafter that cannot draft the other tokens."""

    @functools.cache
    def drafter(prefix):
        probs = torch.zeros(case.vocab_size, dtype=torch.float64)
        probs[draft_ids] = case.drafter(prefix)[draft_ids]
        return probs / probs.sum()

    return replace(case, drafter=drafter)


@pytest.mark.parametrize("kind", ["independent", "autoregressive"])
def test_lengths_are_those_of_the_verifier(kind):
    """E[tau] over all target paths, their cut tails included, with E[tau] enumerated from the verifier's own law."""
    draft_ids = torch.tensor([2, 0])
    case = in_part(toy(kind, seed=3, vocab_size=4), draft_ids)
    paths = case.blocks()
    p, q = case.probs(paths)
    weights, target = chance(p, paths), p[:, :-1].log()
    labels, valid = restrict_labels(paths, None, draft_ids, 4)
    draft, reduced = q[..., draft_ids].log(), normaliser(target, draft_ids=draft_ids)
    for rule in ("token", "block"):
        expected = enumerate_round(functools.partial(law, rule), case.target, case.drafter, 4, 3).survival
        found = torch.zeros(3, dtype=torch.float64)
        for n, weight in enumerate(weights.tolist()):
            one = slice(n, n + 1)
            blocks = draft[one], target[one][..., draft_ids], labels[one], valid[one]
            found += weight * block_statistics(*blocks, reduced=reduced[one]).retention(rule)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_greedy_statistics_look_at_the_whole_vocabulary():
    """The target's argmax may lie outside D, where no draft agrees with it."""
    data = Reduced(num_blocks=40, spread=2.0)
    stats = block_statistics(*data.arguments(), reduced=data.reduced)
    draft, target, tokens, valid = data.whole_arguments()
    agrees, greedy, accuracy = 0, torch.zeros(5, dtype=torch.float64), 0
    outside = 0
    for n, length in enumerate(valid.sum(-1).tolist()):
        alive = True
        for i in range(length):
            best = int(target[n, i].argmax())
            outside += best not in DRAFT_IDS.tolist()
            agrees += int(draft[n, i].argmax()) == best
            alive = alive and int(draft[n, i].argmax()) == best
            greedy[i] += alive
            accuracy += int(draft[n, i].argmax()) == int(tokens[n, i])
    assert outside > 0
    assert stats.agreement.sum().item() == agrees
    assert stats.greedy.tolist() == greedy.tolist()
    assert stats.accuracy.sum().item() == accuracy


def test_labels_are_restricted_as_the_loop_says():
    data = batch(num_blocks=12, vocab_size=VOCAB_SIZE)
    labels, valid = restrict_labels(data.labels, data.valid, DRAFT_IDS, VOCAB_SIZE)
    for n, length in enumerate(data.valid.sum(-1).tolist()):
        expected = []
        for token in data.labels[n, :length].tolist():
            expected.append(DRAFT_IDS.tolist().index(token) if token in DRAFT_IDS else OUTSIDE)
            if expected[-1] == OUTSIDE:
                break
        assert labels[n][valid[n]].tolist() == expected
        assert valid[n].tolist() == [True] * len(expected) + [False] * (5 - len(expected))
    everything = restrict_labels(data.labels.clamp(max=3), None, torch.arange(VOCAB_SIZE), VOCAB_SIZE)
    assert everything[1].all()
    assert torch.equal(everything[0], data.labels.clamp(max=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_target_is_restricted_in_chunks(dtype, monkeypatch):
    hidden, head = torch.randn(3, 4, 8).to(dtype), torch.randn(50, 8).to(dtype)
    draft_ids = torch.randperm(50)[:20]
    logits = (hidden @ head.T).to(torch.float64 if dtype == torch.float64 else torch.float32)
    expected = normaliser(logits, 0.6, draft_ids)
    monkeypatch.setattr("blockdraft.losses.reduced.CHUNK_BYTES", 5 * 50 * 4)
    found = restrict_target(hidden, head, draft_ids, temperature=0.6)
    torch.testing.assert_close(found.log_z, expected.log_z)
    assert torch.equal(found.argmax, expected.argmax)
    assert found.temperature == 0.6
    assert (found.argmax == OUTSIDE).any()


@EACH
def test_nothing_in_padding_reaches_the_result(name, options):
    data, obj = Reduced(), objective(name, **options)
    clean = obj(*data.arguments(), reduced=data.reduced)
    want = torch.autograd.grad(clean.loss, data.draft)[0]
    dirty = replace(data.reduced, log_z=data.reduced.log_z.masked_fill(~data.valid, math.nan))
    value = obj(*data.arguments(), reduced=dirty)
    torch.testing.assert_close(value.loss, clean.loss, atol=0, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(value.loss, data.draft)[0], want, atol=0, rtol=0)


@pytest.mark.parametrize(("name", "options"), ONE_EACH + SAMPLED)
def test_blocks_whose_first_label_is_outside_stay_finite(name, options):
    draft = torch.randn(3, 5, 4, requires_grad=True)
    labels = torch.full((3, 5), OUTSIDE)
    valid = torch.arange(5).expand(3, 5) == 0
    reduced = ReducedTarget(torch.full((3, 5), 3.0))
    value = objective(name, **options)(draft, torch.randn(3, 5, 4), labels, valid, reduced=reduced)
    assert value.per_block.isfinite().all()
    assert torch.autograd.grad(value.loss, draft)[0].isfinite().all()


def test_float32_over_a_part_of_the_vocabulary_of_qwen3():
    """p falls far below one over D, and still both precisions agree."""
    data = batch(num_blocks=2, block_size=3, vocab_size=151_936, dtype=torch.float32, masked=False, spread=4.0)
    draft_ids = torch.arange(0, 151_936, 19)
    labels, valid = restrict_labels(data.labels // 19 * 19, None, draft_ids, 151_936)
    assert valid.all()
    arguments = data.draft[..., draft_ids], data.target[..., draft_ids]
    for name in ("kl", "rkl", "lk", "bv"):
        low = objective(name)(*arguments, labels, reduced=ReducedTarget(data.target.logsumexp(-1)))
        high = objective(name)(
            *(x.double() for x in arguments), labels, reduced=ReducedTarget(data.target.double().logsumexp(-1))
        )
        torch.testing.assert_close(low.loss.double(), high.loss, atol=1e-5, rtol=1e-5)


def test_ce_needs_neither_the_target_nor_its_normaliser():
    data = Reduced()
    expected = objective("ce")(*data.arguments(), reduced=data.reduced).loss
    alone = objective("ce")(data.draft, None, data.labels, data.valid, reduced=ReducedTarget()).loss
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduced": None}, "outside the vocabulary of 4"),
        ({"reduced": ReducedTarget()}, "needs log_z"),
        ({"reduced": ReducedTarget(torch.zeros(8, 4))}, r"log_z must be \[N, B\] = \[8, 5\]"),
        ({"reduced": ReducedTarget(torch.zeros(8, 5), torch.zeros(8))}, r"argmax must be \[N, B\]"),
        ({"reduced": ReducedTarget(torch.zeros(8, 5), temperature=0.5)}, "taken at temperature 0.5"),
        ({"valid": torch.ones(8, 5, dtype=torch.bool)}, "must be the last valid one of its block"),
        ({"labels": torch.full((8, 5), -2)}, "outside the vocabulary of 4"),
    ],
)
def test_bad_input_is_named(change, message):
    data = Reduced()
    labels = data.labels.clone()
    labels[0, :] = torch.tensor([1, OUTSIDE, 0, 0, 0])
    valid = data.valid & (torch.arange(5) < 2)
    arguments = {"labels": labels, "valid": valid, "reduced": data.reduced} | change
    with pytest.raises(ValueError, match=message):
        objective("bv")(data.draft, data.target[..., DRAFT_IDS], **arguments)


def test_statistics_need_the_argmax():
    data = Reduced()
    with pytest.raises(ValueError, match=r"need ReducedTarget\.argmax"):
        block_statistics(*data.arguments(), reduced=replace(data.reduced, argmax=None))


@pytest.mark.parametrize(
    ("draft_ids", "message"),
    [
        (torch.tensor([0, 7]), "between 0 and 6"),
        (torch.tensor([1, 1]), "names a token twice"),
        (torch.zeros(3, dtype=torch.bool), "must be token ids"),
    ],
)
def test_bad_draft_ids_are_named(draft_ids, message):
    with pytest.raises(ValueError, match=message):
        restrict_labels(torch.zeros(1, 2, dtype=torch.long), None, draft_ids, VOCAB_SIZE)
