"""Muon makes the update of momentum orthogonal, for matrices between hidden states (Jordan et al., 2024).

For a matrix W ``[m, n]`` with gradient G and momentum M,

    M <- mu M + G,    U = G + mu M,    W <- (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) orthogonal(U)

where ``orthogonal`` has the singular vectors of U and singular values near 1. The factor gives updates the root mean
square that AdamW's have, so that both share a learning rate.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

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
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                directions = torch.stack([_whole(self._direction(matrix, group["momentum"])) for matrix in matrices])
                scale = 0.2 * math.sqrt(max(shape))
                for matrix, update in zip(matrices, orthogonalize(directions), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(_sharded_like(matrix, update), alpha=-group["lr"] * scale)

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].mul_(momentum).add_(matrix.grad)
        return matrix.grad.add(state["momentum"], alpha=momentum)


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
    return distribute_tensor(whole, matrix.device_mesh, matrix.placements) if isinstance(matrix, DTensor) else whole
