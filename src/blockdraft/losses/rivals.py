"""This module holds objectives that others train block drafters with, so that studies can compare BV with them.

The label y_i is the stored target-generated token everywhere, as in CE. Where it
lies outside a reduced draft vocabulary, its cross-entropy counts as 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blockdraft.losses.objective import Objective, register
from blockdraft.losses.scores import Blocks
from blockdraft.losses.token import TokenObjective


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
        share = torch.exp(-self.decay * blocks.overlap.detach())
        return share * blocks.kl + (1 - share) * (1 - blocks.overlap)


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
