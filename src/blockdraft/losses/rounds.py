"""This module holds the objective that decoding really has: the expected number of verification calls.

A run is a stretch of a target-generated text of which every token is the anchor
of a block: block j of a run holds the tokens after anchor j. Verification is
lossless, so given the text a round that starts at anchor j keeps i of its tokens
or more with probability s_j(i), the sampled score along the text, and the next
round starts at anchor j + k + 1 if k were kept. Where rounds start is a Markov
chain along the text; `trace` computes, without gradient,

    o(j)   the probability that a round starts at anchor j,
    d(j) = 1 - sum_i s_j(i) d(j + i),   the verification calls that having token j saves.

V(a), the expected number of rounds from anchor a to the end, has the gradient

    grad V(0) = - sum_a o(a) sum_i d(a + i) grad s_a(i)

with these occupancies o, credits d and scores s. BV is the case of equal
occupancies and equal credits: every anchor as likely a start, every accepted
token worth the same. In truth a token is worth the calls that having it saves.
See docs/theory/rounds.md.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from blockdraft.losses.bv import BVEstimator, check_beta, check_choice, log_power_mean
from blockdraft.losses.objective import Objective, register
from blockdraft.losses.scores import Blocks

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


RoundsForm = Literal["linear", "log"]


@register
@dataclass(frozen=True, kw_only=True)
class Rounds(Objective):
    """Rounds is the expected number of verification calls per token of a text.

    Blocks come in runs of consecutive anchors (``segments``). Within a run the occupancies o and the credits d
    are computed from the scores as they are, and held fixed in the gradient; beyond it every token is worth the
    run's own calls per token, c. With w the weight of a score s, over all scores of a run, and runs weighing as
    many as they have anchors:

        linear   the mean of d(a) over its anchors,  with the gradient -sum w grad s / (number of anchors)
        log      -(1/beta) log[sum |w| s^beta / sum |w|],  with the gradient -sum w s^beta grad(log s) / sum |w| s^beta

    The linear form has the exact gradient of the expected number of calls; the log form has its direction at
    beta = 1, run by run, and trains from scratch. A credit can be negative, where the anchor after a token is a
    worse place to start from; the log form counts its size in the value and keeps its sign in the gradient.

    form: ``"log"`` or ``"linear"``.
    estimator: ``"sampled"`` gives s_a(i) = a~_i the weight o(a) d(a + i). ``"integrated"`` gives abar_i the
        weight o(a) c, and a~_i the rest, o(a) (d(a + i) - c): d looks at the token that abar has integrated
        out, so abar may only carry what does not.
    beta: exponent of the power mean in the log form, 0 <= beta <= 1; see `Annealing`.
    start: where the first round of a run starts: ``"anywhere"``, as in the middle of a text, for runs placed
        uniformly; or at its first anchor, ``"round"``, for runs that begin where a round does.

    Without segments every block is a run of one anchor and all credits are equal: the log form is that of
    `BV` without floors, for every beta; the linear form has the gradient of 1 / (1 + sum_i score_i), or with
    ``start="round"`` of -log(1 + sum_i score_i), score_i being sampled.

    It is this project's own.
    """

    name: ClassVar[str] = "rounds"
    couples_blocks: ClassVar[bool] = True

    form: RoundsForm = "log"
    estimator: BVEstimator = "integrated"
    beta: float = 1.0
    start: RunStart = "anywhere"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "form", self.form, get_args(RoundsForm))
        check_choice(self.name, "estimator", self.estimator, get_args(BVEstimator))
        check_choice(self.name, "start", self.start, get_args(RunStart))
        check_beta(self.name, self.form, self.beta)

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        runs = AnchorRuns.of(blocks.segments, blocks.labels, blocks.valid, checked=blocks.runs_checked)
        present = blocks.num_valid > 0
        kept = torch.where(blocks.valid, blocks.log_sampled.detach().exp(), 0)
        found = trace(runs.gather(kept), runs.gather(present), self.start)
        occupancy, credit = runs.scatter(found.occupancy), runs.scatter(found.credit)
        common = found.calls_per_token[runs.run, None].expand_as(credit)
        if self.estimator == "sampled":
            parts = [(blocks.log_sampled, credit)]
        else:
            parts = [(blocks.log_integrated, common), (blocks.log_sampled, credit - common)]
        log_scores = torch.cat([log_score for log_score, _ in parts], -1)  # [N, B], or [N, 2 B]
        weights = torch.cat([torch.where(blocks.valid, occupancy[:, None] * worth, 0) for _, worth in parts], -1)
        count = present.to(weights.dtype)
        if self.form == "linear":
            saved = (weights * torch.where(weights != 0, log_scores, 0).exp()).sum(-1)
            return (runs.scatter(found.worth) - (saved - saved.detach())) * count, count
        # The sign of a weight stays in the gradient: minus one times the score's own, at the same value.
        known = log_scores.detach()
        log_scores = torch.where((weights < 0) & known.isfinite(), 2 * known - log_scores, log_scores)
        log_mean, exists = log_power_mean(
            runs.gather(log_scores).flatten(1), runs.gather(weights.abs()).flatten(1), self.beta
        )
        per_run = torch.where(exists, -log_mean, 0)
        return per_run[runs.run] * count, exists[runs.run] * count
