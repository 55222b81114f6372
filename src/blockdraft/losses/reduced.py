"""This module lets a drafter live on a subset D of the vocabulary while every objective stays exact.

Both heads then run over D alone, Vd rows instead of V. What they cannot know of
the target is one number per position, its log normaliser over the WHOLE
vocabulary: p(v) = exp(z_v / T - log Z) for v in D, never renormalised, so that
sum over D of p may be below one. Since q = 0 outside D, S = sum over D of
min(s p, q) is the whole sum.

A label outside D ends its block. Its own integrated score still counts, since
no label enters it; every later position is masked, since q cannot have drafted
the label (r = 0) and no such prefix can be kept. `restrict_labels` writes such
a label as `OUTSIDE` and cuts the mask behind it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

OUTSIDE = -1
"""This label, or argmax, stands for a token outside the drafter's vocabulary."""

CHUNK_BYTES = 2**26


@dataclass(frozen=True)
class ReducedTarget:
    """A ReducedTarget holds what the target's head over D alone cannot know.

    log_z: ``[N, B]`` log sum_v exp(z_v / temperature) over the whole vocabulary; None if only an
        objective that needs no target (CE) is to be taken, without statistics.
    argmax: ``[N, B]`` the target's most probable token of the whole vocabulary, as an index into D,
        `OUTSIDE` if it is not there; None if no statistics are wanted.
    temperature: the one that log_z was taken at, which must be the objective's.
    """

    log_z: Tensor | None = None
    argmax: Tensor | None = None
    temperature: float = 1.0

    def __getitem__(self, blocks: slice) -> "ReducedTarget":
        """Return the part that belongs to some of the blocks."""
        log_z, argmax = (None if x is None else x[blocks] for x in (self.log_z, self.argmax))
        return ReducedTarget(log_z, argmax, self.temperature)

    def check(self, labels: Tensor, temperature: float) -> None:
        """Refuse what does not belong to these labels ``[N, B]``, or to this temperature."""
        for name, tensor in (("log_z", self.log_z), ("argmax", self.argmax)):
            if tensor is not None and tensor.shape != labels.shape:
                raise ValueError(f"{name} must be [N, B] = {list(labels.shape)}, got {list(tensor.shape)}")
        if self.log_z is not None and self.temperature != temperature:
            raise ValueError(
                f"log_z was taken at temperature {self.temperature:g} and the objective is at {temperature:g}; "
                "the normaliser depends on it, so it must be computed at the objective's temperature"
            )


def restrict_labels(
    labels: Tensor, valid: Tensor | None, draft_ids: Tensor, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return labels as indices into D, and the mask, ending each block at its first label outside D.

    Args:
        labels: ``[N, B]`` tokens of the whole vocabulary.
        valid: ``[N, B]`` bool, a contiguous prefix of every block; None for all.
        draft_ids: ``[Vd]`` the tokens of D, in the order of the draft head's rows.
        vocab_size: V. If it is not given, ``draft_ids`` is ``[V]`` what `draft_index` made of them: checking them anew
            makes the host wait for the device.

    Returns:
        labels ``[N, B]``, `OUTSIDE` where a block ends because of it and 0 where masked; valid ``[N, B]``.
    """
    valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
    index = draft_ids if vocab_size is None else draft_index(draft_ids, vocab_size)
    reduced = index[torch.where(valid, labels, 0)]
    outside = valid & (reduced == OUTSIDE)
    behind_one = outside.long().cumsum(-1) - outside.long() > 0
    valid = valid & ~behind_one
    return torch.where(valid, reduced, 0), valid


@torch.no_grad()
def restrict_target(
    target_hidden: Tensor, target_head: Tensor, draft_ids: Tensor, *, temperature: float = 1.0
) -> ReducedTarget:
    """Compute log Z and the argmax over the whole vocabulary, a few rows at a time.

    Args:
        target_hidden: ``[N, B, H]``.
        target_head: ``[V, H]``. The product runs in its dtype, the sum in float32 (float64 for a float64 head);
            make the logits over D in the same dtype, or p is off by the difference.
        draft_ids: ``[Vd]`` the tokens of D, in the order of the draft head's rows.
        temperature: the objective's.
    """
    index = draft_index(draft_ids, target_head.shape[0])
    rows = target_hidden.reshape(-1, target_hidden.shape[-1])
    dtype = torch.float64 if target_head.dtype == torch.float64 else torch.float32
    log_z = torch.empty(len(rows), dtype=dtype, device=rows.device)
    argmax = torch.empty(len(rows), dtype=torch.long, device=rows.device)
    num_rows = max(1, CHUNK_BYTES // (target_head.shape[0] * dtype.itemsize))
    for start in range(0, len(rows), num_rows):
        part = slice(start, start + num_rows)
        logits = (rows[part].to(target_head.dtype) @ target_head.t()).to(dtype)
        argmax[part] = index[logits.argmax(-1)]
        log_z[part] = (logits / temperature).logsumexp(-1)
    shape = target_hidden.shape[:-1]
    return ReducedTarget(log_z.view(shape), argmax.view(shape), temperature)


def draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Return ``[V]`` the place of every token in D, `OUTSIDE` for those that are not in it."""
    if draft_ids.dim() != 1 or draft_ids.is_floating_point() or draft_ids.dtype == torch.bool:
        raise ValueError(f"draft_ids must be token ids [Vd], got {draft_ids.dtype} {list(draft_ids.shape)}")
    if len(draft_ids) and not 0 <= int(draft_ids.min()) <= int(draft_ids.max()) < vocab_size:
        raise ValueError(f"draft_ids must lie between 0 and {vocab_size - 1}, the vocabulary of the target")
    index = torch.full((vocab_size,), OUTSIDE, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    if int((index != OUTSIDE).sum()) != len(draft_ids):
        raise ValueError("draft_ids names a token twice; every token of the draft vocabulary has one row of the head")
    return index
