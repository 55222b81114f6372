"""This module holds the objectives that BV is compared with: the paper's tokenwise ones, and those of other projects.

The tokenwise objectives take each position on its own and let earlier positions weigh more.

    L = sum_i w_i l_i / sum_i w_i,   w_i = exp(-(i - 1) / eta)   (eqs. token_losses, token_weighting, lk_losses)

The sums run over the valid positions of all blocks. The label y_i is the stored target-generated token everywhere.
Where it lies outside a reduced draft vocabulary, CE leaves it out of both sums; the rivals below count its
cross-entropy as 0.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blockdraft.losses.objective import Objective, register
from blockdraft.losses.scores import Blocks, finite_log


@dataclass(frozen=True, kw_only=True)
class TokenObjective(Objective):
    """A TokenObjective is a weighted mean of one loss per position.

    eta: decay of the position weights; 7 for DFlash and 4 for DSpark in the paper, ``math.inf`` for none.
    """

    eta: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eta > 0:
            raise ValueError(f"eta must be positive, got {self.eta}")

    @abstractmethod
    def position_loss(self, blocks: Blocks) -> Tensor:
        """Return the loss l_i of every position, ``[N, B]``."""

    def counted(self, blocks: Blocks) -> Tensor:
        """Return the positions that count, ``[N, B]`` bool: the valid ones, unless a subclass says otherwise."""
        return blocks.valid

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        loss, counted = self.position_loss(blocks), self.counted(blocks)
        weight = torch.where(counted, position_weights(blocks.block_size, self.eta, loss), 0)
        return (torch.where(counted, loss, 0) * weight).sum(-1), weight.sum(-1)


def position_weights(block_size: int, eta: float, like: Tensor) -> Tensor:
    """Return w_i = exp(-(i - 1) / eta), ``[B]``."""
    positions = torch.arange(block_size, dtype=like.dtype, device=like.device)
    return torch.ones_like(positions) if math.isinf(eta) else torch.exp(-positions / eta)


@register
@dataclass(frozen=True, kw_only=True)
class CE(TokenObjective):
    """CE is -log q_i(y_i), y_i the stored token that the target generated (not the target's argmax).

    A label outside a reduced draft vocabulary is left out of both sums.
    """

    name: ClassVar[str] = "ce"
    needs_target: ClassVar[bool] = False

    def position_loss(self, blocks: Blocks) -> Tensor:
        return blocks.cross_entropy

    def counted(self, blocks: Blocks) -> Tensor:
        return blocks.inside


@register
@dataclass(frozen=True, kw_only=True)
class KL(TokenObjective):
    """KL is sum_v p_i log(p_i / q_i).

    Over a reduced draft vocabulary D it is the sum over D, not renormalised: its minimum, at q = p / sum_D p,
    is sum_D p log sum_D p, a little below zero.
    """

    name: ClassVar[str] = "kl"

    def position_loss(self, blocks: Blocks) -> Tensor:
        return blocks.kl


@register
@dataclass(frozen=True, kw_only=True)
class RKL(TokenObjective):
    """RKL is sum_v q_i log(q_i / p_i)."""

    name: ClassVar[str] = "rkl"

    def position_loss(self, blocks: Blocks) -> Tensor:
        return blocks.reverse_kl


@register
@dataclass(frozen=True, kw_only=True)
class TV(TokenObjective):
    """TV is 1 - sum_v min(p_i, q_i) = 1/2 sum_v |p_i - q_i|."""

    name: ClassVar[str] = "tv"

    def position_loss(self, blocks: Blocks) -> Tensor:
        return 1 - blocks.overlap


@register
@dataclass(frozen=True, kw_only=True)
class LK(TokenObjective):
    """LK is -log sum_v min(p_i, q_i) = -log(1 - TV)."""

    name: ClassVar[str] = "lk"

    def position_loss(self, blocks: Blocks) -> Tensor:
        return -finite_log(blocks.overlap)


@register
@dataclass(frozen=True, kw_only=True)
class DPACE(Objective):
    """DPACE is cross-entropy weighted by how far the drafter's own confidence carries.

        L = (1/N) sum_n sum_j w_j (-log q_j(y_j)),
        w_j = sum_{i>=j} prod_{k<=i} ((1 - mix) q_k(y_k) + mix),   held fixed in the gradient

    The weights take the place of a position decay. They are not normalised: a block counts as much as the length
    it may reach, so the sum is divided by the number of blocks and not by the sum of weights.

    mix: smoothing of the confidences, 0 to 1; the paper's alpha, 0.5.

    It is D-PACE of arXiv 2605.18810 (equations 7 to 9), with hard labels.
    """

    name: ClassVar[str] = "dpace"
    needs_target: ClassVar[bool] = False

    mix: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mix <= 1:
            raise ValueError(f"dpace: mix must lie in [0, 1], got {self.mix}")

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        confidence = (1 - self.mix) * blocks.log_q.detach().exp() + self.mix
        reach = torch.where(blocks.valid, confidence.cumprod(-1), 0)
        weight = reach.flip(-1).cumsum(-1).flip(-1)
        any_valid = (blocks.num_valid > 0).to(weight.dtype)
        return blocks.sum_over_valid(weight * blocks.cross_entropy), any_valid


@register
@dataclass(frozen=True, kw_only=True)
class E2ETV(Objective):
    """E2ETV is one minus the accepted share that independent positions would have under token verification.

        L = 1 - (1/L) sum_j prod_{i<=j} sum_v min(p_i, q_i),   over the L valid positions of all blocks

    Where q conditions on its own drafts, a product of overlaps along one path is a biased estimate of that share;
    `TokenBV` has the unbiased one. There are no position weights.

    It is the end-to-end TV loss of Bebop, arXiv 2606.12370 (equation 13).
    """

    name: ClassVar[str] = "e2e-tv"

    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        return blocks.num_valid - blocks.sum_over_valid(blocks.overlap.cumprod(-1)), blocks.num_valid


@register
@dataclass(frozen=True, kw_only=True)
class LKHybrid(TokenObjective):
    """LKHybrid moves from KL to TV as target and drafter come to overlap.

        l_i = lam KL(p_i || q_i) + (1 - lam) TV(p_i, q_i),
        lam = exp(-decay sum_v min(p_i, q_i)),   held fixed in the gradient

    The position weights are those of every tokenwise objective (eta).

    decay: how fast lam falls with the overlap; the paper's eta, 3.

    It is the adaptive LK loss of Samarin et al., arXiv 2602.23881.
    """

    name: ClassVar[str] = "lk-hybrid"

    decay: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decay >= 0:
            raise ValueError(f"lk-hybrid: decay must not be negative, got {self.decay}")

    def position_loss(self, blocks: Blocks) -> Tensor:
        kl, overlap = blocks.kl_and_overlap
        share = torch.exp(-self.decay * overlap.detach())
        return share * kl + (1 - share) * (1 - overlap)


@register
@dataclass(frozen=True, kw_only=True)
class DSparkMixture(TokenObjective):
    """DSparkMixture is the objective that DSpark drafters are trained with, its confidence term apart.

        l_i = ce_weight (-log q_i(y_i)) + l1_weight sum_v |p_i - q_i|

    The second sum is twice the total variation distance. The position weights are those of every tokenwise
    objective; DSpark takes eta = 4.

    ce_weight, l1_weight: 0.1 and 0.9 in DeepSpec.

    It follows the training code of DeepSpec (Cheng et al., *DSpark*).
    """

    name: ClassVar[str] = "dspark"

    ce_weight: float = 0.1
    l1_weight: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.ce_weight, self.l1_weight) < 0 or self.ce_weight + self.l1_weight == 0:
            raise ValueError(
                "dspark: ce_weight and l1_weight must not be negative, and one of them must be positive, "
                f"got {self.ce_weight} and {self.l1_weight}"
            )

    def position_loss(self, blocks: Blocks) -> Tensor:
        return self.ce_weight * blocks.cross_entropy + self.l1_weight * 2 * (1 - blocks.overlap)
