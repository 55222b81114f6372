"""This module computes the quantities of the paper along N target-generated blocks, each at most once.

Notation: p is the target, q the drafter, y a block of B tokens sampled from the
target, all conditionals evaluated on y's own prefixes. Everything is ``[N, B]``
and lives in log space, in float32 (float64 for float64 logits).
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from blockdraft.losses.reduced import OUTSIDE, ReducedTarget
from blockdraft.losses.rows import LOG_ZERO, Rows, RowSums


class Blocks:
    """Blocks is N blocks of B positions as an objective sees them.

    Args:
        draft_logits, target_logits: ``[N, B, V]``; the target's may be None for CE.
        labels: ``[N, B]`` the stored target-generated tokens y.
        valid: ``[N, B]`` bool, a contiguous prefix of every block, or None for all.
            Labels and logits outside it may hold anything.
        temperature: of p and q alike.
        reduced: what is known of the target beyond a reduced draft vocabulary (see
            `blockdraft.losses.reduced`). Logits and labels are then those of this vocabulary, and the
            last valid label of a block may be `OUTSIDE`.
        segments: ``[N]`` the run that each block belongs to (see `blockdraft.losses.rounds`): blocks of one id
            stand at consecutive anchors of one text, in order. None for blocks that have nothing to do with
            each other.
        target_index: ``[N, B]`` which row of the target each position reads, where positions share rows; the target's
            logits are then ``[P, V]``, and positions that are not valid must read one that is finite.
        overwrite: reuse the storage of the logits; for callers that own them.
        checked: labels and mask have been through `check_labels`, which makes the host wait for the device.
        runs_checked: the blocks of a segment are known to continue each other, which else is checked the same way.
        for_statistics: take S(1; p, q) and S(a; p, q) in one sweep, since statistics want both, and KL with them if an
            objective asks for it. Otherwise each is taken when it is first asked for.
        rows: what takes the sums over the vocabulary.

    Attributes:
        labels, valid: as given, labels with zeros where they are not valid.
        inside: ``[N, B]`` bool, the valid positions whose label the drafter can draft.
        segments, runs_checked: as given.
    """

    def __init__(
        self,
        draft_logits: Tensor,
        target_logits: Tensor | None,
        labels: Tensor,
        valid: Tensor | None = None,
        *,
        temperature: float = 1.0,
        reduced: ReducedTarget | None = None,
        segments: Tensor | None = None,
        target_index: Tensor | None = None,
        overwrite: bool = False,
        checked: bool = False,
        runs_checked: bool = False,
        for_statistics: bool = False,
        rows: Callable[..., RowSums] = Rows,
    ) -> None:
        check_logits(draft_logits, target_logits, labels, target_index)
        self.num_blocks, self.block_size, vocab_size = draft_logits.shape
        if checked:
            self.valid, self.labels = _all_of(labels) if valid is None else valid, labels
        else:
            self.valid, self.labels = check_labels(labels, valid, vocab_size, is_reduced=reduced is not None)
        self._outside = None if reduced is None else self.labels == OUTSIDE
        self.inside = self.valid if self._outside is None else self.valid & ~self._outside
        self._flat_labels = self.labels.clamp(min=0).reshape(-1)
        log_z = None
        if reduced is not None:
            reduced.check(labels, temperature)
            if target_logits is not None and reduced.log_z is None:
                raise ValueError("a reduced draft vocabulary needs log_z, the target's normaliser over all of its own")
            log_z = None if target_logits is None or reduced.log_z is None else reduced.log_z.reshape(-1)
            if log_z is not None and target_logits is not None and target_index is not None:
                log_z = torch.where(self.valid.reshape(-1), log_z, math.log(vocab_size))
                nobody = torch.full_like(target_logits[:, 0], -LOG_ZERO, dtype=log_z.dtype)  # p = 0 where none reads
                log_z = nobody.scatter(0, target_index.reshape(-1), log_z)
        self._reduced, self._for_statistics = reduced, for_statistics
        self.segments, self.runs_checked = segments, runs_checked
        self.rows = rows(
            draft_logits.reshape(-1, vocab_size),
            None if target_logits is None else target_logits.reshape(-1, vocab_size),
            temperature=temperature,
            valid=None if valid is None else self.valid.reshape(-1),
            target_log_z=log_z,
            target_index=None if target_index is None else target_index.reshape(-1),
            overwrite=overwrite,
        )

    @cached_property
    def num_valid(self) -> Tensor:
        """Count the valid positions of each block, ``[N]``, in the computing dtype."""
        return self.valid.sum(-1).to(self.rows.dtype)

    # Single positions

    @cached_property
    def log_q(self) -> Tensor:
        """Give log q_i(y_i), `LOG_ZERO` where the label lies outside the drafter's vocabulary."""
        return self._unless_outside(self._per_block(self.rows.draft_label(self._flat_labels)), LOG_ZERO)

    @cached_property
    def log_p(self) -> Tensor:
        """Give log p_i(y_i), 0 where the label lies outside the drafter's vocabulary: it is not known there."""
        return self._unless_outside(self._per_block(self.rows.target_label(self._flat_labels)), 0.0)

    @cached_property
    def cross_entropy(self) -> Tensor:
        """Give -log q_i(y_i), 0 where the label lies outside the drafter's vocabulary and no drafter is finite."""
        return -self._unless_outside(self.log_q, 0.0)

    @cached_property
    def kl(self) -> Tensor:
        """Give KL(p_i || q_i); over a reduced vocabulary D the sum over D, since the rest is infinite for every q."""
        return self.kl_and_overlap[0] if self._for_statistics else self._per_block(self.rows.kl())

    @cached_property
    def reverse_kl(self) -> Tensor:
        """Give KL(q_i || p_i)."""
        return self._per_block(self.rows.reverse_kl())

    @cached_property
    def overlap(self) -> Tensor:
        """Give S(1; p_i, q_i) = sum_v min(p_i, q_i), the chance that token verification keeps position i."""
        if self._for_statistics:
            return self._both_overlaps[0]
        return self._overlaps(self._ones)[0]

    @cached_property
    def kl_and_overlap(self) -> tuple[Tensor, Tensor]:
        """Give `kl` and `overlap` from one sweep over the vocabulary, for an objective that wants both."""
        scales = (self._ones, self._state) if self._for_statistics else (self._ones,)
        self.kl, *overlaps = (self._per_block(each) for each in self.rows.kl_and_overlaps(*scales))
        self.overlap = overlaps[0]
        if self._for_statistics:
            self._both_overlaps = overlaps
        return self.kl, self.overlap

    @cached_property
    def kl_and_log_integrated(self) -> tuple[Tensor, Tensor]:
        """Give `kl` and `log_integrated` from one sweep over the vocabulary, for an objective that wants both."""
        if self._for_statistics:
            return self.kl, self.log_integrated  # `kl` takes both overlaps along
        self.kl, self._state_overlap = (self._per_block(each) for each in self.rows.kl_and_overlaps(self._state))
        return self.kl, self.log_integrated

    # Prefixes

    @cached_property
    def log_ratio(self) -> Tensor:
        """Give log q_i(y_i) - log p_i(y_i), 0 where the label lies outside the drafter's vocabulary."""
        return self._unless_outside(self.log_q - self.log_p, 0.0)

    @cached_property
    def log_r(self) -> Tensor:
        """Give log r_i = sum_{j<=i} log q_j(y_j) - log p_j(y_j)   (eq. prefix_states).

        A label outside the drafter's vocabulary, where r is 0, adds nothing: no later position of its block is valid.
        """
        return self.log_ratio.cumsum(-1)

    @cached_property
    def active_prefix(self) -> Tensor:
        """Give n_i, the earliest position attaining min(1, r_1, .., r_i), zero included."""
        log_r = _after_start(self.log_r.detach())
        is_new_minimum = log_r[:, 1:] < log_r.cummin(-1).values[:, :-1]
        positions = torch.arange(1, self.block_size + 1, device=log_r.device)
        return (positions * is_new_minimum).cummax(-1).values

    @cached_property
    def log_sampled(self) -> Tensor:
        """Give log a~_i, with a~_i = min(1, r_1, .., r_i)   (eq. acceptance_score).

        It is -inf where the label lies outside the drafter's vocabulary.
        """
        return self._unless_outside(self._log_lowest, -math.inf)

    @cached_property
    def log_state(self) -> Tensor:
        """Give log a_{i-1}, with a_i = min(1, a_{i-1} p_i/q_i) = a~_i / r_i   (eq. block_acceptance).

        It is bounded below at -40 (-300 in float64). Only S(a; p, q)/a is ever taken, which there differs from
        its limit by no more than the target mass on tokens with q(v) < e^-40 p(v).
        """
        lowest = -300.0 if self.log_r.dtype == torch.float64 else -40.0
        return _before(self._log_lowest - self.log_r).clamp(min=lowest)

    @cached_property
    def log_integrated(self) -> Tensor:
        """Give log abar_i, with abar_i = sum_v min(a~_{i-1} p_i(v), r_{i-1} q_i(v))   (eq. integrated_score).

        It is computed as a~_{i-1} S(a_{i-1}; p_i, q_i) / a_{i-1}, which stays at most one, up to
        rounding, however large r_{i-1} is.
        """
        return _before(self._log_lowest) + finite_log(self._state_overlap) - self.log_state

    @cached_property
    def log_token(self) -> Tensor:
        """Give the log of prod_{j<i} min(1, q_j(y_j)/p_j(y_j)) S(1; p_i, q_i).

        This is the unbiased counterpart of abar_i for token verification.
        """
        ratio = self.log_ratio
        kept = torch.where(ratio < 0, ratio, 0).cumsum(-1)  # at a tie no gradient, as in `active_prefix`
        return _before(kept) + finite_log(self.overlap)

    # Greedy choices

    @cached_property
    def draft_argmax(self) -> Tensor:
        """Give the drafter's most probable token."""
        return self._per_block(self.rows.draft_argmax())

    @cached_property
    def target_argmax(self) -> Tensor:
        """Give the target's most probable token, `OUTSIDE` where the drafter's vocabulary lacks it."""
        if self._reduced is None:
            return self._per_block(self.rows.target_argmax())
        if self._reduced.argmax is None:
            raise ValueError(
                "greedy statistics over a reduced draft vocabulary need ReducedTarget.argmax: "
                "the target's most probable token may lie outside of it"
            )
        return self._reduced.argmax

    # Sums

    def sum_over_valid(self, values: Tensor) -> Tensor:
        """Return the sum ``[N]`` of ``values`` over each block's valid positions."""
        return torch.where(self.valid, values, 0).sum(-1)

    @cached_property
    def _log_lowest(self) -> Tensor:
        """Give log min(1, r_1, .., r_i) at the active prefix."""
        return _after_start(self.log_r).gather(-1, self.active_prefix)

    @cached_property
    def _state_overlap(self) -> Tensor:
        """Give S(a_{i-1}; p_i, q_i)."""
        return self._both_overlaps[1] if self._for_statistics else self._overlaps(self._state)[0]

    @cached_property
    def _both_overlaps(self) -> list[Tensor]:
        """Give S(1; p_i, q_i) and S(a_{i-1}; p_i, q_i)."""
        return self._overlaps(self._ones, self._state)

    @cached_property
    def _ones(self) -> Tensor:
        """Give the scale 1 for every row, ``[N*B]``."""
        return torch.ones(self.rows.num_rows, dtype=self.rows.dtype, device=self.rows.device)

    @cached_property
    def _state(self) -> Tensor:
        """Give a_{i-1} as one row after the other, ``[N*B]``."""
        return self.log_state.exp().reshape(-1)

    def _overlaps(self, *scales: Tensor) -> list[Tensor]:
        return [self._per_block(overlap) for overlap in self.rows.overlaps(*scales)]

    def _per_block(self, values: Tensor) -> Tensor:
        return values.view(self.num_blocks, self.block_size)

    def _unless_outside(self, values: Tensor, otherwise: float) -> Tensor:
        return values if self._outside is None else torch.where(self._outside, otherwise, values)


def finite_log(x: Tensor) -> Tensor:
    """Return log x, with zero standing at the smallest normal number and passing no gradient there."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()


def check_logits(
    draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor, target_index: Tensor | None = None
) -> None:
    """Refuse shapes that do not belong together."""
    if draft_logits.dim() != 3:
        raise ValueError(f"draft_logits must be [N, B, V], got shape {list(draft_logits.shape)}")
    if target_logits is not None and target_index is not None:
        if target_logits.dim() != 2 or target_logits.shape[1] != draft_logits.shape[2]:
            raise ValueError(
                f"with an index target_logits must be [P, {draft_logits.shape[2]}], got {list(target_logits.shape)}"
            )
        if target_index.shape != labels.shape:
            raise ValueError(f"target_index must be [N, B] = {list(labels.shape)}, got {list(target_index.shape)}")
    elif target_logits is not None and target_logits.shape != draft_logits.shape:
        raise ValueError(
            f"target_logits {list(target_logits.shape)} and draft_logits {list(draft_logits.shape)} differ in shape"
        )
    if labels.shape != draft_logits.shape[:2]:
        raise ValueError(f"labels must be [N, B] = {list(draft_logits.shape[:2])}, got {list(labels.shape)}")


def check_labels(
    labels: Tensor, valid: Tensor | None, vocab_size: int, *, is_reduced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the mask, all true if None, and the labels with zeros outside it; refuse holes and foreign labels.

    The host waits for the device once.
    """
    if valid is not None and (valid.shape != labels.shape or valid.dtype != torch.bool):
        raise ValueError(f"valid must be bool {list(labels.shape)}, got {valid.dtype} {list(valid.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be token ids, got {labels.dtype}")
    valid = _all_of(labels) if valid is None else valid
    labels = torch.where(valid, labels, 0).long()
    outside = labels == OUTSIDE if is_reduced else torch.zeros_like(valid)
    problems = [
        (valid[:, 1:] & ~valid[:, :-1]).any(),
        (outside[:, :-1] & valid[:, 1:]).any(),
        (((labels < 0) | (labels >= vocab_size)) & ~outside).any(),
    ]
    has_hole, continues_outside, has_foreign = torch.stack(problems).tolist()
    if has_hole:
        raise ValueError("valid must be a contiguous prefix of every block: a position follows an invalid one")
    if continues_outside:
        raise ValueError(
            f"a label outside the draft vocabulary ({OUTSIDE}) must be the last valid one of its block: "
            "no later token can be drafted; see restrict_labels"
        )
    if has_foreign:
        raise ValueError(f"a label at a valid position lies outside the vocabulary of {vocab_size}")
    return valid, labels


def _all_of(labels: Tensor) -> Tensor:
    return torch.ones_like(labels, dtype=torch.bool)


def _before(values: Tensor) -> Tensor:
    """Return the value one position earlier, in log space: a block starts from log 1 = 0."""
    return _after_start(values)[:, :-1]


def _after_start(values: Tensor) -> Tensor:
    """Return the values of positions 0 (log 1 = 0), 1, .., B."""
    return torch.nn.functional.pad(values, (1, 0))
