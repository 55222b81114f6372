"""This module estimates how many tokens a verifier would accept, from target-generated blocks, without gradient."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from blockdraft.losses.reduced import ReducedTarget
from blockdraft.losses.scores import Blocks


@dataclass(frozen=True)
class BlockStatistics:
    """BlockStatistics holds sums over blocks, so that chunks, steps and processes add up; means are properties.

    num_blocks: scalar, blocks with at least one valid position.
    num_positions: ``[B]`` valid positions.
    greedy, token, block: ``[B]`` summed prefix retention under each rule, valid positions only.
        block: abar_i, the chance that block verification keeps i tokens or more.
        token: prod_{j<i} min(1, q_j/p_j)(y_j) * sum_v min(p_i, q_i), the same for token verification.
        greedy: whether argmax q = argmax p at positions 1..i. Exact on the target's
            own greedy paths; on sampled paths the later prefixes are not those of greedy decoding.
    accuracy: ``[B]`` positions where argmax q is the stored token (the paper's token accuracy).
    agreement: ``[B]`` positions where argmax q is argmax p.

    Over a reduced draft vocabulary all of it is exact as well: a prefix that holds a token which cannot be
    drafted is never kept, so the positions behind a label outside of it, which are masked, would add nothing.
    """

    num_blocks: Tensor
    num_positions: Tensor
    greedy: Tensor
    token: Tensor
    block: Tensor
    accuracy: Tensor
    agreement: Tensor

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def retention(self, rule: str) -> Tensor:
        """Return Pr(num_accepted >= i) ``[B]`` over all blocks, under ``"greedy"``, ``"token"`` or ``"block"``.

        A block cut to L positions counts as one that could not keep more than L.
        """
        sums: dict[str, Tensor] = {"greedy": self.greedy, "token": self.token, "block": self.block}
        if rule not in sums:
            raise ValueError(f"unknown verification rule {rule!r} (known: {', '.join(sums)})")
        return sums[rule] / self.num_blocks.clamp(min=1)

    def expected_length(self, rule: str) -> Tensor:
        """Return the expected number of accepted draft tokens per block, correction or bonus token excluded."""
        return self.retention(rule).sum()

    @property
    def token_accuracy(self) -> Tensor:
        """Give the share of valid positions where the draft's argmax is the stored token."""
        return self.accuracy.sum() / self.num_positions.sum().clamp(min=1)

    @property
    def argmax_agreement(self) -> Tensor:
        """Give the share of valid positions where the draft's argmax is the target's."""
        return self.agreement.sum() / self.num_positions.sum().clamp(min=1)


@torch.no_grad()
def measure(blocks: Blocks) -> BlockStatistics:
    """Return the statistics of these blocks, reusing whatever an objective has computed on them."""
    valid, dtype = blocks.valid, blocks.num_valid.dtype
    agrees = blocks.draft_argmax == blocks.target_argmax

    def total(values: Tensor) -> Tensor:
        return torch.where(valid, values.detach().to(dtype), 0).sum(0)

    return BlockStatistics(
        num_blocks=(blocks.num_valid > 0).to(dtype).sum(),
        num_positions=total(valid),
        greedy=total(agrees.to(dtype).cumprod(-1)),
        token=total(blocks.log_token.exp()),
        block=total(blocks.log_integrated.exp()),
        accuracy=total(blocks.draft_argmax == blocks.labels),
        agreement=total(agrees),
    )


def block_statistics(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduced: ReducedTarget | None = None,
) -> BlockStatistics:
    """Return expected accepted lengths and agreement on ``[N, B, V]`` logits along target-generated labels."""
    logits = draft_logits.detach(), target_logits.detach()
    return measure(Blocks(*logits, labels, valid, temperature=temperature, reduced=reduced, for_statistics=True))
