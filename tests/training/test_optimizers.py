"""Muon: orthogonal updates by the definition, and every parameter in exactly one optimizer."""

import math

import pytest
import torch

from blockdraft import muon
from blockdraft.muon import Muon, orthogonalize, shares
from blockdraft.recipes.schema import OptimizerSection
from blockdraft.training.step import is_matrix, make_optimizers

from tiny import tiny_drafter, tiny_target


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthogonalize(matrix)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    back = u.T @ found @ v.T  # diagonal, if the singular vectors are kept
    torch.testing.assert_close(back, torch.diag(back.diag()), atol=1e-9, rtol=0)
    large = s / s.norm() > 0.05
    assert ((back.diag()[large] - 1).abs() < 0.35).all()
    torch.testing.assert_close(found, reference(matrix), atol=1e-6, rtol=0)


def test_bfloat16_iterations_keep_the_direction(monkeypatch):
    """Forced here, whatever this machine has: the update differs by rounding, and comes back in the weights' dtype."""
    matrix = torch.randn(40, 90, generator=torch.Generator().manual_seed(4))
    assert muon.iteration_dtype(matrix) == torch.float32  # too small to gain anything
    assert muon.iteration_dtype(torch.empty(2, 4096, 4096, device="meta")) == torch.float32  # no CPU, no GPU
    expected = orthogonalize(matrix)
    monkeypatch.setattr(muon, "iteration_dtype", lambda _x: torch.bfloat16)
    found = orthogonalize(matrix)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_cpu_iterates_in_bfloat16_where_that_pays(monkeypatch, has_bfloat16):
    monkeypatch.setattr(muon, "cpu_multiplies_bfloat16", lambda: has_bfloat16)
    found = [muon.iteration_dtype(torch.empty(3, short, 512)) for short in (95, 96)]
    assert found == [torch.float32, torch.bfloat16 if has_bfloat16 else torch.float32]
    assert muon.iteration_dtype(torch.empty(3, 96, 512, dtype=torch.float64)) == torch.float64


def test_matrices_of_one_shape_together_equal_each_alone():
    matrices = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrices), torch.stack([orthogonalize(each) for each in matrices]))


def test_a_matrix_without_a_gradient_stays():
    matrix = torch.ones(2, 2, requires_grad=True)
    Muon([matrix], lr=1.0, weight_decay=0.5).step()
    assert torch.equal(matrix.detach(), torch.ones(2, 2))


def reference(matrix, iterations=5):
    """The quintic polynomial applied to the singular values, which is what the iteration does."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_a_step_is_the_definition():
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(4, 7, generator=generator, dtype=torch.float64))
    expected, momentum = weight.detach().clone(), torch.zeros(4, 7, dtype=torch.float64)
    optimizer = Muon([weight], lr=0.1, weight_decay=0.3)
    for _ in range(3):
        gradient = torch.randn(4, 7, generator=generator, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + gradient
        update = reference(gradient + 0.95 * momentum)
        expected = expected * (1 - 0.1 * 0.3) - 0.1 * 0.2 * math.sqrt(7) * update
        torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)


def test_shares_hold_every_matrix_once_and_cost_about_the_same():
    """The matrices of a drafter of two layers, in two shares and in more shares than there are matrices."""
    square, wide, narrow = torch.Size([576, 576]), torch.Size([1536, 576]), torch.Size([192, 576])
    shapes = [torch.Size([576, 1728])] + 2 * [square, narrow, narrow, square, wide, wide, torch.Size([576, 1536])]
    for num_shares in (1, 2, 20):
        plan = shares(shapes, num_shares)
        assert all(len(owned) == num_shares for owned in plan)
        assert sorted(number for owned in plan for numbers in owned for number in numbers) == list(range(len(shapes)))
        for owned in plan:
            assert len({shapes[number] for numbers in owned for number in numbers}) == 1
    costs = [0, 0]
    for owned in shares(shapes, 2):
        for share, numbers in enumerate(owned):
            costs[share] += sum(min(s) ** 2 * (2 * max(s) + min(s)) for s in (shapes[n] for n in numbers))
    assert abs(costs[0] - costs[1]) < 0.1 * sum(costs)


class Shared:
    """One of several processes that take turns in one: what it owns is sent through a shared mailbox."""

    def __init__(self, rank, world_size, mail):
        self.rank, self.world_size, self.mail, self.sent = rank, world_size, mail, 0

    def broadcast(self, values, source):
        assert values.is_contiguous()
        key = self.sent
        self.sent += 1
        if source == self.rank:
            self.mail[key] = values.clone()
        else:
            values.copy_(self.mail.get(key, torch.nan))


@pytest.mark.parametrize("num_processes", [2, 7])
def test_shared_steps_are_the_steps_of_one_process(num_processes):
    """The processes run one after the other, twice: in the second turn each receives what the others had sent."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 7), (7, 4), (4, 7), (3, 3), (4, 7)]
    start, *gradients = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(3)
    )

    def stepped(distributed):
        parameters = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer = Muon(parameters, lr=0.1, weight_decay=0.3, distributed=distributed)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        return [each.detach() for each in parameters], [optimizer.state[each]["momentum"] for each in parameters]

    (expected, momenta), mail = stepped(None), {}
    first = [stepped(Shared(rank, num_processes, mail))[0] for rank in range(num_processes)]
    made = [[not each.isnan().any() for each in weights] for weights in first]
    assert any(made[0])
    assert not all(made[0])  # what it does not own, it has not made
    for rank in range(num_processes):
        weights, state = stepped(Shared(rank, num_processes, mail))
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(state, momenta, rtol=0, atol=0)  # whoever saves has the momentum of all


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_every_parameter_has_one_optimizer_and_tables_are_left_to_adamw(kind):
    drafter = tiny_drafter(kind, tiny_target())
    matrices, adamw = make_optimizers(drafter, OptimizerSection(name="muon"))
    of = {id(p): o for o in (matrices, adamw) for group in o.param_groups for p in group["params"]}
    for name, parameter in drafter.named_parameters():
        assert of.pop(id(parameter)) is (matrices if is_matrix(name, parameter) else adamw), name
    assert not of
    assert is_matrix("fc.weight", drafter.fc.weight)
    if kind == "dspark":
        assert not is_matrix("markov_head.markov_w1.weight", drafter.markov_head.markov_w1.weight)


def test_adamw_is_one_kernel_on_cuda_alone(monkeypatch):
    drafter = tiny_drafter("dflash", tiny_target())
    (usual,) = make_optimizers(drafter, OptimizerSection())
    assert not usual.defaults["fused"]
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    (there,) = make_optimizers(drafter, OptimizerSection())
    assert there.defaults["fused"] is True
