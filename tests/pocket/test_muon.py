"""Muon against its definition: exact singular vectors, one matrix at a time."""

import pytest
import torch

from blockdraft.pocket.build.muon import COEFFICIENTS, Muon, orthogonalized


def by_singular_values(matrix, num_iterations=5):
    """The iteration as it acts on singular values: s <- a s + b s^3 + c s^5."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for _ in range(num_iterations):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3)])
def test_matrices_of_one_shape_together_equal_each_by_its_singular_values(shape):
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, matrix in zip(orthogonalized(matrices), matrices, strict=True):
        torch.testing.assert_close(ours, by_singular_values(matrix), atol=1e-5, rtol=1e-5)


def test_singular_values_come_near_one():
    matrices = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrices)[0])
    assert 0.5 < values.min() < values.max() < 1.5


def test_two_steps_follow_the_formula():
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    gradients = [torch.randn(3, 5, dtype=torch.float64, generator=generator) for _ in range(2)]
    matrix = start.clone().requires_grad_()
    optimizer = Muon([matrix], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, momentum = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        matrix.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + gradient
        update = by_singular_values(gradient + 0.9 * momentum)
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * 0.2 * 5**0.5 * update
    torch.testing.assert_close(matrix.detach(), expected, atol=1e-6, rtol=1e-6)


def test_a_matrix_without_a_gradient_stays():
    matrix = torch.ones(2, 2, requires_grad=True)
    Muon([matrix], lr=1.0, weight_decay=0.5).step()
    assert torch.equal(matrix.detach(), torch.ones(2, 2))
