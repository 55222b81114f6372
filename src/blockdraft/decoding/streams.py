"""Separate random streams for what speculative decoding draws."""

from dataclasses import dataclass

import torch
from torch import Generator


@dataclass(frozen=True)
class Streams:
    """Separate generators for drafting, coins and recovery tokens, all from one seed."""

    draft: Generator
    coins: Generator
    recovery: Generator

    @classmethod
    def from_seed(cls, seed: int, device: torch.device) -> "Streams":
        root = Generator().manual_seed(seed)
        seeds = torch.randint(2**62, (3,), generator=root).tolist()
        return cls(*(Generator(device).manual_seed(s) for s in seeds))
