"""Tiny targets and drafters, as functions of the prefix, whose every block can be enumerated."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.verification.reference import Model, Prefix

DRAFTERS = ("independent", "markov", "autoregressive", "one-hot")


@dataclass(frozen=True)
class Toy:
    target: Model
    drafter: Model
    vocab_size: int
    block_size: int

    def blocks(self) -> Tensor:
        """Every block, ``[V^B, B]``."""
        return torch.tensor(list(itertools.product(range(self.vocab_size), repeat=self.block_size)))

    def conditionals(self, model: Model, blocks: Tensor, num_positions: int) -> Tensor:
        """``[N, num_positions, V]`` probabilities along the blocks' own prefixes."""
        return torch.stack([torch.stack([model(tuple(x[:i])) for i in range(num_positions)]) for x in blocks.tolist()])

    def probs(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """p ``[N, B+1, V]`` and q ``[N, B, V]`` along the blocks."""
        return (
            self.conditionals(self.target, blocks, self.block_size + 1),
            self.conditionals(self.drafter, blocks, self.block_size),
        )


def chance(probs: Tensor, blocks: Tensor) -> Tensor:
    """``[N]`` probability of each block under conditionals ``[N, >=B, V]``."""
    return probs[:, : blocks.shape[1]].gather(-1, blocks.unsqueeze(-1)).squeeze(-1).prod(-1)


def toy(kind: str, *, zeros: bool = False, seed: int = 0, vocab_size: int = 3, block_size: int = 3) -> Toy:
    """A random autoregressive target with a drafter of the given kind; with zeros, both miss some tokens."""

    @functools.cache
    def draw(who: str, key: Prefix) -> Tensor:
        index = sum((token + 1) * (vocab_size + 1) ** i for i, token in enumerate(key)) + 1
        generator = torch.Generator().manual_seed(seed * 10_007 + index * 2 + (who == "target"))
        law = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2 + 0.02
        if zeros:
            law[int(torch.randint(vocab_size, (), generator=generator))] = 0
        return law / law.sum()

    def target(prefix: Prefix) -> Tensor:
        return draw("target", prefix)

    def drafter(prefix: Prefix) -> Tensor:
        if kind == "independent":
            return draw("drafter", (0,) * len(prefix))
        if kind == "markov":
            return draw("drafter", (0,) * max(0, len(prefix) - 1) + prefix[-1:])
        law = draw("drafter", prefix)
        if kind == "one-hot":
            return torch.nn.functional.one_hot(law.argmax(), vocab_size).to(torch.float64)
        return law

    return Toy(target, drafter, vocab_size, block_size)
