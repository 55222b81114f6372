"""This module holds BV, the block verification-aware objective, and its counterpart for token verification.

Both are made of one score per prefix of a target-generated block (see
`blockdraft.losses.scores`), whose expectation is the chance Pr(tau >= i) that
verification keeps i tokens or more: sampled a~_i or vocabulary-integrated
abar_i for block verification, and their counterpart for token verification.
Their sum is an unbiased estimate of the accepted length. For a block of L
valid positions:

    linear       1 - (1/L) sum_i score_i                           (eq. linear_bv_train)
    log          log L - log sum_i score_i, averaged over blocks   (eq. annealing at beta = 1)
    log, beta    -(1/beta) log[(1/L) sum_i score_i^beta]           (eq. annealing)
    population   log sum L - log sum sum_i score_i, over the batch (eq. population_bv_loss)
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from blockdraft.losses.objective import Objective, differentiate, register
from blockdraft.losses.reduced import ReducedTarget
from blockdraft.losses.scores import Blocks, finite_log

BVForm = Literal["linear", "log", "population"]
BVEstimator = Literal["integrated", "sampled"]


@dataclass(frozen=True, kw_only=True)
class PrefixObjective(Objective):
    """A PrefixObjective turns one score per prefix of a block into a loss.

    form: ``"log"`` (the paper's runs), ``"linear"`` or ``"population"``.
    beta: exponent of the power mean in the log form, 0 <= beta <= 1; see `Annealing`.
    summand_floor: lower bound of each log score when beta = 1, or None.
    length_floor: lower bound of a block's summed score in the log form when beta = 1, or None.
    ramp_floor: lower bound of each score when beta < 1, or None. The paper has
        1e-6 for DFlash and none for DSpark.

    A floor passes no gradient to the scores below it. At initialisation most
    scores of a long block are far below 1e-6, so the ramp floor is off here unless asked for;
    the shipped DFlash recipes ask for the paper's.

    Over a reduced draft vocabulary the sampled score of a label outside of it is zero whatever the drafter
    does. It counts as zero wherever that is finite; at beta = 0 it is left out of the mean, and a log-form
    block that has no other score and no floor is left out altogether.
    """

    form: BVForm = "log"
    beta: float = 1.0
    summand_floor: float | None = -80.0
    length_floor: float | None = 1e-6
    ramp_floor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "form", self.form, get_args(BVForm))
        check_beta(self.name, self.form, self.beta)
        for field, floor in (("length_floor", self.length_floor), ("ramp_floor", self.ramp_floor)):
            if floor is not None and not floor > 0:
                raise ValueError(f"{self.name}: {field} must be positive, or None for no floor, got {floor}")

    @abstractmethod
    def log_scores(self, blocks: Blocks) -> Tensor:
        """Return the log of every prefix's score, ``[N, B]``."""

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        log_scores = self.log_scores(blocks)
        if self.form == "log":
            per_block, counts = (self._block_log if self.beta == 1 else self._annealed)(log_scores, blocks)
            return torch.where(counts, per_block, 0), counts.to(log_scores.dtype)
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

    def _block_log(self, log_scores: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return log L - log sum_i score_i, and which blocks have one."""
        if self.summand_floor is not None:
            log_scores = log_scores.clamp(min=self.summand_floor)
        positive = blocks.valid & (log_scores.detach() > -math.inf)
        counts, log_length = positive.any(-1), torch.where(positive, log_scores, -math.inf).logsumexp(-1)
        if self.length_floor is not None:
            counts, log_length = blocks.num_valid > 0, log_length.clamp(min=math.log(self.length_floor))
        return blocks.num_valid.clamp(min=1).log() - log_length, counts

    def _annealed(self, log_scores: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return -log of the power mean of exponent beta (eq. annealing), and which blocks have one."""
        if self.ramp_floor is not None:
            log_scores = log_scores.clamp(min=math.log(self.ramp_floor))
        log_mean, counts = log_power_mean(log_scores, blocks.valid.to(log_scores.dtype), self.beta)
        return -log_mean, counts


def log_power_mean(log_scores: Tensor, weights: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log [(sum_k w_k s_k^beta / sum_k w_k)^(1/beta)] over the last dimension, and where there is one.

    It is written about the largest log score m, m + log1p(mean expm1(beta (x - m))) / beta,
    which loses no digits as beta goes to 0. Its gradient is that of eq. annealing_gradient: power
    weights times the gradients of log s.

    Args:
        log_scores: ``[..., K]``, -inf for a score of zero, which adds nothing to the sum. At beta = 0 the
            mean would be zero for its sake, whatever the others are, so it is left out of the mean.
        weights: ``[..., K]``, not negative; entries of weight zero are ignored.
        beta: exponent, 0 <= beta <= 1.
    """
    positive = (weights > 0) & (log_scores.detach() > -math.inf)
    exists = positive.any(-1)
    if beta < torch.finfo(log_scores.dtype).eps ** 2:  # the limit, to all digits
        weights = torch.where(positive, weights, 0)
        total = torch.where(exists, weights.sum(-1), 1)
        return (weights * torch.where(positive, log_scores, 0)).sum(-1) / total, exists
    largest = torch.where(positive, log_scores.detach(), -math.inf).amax(-1, keepdim=True)
    largest = largest.clamp(min=torch.finfo(largest.dtype).min)
    power = torch.where(positive, torch.expm1(beta * torch.where(positive, log_scores - largest, 0)), -1)
    mean = (weights * power).sum(-1) / torch.where(exists, weights.sum(-1), 1)
    return largest.squeeze(-1) + torch.log1p(torch.where(exists, mean, 0)) / beta, exists


@register
@dataclass(frozen=True, kw_only=True)
class BV(PrefixObjective):
    """BV is the block verification-aware loss (Kim et al., *BV Loss*).

    estimator: ``"integrated"`` scores abar_i (the paper's runs) or ``"sampled"`` ones, a~_i.
    control_variate: add a zero-mean term to the gradient that usually reduces the variance due to sampled labels; the
        expected gradient does not change (`expected_credit`). Not in the paper; for integrated scores in the log form.

    Every position of a block weighs the same; the prefix scores themselves make early positions matter more.
    """

    name: ClassVar[str] = "bv"

    estimator: BVEstimator = "integrated"
    control_variate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "estimator", self.estimator, get_args(BVEstimator))
        if not isinstance(self.control_variate, bool):
            raise ValueError(f"{self.name}: control_variate must be true or false, got {self.control_variate!r}")
        if self.control_variate and (self.form, self.estimator) != ("log", "integrated"):
            raise ValueError(
                f"{self.name}: control_variate belongs to integrated scores in the log form, not to "
                f"{self.estimator} ones in the {self.form} form"
            )

    def log_scores(self, blocks: Blocks) -> Tensor:
        return blocks.log_integrated if self.estimator == "integrated" else blocks.log_sampled

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        if not self.control_variate:
            return super().sums(blocks)
        zero_mean = blocks.kl_and_log_integrated[0] - blocks.cross_entropy
        numerator, denominator = super().sums(blocks)
        credit = expected_credit(blocks.log_integrated.detach(), blocks.log_state.detach(), self.beta, self._log_floor)
        control = blocks.sum_over_valid(credit * zero_mean)
        return numerator + (control - control.detach()), denominator

    @property
    def _log_floor(self) -> float:
        """Give the log score at and below which scores pass no gradient."""
        if self.beta == 1:
            return -math.inf if self.summand_floor is None else self.summand_floor
        return -math.inf if self.ramp_floor is None else math.log(self.ramp_floor)


def expected_credit(log_integrated: Tensor, log_state: Tensor, beta: float, log_floor: float = -math.inf) -> Tensor:
    """Predict, from the labels before it, the coefficient of each label's log-probability in the gradient of BV.

    That gradient holds -c_j grad log q_j(y_j) for every label. Whatever c^_j is, if y_{<j} determines it, adding
    c^_j grad (KL(p_j || q_j) + log q_j(y_j)) leaves the expected gradient unchanged, since the expectation of
    grad log q_j(y_j) is -grad KL. The closer c^_j is to c_j, the smaller the variance. Here

        c^_j = a_{j-1} / (1 + beta) sum_{i>j} w_i

    with w_i the shares of abar_1^beta, .., abar_j^beta, abar_j^(beta (j+1)/j), abar_j^(beta (j+2)/j), ..

    Scores that are not known yet are extrapolated geometrically from abar_j. The factor in front is the mean of
    1[u < a_{j-1}] (u / a_{j-1})^beta over u uniform on [0, 1], as a rough model of u = q_j(y_j)/p_j(y_j): a label with
    u < a_{j-1} lowers the later scores by the factor u / a_{j-1}.

    Args:
        log_integrated: log abar_i, ``[N, B]``.
        log_state: log a_{i-1}, ``[N, B]``.
        beta: exponent of the power mean.
        log_floor: scores at or below it pass no gradient.

    Returns:
        c^ ``[N, B]``, between 0 and 1.
    """
    block_size = log_integrated.shape[-1]
    position = torch.arange(1, block_size + 1, dtype=log_integrated.dtype, device=log_integrated.device)
    is_later = position > position[:, None]  # [j, i]
    known = log_integrated.clamp(max=0)
    predicted = torch.where(is_later, known[..., :, None] * (position / position[:, None]), known[..., None, :])
    shares = (beta * predicted.clamp(min=log_floor)).softmax(-1)  # [N, j, i]
    return torch.where(is_later & (predicted > log_floor), shares, 0).sum(-1) * log_state.exp() / (1 + beta)


@register
@dataclass(frozen=True, kw_only=True)
class TokenBV(PrefixObjective):
    """TokenBV is BV with the scores of token verification, for drafters that will be served with it.

        score_i = prod_{j<i} min(1, q_j(y_j)/p_j(y_j)) * sum_v min(p_i, q_i)

    Over target paths it averages to the chance that token verification keeps i tokens or more. It is this
    project's own; no position weights.
    """

    name: ClassVar[str] = "token-bv"

    def log_scores(self, blocks: Blocks) -> Tensor:
        return blocks.log_token


def check_choice(objective: str, option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse an option that is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{objective}: {option} must be one of {', '.join(allowed)}, got {value!r}")


def check_beta(objective: str, form: str, beta: float) -> None:
    """Refuse a beta outside [0, 1], or beside another form than the log."""
    if not 0 <= beta <= 1:
        raise ValueError(f"{objective}: beta must lie in [0, 1], got {beta}")
    if form != "log" and beta != 1:
        raise ValueError(f"{objective}: beta belongs to the log form, not to {form!r}")


def block_scores(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduced: ReducedTarget | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log a~_i and log abar_i, ``[N, B]`` each, differentiable in the draft logits.

    Invalid positions hold 0 and pass no gradient. Over a reduced draft vocabulary, log a~_i is -inf at a
    label outside of it.
    """
    blocks = Blocks(draft_logits, target_logits, labels, valid, temperature=temperature, reduced=reduced)

    def scores(blocks: Blocks) -> tuple[Tensor, Tensor]:
        keep = blocks.valid
        return torch.where(keep, blocks.log_sampled, 0), torch.where(keep, blocks.log_integrated, 0)

    log_sampled, log_integrated = differentiate(scores, draft_logits, blocks)
    return log_sampled, log_integrated
