"""This module makes the Triton kernels PyTorch operators, so that they can be traced and counted like all others.

Each operator allocates its small results and launches one kernel. On tensors
without storage (`FakeTensorMode`, ``torch.compile``) only shapes, dtypes and
devices are worked out, for which Triton need not be installed.

Logits are ``[R, V]`` in float32, bfloat16 or float16; ``log_z``, ``valid`` and labels are ``[R]``. Sums are float32.
With an index ``[R]`` the target's logits are ``[P, V]`` and row r meets the target's row ``index[r]``.
"""

import torch
from torch import Tensor
from torch.library import custom_op

MAX_SCALES = 2
"""So many overlaps can share one sweep, and one gradient."""

SUM_ROWS = 7
"""The number of rows of the table of sums; see `sums`."""

TABLE_ROWS = 8
"""The number of rows of the table of coefficients; see `gradient_`."""


def _normaliser_shapes(logits: Tensor, valid: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    del valid, temperature
    num_rows = logits.shape[0]
    return logits.new_empty(num_rows, dtype=torch.float32), logits.new_empty(num_rows, dtype=torch.int64)


@custom_op("blockdraft::normaliser", mutates_args=())
def normaliser(logits: Tensor, valid: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log sum_v exp(z_v / T) and the first argmax of each row, ``[R]`` each."""
    from blockdraft.losses.kernels import launch_normaliser

    log_z, argmax = _normaliser_shapes(logits, valid, temperature)
    if logits.numel():
        launch_normaliser(logits, valid, log_z, argmax, temperature)
    return log_z, argmax


normaliser.register_fake(_normaliser_shapes)


def _sums_shape(
    draft: Tensor,
    draft_log_z: Tensor,
    target: Tensor,
    target_log_z: Tensor,
    valid: Tensor,
    scales: Tensor | None,
    temperature: float,
    has_kl: bool,
    has_reverse_kl: bool,
    target_index: Tensor | None = None,
) -> Tensor:
    del draft_log_z, target, target_log_z, valid, scales, temperature, has_kl, has_reverse_kl, target_index
    return draft.new_empty(SUM_ROWS, draft.shape[0], dtype=torch.float32)


@custom_op("blockdraft::sums", mutates_args=())
def sums(
    draft: Tensor,
    draft_log_z: Tensor,
    target: Tensor,
    target_log_z: Tensor,
    valid: Tensor,
    scales: Tensor | None,
    temperature: float,
    has_kl: bool,
    has_reverse_kl: bool,
    target_index: Tensor | None = None,
) -> Tensor:
    """Return sums over the vocabulary, ``[7, R]``, from one sweep; what is not asked for may hold anything.

    They are A_1, C_1, A_2, C_2, KL(p || q), the mass sum_v p, and KL(q || p). For each of the scales s ``[K, R]``, none
    for None, A = sum of q over q < s p and C = sum of p over s p <= q. Then S(s; p, q) = A + s C.
    """
    from blockdraft.losses.kernels import launch_sums

    found = _sums_shape(
        draft, draft_log_z, target, target_log_z, valid, scales, temperature, has_kl, has_reverse_kl, target_index
    )
    if draft.numel():
        launch_sums(
            draft, draft_log_z, target, target_log_z, valid, scales, found, temperature, target_index,
            has_kl=has_kl, has_reverse_kl=has_reverse_kl,
        )  # fmt: skip
    return found


sums.register_fake(_sums_shape)


@custom_op("blockdraft::gradient_", mutates_args=("draft",))
def gradient_(
    draft: Tensor,
    draft_log_z: Tensor,
    target: Tensor | None,
    target_log_z: Tensor | None,
    valid: Tensor,
    labels: Tensor | None,
    table: Tensor,
    temperature: float,
    num_scales: int,
    has_kl: bool,
    has_reverse_kl: bool,
    target_index: Tensor | None = None,
) -> None:
    """Overwrite the draft logits z by the gradient ``[R, V]`` of a loss that is known by its coefficients.

        g_v = q_v (base + sum_k c_k 1[q_v < s_k p_v] + c_r (log q_v - log p_v)) - c_f p_v + c_y 1[v = y]

    Args:
        draft, draft_log_z, target, target_log_z, valid, temperature, target_index: as in the forward operators; no
            target if none of the terms has p.
        labels: y ``[R]``, or None for no such term.
        table: ``[8, R]`` holding base, c_y, c_f, c_r, c_1, s_1, c_2, s_2; what is not used may hold anything.
        num_scales, has_kl, has_reverse_kl: which of the terms k, c_f and c_r there are.
    """
    from blockdraft.losses.kernels import launch_gradient

    if not draft.numel():
        return
    launch_gradient(
        draft,
        draft_log_z,
        draft if target is None else target,  # a kernel wants pointers for what it will not read, too
        draft_log_z if target_log_z is None else target_log_z,
        valid,
        table if labels is None else labels,
        table,
        temperature,
        target_index,
        has_label=labels is not None,
        num_scales=num_scales,
        has_kl=has_kl,
        has_reverse_kl=has_reverse_kl,
    )


gradient_.register_fake(lambda *_, **__: None)
