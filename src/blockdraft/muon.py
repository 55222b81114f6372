"""Muon makes the update of momentum orthogonal, for matrices between hidden states (Jordan et al., 2024).

For a matrix W ``[m, n]`` with gradient G and momentum M,

    M <- mu M + G,    U = G + mu M,    W <- (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) orthogonal(U)

where ``orthogonal`` has the singular vectors of U and singular values near 1. The factor gives updates the root mean
square that AdamW's have, so that both share a learning rate.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from blockdraft.distributed import Distributed
from blockdraft.selfcheck import cpu_multiplies_bfloat16

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, which send singular values from (0, 1] to about 1 in five steps."""

NUM_ITERATIONS = 5

LEAST_BFLOAT16_SIDE = 96
"""The short side of a matrix from which a CPU's bfloat16 products repay the conversions."""


class Muon(torch.optim.Optimizer):
    """Update matrices by the formulas above; matrices of one shape go through the iteration together.

    The iteration runs in bfloat16 where that is faster (see `iteration_dtype`), and in the weights' own precision
    elsewhere; PyTorch's `torch.optim.Muon` runs it in bfloat16 everywhere, which is far slower on CPUs without
    bfloat16 arithmetic. Sharded parameters are gathered for it.

    Args:
        matrices: what to update.
        lr, weight_decay, momentum: as in the formulas.
        distributed: the processes that have the same matrices and gradients. Each runs the iteration for its share of
            the matrices and sends the result to the others; without, this process runs all of it.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        distributed: Distributed | None = None,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._distributed = distributed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            for matrix, update in self._updates(matrices, group["momentum"]):
                scale = 0.2 * math.sqrt(max(matrix.shape))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(_sharded_like(matrix, update), alpha=-group["lr"] * scale)

    def _updates(self, matrices: list[Tensor], momentum: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield matrices with their orthogonal updates; each process computes its share, then all exchange results."""
        distributed = self._distributed
        rank, num_shares = (0, 1) if distributed is None else (distributed.rank, distributed.world_size)
        plan = shares([matrix.shape for matrix in matrices], num_shares)
        computed: Iterable[Tensor | None] = (self._share_of(rank, owned, matrices, momentum) for owned in plan)
        if num_shares > 1:
            computed = list(computed)  # nobody waits for others before its whole share is computed
        for owned, mine in zip(plan, computed, strict=True):
            for owner, numbers in enumerate(owned):
                if numbers:
                    like = matrices[numbers[0]]
                    updates = mine if owner == rank else None
                    if updates is None:
                        updates = torch.empty(len(numbers), *like.shape, dtype=like.dtype, device=like.device)
                    if distributed is not None and num_shares > 1:
                        updates = updates.contiguous()
                        distributed.broadcast(updates, owner)
                    yield from zip((matrices[number] for number in numbers), updates, strict=True)

    def _share_of(self, rank: int, owned: list[list[int]], matrices: list[Tensor], momentum: float) -> Tensor | None:
        """Move the momentum of all matrices of one shape, and return the orthogonal updates of those a process owns."""
        mine = list[Tensor]()
        for owner, numbers in enumerate(owned):
            for number in numbers:
                direction = _whole(self._direction(matrices[number], momentum))  # of a DTensor: by all processes
                if owner == rank:
                    mine.append(direction)
        return orthogonalize(torch.stack(mine)) if mine else None

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].mul_(momentum).add_(matrix.grad)
        return matrix.grad.add(state["momentum"], alpha=momentum)


def shares(shapes: Sequence[torch.Size], num_shares: int) -> list[list[list[int]]]:
    """Split the iteration over matrices of these shapes into shares that take about as long.

    Returns:
        For every shape, the most expensive first, and every share, the indices of its matrices.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for number, shape in enumerate(shapes):
        by_shape[shape].append(number)
    cost = {shape: min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in by_shape}
    loads, found = [0] * num_shares, []
    for shape in sorted(by_shape, key=lambda shape: -cost[shape]):
        owned: list[list[int]] = [[] for _ in loads]
        for number in by_shape[shape]:
            least = loads.index(min(loads))
            loads[least] += cost[shape]
            owned[least].append(number)
        found.append(owned)
    return found


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices ``[.., m, n]`` with the same singular vectors and singular values near 1, by Newton-Schulz.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X = matrix / its norm.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).reshape(-1, *sorted(matrices.shape[-2:]))
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)).to(iteration_dtype(x))
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).reshape(matrices.shape).to(matrices.dtype)


def iteration_dtype(x: Tensor) -> torch.dtype:
    """Return the precision of the iteration over float32 matrices ``[.., m, n]``, m <= n.

    Singular values end between 0.7 and 1.2 anyway, so bfloat16 is good enough. It is faster on GPUs, and twice as fast
    on CPUs that have bfloat16 arithmetic and matrices that are large enough.
    """
    if x.dtype != torch.float32:
        return x.dtype
    if x.device.type == "cpu":
        is_faster = x.shape[-2] >= LEAST_BFLOAT16_SIDE and cpu_multiplies_bfloat16()
    else:
        is_faster = x.device.type == "cuda"
    return torch.bfloat16 if is_faster else torch.float32


def _whole(matrix: Tensor) -> Tensor:
    return matrix.full_tensor() if isinstance(matrix, DTensor) else matrix


def _sharded_like(matrix: Tensor, whole: Tensor) -> Tensor:
    """Return what a process keeps of a tensor that every process has whole, placed as ``matrix`` is."""
    if not isinstance(matrix, DTensor):
        return whole
    mesh = matrix.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=matrix.placements)
