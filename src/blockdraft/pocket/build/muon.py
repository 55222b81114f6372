"""Muon: momentum whose update is made orthogonal, for the matrices of the layers.

For a matrix W ``[m, n]`` with gradient G and momentum buffer M,

    M <- mu M + G,   U = G + mu M   (Nesterov),   W <- (1 - rate decay) W - rate 0.2 sqrt(max(m, n)) orth(U)

where ``orth`` is the nearest orthogonal matrix, found approximately by five Newton-Schulz iterations

    X <- a X + b (X X^T) X + c (X X^T)^2 X

from ``X = U / |U|_F`` (Jordan et al., 2024). The factor gives updates the size that AdamW's have, so that both take
similar learning rates. Iterations are in float32, and the matrices of one shape go through them together.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonalized(updates: Tensor) -> Tensor:
    """Return ``[K, m, n]`` matrices with about the same singular vectors and singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = updates.shape[-2] <= updates.shape[-1]
    x = updates if wide else updates.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """The optimizer described above, for a list of matrices."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for (rows, columns), matrices in by_shape.items():
                updates = torch.stack([self._momentum(matrix, group["momentum"]) for matrix in matrices])
                scale = 0.2 * max(rows, columns) ** 0.5
                for matrix, update in zip(matrices, orthogonalized(updates), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].mul_(momentum).add_(matrix.grad)
        return matrix.grad.add(state["momentum"], alpha=momentum)
