"""Every objective against the loop reference and against finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.losses import block_scores, objective
from blockdraft.losses.reference import reference_loss

from batches import IDS, OBJECTIVES, batch, has_exact_gradient, value_and_gradient

EVERY = pytest.mark.parametrize(("name", "options"), OBJECTIVES, ids=IDS)


@EVERY
@pytest.mark.parametrize(("temperature", "masked"), [(1.0, False), (0.6, True)])
def test_equals_the_loop_reference(name, options, temperature, masked):
    data = batch(masked=masked).leaf()
    fast = objective(name, temperature=temperature, **options)(*data.arguments()).loss
    slow = reference_loss(name, *data.arguments(), temperature=temperature, **options)
    for got, expected in zip(value_and_gradient(fast, data.draft), value_and_gradient(slow, data.draft), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "options"),
    [o for o in OBJECTIVES if has_exact_gradient(*o)],
    ids=[i for i, o in zip(IDS, OBJECTIVES, strict=True) if has_exact_gradient(*o)],
)
def test_gradcheck(name, options):
    """Finite differences, for the total and for every block's own value."""
    data = batch(num_blocks=2, block_size=4, vocab_size=4, seed=3)

    def outputs(draft):
        value = objective(name, temperature=1.3, **options)(draft, data.target, data.labels, data.valid)
        return value.loss, value.numerator, value.per_block

    assert torch.autograd.gradcheck(outputs, data.leaf().draft, eps=1e-7, atol=1e-6)


def test_gradcheck_of_the_block_scores():
    data = batch(num_blocks=3, block_size=4, vocab_size=5, seed=4)
    assert torch.autograd.gradcheck(
        lambda draft: block_scores(draft, data.target, data.labels, data.valid), data.leaf().draft, eps=1e-7, atol=1e-6
    )


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(1, 4),
    block_size=st.integers(1, 6),
    vocab_size=st.integers(2, 9),
    spread=st.floats(0.1, 4.0),
    temperature=st.floats(0.5, 2.0),
    beta=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1.0)),
    choice=st.integers(0, len(OBJECTIVES) - 1),
)
def test_equals_the_loop_reference_anywhere(
    seed, num_blocks, block_size, vocab_size, spread, temperature, beta, choice
):
    name, options = OBJECTIVES[choice]
    if "beta" in options:
        options = options | {"beta": beta}
    data = batch(num_blocks, block_size, vocab_size, seed=seed, spread=spread).leaf()
    fast = objective(name, temperature=temperature, **options)(*data.arguments()).loss
    slow = reference_loss(name, *data.arguments(), temperature=temperature, **options)
    # The reference takes the 1/beta root directly, which loses digits as beta goes to 0.
    slack = 1e-14 / beta if 0 < options.get("beta", 1.0) < 1 else 0.0
    torch.testing.assert_close(fast.detach(), slow.detach(), atol=1e-11 + slack, rtol=1e-9)
    if slow.requires_grad:
        expected = torch.autograd.grad(slow, data.draft)[0]
        torch.testing.assert_close(torch.autograd.grad(fast, data.draft)[0], expected, atol=1e-10, rtol=1e-7)


@EVERY
def test_lower_precision_logits_are_computed_in_float32(name, options):
    obj = objective(name, **options)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        data = batch(vocab_size=50, dtype=dtype).leaf()
        value = obj(*data.arguments())
        assert value.loss.dtype == value.per_block.dtype == torch.float32
        leaf = data.draft.detach().double().requires_grad_()
        expected = obj(leaf, data.target.double(), data.labels, data.valid)
        # The logits are the same numbers: float32 arithmetic is the only difference in the value.
        torch.testing.assert_close(value.loss.double(), expected.loss, atol=1e-5, rtol=1e-5)
        gradient, want = (torch.autograd.grad(*x)[0] for x in ((value.loss, data.draft), (expected.loss, leaf)))
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), want, atol=tolerance * float(want.abs().max()), rtol=0)


def test_float64_logits_stay_float64():
    assert objective("bv")(*batch().arguments()).loss.dtype == torch.float64


@EVERY
def test_parts_are_additive_over_blocks(name, options):
    data, obj = batch(num_blocks=6), objective(name, **options)
    whole = obj(*data.arguments())
    parts = [obj(data.draft[s], data.target[s], data.labels[s], data.valid[s]) for s in (slice(0, 2), slice(2, 6))]
    numerator, denominator = sum(p.numerator for p in parts), sum(p.denominator for p in parts)
    torch.testing.assert_close(numerator, whole.numerator)
    torch.testing.assert_close(denominator, whole.denominator)
    torch.testing.assert_close(obj.reduce(numerator, denominator), whole.loss)
    torch.testing.assert_close(torch.cat([p.per_block for p in parts]), whole.per_block)


@EVERY
def test_two_processes_can_share_one_denominator(name, options):
    """Each backs its own numerator, times `gradient_scale` at the global sums; gradients add to the whole's."""
    data, obj = batch(num_blocks=6).leaf(), objective(name, **options)
    _, expected = value_and_gradient(obj(*data.arguments()).loss, data.draft)
    parts = [obj(data.draft[s], data.target[s], data.labels[s], data.valid[s]) for s in (slice(0, 2), slice(2, 6))]
    numerator = sum(p.numerator.detach() for p in parts).requires_grad_()
    denominator = sum(p.denominator for p in parts)
    scale = obj.gradient_scale(numerator.detach(), denominator)
    torch.testing.assert_close(scale, torch.autograd.grad(obj.reduce(numerator, denominator), numerator)[0])
    gradient = sum(torch.autograd.grad(p.numerator * scale, data.draft)[0] for p in parts)
    torch.testing.assert_close(gradient, expected)


@EVERY
def test_value_per_block_is_the_loss_of_that_block_alone(name, options):
    data, obj = batch(), objective(name, **options)
    per_block = obj(*data.arguments()).per_block
    for n in range(4):
        alone = obj(data.draft[n : n + 1], data.target[n : n + 1], data.labels[n : n + 1], data.valid[n : n + 1])
        torch.testing.assert_close(per_block[n], alone.loss)


def test_a_second_backward_gives_the_same_gradient():
    data = batch().leaf()
    loss = objective("bv")(*data.arguments()).loss
    first = torch.autograd.grad(loss, data.draft, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, data.draft)[0], first, atol=0, rtol=0)


def test_the_logits_given_are_left_alone():
    data = batch().leaf()
    draft, target = data.draft.detach().clone(), data.target.clone()
    objective("bv")(*data.arguments()).loss.backward()
    assert torch.equal(data.draft.detach(), draft)
    assert torch.equal(data.target, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [5e-324, 1e-46, 1e-20, 1e-9])
def test_a_vanishing_beta_is_its_limit(beta, dtype):
    data = batch(dtype=dtype).leaf()
    tiny, zero = (objective("bv", beta=b)(*data.arguments()).loss for b in (beta, 0.0))
    torch.testing.assert_close(tiny, zero, atol=1e-6, rtol=0)
    gradients = [torch.autograd.grad(loss, data.draft)[0] for loss in (tiny, zero)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_float32_at_the_vocabulary_of_qwen3():
    """Peaked distributions over 151,936 tokens: float32 against float64, and q = p against its exact value."""
    data = batch(num_blocks=2, block_size=3, vocab_size=151_936, dtype=torch.float32, masked=False, spread=4.0)
    for name in ("ce", "kl", "rkl", "tv", "lk", "bv"):
        low = objective(name)(*data.arguments()).loss.double()
        high = objective(name)(data.draft.double(), data.target.double(), data.labels).loss
        torch.testing.assert_close(low, high, atol=1e-5, rtol=1e-5)
    for name in ("kl", "rkl", "tv", "lk", "bv"):
        assert abs(objective(name)(data.target, data.target, data.labels).loss.item()) < 1e-5
