"""Blocks to train on: which texts, which anchors, and how they lie in tensors.

An anchor is a position of a response whose next token belongs to the response
too; in decoding it is the last committed token. Its block are the next B tokens,
fewer where the response ends. Which texts and anchors a step takes is a function
of (seed, epoch, step) alone; processes and accumulation only share them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.data.manifest import DataError
from blockdraft.data.store import TextDataset
from blockdraft.drafters import Anchors
from blockdraft.targets import Span

ORDER, ANCHORS = 1, 2
"""What a random stream is for; one seed gives a stream for each."""


@dataclass(frozen=True)
class TextAnchors:
    """A text and the anchors taken from it, counted from its first token, in order."""

    text: int
    anchors: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """A blocks over N packed rows of T tokens.

    tokens: ``[N, T]``; zeros outside of the spans.
    spans: where the texts lie.
    anchors: where the blocks stand.
    path: ``[A, B + 1]`` the anchor's token and the B that follow it; zeros where the response has ended.
    valid: ``[A, B]`` which of them exist: a prefix of each block.
    """

    tokens: Tensor
    spans: list[Span]
    anchors: Anchors
    path: Tensor
    valid: Tensor

    @property
    def labels(self) -> Tensor:
        """``[A, B]`` tokens to be drafted."""
        return self.path[:, 1:]

    @property
    def previous(self) -> Tensor:
        """``[A, B]`` the token before each of them."""
        return self.path[:, :-1]

    def at_blocks(self, hidden: Tensor) -> Tensor:
        """``[A, B, H]``: of hidden states ``[N, T, H]``, those that predict the labels."""
        steps = torch.arange(self.valid.shape[1], device=hidden.device)
        positions = (self.anchors.position[:, None] + steps).clamp(max=hidden.shape[1] - 1)
        return hidden[self.anchors.row[:, None], positions]

    def to(self, device: torch.device | str) -> "Batch":
        """The same elsewhere."""
        anchors = Anchors(*(x.to(device) for x in (self.anchors.row, self.anchors.position, self.anchors.start)))
        return Batch(self.tokens.to(device), self.spans, anchors, self.path.to(device), self.valid.to(device))


class BatchSampler:
    """What every step of every epoch trains on.

    An epoch is a random order of all texts that have an anchor, cut into steps of
    ``num_texts``; the last step may have fewer. A step's anchors are drawn
    uniformly without replacement from all those of its texts, up to ``num_anchors``.
    """

    def __init__(
        self,
        paths: TextDataset,
        *,
        num_texts: int,
        num_anchors: int,
        num_proposals: int,
        seed: int,
        full_blocks: bool = False,
    ) -> None:
        """BatchSampler over paths.

        Args:
            paths: the data.
            num_texts: texts per step (the global batch).
            num_anchors: anchors per step, at most.
            num_proposals: B.
            seed: of all choices.
            full_blocks: leave out anchors with fewer than B tokens behind them.
        """
        if min(num_texts, num_anchors, num_proposals) < 1:
            raise ValueError("num_texts, num_anchors and num_proposals must be at least 1")
        self.paths, self.num_texts, self.num_anchors, self.seed = paths, num_texts, num_anchors, seed
        self.num_proposals = num_proposals
        behind = num_proposals if full_blocks else 1
        self.num_eligible = np.maximum(paths.response_lengths - behind, 0)
        self.texts = np.flatnonzero(self.num_eligible)
        if len(self.texts) == 0:
            raise DataError(f"none of the {len(paths)} responses is long enough to hold a block")

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.texts) // self.num_texts)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The texts of an epoch, in order."""
        return np.random.default_rng([self.seed, ORDER, epoch]).permutation(self.texts)

    def step(self, epoch: int, step: int) -> list[TextAnchors]:
        """Texts and anchors of one step, counted from 0 within its epoch."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"an epoch has {self.steps_per_epoch} steps; there is no step {step}")
        texts = self.order(epoch)[step * self.num_texts : (step + 1) * self.num_texts]
        ends = np.cumsum(self.num_eligible[texts])
        rng = np.random.default_rng([self.seed, ANCHORS, epoch, step])
        drawn = np.sort(rng.choice(ends[-1], size=min(self.num_anchors, int(ends[-1])), replace=False))
        owner = np.searchsorted(ends, drawn, side="right")
        within = drawn - (ends - self.num_eligible[texts])[owner]
        return [
            TextAnchors(int(text), self.paths.prompt_lengths[text] + within[owner == place])
            for place, text in enumerate(texts)
        ]


def partition(chosen: Sequence[TextAnchors], num_parts: int, paths: TextDataset) -> list[list[TextAnchors]]:
    """The texts of a step in parts of about equal work; texts without anchors are left out.

    Longest work first, each to the part with the least so far. Some parts are empty if there are fewer texts.
    """
    parts: list[list[TextAnchors]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    lengths = paths.lengths
    work = {each.text: int(lengths[each.text]) + 8 * len(each.anchors) for each in chosen}
    for each in sorted(chosen, key=lambda each: (-work[each.text], each.text)):
        if len(each.anchors):
            least = loads.index(min(loads))
            parts[least].append(each)
            loads[least] += work[each.text]
    return parts


def pack(lengths: Sequence[int]) -> list[Span]:
    """Places for texts, end to end in one row: nothing is padded."""
    ends = np.cumsum(lengths).tolist()
    return [Span(0, end - length, end) for length, end in zip(lengths, ends, strict=True)]


def collate(chosen: Sequence[TextAnchors], paths: TextDataset, num_proposals: int) -> Batch:
    """Tensors for these texts and anchors."""
    texts = [torch.from_numpy(paths[each.text].astype(np.int64)) for each in chosen]
    ends = [int(each.anchors.max()) + num_proposals + 1 for each in chosen]
    texts = [text[:end] for text, end in zip(texts, ends, strict=True)]  # what no block reaches is not run
    spans = pack([len(text) for text in texts])
    tokens = torch.zeros(max(span.row for span in spans) + 1, max(span.end for span in spans), dtype=torch.long)
    for text, span in zip(texts, spans, strict=True):
        tokens[span.row, span.start : span.end] = text
    counts = torch.tensor([len(each.anchors) for each in chosen])
    row, start, end = (
        torch.tensor([getattr(span, name) for span in spans]).repeat_interleave(counts)
        for name in ("row", "start", "end")
    )
    position = start + torch.from_numpy(np.concatenate([each.anchors for each in chosen]))
    steps = position[:, None] + torch.arange(num_proposals + 1)
    exists = steps < end[:, None]
    path = torch.where(exists, tokens[row[:, None], steps.clamp(max=tokens.shape[1] - 1)], 0)
    return Batch(tokens, spans, Anchors(row, position, start), path, exists[:, 1:])
