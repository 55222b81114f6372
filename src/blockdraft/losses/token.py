"""The tokenwise objectives take each position on its own and let earlier positions weigh more.

    L = sum_i w_i l_i / sum_i w_i,   w_i = exp(-(i - 1) / eta)   (eqs. token_losses, token_weighting, lk_losses)

The sums run over the valid positions of all blocks.
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
