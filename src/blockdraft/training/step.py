"""One batch through drafter and objective."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blockdraft.data import Batch
from blockdraft.drafters import Drafter
from blockdraft.losses import BlockStatistics, Objective, block_scores, block_statistics, fused_linear_objective
from blockdraft.losses.anchor_runs import check_runs
from blockdraft.losses.fused import TargetIndex
from blockdraft.losses.reduced import ReducedTarget, draft_index, restrict_labels
from blockdraft.losses.scores import check_labels
from blockdraft.targets import Target, TargetOutput


class TrainingStep(nn.Module):
    """The forward pass that touches all of the drafter's weights, as a module that can be replicated or sharded.

    The target is no part of the module: it is frozen, and shares only its embedding and head.
    """

    def __init__(self, drafter: Drafter, target: Target, precision: torch.dtype, *, fused: bool = True) -> None:
        super().__init__()
        self.drafter = drafter
        self.target, self.precision, self.fused = target, precision, fused

    def forward(
        self, batch: Batch, output: TargetOutput, objective: Objective, *, stats: bool = True
    ) -> tuple[Tensor, Tensor, BlockStatistics | None, Tensor | None]:
        """Return the objective's numerator (with gradient) and denominator, and statistics and survival ``[A, B]``.

        The last two are None without ``stats``. The batch is taken as it is: see `check_batch`.
        """
        assert output.features is not None
        with torch.autocast(batch.tokens.device.type, self.precision, enabled=self.precision != torch.float32):
            features = output.features if self.precision != torch.float32 else output.features.float()
            hidden = self.drafter(features, batch.anchor_tokens, batch.anchors, self.target)
            markov = self.drafter.markov(hidden, batch.previous)
        head, labels, valid = self.drafter.head(self.target), batch.labels, batch.valid
        reduced = None
        if self.drafter.draft_ids is not None:
            labels, valid = restrict_labels(labels, valid, self._draft_index)
            reduced = self._reduced(batch, output, objective.temperature)
        if self.fused:
            value = fused_linear_objective(
                objective, hidden, batch.read_by_blocks(output.hidden), head, head, labels, valid, markov,
                reduced=reduced, segments=batch.segments, target_index=TargetIndex(batch.read_index, batch.read_bounds),
                checked=True, stats=stats,
            )  # fmt: skip
            return value.numerator, value.denominator, value.stats, value.survival
        logits = hidden.to(self.target.dtype) @ head.T
        if markov is not None:
            logits = logits + (markov[0] @ markov[1].T).to(logits.dtype)
        target_logits = linear(batch.at_blocks(output.hidden), head)
        options: dict[str, Any] = {"temperature": objective.temperature, "reduced": reduced}
        value = objective(logits, target_logits, labels, valid, reduced=reduced, segments=batch.segments)
        if not stats:
            return value.numerator, value.denominator, None, None
        measured = block_statistics(logits, target_logits, labels, valid, **options)
        log_sampled, _ = block_scores(logits.detach(), target_logits, labels, valid, **options)
        return value.numerator, value.denominator, measured, log_sampled.exp()

    def _reduced(self, batch: Batch, output: TargetOutput, temperature: float) -> ReducedTarget:
        """Return the target's normaliser and argmax at the blocks' positions, the argmax as an index into D."""
        assert output.normalizer is not None
        argmax = self._draft_index[batch.at_blocks(output.normalizer.argmax)]
        return ReducedTarget(batch.at_blocks(output.normalizer.log_z), argmax, temperature)

    @cached_property
    def _draft_index(self) -> Tensor:
        """Give the place of every token in the drafter's vocabulary ``[V]``; looked up once, since it is checked."""
        assert self.drafter.draft_ids is not None
        return draft_index(self.drafter.draft_ids, self.target.vocab_size)


def check_batch(batch: Batch, vocab_size: int) -> None:
    """Refuse labels outside the vocabulary and masks with holes, on the CPU: a device would make the host wait."""
    check_labels(batch.labels, batch.valid, vocab_size)
    if batch.segments is not None:
        check_runs(batch.segments, batch.labels, batch.valid)
