"""What the paper proves of the objectives, held in numbers."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.losses import Blocks, block_scores, block_statistics, objective
from blockdraft.verification import law
from blockdraft.verification.reference import enumerate_round, joint_law

from batches import IDS, OBJECTIVES, batch
from toys import DRAFTERS, chance, toy


def logits_with_ratios(ratios):
    """Logits over two tokens whose label 0 has the draft-to-target ratios given, with p = 0.5."""
    q = torch.tensor(ratios, dtype=torch.float64) * 0.5
    p = torch.full_like(q, 0.5)
    return torch.stack([q, 1 - q], -1).log()[None], torch.stack([p, 1 - p], -1).log()[None]


def enumerated(case):
    """All target paths with their probabilities, and logits along them."""
    blocks = case.blocks()
    p, q = case.probs(blocks)
    return q.log(), p[:, :-1].log(), blocks, chance(p, blocks)


@pytest.mark.parametrize("seed", range(5))
def test_one_position_linear_bv_is_tv(seed):
    """Integrated, block by block; sampled, on average over the target's tokens."""
    data = batch(block_size=1, masked=False, seed=seed)
    tv = objective("tv")(*data.arguments()).per_block
    torch.testing.assert_close(objective("bv", form="linear")(*data.arguments()).per_block, tv)
    vocab = torch.arange(6)
    repeated = [x[:1].expand(6, -1, -1) for x in (data.draft, data.target)]
    sampled = objective("bv", form="linear", estimator="sampled")(*repeated, vocab[:, None]).per_block
    torch.testing.assert_close(sampled @ data.target[0, 0].softmax(-1), tv[0])


def test_one_position_integrated_log_bv_is_lk():
    data = batch(block_size=1, masked=False)
    lk = objective("lk")(*data.arguments()).per_block
    for beta in (0.0, 0.5, 1.0):
        torch.testing.assert_close(objective("bv", beta=beta)(*data.arguments()).per_block, lk)


def test_a_surplus_offsets_a_later_deficit():
    draft, target = logits_with_ratios([1.25, 0.8])
    log_sampled, _ = block_scores(draft, target, torch.zeros(1, 2, dtype=torch.long))
    assert log_sampled.exp()[0].tolist() == pytest.approx([1.0, 1.0])
    clipped = (Blocks(draft, target, torch.zeros(1, 2, dtype=torch.long)).log_q.detach() - math.log(0.5)).clamp(max=0)
    assert clipped.sum().exp().item() == pytest.approx(0.8)


@pytest.mark.parametrize(("draft_a", "length"), [((0.3, 0.2), 1.73), ((0.1, 0.2), 1.79)], ids=["A", "B"])
def test_the_two_token_example_of_the_appendix(draft_a, length):
    """Two drafts with equal overlaps: TV, LK and token verification cannot tell them apart, BV can."""
    blocks = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    p = torch.tensor([[0.2, 0.8], [0.1, 0.9]], dtype=torch.float64).expand(4, 2, 2)
    q = torch.tensor([[a, 1 - a] for a in draft_a], dtype=torch.float64).expand(4, 2, 2)
    weights = chance(p, blocks)
    _, log_integrated = block_scores(q.log(), p.log(), blocks)
    assert float(weights @ log_integrated.exp().sum(-1)) == pytest.approx(length, abs=1e-12)
    token = Blocks(q.log(), p.log(), blocks).log_token.detach().exp()
    assert (weights @ token).tolist() == pytest.approx([0.9, 0.81], abs=1e-12)
    eta = {"eta": math.inf}
    assert objective("tv", **eta)(q.log(), p.log(), blocks).loss.item() == pytest.approx(0.1)
    assert objective("lk", **eta)(q.log(), p.log(), blocks).loss.item() == pytest.approx(-math.log(0.9))


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_expected_linear_loss_is_the_expected_length(kind, zeros):
    """1 - E[tau]/B over all target paths, by both estimators, with E[tau] enumerated from the verifier's own law."""
    case = toy(kind, zeros=zeros, seed=1)
    draft, target, blocks, weights = enumerated(case)
    assert float(weights.sum()) == pytest.approx(1)
    lengths = {
        estimator: float(
            weights @ (1 - objective("bv", form="linear", estimator=estimator)(draft, target, blocks).per_block)
        )
        * case.block_size
        for estimator in ("sampled", "integrated")
    }
    expected = enumerate_round(functools.partial(law, "block"), case.target, case.drafter, 3, 3).survival.sum().item()
    assert lengths["sampled"] == pytest.approx(expected, abs=1e-12)
    assert lengths["integrated"] == pytest.approx(expected, abs=1e-12)
    scores = Blocks(draft, target, blocks).log_token.detach().exp()
    assert float(weights @ scores.sum(-1)) <= lengths["integrated"] + 1e-12


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_token_score_is_the_survival_under_token_verification(kind, zeros):
    """E_p of prod_{j<i} min(1, q/p) S(1; p_i, q_i) = E_q of prod_{j<=i} min(1, p/q); a product of overlaps is not."""
    case = toy(kind, zeros=zeros, seed=1)
    draft, target, blocks, weights = enumerated(case)
    p, q = target.exp(), draft.exp()
    at = blocks.unsqueeze(-1)
    ratio = torch.where(q.gather(-1, at) > 0, p.gather(-1, at) / q.gather(-1, at), 0).squeeze(-1)
    survival = chance(q, blocks) @ ratio.clamp(max=1).cumprod(-1)
    torch.testing.assert_close(
        weights @ Blocks(draft, target, blocks).log_token.detach().exp(), survival, atol=1e-12, rtol=0
    )
    if kind == "autoregressive":
        biased = weights @ torch.minimum(p, q).sum(-1).cumprod(-1)
        assert float((biased - survival).abs().max()) > 1e-3


def test_prefix_credit_equals_autograd():
    """c_j = sum over {i : n_i >= j} of a~_i / S, and the gradient is -c_j (1[v = y_j] - q_j(v))."""
    data = batch(num_blocks=16, masked=False).leaf()
    per_block = objective("bv", estimator="sampled")(*data.arguments()).per_block
    gradient = torch.autograd.grad(per_block.sum(), data.draft)[0]
    blocks = Blocks(*data.arguments())
    scores = blocks.log_sampled.exp().detach()
    reaches = blocks.active_prefix.unsqueeze(-1) >= torch.arange(1, 6)
    credit = (scores.unsqueeze(-1) * reaches).sum(1) / scores.sum(-1, keepdim=True)
    assert ((credit >= 0) & (credit <= 1)).all()
    direction = torch.nn.functional.one_hot(data.labels, 6) - data.draft.detach().softmax(-1)
    torch.testing.assert_close(gradient, -credit.unsqueeze(-1) * direction, atol=1e-12, rtol=0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.1, 8.0), estimator=st.sampled_from(["sampled", "integrated"]))
def test_conditional_logit_derivatives_are_bounded_by_one(seed, spread, estimator):
    """Proved for the sampled estimator; held here for the integrated one too."""
    data = batch(num_blocks=8, masked=False, seed=seed, spread=spread).leaf()
    per_block = objective("bv", estimator=estimator)(*data.arguments()).per_block
    assert float(torch.autograd.grad(per_block.sum(), data.draft)[0].abs().max()) <= 1 + 1e-9


def test_jensen():
    """For blocks of equal length."""
    data = batch(num_blocks=32, masked=False)
    block_log, population = (objective("bv", form=f)(*data.arguments()).loss for f in ("log", "population"))
    assert block_log > population
    linear = objective("bv", form="linear")(*data.arguments()).loss
    torch.testing.assert_close(population, -torch.log(1 - linear))


@pytest.mark.parametrize(("name", "options"), OBJECTIVES, ids=IDS)
def test_a_drafter_equal_to_the_target_is_a_stationary_optimum(name, options):
    data = batch()
    draft = data.target.clone().requires_grad_()
    value = objective(name, **options)(draft, data.target, data.labels, data.valid)
    if name == "dpace":  # its weights move with the labels, so not even its mean over labels is stationary there
        return
    if name in ("ce", "dspark") or options.get(
        "control_variate"
    ):  # their optimum is the target only on average over labels
        weights = data.target.softmax(-1)
        every = [
            objective(name, **options)(draft, data.target, torch.full_like(data.labels, v), data.valid)
            for v in range(6)
        ]
        per_label = torch.stack([torch.autograd.grad(v.numerator, draft)[0] for v in every], -1)
        mean = (per_label * weights.unsqueeze(-2)).sum(-1)
        assert mean.abs().max().item() < 1e-12
        return
    if (name, options.get("form")) == ("rounds", "linear"):  # calls per token: one for every block and its bonus
        lengths = data.valid.sum(-1)
        assert value.loss.item() == pytest.approx((1 / (1 + lengths[lengths > 0])).mean().item())
    elif options.get("summand_floor") != -2.0:
        assert value.loss.item() == pytest.approx(0, abs=1e-12)
    assert float(torch.autograd.grad(value.loss, draft)[0].abs().max()) < 1e-12


def test_token_bv_of_one_position_is_tv_and_lk():
    data = batch(block_size=1, masked=False)
    linear, log, tv, lk = (
        objective(name, **options)(*data.arguments()).per_block
        for name, options in (("token-bv", {"form": "linear"}), ("token-bv", {}), ("tv", {}), ("lk", {}))
    )
    torch.testing.assert_close(linear, tv)
    torch.testing.assert_close(log, lk)


def test_token_bv_is_the_expected_length_under_token_verification():
    """1 - E[tau]/B over all target paths; the product of overlaps of e2e-tv is another number."""
    case = toy("autoregressive", seed=1)
    draft, target, blocks, weights = enumerated(case)
    length = enumerate_round(functools.partial(law, "token"), case.target, case.drafter, 3, 3).survival.sum().item()
    unbiased, biased = (
        float(weights @ (1 - objective(name, **options)(draft, target, blocks).per_block)) * case.block_size
        for name, options in (("token-bv", {"form": "linear"}), ("e2e-tv", {}))
    )
    assert unbiased == pytest.approx(length, abs=1e-12)
    assert abs(biased - length) > 1e-3


def test_the_rivals_reduce_to_what_they_are_made_of():
    data = batch()
    of = lambda name, **options: objective(name, **options)(*data.arguments()).loss  # noqa: E731
    torch.testing.assert_close(of("lk-hybrid", decay=0.0), of("kl"))
    torch.testing.assert_close(of("lk-hybrid", decay=1e6), of("tv"))
    torch.testing.assert_close(of("dspark", ce_weight=1.0, l1_weight=0.0), of("ce"))
    torch.testing.assert_close(of("dspark", ce_weight=0.0, l1_weight=0.5), of("tv"))
    lengths = data.valid.sum(-1)
    positions = torch.arange(5)
    suffixes = (lengths[:, None] - positions).clamp(min=0)  # with mix 1 a position counts once per prefix it is in
    by_hand = -(suffixes * data.draft.log_softmax(-1).gather(-1, data.labels.unsqueeze(-1)).squeeze(-1)).sum()
    torch.testing.assert_close(of("dpace", mix=1.0), by_hand / (lengths > 0).sum())


def test_a_drafter_equal_to_the_target_scores_one_everywhere():
    data = batch(masked=False)
    for log_scores in block_scores(data.target, data.target, data.labels):
        torch.testing.assert_close(log_scores, torch.zeros_like(log_scores), atol=1e-12, rtol=0)
    stats = block_statistics(data.target, data.target, data.labels)
    for rule in ("greedy", "token", "block"):
        assert float(stats.expected_length(rule)) == pytest.approx(5)


def test_annealing_gradient_is_the_power_weighted_mean():
    """eq. annealing_gradient, with weights score^beta / sum score^beta held fixed."""
    for beta in (0.0, 0.2, 1.0):
        data = batch(masked=False).leaf()
        exact = torch.autograd.grad(objective("bv", beta=beta)(*data.arguments()).loss, data.draft)[0]
        _, log_scores = block_scores(*data.arguments())
        weights = (beta * log_scores).softmax(-1).detach()
        surrogate = -(weights * log_scores).sum(-1).mean()
        torch.testing.assert_close(torch.autograd.grad(surrogate, data.draft)[0], exact, atol=1e-12, rtol=1e-9)


def test_beta_is_continuous_at_both_ends():
    data = batch(dtype=torch.float32, masked=False, spread=4.0)
    losses = {b: objective("bv", beta=b)(*data.arguments()).loss.item() for b in (0.0, 1e-7, 1e-4, 0.9999, 1.0)}
    assert losses[1e-7] == pytest.approx(losses[0.0], abs=1e-4)
    assert losses[1e-4] == pytest.approx(losses[0.0], abs=1e-2)
    assert losses[0.9999] == pytest.approx(losses[1.0], abs=1e-3)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"beta": 0.0}, {"beta": 0.4, "temperature": 0.7}, {"beta": 0.4, "ramp_floor": 0.3}, {"beta": 1.0},
     {"beta": 1.0, "summand_floor": -1.0, "length_floor": 0.9}],
)  # fmt: skip
def test_the_control_variate_changes_no_expected_gradient(kind, zeros, cut, options):
    """Over all target paths, for the logits behind every prefix, also of texts that end; and it changes no value."""
    draft, target, blocks, weights = enumerated(toy(kind, zeros=zeros, seed=1))
    draft = torch.where(draft > -math.inf, draft, -200.0)  # logits, so that a gradient exists
    draft, target = (options.get("temperature", 1.0) * each for each in (draft, target))
    ended = (blocks == 0).cumsum(-1) - (blocks == 0).long() > 0  # behind the first token 0
    per_prefix, values = [], []
    for control_variate in (False, True):
        leaf = draft.clone().requires_grad_()
        value = objective("bv", control_variate=control_variate, **options)(
            leaf, target, blocks, ~ended if cut else None
        )
        gradients = weights[:, None, None] * torch.autograd.grad(value.numerator, leaf)[0]
        sums = {}
        for path, gradient in zip(blocks.tolist(), gradients, strict=True):
            for i, row in enumerate(gradient):
                prefix = tuple(path[:i])
                sums[prefix] = sums.get(prefix, 0) + row
        per_prefix.append(sums)
        values.append(value.per_block.detach())
    assert torch.equal(*values)
    without, with_it = per_prefix
    assert without.keys() == with_it.keys()
    for prefix, gradient in without.items():
        torch.testing.assert_close(with_it[prefix], gradient, atol=1e-12, rtol=1e-9)


def variances(beta, nearness, spread, block_size, ramp_floor, num_paths=500):
    """Mean variances of the gradient over 12 random contexts of 50 tokens, without and with the control variate."""
    totals = [0.0, 0.0]
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        target, other = (
            spread * torch.randn(block_size, 50, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        draft = nearness * target + (1 - nearness**2) ** 0.5 * other
        labels = torch.multinomial(target.softmax(-1), num_paths, replacement=True, generator=generator).T
        for which, control_variate in enumerate((False, True)):
            leaf = draft.expand(num_paths, -1, -1).clone().requires_grad_()
            made = objective("bv", beta=beta, ramp_floor=ramp_floor, control_variate=control_variate)
            value = made(leaf, target.expand_as(leaf), labels)
            totals[which] += torch.autograd.grad(value.numerator, leaf)[0].var(0).sum().item()
    return totals


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("nearness", [0.0, 0.5, 0.9])
def test_the_control_variate_reduces_the_variance_of_flat_targets(beta, nearness):
    without, with_it = variances(beta, nearness, 1.0, 5, None)
    assert with_it < 0.5 * without


@pytest.mark.parametrize(
    ("beta", "nearness", "ramp_floor", "most"),
    [
        (0.0, 0.5, None, 0.1), (0.2, 0.5, None, 0.6), (0.0, 0.9, None, 0.1), (0.0, 0.9, 1e-6, 0.3),
        (0.2, 0.9, 1e-6, 0.3), (0.2, 0.5, 1e-6, 2.0), (0.0, 0.5, 1e-6, 5.0),
    ],
)  # fmt: skip
def test_the_control_variate_knows_of_the_floor(beta, nearness, ramp_floor, most):
    """Labels get no credit from scores below the floor, most of a long block here; else the last ratio would be 40."""
    without, with_it = variances(beta, nearness, 4.0, 15, ramp_floor)
    assert with_it < most * without


def test_the_control_variate_belongs_to_integrated_scores_in_the_log_form():
    for options in ({"form": "linear"}, {"form": "population"}, {"estimator": "sampled"}):
        with pytest.raises(ValueError, match="control_variate belongs to integrated scores in the log form"):
            objective("bv", control_variate=True, **options)
    with pytest.raises(ValueError, match="control_variate must be true or false, got 'no'"):
        objective("bv", control_variate="no")


def test_the_gradient_flows_through_the_prefix_states():
    """Detaching them gives another, wrong, gradient."""
    data = batch(num_blocks=1, block_size=3, vocab_size=3, masked=False, seed=1).leaf()
    exact = torch.autograd.grad(objective("bv")(*data.arguments()).loss, data.draft)[0]
    blocks = Blocks(*data.arguments())
    q, p = data.draft.log_softmax(-1).exp(), data.target.softmax(-1)
    before = lambda x: torch.nn.functional.pad(x.detach(), (1, 0))[:, :-1].exp().unsqueeze(-1)  # noqa: E731
    detached = torch.minimum(before(blocks.log_sampled) * p, before(blocks.log_r) * q).sum(-1)
    wrong = torch.autograd.grad(math.log(3) - detached.sum(-1).log().mean(), data.draft)[0]
    assert float((wrong - exact).norm()) > 0.3 * float(exact.norm())


def test_population_gradient_is_that_of_the_expected_length():
    """-grad E[tau] / E[tau], with E[tau] differentiated through the enumeration of all target paths."""
    case = toy("independent", seed=2)
    _, target, blocks, weights = enumerated(case)
    draft = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert float(joint_law(case.target, 3, 3).sum()) == pytest.approx(1)
    _, log_integrated = block_scores(draft.expand(27, 3, 3), target, blocks)
    length = (weights @ log_integrated.exp()).sum()
    q = draft.softmax(-1).expand(27, 3, 3).gather(-1, blocks.unsqueeze(-1)).squeeze(-1)
    p = target.exp().gather(-1, blocks.unsqueeze(-1)).squeeze(-1)
    ratios = torch.cat([torch.ones(27, 1, dtype=torch.float64), (q / p).cumprod(-1)], -1)
    by_definition = sum((weights * ratios[:, : i + 1].amin(-1)).sum() for i in range(1, 4))
    torch.testing.assert_close(length, by_definition)
    got, expected = (torch.autograd.grad(-x.log(), draft)[0] for x in (length, by_definition))
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-8)
