"""This module follows the rounds of speculative decoding along runs of consecutive anchors.

A run is a stretch of a target-generated text of which every token is the anchor
of a block: block j of a run holds the tokens after anchor j. Verification is
lossless, so given the text a round that starts at anchor j keeps i of its tokens
or more with probability s_j(i), the sampled score along the text, and the next
round starts at anchor j + k + 1 if k were kept. Where rounds start is a Markov
chain along the text; `trace` computes, without gradient,

    o(j)   the probability that a round starts at anchor j,
    d(j) = 1 - sum_i s_j(i) d(j + i),   the verification calls that having token j saves.

See docs/theory/rounds.md.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RunStart = Literal["round", "anywhere"]


@dataclass(frozen=True)
class AnchorRuns:
    """AnchorRuns says which blocks stand at consecutive anchors of one text.

    run: ``[N]`` the number of each block's run, counted from 0.
    place: ``[N]`` its place in the run, counted from 0.
    num_runs: R. longest: n, the number of blocks in the longest run, at least 1.
    """

    run: Tensor
    place: Tensor
    num_runs: int
    longest: int

    @classmethod
    def of(cls, segments: Tensor | None, labels: Tensor, valid: Tensor, *, checked: bool = False) -> "AnchorRuns":
        """Read the runs off ``segments`` ``[N]``: blocks of one id form a run; None makes every block its own.

        Refuses ids that come back after another one and, unless they are known to (``checked``), blocks that do not
        continue the one before them. Segments on the CPU are read without waiting for the labels' device.
        """
        num_blocks = labels.shape[0]
        if segments is None:
            every = torch.arange(num_blocks, device=labels.device)
            return cls(every, torch.zeros_like(every), num_blocks, 1)
        bounds = run_bounds(segments, num_blocks)
        lengths = torch.tensor([stop - start for start, stop in bounds], dtype=torch.long)
        run = torch.repeat_interleave(torch.arange(len(bounds)), lengths)
        place = torch.arange(num_blocks) - (lengths.cumsum(0) - lengths)[run]
        longest = int(lengths.max()) if bounds else 1
        run, place = (x.to(labels.device, non_blocking=True) for x in (run, place))
        if not checked:
            check_runs(run, labels, valid)
        return cls(run, place, len(bounds), longest)

    def gather(self, values: Tensor) -> Tensor:
        """Return ``values`` ``[N, ...]`` as ``[R, n, ...]``, with zeros where a run has ended."""
        gathered = values.new_zeros(self.num_runs, self.longest, *values.shape[1:])
        return gathered.index_put((self.run, self.place), values)

    def scatter(self, values: Tensor) -> Tensor:
        """Return ``values`` ``[R, n, ...]`` as ``[N, ...]``."""
        return values[self.run, self.place]


def check_runs(run: Tensor, labels: Tensor, valid: Tensor) -> None:
    """Refuse blocks ``[N, B]`` of one run ``[N]`` that do not continue the one before them."""
    follows = (run[1:] == run[:-1]).unsqueeze(-1)
    shared = follows & valid[:-1, 1:] & valid[1:, :-1]
    if bool((shared & (labels[:-1, 1:] != labels[1:, :-1])).any()):
        raise ValueError(
            "segments: a block does not continue the one before it; the blocks of a run must stand at "
            "consecutive anchors of one text, in order"
        )
    if bool((follows.squeeze(-1) & valid[1:, 0] & ~valid[:-1, 0]).any()):
        raise ValueError("segments: a block without a valid position may only stand at the end of its run")


def run_bounds(segments: Tensor, num_blocks: int) -> list[tuple[int, int]]:
    """Return where each run of equal ids starts and stops."""
    if segments.shape != (num_blocks,) or segments.is_floating_point() or segments.dtype == torch.bool:
        raise ValueError(f"segments must be ids [N] = [{num_blocks}], got {segments.dtype} {list(segments.shape)}")
    ids, counts = torch.unique_consecutive(segments, return_counts=True)
    if len(ids) != len(torch.unique(ids)):
        raise ValueError("segments: the blocks of a run must be adjacent, and an id comes back after another one")
    stops = counts.cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []


def whole_runs(bounds: list[tuple[int, int]], limit: int) -> list[slice]:
    """Return slices of runs, filled up to ``limit`` blocks; a longer run is a slice of its own."""
    slices: list[slice] = []
    for start, stop in bounds:
        if slices and stop - slices[-1].start <= limit:
            slices[-1] = slice(slices[-1].start, stop)
        else:
            slices.append(slice(start, stop))
    return slices


@dataclass(frozen=True)
class Trace:
    """A Trace holds what decoding would do along R runs of up to n anchors.

    occupancy: ``[R, n]`` o(j), 0 where a run has ended.
    worth: ``[R, n]`` d(j) of the anchor's own token.
    credit: ``[R, n, B]`` d(j + i), what keeping i tokens from anchor j saves more than keeping i - 1.
    calls_per_token: ``[R]`` c = sum_j o(j) / sum_j o(j) (1 + sum_i s_j(i)), what every token beyond a run is worth.
    """

    occupancy: Tensor
    worth: Tensor
    credit: Tensor
    calls_per_token: Tensor


@torch.no_grad()
def trace(scores: Tensor, present: Tensor, start: RunStart) -> Trace:
    """Follow the rounds along R runs.

    Args:
        scores: ``[R, n, B]`` s_j(i), the chance that a round from anchor j keeps i tokens or more; 0 where there
            is no token.
        present: ``[R, n]`` bool, the anchors of each run: a prefix.
        start: ``"round"`` lets a round start at a run's first anchor. ``"anywhere"`` lets the rounds before
            the run end where those of a stationary text would: at anchor j first with probability c s(j),
            with s the mean of the run's scores, s(0) = 1 and c = 1 / (1 + sum_i s(i)).
    """
    num_runs, longest, block_size = scores.shape
    one = scores.new_ones(num_runs, longest, 1)
    survival = torch.cat([one, scores, torch.zeros_like(one)], -1)
    exactly = (survival[..., :-1] - survival[..., 1:]) * present.unsqueeze(-1)  # [R, n, B + 1]: k kept, no more
    reached = scores.new_zeros(num_runs, longest + block_size + 1)
    if start == "round":
        reached[:, 0] = 1
    else:
        mean = (survival[..., :-1] * present.unsqueeze(-1)).sum(1) / present.sum(1, keepdim=True).clamp(min=1)
        reached[:, : block_size + 1] = mean / mean.sum(-1, keepdim=True).clamp(min=1)
    for j in range(longest):
        reached[:, j + 1 : j + block_size + 2] += reached[:, j : j + 1] * exactly[:, j]
    occupancy = reached[:, :longest] * present
    num_calls = occupancy.sum(-1)
    num_tokens = (occupancy * survival[..., :-1].sum(-1)).sum(-1)
    calls_per_token = torch.where(num_calls > 0, num_calls / num_tokens.clamp(min=1e-30), 1)
    saved = calls_per_token.unsqueeze(-1).repeat(1, longest + block_size)
    for j in reversed(range(longest)):
        lost = (scores[:, j] * saved[:, j + 1 : j + 1 + block_size]).sum(-1)
        saved[:, j] = torch.where(present[:, j], 1 - lost, calls_per_token)
    credit = saved.unfold(1, block_size, 1)[:, 1 : longest + 1]
    return Trace(occupancy, saved[:, :longest], credit, calls_per_token)
