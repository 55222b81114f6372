import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.overlap import overlap, overlap_and_slope, overlap_logit_gradient


def rows(seed, num_rows, vocab_size, zeros=False):
    g = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, num_rows, vocab_size, generator=g, dtype=torch.float64) ** 3
    if zeros:
        p, q = p * (torch.rand(p.shape, generator=g) > 0.3), q * (torch.rand(q.shape, generator=g) > 0.3)
    scale = torch.rand(num_rows, generator=g, dtype=torch.float64)
    return scale, p / p.sum(-1, keepdim=True).clamp(min=1e-9), q / q.sum(-1, keepdim=True).clamp(min=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_value_from_the_definition(seed, num_rows, vocab_size, zeros):
    scale, p, q = rows(seed, num_rows, vocab_size, zeros)
    value, slope = overlap_and_slope(scale, p, q)
    for n in range(num_rows):
        s = float(scale[n])
        pairs = list(zip(p[n].tolist(), q[n].tolist(), strict=True))
        assert abs(float(value[n]) - sum(min(s * a, b) for a, b in pairs)) < 1e-12
        assert abs(float(slope[n]) - sum(a for a, b in pairs if s * a <= b)) < 1e-9


def test_gradients_by_finite_differences():
    scale, p, q = (x.requires_grad_() for x in rows(0, 3, 7))
    assert torch.autograd.gradcheck(overlap, (scale, p, q), eps=1e-7, atol=1e-6)


def test_logit_gradient_equals_autograd_through_the_softmax():
    scale, p, q = rows(1, 3, 9)
    logits = q.log().requires_grad_()
    expected = torch.autograd.grad(overlap(scale, p, logits.softmax(-1)).sum(), logits)[0]
    torch.testing.assert_close(overlap_logit_gradient(scale, p, q), expected)


def test_ties_side_with_the_target():
    p = torch.full((1, 4), 0.25, dtype=torch.float64)
    scale = torch.ones(1, dtype=torch.float64)
    assert overlap_and_slope(scale, p, p)[1].tolist() == [1.0]
    assert (overlap_logit_gradient(scale, p, p) == 0).all()


def test_a_zero_scale_has_the_slope_of_all_of_p():
    _, p, q = rows(2, 3, 5)
    value, slope = overlap_and_slope(torch.zeros(3, dtype=torch.float64), p, q)
    assert (value == 0).all()
    torch.testing.assert_close(slope, p.sum(-1))
