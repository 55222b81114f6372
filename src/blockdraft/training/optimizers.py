"""Optimizers and the learning rate: AdamW as in the paper, or Muon for matrices with AdamW for the rest."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockdraft.muon import Muon
from blockdraft.recipes.schema import OptimizerSection


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
