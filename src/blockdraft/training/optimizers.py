"""Optimizers and the learning rate: AdamW as in the paper, or Muon for matrices with AdamW for the rest."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from blockdraft.recipes.schema import OptimizerSection

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, which send singular values from (0, 1] to about 1 in five steps."""


def make_optimizers(module: nn.Module, options: OptimizerSection) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a recipe over a module's parameters; each parameter belongs to exactly one of them.

    On CUDA, AdamW takes one kernel for all of them.
    """
    adamw: dict[str, Any] = {
        "lr": options.learning_rate, "betas": options.betas, "weight_decay": options.weight_decay
    }  # fmt: skip
    if all(parameter.is_cuda for parameter in module.parameters()):
        adamw["fused"] = True
    if options.name == "adamw":
        return [torch.optim.AdamW(module.parameters(), **adamw)]
    named = dict(module.named_parameters())
    matrices = [parameter for name, parameter in named.items() if is_matrix(name, parameter)]
    others = [parameter for name, parameter in named.items() if not is_matrix(name, parameter)]
    muon = Muon(matrices, lr=options.learning_rate, weight_decay=options.weight_decay)
    return [muon, torch.optim.AdamW(others, **adamw)]


def scale_gradients(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply all gradients by a number on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and not any(isinstance(gradient, DTensor) for gradient in gradients):
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        return
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: matrices between hidden states, not tables over the vocabulary."""
    return parameter.dim() == 2 and not name.startswith("markov_head.markov_w")


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix-shaped updates are made orthogonal (Jordan et al., 2024).

        M <- mu M + G,    U = orthogonal(G + mu M),    W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, columns)) U

    The factor gives updates the root mean square that AdamW's have, so that both share a learning rate. The
    Newton-Schulz iteration runs in the weights' own float32; PyTorch's `torch.optim.Muon` runs it in bfloat16, which
    is far slower on CPUs without bfloat16 arithmetic. Sharded parameters are gathered for it.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        num_iterations: int = 5,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "num_iterations": num_iterations}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum: Tensor = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                direction = parameter.grad.add(momentum, alpha=group["momentum"])
                update = _orthogonalized(direction, group["num_iterations"])
                scale = 0.2 * math.sqrt(max(parameter.shape))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def _orthogonalized(matrix: Tensor, num_iterations: int) -> Tensor:
    if isinstance(matrix, DTensor):
        whole = orthogonalize(matrix.full_tensor(), num_iterations)
        return distribute_tensor(whole, matrix.device_mesh, matrix.placements)
    return orthogonalize(matrix, num_iterations)


def orthogonalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, by Newton-Schulz.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X = matrix / its norm.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def learning_rate_at(step: int, num_steps: int, options: OptimizerSection) -> float:
    """Return the learning rate of an optimizer step, counted from 0.

    ``learning_rate * (step + 1) / W`` for the first ``W = ceil(warmup_ratio * num_steps)`` steps, then half a cosine
    down to 0.
    """
    num_warmup = math.ceil(options.warmup_ratio * num_steps)
    if step < num_warmup:
        return options.learning_rate * (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
