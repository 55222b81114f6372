"""This module holds the Triton kernels below `blockdraft.losses.rows_triton.TritonRows`, and launches them.

One program takes one row of V logits, in tiles of `TILE` tokens. Every lane of
a tile keeps sums of its own in float32, which are added up at the end of the
row: no reduction inside the loop, and partial sums short enough to keep all
digits. Rows that are not valid are not read. The derivation, with the bytes
that each pass moves, is in ``docs/theory/kernels.md``.

Importing this module imports Triton; `blockdraft.losses.rows_triton` does so when the first kernel runs.
"""

import contextlib
import math
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
NUM_WARPS = 8

LOG_ZERO = tl.constexpr(-1e4)
LOWEST = tl.constexpr(-3e38)


@triton.jit
def _log_probs(logits, stride, row, tokens, vocab_size, inverse_temperature, log_z):
    """Return z / T - log_z of one tile, -inf beyond the vocabulary."""
    z = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return z.to(tl.float32) * inverse_temperature - log_z


@triton.jit
def _row_of(index, row, INDEXED: tl.constexpr):
    """Return the row that an index names, or the row itself."""
    return tl.load(index + row) if INDEXED else row


@triton.jit
def normaliser_kernel(
    logits, stride, valid, log_z, argmax, vocab_size, inverse_temperature, log_vocab_size, TILE: tl.constexpr
):
    """Write log sum_v exp(z_v / T) and the first argmax of a row; log V and 0 where the row is not valid."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(valid + row) == 0:
        tl.store(log_z + row, log_vocab_size)
        tl.store(argmax + row, 0)
        return
    lanes = tl.arange(0, TILE)
    highest = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    place = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        tokens = start + lanes
        z = _log_probs(logits, stride, row, tokens, vocab_size, inverse_temperature, 0.0)
        # the smaller of z and the highest so far, relative to the larger: one exponential per logit
        change = z - highest
        smaller = tl.exp(-tl.abs(change))
        is_new = change > 0
        total = tl.where(is_new, total * smaller + 1, total + smaller)
        place = tl.where(is_new, tokens, place)
        highest = tl.where(is_new, z, highest)
    top = tl.max(highest, 0)
    tl.store(log_z + row, top + tl.log(tl.sum(total * tl.exp(highest - top), 0)))
    tl.store(argmax + row, tl.min(tl.where(highest == top, place, vocab_size), 0))


@triton.jit
def sums_kernel(
    draft, draft_stride, draft_log_z, target, target_stride, target_log_z, valid,
    scales, sums, target_index, num_rows, vocab_size, inverse_temperature, NUM_SCALES: tl.constexpr,
    HAS_KL: tl.constexpr, HAS_REVERSE_KL: tl.constexpr, INDEXED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the sums of a row that are asked for, with zero probabilities at `LOG_ZERO`.

    The table ``[7, R]`` takes A_1, C_1, A_2, C_2, KL(p || q), the mass sum_v p, KL(q || p), where for a scale s
    A = sum of q over q < s p and C = sum of p over s p <= q; then S(s; p, q) = A + s C.
    """
    row = tl.program_id(0).to(tl.int64)
    if NUM_SCALES > 0:
        first = tl.load(scales + row)
    if NUM_SCALES > 1:
        second = tl.load(scales + num_rows + row)
    if tl.load(valid + row) == 0:  # q = p = 1 / V everywhere
        if NUM_SCALES > 0:
            tl.store(sums + row, tl.where(first > 1, 1.0, 0.0))
            tl.store(sums + num_rows + row, tl.where(first > 1, 0.0, 1.0))
        if NUM_SCALES > 1:
            tl.store(sums + 2 * num_rows + row, tl.where(second > 1, 1.0, 0.0))
            tl.store(sums + 3 * num_rows + row, tl.where(second > 1, 0.0, 1.0))
        if HAS_KL:
            tl.store(sums + 4 * num_rows + row, 0.0)
            tl.store(sums + 5 * num_rows + row, 1.0)
        if HAS_REVERSE_KL:
            tl.store(sums + 6 * num_rows + row, 0.0)
        return
    target_row = _row_of(target_index, row, INDEXED)
    log_z_q = tl.load(draft_log_z + row)
    log_z_p = tl.load(target_log_z + row)
    lanes = tl.arange(0, TILE)
    a_first = tl.zeros([TILE], tl.float32)
    c_first = tl.zeros([TILE], tl.float32)
    a_second = tl.zeros([TILE], tl.float32)
    c_second = tl.zeros([TILE], tl.float32)
    kl = tl.zeros([TILE], tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    reverse_kl = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        tokens = start + lanes
        log_q = _log_probs(draft, draft_stride, row, tokens, vocab_size, inverse_temperature, log_z_q)
        log_p = _log_probs(target, target_stride, target_row, tokens, vocab_size, inverse_temperature, log_z_p)
        q = tl.exp(log_q)
        p = tl.exp(log_p)
        if HAS_KL:
            kl += p * (tl.maximum(log_p, LOG_ZERO) - tl.maximum(log_q, LOG_ZERO))
            mass += p
        if HAS_REVERSE_KL:
            reverse_kl += q * (tl.maximum(log_q, LOG_ZERO) - tl.maximum(log_p, LOG_ZERO))
        if NUM_SCALES > 0:
            below_first = q < first * p
            a_first += tl.where(below_first, q, 0.0)
            c_first += tl.where(below_first, 0.0, p)
        if NUM_SCALES > 1:
            below_second = q < second * p
            a_second += tl.where(below_second, q, 0.0)
            c_second += tl.where(below_second, 0.0, p)
    if NUM_SCALES > 0:
        tl.store(sums + row, tl.sum(a_first, 0))
        tl.store(sums + num_rows + row, tl.sum(c_first, 0))
    if NUM_SCALES > 1:
        tl.store(sums + 2 * num_rows + row, tl.sum(a_second, 0))
        tl.store(sums + 3 * num_rows + row, tl.sum(c_second, 0))
    if HAS_KL:
        tl.store(sums + 4 * num_rows + row, tl.sum(kl, 0))
        tl.store(sums + 5 * num_rows + row, tl.sum(mass, 0))
    if HAS_REVERSE_KL:
        tl.store(sums + 6 * num_rows + row, tl.sum(reverse_kl, 0))


@triton.jit
def gradient_kernel(
    draft, draft_stride, draft_log_z, target, target_stride, target_log_z, valid, labels, table, target_index,
    num_rows, vocab_size, inverse_temperature, HAS_LABEL: tl.constexpr, NUM_SCALES: tl.constexpr,
    HAS_KL: tl.constexpr, HAS_REVERSE_KL: tl.constexpr, INDEXED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Overwrite the draft logits of a row by their gradient, or by zeros where the row is not valid.

    g_v = q_v (base + sum_k c_k 1[q_v < s_k p_v] + c_r (log q_v - log p_v)) - c_f p_v + c_y 1[v = y],
    with the table ``[8, R]`` holding base, c_y, c_f, c_r, c_1, s_1, c_2, s_2.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    if tl.load(valid + row) == 0:
        for start in range(0, vocab_size, TILE):
            zeros = tl.zeros([TILE], draft.dtype.element_ty)
            tl.store(draft + row * draft_stride + start + lanes, zeros, mask=start + lanes < vocab_size)
        return
    target_row = _row_of(target_index, row, INDEXED)
    log_z_q = tl.load(draft_log_z + row)
    log_z_p = tl.load(target_log_z + row)
    label = tl.load(labels + row)
    base = tl.load(table + row)
    label_coefficient = tl.load(table + num_rows + row)
    kl = tl.load(table + 2 * num_rows + row)
    reverse_kl = tl.load(table + 3 * num_rows + row)
    first = tl.load(table + 4 * num_rows + row)
    first_scale = tl.load(table + 5 * num_rows + row)
    second = tl.load(table + 6 * num_rows + row)
    second_scale = tl.load(table + 7 * num_rows + row)
    for start in range(0, vocab_size, TILE):
        tokens = start + lanes
        log_q = _log_probs(draft, draft_stride, row, tokens, vocab_size, inverse_temperature, log_z_q)
        q = tl.exp(log_q)
        if NUM_SCALES > 0 or HAS_KL or HAS_REVERSE_KL:
            log_p = _log_probs(target, target_stride, target_row, tokens, vocab_size, inverse_temperature, log_z_p)
            p = tl.exp(log_p)
        factor = tl.full([TILE], 0.0, tl.float32) + base
        if NUM_SCALES > 0:
            factor += tl.where(q < first_scale * p, first, 0.0)
        if NUM_SCALES > 1:
            factor += tl.where(q < second_scale * p, second, 0.0)
        if HAS_REVERSE_KL:
            factor += reverse_kl * (tl.maximum(log_q, LOG_ZERO) - tl.maximum(log_p, LOG_ZERO))
        gradient = q * factor
        if HAS_KL:
            gradient -= kl * p
        if HAS_LABEL:
            gradient += tl.where(tokens == label, label_coefficient, 0.0)
        gradient = gradient.to(draft.dtype.element_ty)
        tl.store(draft + row * draft_stride + tokens, gradient, mask=tokens < vocab_size)


def launch_normaliser(logits: Tensor, valid: Tensor, log_z: Tensor, argmax: Tensor, temperature: float) -> None:
    """Fill ``log_z`` (float32) and ``argmax`` (int64), ``[R]`` each, from logits ``[R, V]`` and valid ``[R]``."""
    num_rows, vocab_size = logits.shape
    with _device_of(logits):
        normaliser_kernel[(num_rows,)](
            logits, logits.stride(0), valid, log_z, argmax, vocab_size, 1 / temperature, math.log(vocab_size),
            TILE=_tile(vocab_size), num_warps=NUM_WARPS,
        )  # fmt: skip


def launch_sums(
    draft: Tensor, draft_log_z: Tensor, target: Tensor, target_log_z: Tensor, valid: Tensor,
    scales: Tensor | None, sums: Tensor, temperature: float, target_index: Tensor | None, *,
    has_kl: bool, has_reverse_kl: bool,
) -> None:  # fmt: skip
    """Fill what is asked for of ``sums`` ``[7, R]``, for scales ``[K, R]``, K = 1 or 2, or none; see `sums_kernel`.

    Row r of the draft meets row ``target_index[r]`` of the target, or row r if there is no index.
    """
    num_rows, vocab_size = draft.shape
    with _device_of(draft):
        sums_kernel[(num_rows,)](
            draft, draft.stride(0), draft_log_z, target, target.stride(0), target_log_z, valid,
            sums if scales is None else scales, sums, valid if target_index is None else target_index,
            num_rows, vocab_size, 1 / temperature, NUM_SCALES=0 if scales is None else len(scales),
            HAS_KL=has_kl, HAS_REVERSE_KL=has_reverse_kl, INDEXED=target_index is not None,
            TILE=_tile(vocab_size), num_warps=NUM_WARPS,
        )  # fmt: skip


def launch_gradient(
    draft: Tensor, draft_log_z: Tensor, target: Tensor, target_log_z: Tensor, valid: Tensor,
    labels: Tensor, table: Tensor, temperature: float, target_index: Tensor | None, *,
    has_label: bool, num_scales: int, has_kl: bool, has_reverse_kl: bool,
) -> None:  # fmt: skip
    """Overwrite draft logits ``[R, V]`` by their gradient; see `gradient_kernel` for the table."""
    num_rows, vocab_size = draft.shape
    with _device_of(draft):
        gradient_kernel[(num_rows,)](
            draft, draft.stride(0), draft_log_z, target, target.stride(0), target_log_z, valid, labels, table,
            valid if target_index is None else target_index, num_rows, vocab_size, 1 / temperature,
            HAS_LABEL=has_label, NUM_SCALES=num_scales, HAS_KL=has_kl, HAS_REVERSE_KL=has_reverse_kl,
            INDEXED=target_index is not None, TILE=_tile(vocab_size), num_warps=NUM_WARPS,
        )  # fmt: skip


def _tile(vocab_size: int) -> int:
    return min(TILE, max(16, 1 << (vocab_size - 1).bit_length()))


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
