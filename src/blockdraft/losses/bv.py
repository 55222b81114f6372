"""This module holds BV, the block verification-aware objective, in every form of the paper.

Scores along a target-generated block (see `blockdraft.losses.scores`): sampled
a~_i, or vocabulary-integrated abar_i. Both average to Pr(tau >= i) under block
verification, so their sum is an unbiased estimate of the accepted length. For
a block of L valid positions:

    linear       1 - (1/L) sum_i score_i                           (eq. linear_bv_train)
    log          log L - log sum_i score_i, averaged over blocks   (eq. annealing at beta = 1)
    log, beta    -(1/beta) log[(1/L) sum_i score_i^beta]           (eq. annealing)
    population   log sum L - log sum sum_i score_i, over the batch (eq. population_bv_loss)
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from blockdraft.losses.objective import Objective, differentiate, register
from blockdraft.losses.scores import Blocks, finite_log

BVForm = Literal["linear", "log", "population"]
BVEstimator = Literal["integrated", "sampled"]


@register
@dataclass(frozen=True, kw_only=True)
class BV(Objective):
    """BV is the block verification-aware loss.

    form: ``"log"`` (the paper's runs), ``"linear"`` or ``"population"``.
    estimator: ``"integrated"`` (the paper's runs) or ``"sampled"``.
    beta: exponent of the power mean in the log form, 0 <= beta <= 1; see `Annealing`.
    summand_floor: lower bound of each log score when beta = 1, or None.
    length_floor: lower bound of a block's summed score in the log form when beta = 1, or None.
    ramp_floor: lower bound of each score when beta < 1, or None. The paper has
        1e-6 for DFlash and none for DSpark.

    A floor passes no gradient to the scores below it. At initialisation most
    scores of a long block are far below 1e-6, so the ramp floor is off unless asked for.
    """

    name: ClassVar[str] = "bv"

    form: BVForm = "log"
    estimator: BVEstimator = "integrated"
    beta: float = 1.0
    summand_floor: float | None = -80.0
    length_floor: float | None = 1e-6
    ramp_floor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value, allowed in (
            ("form", self.form, get_args(BVForm)),
            ("estimator", self.estimator, get_args(BVEstimator)),
        ):
            if value not in allowed:
                raise ValueError(f"bv: {field} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"bv: beta must lie in [0, 1], got {self.beta}")
        if self.form != "log" and self.beta != 1:
            raise ValueError(f"bv: beta belongs to the log form, not to {self.form!r}")
        for field, floor in (("length_floor", self.length_floor), ("ramp_floor", self.ramp_floor)):
            if floor is not None and not floor > 0:
                raise ValueError(f"bv: {field} must be positive, or None for no floor, got {floor}")

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        log_scores = blocks.log_integrated if self.estimator == "integrated" else blocks.log_sampled
        if self.form == "log":
            any_valid = (blocks.num_valid > 0).to(log_scores.dtype)
            per_block = self._block_log(log_scores, blocks) if self.beta == 1 else self._annealed(log_scores, blocks)
            return per_block * any_valid, any_valid
        accepted = blocks.sum_over_valid(log_scores.exp())
        return (accepted if self.form == "population" else blocks.num_valid - accepted), blocks.num_valid

    def reduce(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        if self.form != "population":
            return super().reduce(numerator, denominator)
        return torch.where(denominator > 0, denominator.clamp(min=1).log() - finite_log(numerator), 0)

    def gradient_scale(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        if self.form != "population":
            return super().gradient_scale(numerator, denominator)
        return torch.where(denominator > 0, -1 / numerator.clamp(min=torch.finfo(numerator.dtype).tiny), 0)

    def _block_log(self, log_scores: Tensor, blocks: Blocks) -> Tensor:
        """Return log L - log sum_i score_i."""
        if self.summand_floor is not None:
            log_scores = log_scores.clamp(min=self.summand_floor)
        log_length = torch.where(blocks.valid, log_scores, -math.inf).logsumexp(-1)
        if self.length_floor is not None:
            log_length = log_length.clamp(min=math.log(self.length_floor))
        return torch.where(blocks.num_valid > 0, blocks.num_valid.clamp(min=1).log() - log_length, 0)

    def _annealed(self, log_scores: Tensor, blocks: Blocks) -> Tensor:
        """Return -log of the power mean of exponent beta.

        It is written about the largest log score m, -m - log1p(mean expm1(beta (x - m))) / beta,
        which loses no digits as beta goes to 0. Its gradient is that of
        eq. annealing_gradient: power weights times the gradients of -log score.
        """
        if self.ramp_floor is not None:
            log_scores = log_scores.clamp(min=math.log(self.ramp_floor))
        if self.beta < torch.finfo(log_scores.dtype).eps ** 2:  # the limit, to all digits
            return -blocks.mean_over_valid(log_scores)
        largest = torch.where(blocks.valid, log_scores.detach(), -math.inf).amax(-1, keepdim=True)
        largest = largest.clamp(min=torch.finfo(largest.dtype).min)
        power = torch.expm1(self.beta * torch.where(blocks.valid, log_scores - largest, 0))
        return -(largest.squeeze(-1) + torch.log1p(blocks.mean_over_valid(power)) / self.beta)


def block_scores(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return log a~_i and log abar_i, ``[N, B]`` each, differentiable in the draft logits.

    Invalid positions hold 0 and pass no gradient.
    """
    blocks = Blocks(draft_logits, target_logits, labels, valid, temperature=temperature)

    def scores(blocks: Blocks) -> tuple[Tensor, Tensor]:
        keep = blocks.valid
        return torch.where(keep, blocks.log_sampled, 0), torch.where(keep, blocks.log_integrated, 0)

    log_sampled, log_integrated = differentiate(scores, draft_logits, blocks)
    return log_sampled, log_integrated
