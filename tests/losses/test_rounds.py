"""The expected number of rounds: proved by enumeration, then its objective along runs of anchors."""

import math
from dataclasses import replace

import pytest
import torch
from test_fused import leaves_of, plain_logits, problem, with_leaves

from blockdraft.losses import (
    OUTSIDE,
    Annealing,
    ReducedTarget,
    fused_linear_objective,
    objective,
    restrict_labels,
)
from blockdraft.losses.reference import expected_rounds, occupancies, reference_loss, reference_scores
from blockdraft.losses.rounds import AnchorRuns, run_bounds, trace, whole_runs

from batches import Batch, batch
from toys import text_toy

KINDS = ("independent", "markov", "autoregressive")
OPTIONS = [
    {"form": "linear", "estimator": "sampled"},
    {"form": "linear"},
    {"form": "linear", "start": "round"},
    {"estimator": "sampled"},
    {},
    {"beta": 0.37, "estimator": "sampled", "start": "round"},
    {"beta": 0.37},
    {"beta": 0.0},
    {"beta": 0.0, "start": "round"},
]


def token_scores(p, q, y):
    kept, scores = torch.ones((), dtype=torch.float64), []
    for i, token in enumerate(y):
        kept = kept * torch.clamp(q[i][token] / p[i][token], max=1)
        scores.append(kept)
    return scores


def along(case, text, rule="block"):
    """``[A, B]`` sampled and integrated scores from every anchor of a text, 0 behind its end."""
    rows = []
    for anchor in range(case.num_tokens):
        block = case.block(text, anchor)
        rows.append((token_scores(*block), []) if rule == "token" else reference_scores(*block))
    zero = torch.zeros((), dtype=torch.float64)
    padded = [[torch.stack([*s, *[zero] * (case.block_size - len(s))]) for s in row] for row in rows]
    return tuple(torch.stack([row[which] for row in padded]) for which in (0, 1))


def gradient(loss, case):
    found = torch.autograd.grad(loss, list(case.logits.values()), allow_unused=True, retain_graph=True)
    return torch.cat([torch.zeros(case.vocab_size) if g is None else g for g in found])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_expected_rounds_are_the_verification_calls_of_decoding(kind, rule):
    """E over texts of V(0) is the number of calls that decoding takes, enumerated from the verifier's own law."""
    case = text_toy(kind, seed=1)
    expected = sum(
        probability * expected_rounds(along(case, text, rule)[0])[0].item() for text, probability in case.texts()
    )
    assert expected == pytest.approx(case.expected_calls(rule), abs=1e-12)
    assert 1 < expected < case.num_tokens


def credits_of(values, num_anchors, block_size):
    """d(a + i) ``[A, B]`` along a whole text, 0 behind its end."""
    worth = torch.cat([values[:-1] - values[1:], values.new_zeros(block_size + 1)])
    return worth.unfold(0, block_size, 1)[1 : num_anchors + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_formula(kind):
    """-sum_a o(a) sum_i d(a+i) grad s_a(i); with abar in place of s only where the credit does not see the token."""
    case = text_toy(kind, seed=2)
    exact, formula, naive, split = (torch.zeros((), dtype=torch.float64) for _ in range(4))
    for text, probability in case.texts():
        sampled, integrated = along(case, text)
        values = expected_rounds(sampled)
        exact = exact + probability * values[0]
        occupancy = torch.tensor(occupancies(sampled.tolist(), [1.0]), dtype=torch.float64)[:, None]
        credit = credits_of(values.detach(), *sampled.shape)
        formula = formula - probability * (occupancy * credit * sampled).sum()
        naive = naive - probability * (occupancy * credit * integrated).sum()
        split = split - probability * (occupancy * (0.4 * integrated + (credit - 0.4) * sampled)).sum()
    want = gradient(exact, case)
    torch.testing.assert_close(gradient(formula, case), want, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(split, case), want, atol=1e-12, rtol=0)
    assert float((gradient(naive, case) - want).norm()) > 0.02 * float(want.norm())


def random_scores(num_runs, longest, block_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(num_runs, longest, block_size, generator=generator, dtype=torch.float64).sqrt().cumprod(-1)
    lengths = torch.randint(1, longest + 1, (num_runs,), generator=generator)
    lengths[0] = longest
    present = torch.arange(longest) < lengths[:, None]
    return kept * present.unsqueeze(-1), present, lengths.tolist()


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_the_trace_equals_the_reference(block_size):
    scores, present, lengths = random_scores(6, 5, block_size)
    found = trace(scores, present, "round")
    for r, length in enumerate(lengths):
        kept = scores[r, :length]
        occupancy = occupancies(kept.tolist(), [1.0])
        torch.testing.assert_close(found.occupancy[r, :length], torch.tensor(occupancy, dtype=torch.float64))
        assert (found.occupancy[r, length:] == 0).all()
        c = found.calls_per_token[r].item()
        values = expected_rounds(kept, c)
        worth = torch.cat([values[:-1] - values[1:], torch.full((block_size,), c, dtype=torch.float64)])
        torch.testing.assert_close(found.worth[r, :length], worth[:length])
        for j in range(length):
            torch.testing.assert_close(found.credit[r, j], worth[j + 1 : j + 1 + block_size])
        assert values[0].item() == pytest.approx(length * c)  # beyond the run a token is worth what it is on average


def test_a_start_anywhere_is_that_of_a_stationary_text():
    """With the same scores at every anchor, rounds start everywhere with the same probability, c = 1 / (1 + length)."""
    kept = torch.tensor([0.9, 0.5, 0.3, 0.1], dtype=torch.float64)
    found = trace(kept.expand(1, 12, 4), torch.ones(1, 12, dtype=torch.bool), "anywhere")
    c = 1 / 2.8
    torch.testing.assert_close(found.occupancy, torch.full((1, 12), c, dtype=torch.float64))
    torch.testing.assert_close(found.worth, torch.full((1, 12), c, dtype=torch.float64))
    assert found.calls_per_token.item() == pytest.approx(c)


def test_a_credit_can_be_negative():
    """From anchor 0 the draft reaches far, from anchor 1 it does not: token 1 is better not drafted alone."""
    scores = torch.zeros(1, 6, 4, dtype=torch.float64)
    scores[0, 0] = 1.0
    found = trace(scores, torch.ones(1, 6, dtype=torch.bool), "round")
    assert found.worth[0, 0] < 0 < found.worth[0, 1]


def in_runs(lengths=(4, 1, 3), block_size=5, vocab_size=6, *, seed=0, spread=1.0):
    """Blocks at consecutive anchors of one text per run; the last text ends with its run."""
    generator = torch.Generator().manual_seed(seed)
    parts, segments = [], []
    for number, length in enumerate(lengths):
        size = length + block_size
        target = spread * torch.randn(size, vocab_size, generator=generator, dtype=torch.float64)
        text = torch.multinomial(target.softmax(-1), 1, generator=generator).squeeze(-1)
        at = torch.arange(length)[:, None] + torch.arange(block_size)
        known = length if number == len(lengths) - 1 else size
        draft = spread * torch.randn(length, block_size, vocab_size, generator=generator, dtype=torch.float64)
        parts.append((draft, target[at], text[at], at < known))
        segments += [10 * number] * length
    return Batch(*(torch.cat(part) for part in zip(*parts, strict=True))), torch.tensor(segments)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients_equal_the_loop_reference(options):
    data, segments = in_runs((7, 1, 3), spread=1.5)
    assert (objective("rounds", form="linear")(*data.arguments(), segments=segments).per_block < 0).any()
    data = data.leaf()
    value = objective("rounds", temperature=0.8, **options)(*data.arguments(), segments=segments)
    expected = reference_loss("rounds", *data.arguments(), segments, temperature=0.8, **options)
    torch.testing.assert_close(value.loss, expected, atol=1e-12, rtol=1e-10)
    got, want = (torch.autograd.grad(loss, data.draft)[0] for loss in (value.loss, expected))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)
    alone = objective("rounds", temperature=0.8, **options)(*data.arguments())
    assert abs(value.loss.item() - alone.loss.item()) > 1e-4


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_reduced_vocabulary_is_exact(options):
    data, segments = in_runs(vocab_size=7, seed=1)
    draft_ids = torch.tensor([5, 0, 3, 6])
    labels, valid = restrict_labels(data.labels, data.valid, draft_ids, 7)
    assert (labels == OUTSIDE).any()
    draft = data.draft[..., :4].detach().requires_grad_()
    value = objective("rounds", **options)(
        draft, data.target[..., draft_ids], labels, valid,
        segments=segments, reduced=ReducedTarget(data.target.logsumexp(-1)),
    )  # fmt: skip
    whole = torch.full(data.target.shape, -math.inf, dtype=torch.float64).index_copy(-1, draft_ids, draft)
    expected = reference_loss("rounds", whole, data.target, data.labels, valid, segments, **options)
    torch.testing.assert_close(value.loss, expected, atol=1e-12, rtol=1e-10)
    got, want = (torch.autograd.grad(loss, draft)[0] for loss in (value.loss, expected))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


def test_the_linear_form_has_the_exact_gradient_of_the_expected_rounds():
    """By autograd through the whole chain, what a token is worth beyond the run held fixed."""
    data, segments = in_runs((6,))
    data = data.leaf()
    value = objective("rounds", form="linear", estimator="sampled", start="round")(*data.arguments(), segments=segments)
    probs = data.target.softmax(-1), data.draft.softmax(-1)
    rows = []
    for n, length in enumerate(data.valid.sum(-1).tolist()):
        sampled, _ = reference_scores(*(list(x[n, :length]) for x in probs), data.labels[n, :length].tolist())
        rows.append(torch.nn.functional.pad(torch.stack(sampled), (0, 5 - length)))
    calls = expected_rounds(torch.stack(rows), value.loss.item())[0]
    assert value.numerator.item() == pytest.approx(calls.item())
    got, want = (torch.autograd.grad(x, data.draft)[0] for x in (value.numerator, calls))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("estimator", ["sampled", "integrated"])
def test_the_log_form_has_the_direction_of_the_linear_one(estimator):
    data, segments = in_runs((6,), spread=2.0)
    data = data.leaf()
    log, linear = (
        torch.autograd.grad(
            objective("rounds", form=form, estimator=estimator)(*data.arguments(), segments=segments).loss, data.draft
        )[0].flatten()
        for form in ("log", "linear")
    )
    assert float(torch.cosine_similarity(log, linear, dim=0)) == pytest.approx(1, abs=1e-12)


def test_the_log_form_learns_where_the_linear_one_cannot():
    """A drafter far from the target: the later positions get a gradient in the log form alone."""
    data, segments = in_runs((4, 4), block_size=8, vocab_size=40, spread=6.0)
    data = data.leaf()

    def at_the_last_position(**options):
        loss = objective("rounds", **options)(*data.arguments(), segments=segments).loss
        return float(torch.autograd.grad(loss, data.draft)[0][:, -1].abs().max())

    assert at_the_last_position(form="linear") < 1e-9
    assert at_the_last_position(beta=0.0) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("estimator", ["sampled", "integrated"])
@pytest.mark.parametrize("start", ["round", "anywhere"])
def test_without_segments_the_log_form_is_bv(beta, estimator, start):
    data = batch().leaf()
    bv = objective("bv", beta=beta, estimator=estimator, summand_floor=None, length_floor=None)
    rounds = objective("rounds", beta=beta, estimator=estimator, start=start)
    values = [obj(*data.arguments()) for obj in (rounds, bv)]
    torch.testing.assert_close(values[0].per_block, values[1].per_block)
    gradients = [torch.autograd.grad(value.loss, data.draft)[0] for value in values]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("start", "of_tokens_per_call"), [("anywhere", torch.reciprocal), ("round", lambda tokens: -torch.log(tokens))]
)
def test_without_segments_the_linear_form_has_the_gradient_of_calls_per_token_or_its_log(start, of_tokens_per_call):
    data = batch().leaf()
    value = objective("rounds", form="linear", estimator="sampled", start=start)(*data.arguments())
    lost = objective("bv", form="linear", estimator="sampled")(*data.arguments()).per_block
    lengths = data.valid.sum(-1)
    tokens = (1 + lengths * (1 - lost))[lengths > 0]
    torch.testing.assert_close(value.per_block[lengths > 0], 1 / tokens.detach())
    got, want = (torch.autograd.grad(x, data.draft)[0] for x in (value.loss, of_tokens_per_call(tokens).mean()))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


def consecutive(data, lengths):
    """The hidden states and labels of a fused problem, rewritten so that its blocks stand at consecutive anchors."""
    data, at = dict(data), 0
    block_size = data["labels"].shape[1]
    for length in lengths:
        text = torch.randint(data["draft_head"].shape[0], (length + block_size,))
        data["labels"][at : at + length] = text.unfold(0, block_size, 1)[:length]
        at += length
    data["segments"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return data


@pytest.mark.parametrize("chunk_blocks", [None, 1, 3, 4])
@pytest.mark.parametrize("options", OPTIONS[3:6], ids=str)
def test_fused_equals_plain(options, chunk_blocks):
    data = consecutive(problem(num_blocks=9, masked=False), (3, 1, 5))
    obj = objective("rounds", **options)
    segments = data.pop("segments")
    fast, slow = with_leaves(data), with_leaves(data)
    value = fused_linear_objective(obj, **fast, segments=segments, chunk_blocks=chunk_blocks)
    expected = obj(*plain_logits(slow), slow["labels"], slow["valid"], segments=segments)
    torch.testing.assert_close(value.per_block, expected.per_block.detach())
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-11, rtol=1e-9)


def test_a_chunk_never_splits_a_run():
    bounds = run_bounds(torch.tensor([4, 4, 4, 7, 1, 1, 1, 1, 2]), 9)
    assert bounds == [(0, 3), (3, 4), (4, 8), (8, 9)]
    assert whole_runs(bounds, 4) == [slice(0, 4), slice(4, 8), slice(8, 9)]
    assert whole_runs(bounds, 1) == [slice(0, 3), slice(3, 4), slice(4, 8), slice(8, 9)]
    assert whole_runs([], 4) == []


def test_other_objectives_do_not_ask_for_runs():
    data = consecutive(problem(num_blocks=9, masked=False), (3, 1, 5))
    segments = data.pop("segments")
    alone, given = (
        fused_linear_objective(objective("bv"), **data, segments=s, chunk_blocks=2).loss for s in (None, segments)
    )
    torch.testing.assert_close(given, alone, atol=0, rtol=0)


def test_an_empty_block_at_the_end_of_a_run_counts_for_nothing():
    data, segments = in_runs((4,))
    kept = slice(0, 3)
    valid = data.valid.clone()
    valid[3] = False
    for options in OPTIONS:
        obj = objective("rounds", **options)
        with_it = obj(data.draft, data.target, data.labels, valid, segments=segments)
        without = obj(data.draft[kept], data.target[kept], data.labels[kept], valid[kept], segments=segments[kept])
        torch.testing.assert_close(with_it.loss, without.loss)


def test_annealing_applies():
    assert Annealing(num_steps=4, step=1).apply(objective("rounds")).beta == pytest.approx(0.5)
    linear = objective("rounds", form="linear")
    assert Annealing(num_steps=4, step=1).apply(linear) is linear


def test_runs_gather_and_scatter():
    data, segments = in_runs()
    runs = AnchorRuns.of(segments, data.labels, data.valid)
    gathered = runs.gather(data.labels)
    assert gathered.shape == (3, 4, 5)
    assert (gathered[1, 1:] == 0).all()
    assert torch.equal(runs.scatter(gathered), data.labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": torch.zeros(7, dtype=torch.long)}, r"segments must be ids \[N\] = \[8\]"),
        ({"segments": torch.zeros(8)}, "segments must be ids"),
        ({"segments": torch.tensor([0, 0, 1, 1, 0, 2, 2, 2])}, "must be adjacent"),
        ({"segments": torch.zeros(8, dtype=torch.long)}, "does not continue the one before it"),
    ],
)
def test_bad_segments_are_named(change, message):
    data, _ = in_runs()
    with pytest.raises(ValueError, match=message):
        objective("rounds")(*data.arguments(), **change)


def test_a_hole_in_a_run_is_named():
    data, segments = in_runs((3,))
    valid = data.valid.clone()
    valid[1] = False
    with pytest.raises(ValueError, match="at the end of its run"):
        objective("rounds")(*replace(data, valid=valid).arguments(), segments=segments)
