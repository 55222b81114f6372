"""This module takes the sums over the vocabulary in Triton kernels, straight from the logits.

Nothing of the size of the logits is made: log-probabilities exist only inside
the kernels, and the gradient overwrites the draft logits. Every sum is kept
with what its gradient needs of it, a number per row, so that all objectives
reach the draft logits through one kernel and one small table of coefficients.

The kernels are PyTorch operators, so that they can be traced and counted like
all others: each allocates its small results and launches one kernel. On tensors
without storage (`FakeTensorMode`, ``torch.compile``) only shapes, dtypes and
devices are worked out, for which Triton need not be installed.

Logits are ``[R, V]`` in float32, bfloat16 or float16; ``log_z``, ``valid`` and labels are ``[R]``. Sums are float32.
With an index ``[R]`` the target's logits are ``[P, V]`` and row r meets the target's row ``index[r]``.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.library import custom_op

from blockdraft.errors import BlockdraftError
from blockdraft.losses.rows import LOG_ZERO, RowSums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Logits may come in these dtypes; the kernels compute in float32."""

MAX_SCALES = 2
"""The number of overlaps that can share one sweep, and one gradient."""

SUM_ROWS = 7
"""The number of rows of the table of sums; see `sums`."""

TABLE_ROWS = 8
"""The number of rows of the table of coefficients; see `gradient_`."""


class KernelLimitError(BlockdraftError):
    """An objective asks for more than the kernels have; the plain path has no such limit."""


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


@dataclass(frozen=True)
class _Term:
    """_Term is one differentiable sum t: dt/dz_v = q_v (share + x_v) + y_v, x and y being the kernel's business.

    kind: ``"label"`` (y_v = 1[v = label]), ``"overlap"`` (x_v = 1[q_v < s p_v]), ``"kl"`` (y_v = -p_v) or
        ``"reverse_kl"`` (x_v = log q_v - log p_v); x and y are 0 unless named.
    share: ``[R]`` the part that is the same for every v, or a number.
    argument: ``[R]`` the label, or the scale s.
    """

    kind: Literal["label", "overlap", "kl", "reverse_kl"]
    share: Tensor | float
    argument: Tensor | None = None


class TritonRows(RowSums):
    """TritonRows takes the sums in Triton kernels, from logits in float32, bfloat16 or float16.

    The gradient has the dtype of the draft logits, and is 0 where a row is not valid, whatever flows into it. It takes
    the place of the logits if they may be overwritten, and then nothing else can be asked for afterwards.
    """

    def __init__(
        self,
        draft_logits: Tensor,
        target_logits: Tensor | None,
        *,
        temperature: float = 1.0,
        valid: Tensor | None = None,
        target_log_z: Tensor | None = None,
        target_index: Tensor | None = None,
        overwrite: bool = False,
    ) -> None:
        num_rows, vocab_size = draft_logits.shape
        super().__init__(num_rows, vocab_size, temperature, torch.float32, draft_logits.device)
        for logits in (draft_logits, target_logits):
            if logits is not None and logits.dtype not in DTYPES:
                raise KernelLimitError(f"the kernels take logits in float32, bfloat16 or float16, not {logits.dtype}")
        self._overwrite = overwrite
        self._draft = draft_logits.detach().contiguous()
        self._target = None if target_logits is None else target_logits.detach().contiguous()
        self._valid = (
            torch.ones(num_rows, dtype=torch.bool, device=self.device) if valid is None else valid.contiguous()
        )
        self._index = None if target_index is None else target_index.contiguous()
        self._given_log_z = None if target_log_z is None else self._of_rows(target_log_z.detach().float()).contiguous()
        self._draft_log_z, self._draft_argmax = self._normaliser(self._draft, self._valid)
        self._terms: list[_Term] = []

    @property
    def draft_log_probs(self) -> Tensor:
        return self._log_probs(self._draft, self._draft_log_z)

    @property
    def target_log_probs(self) -> Tensor:
        target, log_z = self._known_target
        return self._log_probs(self._of_rows(target), log_z)

    def draft_label(self, labels: Tensor) -> Tensor:
        value = self._label_log_probs(self._draft, self._draft_log_z, labels)
        return self._term(value, _Term("label", -1.0, labels)).clamp(min=LOG_ZERO)

    def target_label(self, labels: Tensor) -> Tensor:
        target, log_z = self._known_target
        return self._label_log_probs(target, log_z, labels, self._index).clamp(min=LOG_ZERO)

    def reverse_kl(self) -> Tensor:
        value = self._sums(None, reverse_kl=True)[6]
        return self._term(value, _Term("reverse_kl", -value))

    def draft_argmax(self) -> Tensor:
        return self._draft_argmax

    def target_argmax(self) -> Tensor:
        return self._of_rows(self._target_normaliser[1])

    @torch.no_grad()
    def draft_gradient(self, outputs: list[Tensor], grads: list[Tensor]) -> Tensor:
        coefficients, full = self._coefficients(outputs, grads)
        found = [
            (term, c / self.temperature) for term, c in zip(self._terms, coefficients, strict=True) if c is not None
        ]
        gradient = self._draft if self._overwrite else self._draft.clone()
        table, labels, num_scales = self._table(found)
        kinds = {term.kind for term, _ in found}
        target, target_log_z = self._known_target if kinds - {"label"} else (None, None)
        gradient_(
            gradient, self._draft_log_z, target, target_log_z, self._valid, labels, table, self.temperature,
            num_scales, "kl" in kinds, "reverse_kl" in kinds, None if target is None else self._index,
        )  # fmt: skip
        if full is not None and self._full_leaf is not None:
            direct = full / self.temperature
            gradient += direct.addcmul_(self._full_leaf.exp(), direct.sum(-1, keepdim=True), value=-1)
        return gradient

    def _table(self, found: list[tuple[_Term, Tensor]]) -> tuple[Tensor, Tensor | None, int]:
        """Return the table of `gradient_`, the labels if any, and the number of overlaps."""
        rows = list(torch.zeros(TABLE_ROWS, self.num_rows, device=self.device))
        labels, num_scales = None, 0
        for term, coefficient in found:
            rows[0] = rows[0] + coefficient * term.share
            if term.kind == "kl":
                rows[2] = rows[2] + coefficient
            elif term.kind == "reverse_kl":
                rows[3] = rows[3] + coefficient
            elif term.kind == "label" and (labels is None or labels is term.argument):
                labels, rows[1] = term.argument, rows[1] + coefficient
            elif term.kind == "overlap" and term.argument is not None and num_scales < MAX_SCALES:
                rows[4 + 2 * num_scales : 6 + 2 * num_scales] = [coefficient, term.argument]
                num_scales += 1
            else:
                raise KernelLimitError(
                    f"the kernels differentiate one label and {MAX_SCALES} overlaps per row, and this "
                    "objective has more; evaluate it with kernels=False"
                )
        return torch.stack(rows), labels, num_scales

    def _sweep(self, scales: tuple[Tensor, ...], *, with_kl: bool) -> list[Tensor]:
        results = []
        for start in range(0, max(1, len(scales)), MAX_SCALES):
            some = scales[start : start + MAX_SCALES]
            known = torch.stack([scale.detach() for scale in some]) if some else None
            is_first = start == 0
            found = self._sums(known, kl=with_kl and is_first)
            if with_kl and is_first:
                results.append(self._term(found[4], _Term("kl", found[5])))
            if known is None:
                continue
            below, slope = found[: 2 * len(some)].unflatten(0, (len(some), 2)).unbind(1)
            value = torch.addcmul(below, known, slope)
            for k, scale in enumerate(some):
                term = _Term("overlap", -below[k], known[k])
                results.append(self._term(value[k] + slope[k] * (scale - known[k]), term))
        return results

    def _sums(self, scales: Tensor | None, *, kl: bool = False, reverse_kl: bool = False) -> Tensor:
        """Return the table of `sums`."""
        target, target_log_z = self._known_target
        table: Tensor = sums(
            self._draft, self._draft_log_z, target, target_log_z, self._valid, scales, self.temperature, kl, reverse_kl,
            self._index,
        )  # fmt: skip
        return table

    def _term(self, value: Tensor, term: _Term) -> Tensor:
        self._terms.append(term)
        return self._with_leaf(value)

    @property
    def _known_target(self) -> tuple[Tensor, Tensor]:
        """Give the target's logits ``[P, V]`` and the normalisers ``[R]`` of the rows that are read of them."""
        if self._target is None:
            raise ValueError("this objective needs target logits, and none were given")
        if self._given_log_z is not None:
            return self._target, self._given_log_z
        return self._target, self._of_rows(self._target_normaliser[0])

    @cached_property
    def _target_normaliser(self) -> tuple[Tensor, Tensor]:
        """Give the log normaliser and argmax of the target's logits, these V alone."""
        if self._target is None:
            raise ValueError("this objective needs target logits, and none were given")
        valid = self._valid if self._index is None else self._valid.new_ones(len(self._target))
        return self._normaliser(self._target, valid)

    def _of_rows(self, values: Tensor) -> Tensor:
        """Return ``[R, ..]`` of values ``[P, ..]`` of the target's rows."""
        return values if self._index is None else values[self._index]

    def _normaliser(self, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        log_z, argmax = normaliser(logits, valid, self.temperature)
        return log_z, argmax

    def _label_log_probs(self, logits: Tensor, log_z: Tensor, labels: Tensor, index: Tensor | None = None) -> Tensor:
        at_label = logits.gather(1, labels[:, None]).squeeze(1) if index is None else logits[index, labels]
        value = at_label.float() / self.temperature - log_z
        return torch.where(self._valid, value, -math.log(self.vocab_size))

    def _log_probs(self, logits: Tensor, log_z: Tensor) -> Tensor:
        log_probs = (logits.float() / self.temperature).sub_(log_z[:, None])
        return log_probs.masked_fill_(~self._valid[:, None], -math.log(self.vocab_size))
