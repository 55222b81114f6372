"""Blocks to train on: which texts, which anchors, and how they lie in tensors.

An anchor is a position of a response whose next token belongs to the response
too; in decoding it is the last committed token. Its block is the next B tokens,
fewer where the response ends. Which texts and anchors a step takes is a function
of (seed, epoch, step) alone; processes and accumulation only share them out.

Packing: the texts of a batch lie end to end in one row, nothing is padded, and
each is read as if it were alone. A `Span` says where a text lies; positions
count from the start of each text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.data.paths import TextDataset
from blockdraft.data.store import DataError
from blockdraft.drafters import Anchors
from blockdraft.targets import Span
from blockdraft.targets.attention import span_positions

ORDER, ANCHORS = 1, 2
"""Numbers of the random streams, so that one seed gives a separate stream for each purpose."""


@dataclass(frozen=True)
class TextAnchors:
    """A text and the anchors taken from it, counted from its first token, in order."""

    text: int
    anchors: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """A blocks over N packed rows of T tokens.

    tokens: ``[N, T]`` token ids; zeros outside of the spans.
    positions: ``[N, T]`` of each token within its text, which rotary embeddings are made of.
    texts: indices of the texts in their data set, in the order of the spans.
    spans: where the texts lie.
    anchors: where the blocks stand.
    block_tokens: ``[A, B + 1]`` the anchor's token and the B that follow it; zeros where the response has ended.
    valid: ``[A, B]`` which of them exist: a prefix of each block.
    """

    tokens: Tensor
    positions: Tensor
    texts: list[int]
    spans: list[Span]
    anchors: Anchors
    block_tokens: Tensor
    valid: Tensor

    @property
    def anchor_tokens(self) -> Tensor:
        """``[A]`` the committed token that each block starts from."""
        return self.block_tokens[:, 0]

    @property
    def labels(self) -> Tensor:
        """``[A, B]`` tokens to be drafted."""
        return self.block_tokens[:, 1:]

    @property
    def previous(self) -> Tensor:
        """``[A, B]`` the token before each label."""
        return self.block_tokens[:, :-1]

    def at_blocks(self, hidden: Tensor) -> Tensor:
        """Return ``[A, B, H]``: of hidden states ``[N, T, H]``, those that predict the labels."""
        steps = torch.arange(self.valid.shape[1], device=hidden.device)
        positions = (self.anchors.position[:, None] + steps).clamp(max=hidden.shape[1] - 1)
        return hidden[self.anchors.row[:, None], positions]

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on another device."""
        anchors = Anchors(*(x.to(device) for x in (self.anchors.row, self.anchors.position, self.anchors.start)))
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "block_tokens", "valid")}
        return replace(self, anchors=anchors, **moved)


class BatchSampler:
    """Chooses what every step of every epoch trains on.

    An epoch is a random order of all texts that have an anchor, cut into steps of
    ``num_texts``; the last step may have fewer. A step's anchors are drawn
    uniformly without replacement from all those of its texts, up to ``num_anchors``.
    """

    def __init__(
        self,
        dataset: TextDataset,
        *,
        num_texts: int,
        num_anchors: int,
        num_proposals: int,
        seed: int,
        full_blocks: bool = False,
    ) -> None:
        """Sample batches from a data set.

        Args:
            dataset: the texts.
            num_texts: texts per step (the global batch).
            num_anchors: anchors per step, at most.
            num_proposals: B.
            seed: of all choices.
            full_blocks: leave out anchors with fewer than B tokens behind them.
        """
        if min(num_texts, num_anchors, num_proposals) < 1:
            raise ValueError("num_texts, num_anchors and num_proposals must be at least 1")
        self.dataset, self.num_texts, self.num_anchors, self.seed = dataset, num_texts, num_anchors, seed
        self.num_proposals = num_proposals
        behind = num_proposals if full_blocks else 1
        self.num_eligible = np.maximum(dataset.response_lengths - behind, 0)
        self.texts = np.flatnonzero(self.num_eligible)
        if len(self.texts) == 0:
            raise DataError(f"none of the {len(dataset)} responses is long enough to hold a block")

    @property
    def steps_per_epoch(self) -> int:
        """Steps that one pass over the texts takes."""
        return -(-len(self.texts) // self.num_texts)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the texts of an epoch, in order."""
        return np.random.default_rng([self.seed, ORDER, epoch]).permutation(self.texts)

    def step(self, epoch: int, step: int) -> list[TextAnchors]:
        """Return the texts and anchors of one step, counted from 0 within its epoch."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"an epoch has {self.steps_per_epoch} steps; there is no step {step}")
        texts = self.order(epoch)[step * self.num_texts : (step + 1) * self.num_texts]
        ends = np.cumsum(self.num_eligible[texts])
        rng = np.random.default_rng([self.seed, ANCHORS, epoch, step])
        drawn = np.sort(rng.choice(ends[-1], size=min(self.num_anchors, int(ends[-1])), replace=False))
        owner = np.searchsorted(ends, drawn, side="right")
        within = drawn - (ends - self.num_eligible[texts])[owner]
        return [
            TextAnchors(int(text), self.dataset.prompt_lengths[text] + within[owner == place])
            for place, text in enumerate(texts)
        ]


def partition(chosen: Sequence[TextAnchors], num_parts: int, dataset: TextDataset) -> list[list[TextAnchors]]:
    """Split the texts of a step into parts of about equal work, leaving out texts without anchors.

    Longest work first, each to the part with the least so far. Some parts are empty if there are fewer texts.
    """
    parts: list[list[TextAnchors]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    lengths = dataset.lengths
    work = {each.text: int(lengths[each.text]) + 8 * len(each.anchors) for each in chosen}
    for each in sorted(chosen, key=lambda each: (-work[each.text], each.text)):
        if len(each.anchors):
            least = loads.index(min(loads))
            parts[least].append(each)
            loads[least] += work[each.text]
    return parts


def pack(lengths: Sequence[int]) -> list[Span]:
    """Return places for texts of these lengths, end to end in one row."""
    ends = np.cumsum(lengths).tolist()
    return [Span(0, end - length, end) for length, end in zip(lengths, ends, strict=True)]


def pack_tokens(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Span]]:
    """Lay texts end to end: their tokens ``[1, T]``, the positions ``[1, T]`` within each text, and the spans."""
    spans = pack([len(text) for text in texts])
    tokens = torch.cat(list(texts))[None]
    return tokens, span_positions(spans, *tokens.shape), spans


def collate(chosen: Sequence[TextAnchors], dataset: TextDataset, num_proposals: int) -> Batch:
    """Make the tensors for these texts and anchors."""
    texts = [torch.from_numpy(dataset[each.text].astype(np.int64)) for each in chosen]
    ends = [int(each.anchors.max()) + num_proposals + 1 for each in chosen]
    texts = [text[:end] for text, end in zip(texts, ends, strict=True)]  # what no block reaches is not run
    tokens, positions, spans = pack_tokens(texts)
    counts = torch.tensor([len(each.anchors) for each in chosen])
    row, start, end = (
        torch.tensor([getattr(span, name) for span in spans]).repeat_interleave(counts)
        for name in ("row", "start", "end")
    )
    position = start + torch.from_numpy(np.concatenate([each.anchors for each in chosen]))
    steps = position[:, None] + torch.arange(num_proposals + 1)
    exists = steps < end[:, None]
    block_tokens = torch.where(exists, tokens[row[:, None], steps.clamp(max=tokens.shape[1] - 1)], 0)
    return Batch(
        tokens=tokens,
        positions=positions,
        texts=[each.text for each in chosen],
        spans=spans,
        anchors=Anchors(row, position, start),
        block_tokens=block_tokens,
        valid=exists[:, 1:],
    )
