"""The optimizer and its learning rate."""

import math

import torch
from torch import nn

from blockdraft.recipes.schema import OptimizerSection


def make_optimizer(module: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
    """Build the optimizer of a recipe over a module's parameters."""
    return torch.optim.AdamW(
        module.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay
    )


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
