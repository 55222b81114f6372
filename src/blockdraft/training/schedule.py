"""The learning rate: linear warm-up, then a cosine to zero."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """``rate * (step + 1) / W`` for the first ``W = ceil(warmup * num_steps)`` steps, then half a cosine down to 0."""

    rate: float
    warmup: float
    num_steps: int

    def rate_at(self, step: int) -> float:
        """Of the optimizer step of this index, counted from 0."""
        num_warmup = math.ceil(self.warmup * self.num_steps)
        if step < num_warmup:
            return self.rate * (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, self.num_steps - num_warmup)
        return self.rate * 0.5 * (1 + math.cos(math.pi * done))
