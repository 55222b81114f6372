"""One batch through target, drafter and objective."""

import torch
from torch import Tensor, nn

from blockdraft.data import Batch
from blockdraft.drafters import Drafter
from blockdraft.losses import BlockStatistics, Objective, block_statistics, fused_linear_objective
from blockdraft.targets import Target, TargetOutput


class Step(nn.Module):
    """A module whose forward pass is all that touches the drafter's weights, so that it can be replicated or sharded.

    The target is not part of it: it is frozen, and shares only its embedding and head.
    """

    def __init__(self, drafter: Drafter, target: Target, precision: torch.dtype, *, fused: bool = True) -> None:
        super().__init__()
        self.drafter = drafter
        self._target = [target]  # out of reach of the module's own parameters
        self.precision, self.fused = precision, fused

    def forward(
        self, batch: Batch, output: TargetOutput, objective: Objective
    ) -> tuple[Tensor, Tensor, BlockStatistics]:
        """Numerator (with gradient), denominator, statistics of the batch's blocks."""
        target, device = self._target[0], batch.path.device
        assert output.features is not None
        with torch.autocast(device.type, self.precision, enabled=self.precision != torch.float32):
            features = output.features if self.precision != torch.float32 else output.features.float()
            hidden = self.drafter(features, batch.path[:, 0], batch.anchors, target)
            markov = self.drafter.markov(hidden, batch.previous)
        target_hidden = batch.at_blocks(output.hidden)
        if self.fused:
            value = fused_linear_objective(
                objective, hidden, target_hidden, target.head, target.head, batch.labels, batch.valid, markov
            )
            assert value.stats is not None
            return value.numerator, value.denominator, value.stats
        logits = hidden.to(target.dtype) @ target.head.T
        if markov is not None:
            logits = logits + (markov[0] @ markov[1].T).to(logits.dtype)
        target_logits = target.logits(target_hidden)
        value = objective(logits, target_logits, batch.labels, batch.valid)
        stats = block_statistics(logits, target_logits, batch.labels, batch.valid, temperature=objective.temperature)
        return value.numerator, value.denominator, stats
