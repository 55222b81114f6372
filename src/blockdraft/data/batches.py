"""Choose blocks to train on, their texts and anchors, and lay them out in tensors.

An anchor is a position of a response whose next token belongs to the response
too; in decoding it is the last committed token. Its block is the next B tokens,
fewer where the response ends. Which texts and anchors a step takes is a function
of (seed, epoch, step) alone; processes and accumulation only share them out.

Packing: the texts of a batch lie end to end in one row, nothing is padded, and
each is read as if it were alone. A `Span` says where a text lies; positions
count from the start of each text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.data.manifest import DataError
from blockdraft.data.store import TextDataset
from blockdraft.drafters import Anchors
from blockdraft.targets import Span
from blockdraft.targets.attention import span_positions

AnchorChoice = Literal["uniform", "rounds", "mixed"]

ORDER, ANCHORS, WALK, CAP = 1, 2, 4, 5
"""Numbers of the random streams, so that one seed gives a separate stream for each purpose."""


Walk = dict[int, NDArray[np.int64]]
"""By text: positions where blocks start, counted from the first token of the response."""


@dataclass(frozen=True)
class TextAnchors:
    """Holds a text and the anchors taken from it, counted from its first token, in order.

    uniforms: a uniform number for each anchor, which decides where its round would end; None where anchors do not walk.
    runs: for each anchor the number of its run of consecutive anchors; None where anchors are drawn one by one.
    """

    text: int
    anchors: NDArray[np.int64]
    uniforms: NDArray[np.float64] | None = None
    runs: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Batch:
    """Holds A blocks over N packed rows of T tokens.

    tokens: ``[N, T]`` token ids; zeros outside of the spans.
    positions: ``[N, T]`` of each token within its text, which rotary embeddings are made of.
    texts: indices of the texts in their data set, in the order of the spans.
    spans: where the texts lie.
    anchors: where the blocks stand.
    block_tokens: ``[A, B + 1]`` the anchor's token and the B that follow it; zeros where the response has ended.
    valid: ``[A, B]`` which of them exist: a prefix of each block.
    read_positions: ``[P]`` the positions, counted through all rows, whose hidden state predicts a label of a block.
    read_index: ``[A, B]`` which of them predicts each label; where there is none, one that the block reads anyway.
    read_bounds: for each block the first p that it reads, and the one behind the last.
    uniforms: ``[A]`` of `TextAnchors`, where anchors walk.
    loaded: what `Features.load` read for the batch ahead of time.
    segments: ``[A]`` always on the CPU: a number for each block, the same for blocks at consecutive anchors of one run.
    """

    tokens: Tensor
    positions: Tensor
    texts: list[int]
    spans: list[Span]
    anchors: Anchors
    block_tokens: Tensor
    valid: Tensor
    read_positions: Tensor
    read_index: Tensor
    read_bounds: list[tuple[int, int]]
    uniforms: Tensor | None = None
    segments: Tensor | None = None
    loaded: tuple[Tensor, ...] = ()

    @property
    def anchor_tokens(self) -> Tensor:
        """Give the committed token that each block starts from, ``[A]``."""
        return self.block_tokens[:, 0]

    @property
    def labels(self) -> Tensor:
        """Give the tokens to be drafted, ``[A, B]``."""
        return self.block_tokens[:, 1:]

    @property
    def previous(self) -> Tensor:
        """Give the token before each label, ``[A, B]``."""
        return self.block_tokens[:, :-1]

    def at_blocks(self, hidden: Tensor) -> Tensor:
        """Return ``[A, B, ..]``: of values ``[N, T, ..]`` at every position, those that predict the labels."""
        steps = torch.arange(self.valid.shape[1], device=hidden.device)
        positions = (self.anchors.position[:, None] + steps).clamp(max=hidden.shape[1] - 1)
        return hidden[self.anchors.row[:, None], positions]

    def read_by_blocks(self, hidden: Tensor) -> Tensor:
        """Return ``[P, ..]``: of values ``[N, T, ..]`` at every position, each that a block reads, once."""
        return hidden.flatten(0, 1).index_select(0, self.read_positions)

    def spread_to_positions(self, values: Tensor) -> Tensor:
        """Return ``[N, T, ..]`` from values ``[P, ..]`` where blocks read, zero elsewhere: `read_by_blocks` undone."""
        whole = values.new_zeros(self.tokens.numel(), *values.shape[1:])
        return whole.index_copy_(0, self.read_positions, values).view(*self.tokens.shape, *values.shape[1:])

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on another device; the host does not wait for tensors in pinned memory."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Return the same batch in memory that an accelerator can read while the host goes on."""
        return self._each(lambda x: x.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor but those that stay on the CPU."""
        anchors = Anchors(*(change(x) for x in (self.anchors.row, self.anchors.position, self.anchors.start)))
        names = ("tokens", "positions", "block_tokens", "valid", "read_positions", "read_index", "uniforms")
        changed: dict[str, Any] = {
            name: change(getattr(self, name)) for name in names if getattr(self, name) is not None
        }
        return replace(self, anchors=anchors, loaded=tuple(map(change, self.loaded)), **changed)


class BatchSampler:
    """Chooses what every step of every epoch trains on.

    An epoch is a random order of all texts that have an anchor, cut into steps of
    ``num_texts``; the last step may have fewer. A step's anchors are drawn
    uniformly without replacement from all those of its texts, up to ``num_anchors``. A text
    that was dealt more than ``max_anchors_per_text`` keeps that many of them, chosen uniformly.

    With ``anchors="rounds"`` that draw only decides how many blocks a text gets. Where they start, from the second
    epoch on, is where rounds of decoding would: each anchor of a text moves on, from one visit to the next, by the
    number of tokens that verification would have kept plus one (`walk`, docs/theory/rounds.md). With ``"mixed"``, half
    of them do. The walk is part of a run's state; it does not depend on the number of processes.
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
        anchors: AnchorChoice = "uniform",
        run_length: int = 1,
        max_anchors_per_text: int = 512,
    ) -> None:
        """Sample batches from a data set.

        Args:
            dataset: the texts.
            num_texts: texts per step (the global batch).
            num_anchors: anchors per step, at most.
            num_proposals: B.
            seed: of all choices.
            full_blocks: leave out anchors with fewer than B tokens behind them.
            anchors: where blocks start.
            run_length: draw anchors in runs of this number of consecutive ones, for objectives that follow rounds.
            max_anchors_per_text: anchors of one text in one step, at most; at least one whole run.
        """
        if min(num_texts, num_anchors, num_proposals, run_length, max_anchors_per_text) < 1:
            raise ValueError("numbers of texts, anchors, proposals and the length of runs must be at least 1")
        if run_length > 1 and anchors != "uniform":
            raise ValueError("runs of consecutive anchors are placed uniformly; they do not walk")
        self.dataset, self.num_texts, self.num_anchors, self.seed = dataset, num_texts, num_anchors, seed
        self.num_proposals, self.anchors, self.run_length = num_proposals, anchors, run_length
        self.max_anchors_per_text = max_anchors_per_text
        self.walk: Walk = {}
        """Where the blocks of each text start in this epoch."""
        self.next_walk: Walk = {}
        """Where they start in the next one, as far as this epoch has been trained on."""
        behind = num_proposals if full_blocks else 1
        self.num_eligible = np.maximum(dataset.response_lengths - behind, 0)
        self.texts = np.flatnonzero(self.num_eligible)
        if len(self.texts) == 0:
            raise DataError(f"none of the {len(dataset)} responses is long enough to hold a block")

    @property
    def steps_per_epoch(self) -> int:
        """Give the number of steps that one pass over the texts takes."""
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
        if self.run_length > 1:
            return self._in_runs(texts, rng)
        drawn = np.sort(rng.choice(ends[-1], size=min(self.num_anchors, int(ends[-1])), replace=False))
        owner = np.searchsorted(ends, drawn, side="right")
        within = drawn - (ends - self.num_eligible[texts])[owner]
        caps = np.random.default_rng([self.seed, CAP, epoch, step])
        chosen = [(int(text), self._capped(within[owner == place], caps)) for place, text in enumerate(texts)]
        if self.anchors == "uniform":
            return [TextAnchors(text, self.dataset.prompt_lengths[text] + drawn) for text, drawn in chosen]
        rng = np.random.default_rng([self.seed, WALK, epoch, step])
        return [self._walked(text, drawn, rng) for text, drawn in chosen]

    def _capped(self, drawn: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        if len(drawn) <= self.max_anchors_per_text:
            return drawn
        return np.sort(rng.choice(drawn, size=self.max_anchors_per_text, replace=False))

    def _in_runs(self, texts: NDArray[np.int64], rng: np.random.Generator) -> list[TextAnchors]:
        """Cut every text at a random offset into runs of consecutive anchors, and choose some runs uniformly."""
        length = self.run_length
        cuts = []
        for text in texts:
            eligible = int(self.num_eligible[text])
            starts = np.arange(-int(rng.integers(length)), eligible, length)
            cuts += [(int(text), max(0, int(s)), min(int(s) + length, eligible)) for s in starts if s + length > 0]
        kept = np.sort(rng.permutation(len(cuts))[: max(1, self.num_anchors // length)])
        chosen = []
        for text in texts:
            runs = [cuts[i] for i in kept if cuts[i][0] == text]
            allowed = max(1, self.max_anchors_per_text // length)
            if len(runs) > allowed:
                runs = [runs[i] for i in np.sort(rng.permutation(len(runs))[:allowed])]
            parts = [np.arange(start, stop) for _, start, stop in runs]
            anchors = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            prompt = self.dataset.prompt_lengths[text]
            chosen.append(TextAnchors(int(text), prompt + anchors.astype(np.int64), runs=numbers))
        return chosen

    def _walked(self, text: int, drawn: NDArray[np.int64], rng: np.random.Generator) -> TextAnchors:
        """Put the text's walking anchors in the place of as many that were drawn uniformly."""
        walking = self.walk.get(text, drawn[:0])
        wanted = len(drawn) if self.anchors == "rounds" else len(drawn) // 2
        walking = rng.permutation(np.unique(walking))[:wanted]
        others = rng.permutation(np.setdiff1d(drawn, walking))[: len(drawn) - len(walking)]
        anchors = np.sort(np.concatenate([walking, others]))
        return TextAnchors(text, self.dataset.prompt_lengths[text] + anchors, rng.random(len(anchors)))

    def move_on(self, batch: Batch, survival: Tensor) -> None:
        """Note where the next blocks of a batch's texts start, given how far this batch's blocks survive.

        A round from anchor a keeps at least i tokens of the text with probability s_a(i) (``survival`` ``[A, B]``),
        so with a uniform number u it keeps k = #{i : s_a(i) >= u}, and the next round starts at a + k + 1; one that
        would start past the end starts at the first token of the response again.
        """
        assert batch.uniforms is not None
        survival = torch.where(batch.valid, survival, 0.0)
        kept = (survival >= batch.uniforms[:, None]).sum(-1)
        ends = batch.anchors.position - batch.anchors.start + kept + 1
        ends, starts = torch.stack([ends, batch.anchors.start]).cpu().numpy()  # the host waits once
        for text, span in zip(batch.texts, batch.spans, strict=True):
            next_starts = ends[starts == span.start] - self.dataset.prompt_lengths[text]
            self.next_walk[text] = np.where(next_starts < self.num_eligible[text], next_starts, 0)

    def finish_epoch(self) -> None:
        """Let the next epoch start where this one's rounds would have ended."""
        self.walk, self.next_walk = self.walk | self.next_walk, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep: where anchors walk."""
        return {"walk": _flat(self.walk), "next_walk": _flat(self.next_walk)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`."""
        self.walk, self.next_walk = _unflat(state["walk"]), _unflat(state["next_walk"])


def _flat(walk: Walk) -> dict[str, Tensor]:
    """Return a walk as three tensors: texts, how many anchors each has, and the anchors end to end."""
    texts = sorted(walk)
    anchors = np.concatenate([walk[text] for text in texts]) if texts else np.zeros(0, np.int64)
    counts = [len(walk[text]) for text in texts]
    return {
        "texts": torch.tensor(texts, dtype=torch.long),
        "counts": torch.tensor(counts, dtype=torch.long),
        "anchors": torch.from_numpy(anchors),
    }


def _unflat(state: Mapping[str, Tensor]) -> Walk:
    parts = state["anchors"].split(state["counts"].tolist())
    return {text: part.numpy() for text, part in zip(state["texts"].tolist(), parts, strict=True)}


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
    valid = exists[:, 1:]
    read = row[:, None] * tokens.shape[1] + torch.where(valid, steps[:, :-1], position[:, None])
    read_positions, read_index = read.unique(return_inverse=True)
    return Batch(
        tokens=tokens,
        positions=positions,
        texts=[each.text for each in chosen],
        spans=spans,
        anchors=Anchors(row, position, start),
        block_tokens=block_tokens,
        valid=valid,
        read_positions=read_positions,
        read_index=read_index,
        read_bounds=list(zip(read_index.amin(-1).tolist(), (read_index.amax(-1) + 1).tolist(), strict=True)),
        uniforms=_uniforms(chosen),
        segments=_segments(chosen),
    )


def _segments(chosen: Sequence[TextAnchors]) -> Tensor | None:
    """Number the runs of all texts through."""
    runs = [each.runs for each in chosen if each.runs is not None]
    if len(runs) < len(chosen):
        return None
    firsts = np.cumsum([0, *(int(each.max()) + 1 if len(each) else 0 for each in runs)])[:-1]
    return torch.from_numpy(np.concatenate([each + first for each, first in zip(runs, firsts, strict=True)]))


def _uniforms(chosen: Sequence[TextAnchors]) -> Tensor | None:
    drawn = [each.uniforms for each in chosen if each.uniforms is not None]
    return torch.from_numpy(np.concatenate(drawn)) if len(drawn) == len(chosen) else None
