"""Tiny targets and drafters, as functions of the prefix, whose every block can be enumerated."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.verification.reference import Model, Prefix, reference_law

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


@dataclass(frozen=True)
class TextToy:
    """A target that writes texts of ``num_tokens`` after a first one, and a drafter of blocks from any anchor.

    The first token is 0. ``drafter(prefix, drafted)`` is the draft law of the next token of a block whose anchor is
    the last token of ``prefix``; it comes from logits that require gradients.
    """

    target: Model
    drafter: Callable[[Prefix, Prefix], Tensor]
    logits: dict[object, Tensor]
    vocab_size: int
    block_size: int
    num_tokens: int

    def texts(self) -> Iterator[tuple[Prefix, float]]:
        """Every text with its probability."""
        for tokens in itertools.product(range(self.vocab_size), repeat=self.num_tokens):
            text, probability = (0, *tokens), 1.0
            for i in range(1, len(text)):
                probability *= float(self.target(text[:i])[text[i]])
            yield text, probability

    def block(self, text: Prefix, anchor: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """p, q and labels of the block behind an anchor, up to the end of the text."""
        stop = min(anchor + self.block_size, self.num_tokens)
        p = [self.target(text[: i + 1]) for i in range(anchor, stop)]
        q = [self.drafter(text[: anchor + 1], text[anchor + 1 : i + 1]) for i in range(anchor, stop)]
        return p, q, list(text[anchor + 1 : stop + 1])

    def expected_calls(self, rule: str) -> float:
        """The number of verification calls that decoding takes, by enumeration of all it can do."""

        @functools.cache
        def calls_after(prefix: Prefix) -> float:
            if len(prefix) > self.num_tokens:
                return 0.0
            expected = 1.0
            for block in itertools.product(range(self.vocab_size), repeat=self.block_size):
                q = torch.stack([self.drafter(prefix, block[:i]).detach() for i in range(self.block_size)])
                p = torch.stack([self.target(prefix + block[:i]) for i in range(self.block_size + 1)])
                drafted = float(q.gather(1, torch.tensor(block)[:, None]).prod())
                accept, residual = reference_law(rule, p, q, list(block))
                for k, chance_of_k in enumerate(accept.tolist()):
                    for token, chance_of_token in enumerate(residual[k].tolist()):
                        after = (*prefix, *block[:k], token)[: self.num_tokens + 1]
                        expected += drafted * chance_of_k * chance_of_token * calls_after(after)
            return expected

        return calls_after((0,))


def text_toy(kind: str, *, seed: int = 0, vocab_size: int = 2, block_size: int = 2, num_tokens: int = 4) -> TextToy:
    """A random autoregressive target, and a drafter of the given kind from each anchor."""
    base = toy("autoregressive", seed=seed, vocab_size=vocab_size)
    logits: dict[object, Tensor] = {}

    def drafter(prefix: Prefix, drafted: Prefix) -> Tensor:
        seen = {"independent": (), "markov": drafted[-1:], "autoregressive": drafted}[kind]
        key = (prefix, len(drafted), seen)
        if key not in logits:
            generator = torch.Generator().manual_seed(seed * 10_007 + len(logits))
            logits[key] = torch.randn(vocab_size, generator=generator, dtype=torch.float64).requires_grad_()
        return logits[key].softmax(-1)

    return TextToy(base.target, drafter, logits, vocab_size, block_size, num_tokens)
