"""This module holds the objective that decoding really has: the expected number of verification calls.

Along a text of the target, V(a), the expected number of rounds from anchor a to
the end, has the gradient

    grad V(0) = - sum_a o(a) sum_i d(a + i) grad s_a(i)

with the occupancies o, credits d and scores s of `blockdraft.losses.anchor_runs`. BV is
the case of equal occupancies and equal credits: every anchor as likely a start,
every accepted token worth the same. In truth a token is worth the calls that
having it saves.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from blockdraft.losses.anchor_runs import RunStart, trace
from blockdraft.losses.bv import BVEstimator, check_beta, check_choice, log_power_mean
from blockdraft.losses.objective import Objective, register
from blockdraft.losses.scores import Blocks

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
        runs, present = blocks.runs, blocks.num_valid > 0
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
