"""Random batches of blocks for the tests of the objectives."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

OBJECTIVES = [
    ("ce", {}),
    ("kl", {}),
    ("rkl", {"eta": 4.0}),
    ("tv", {}),
    ("lk", {"eta": float("inf")}),
    ("bv", {"form": "linear", "estimator": "sampled"}),
    ("bv", {"form": "linear"}),
    ("bv", {"form": "population", "estimator": "sampled"}),
    ("bv", {"form": "population"}),
    ("bv", {"estimator": "sampled"}),
    ("bv", {}),
    ("bv", {"beta": 0.0}),
    ("bv", {"beta": 0.37}),
    ("bv", {"beta": 0.37, "estimator": "sampled", "ramp_floor": 1e-2}),
    ("bv", {"beta": 0.0, "ramp_floor": 1e-2}),
    ("bv", {"summand_floor": -2.0, "length_floor": 0.5}),
    ("bv", {"summand_floor": None, "length_floor": None}),
    ("bv", {"control_variate": True}),
    ("bv", {"control_variate": True, "beta": 0.37, "ramp_floor": 1e-2}),
    ("bv", {"control_variate": True, "beta": 0.0}),
    ("bv", {"control_variate": True, "summand_floor": -2.0}),
    ("token-bv", {"form": "linear"}),
    ("token-bv", {"form": "population"}),
    ("token-bv", {}),
    ("token-bv", {"beta": 0.37, "ramp_floor": 1e-2}),
    ("token-bv", {"beta": 0.0}),
    ("e2e-tv", {}),
    ("lk-hybrid", {"decay": 2.0}),
    ("dspark", {"eta": 4.0}),
    ("dspark", {"ce_weight": 0.5, "l1_weight": 0.2}),
    ("dpace", {}),
    ("dpace", {"mix": 0.1}),
    ("rounds", {}),
    ("rounds", {"beta": 0.37, "estimator": "sampled"}),
    ("rounds", {"beta": 0.0}),
    ("rounds", {"form": "linear"}),
]

STOPS_GRADIENTS = {"lk-hybrid", "dpace", "rounds"}
"""Objectives with factors held fixed in the gradient, which finite differences cannot know of."""


def has_exact_gradient(name, options) -> bool:
    """Whether an objective's gradient is that of its value."""
    return name not in STOPS_GRADIENTS and not options.get("control_variate")


IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in OBJECTIVES]

ONE_EACH = list({name: (name, options) for name, options in reversed(OBJECTIVES)}.values())
"""One set of options for every objective, where the options make no difference to what is tested."""


@dataclass(frozen=True)
class Batch:
    draft: Tensor
    target: Tensor
    labels: Tensor
    valid: Tensor | None = None

    def leaf(self) -> "Batch":
        return replace(self, draft=self.draft.detach().clone().requires_grad_())

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.draft, self.target, self.labels, self.valid


def batch(num_blocks=4, block_size=5, vocab_size=6, *, dtype=torch.float64, masked=True, seed=0, spread=1.0) -> Batch:
    """Logits of ``spread``, labels sampled from the target; masked, blocks are whole, partial, empty, short in turn."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, block_size, vocab_size)
    draft = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    target = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(target.softmax(-1).flatten(0, 1), 1, generator=generator).view(num_blocks, block_size)
    valid = None
    if masked:
        in_turn = (block_size, block_size // 2 + 1, 0, 1)
        lengths = torch.tensor([in_turn[n % 4] for n in range(num_blocks)])
        valid = torch.arange(block_size) < lengths[:, None]
    return Batch(draft.to(dtype), target.to(dtype), labels, valid)


def value_and_gradient(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, leaves)
