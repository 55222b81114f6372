"""This module says what an objective may ask of R rows of logits, whoever takes the sums.

`blockdraft.losses.rows.Rows` takes them in PyTorch, on any device and in any
precision; `blockdraft.losses.rows_triton.TritonRows` takes them in Triton
kernels. Both return small ``[R]`` tensors on which autograd is cheap. To each
of them a leaf of zeros is added; what autograd finds at a leaf is the
coefficient of that sum in the loss, and `RowSums.draft_gradient` turns all
coefficients into the gradient of the draft logits in one sweep.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

LOG_ZERO = -1e4
"""This number stands for the logarithm of a zero probability: far below any real one, and safe to sum and multiply."""


class RowSums(ABC):
    """RowSums is R rows of target and draft conditionals over V tokens, seen through sums over the vocabulary.

    Implementations are made from the same arguments:

        draft_logits: ``[R, V]``.
        target_logits: ``[R, V]``, or None for an objective that needs no target.
        temperature: T of both distributions, p = softmax(target / T), q = softmax(draft / T).
        valid: ``[R]`` bool, None for all; rows outside it count as uniform distributions,
            so that nothing in padding, NaN included, reaches a result.
        target_log_z: ``[R]`` the target's log normaliser at this temperature, where these V tokens are
            only a part of its vocabulary: log p = target / T - log_z, and p may sum to less than one.
        target_index: ``[R]`` which row of the target each row meets, where several meet the same one. The target's
            logits and normaliser are then ``[P, V]`` and ``[P]``, and what depends on the target alone is done once
            for each of the P rows, none of which ``valid`` masks.
        overwrite: whether the storage of the logits may be reused.

    Attributes:
        num_rows, vocab_size: R and V.
        temperature: T.
        dtype: of every ``[R]`` result.
        device: of everything.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, temperature: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_rows, self.vocab_size, self.temperature = num_rows, vocab_size, temperature
        self.dtype, self.device = dtype, device
        self._leaves: list[Tensor] = []
        self._full_leaf: Tensor | None = None

    @property
    @abstractmethod
    def draft_log_probs(self) -> Tensor:
        """Give log q, ``[R, V]``."""

    @property
    @abstractmethod
    def target_log_probs(self) -> Tensor:
        """Give log p, ``[R, V]``."""

    @property
    def differentiable_draft_log_probs(self) -> Tensor:
        """Give log q ``[R, V]`` as an autograd leaf, for objectives that no sum of this class expresses.

        It costs vocabulary-sized temporaries; the named sums below do not.
        """
        if self._full_leaf is None:
            self._full_leaf = self.draft_log_probs.detach().requires_grad_()
        return self._full_leaf

    @abstractmethod
    def draft_label(self, labels: Tensor) -> Tensor:
        """Return log q(y) for labels y ``[R]``; a zero probability counts as `LOG_ZERO`."""

    @abstractmethod
    def target_label(self, labels: Tensor) -> Tensor:
        """Return log p(y) for labels y ``[R]``; a zero probability counts as `LOG_ZERO`."""

    @abstractmethod
    def overlaps(self, *scales: Tensor) -> list[Tensor]:
        """Return S(s; p, q) for each s ``[R]`` in one sweep, differentiable in s and in the draft logits."""

    @abstractmethod
    def kl(self) -> Tensor:
        """Return KL(p || q) = sum_v p (log p - log q), ``[R]``; of a partial target, the sum over its part."""

    @abstractmethod
    def reverse_kl(self) -> Tensor:
        """Return KL(q || p) = sum_v q (log q - log p), ``[R]``."""

    @abstractmethod
    def draft_argmax(self) -> Tensor:
        """Return the draft's most probable tokens, ``[R]``."""

    @abstractmethod
    def target_argmax(self) -> Tensor:
        """Return the target's most probable tokens, ``[R]``, among these V."""

    @abstractmethod
    def draft_gradient(self, outputs: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Return the gradient ``[R, V]`` of the draft logits when ``grads`` flow into the small tensors ``outputs``.

        If the logits may be overwritten, their storage may hold it afterwards.
        """

    def _with_leaf(self, value: Tensor) -> Tensor:
        """Return ``value`` plus a new leaf of zeros, the next one of `_coefficients`."""
        leaf = torch.zeros(self.num_rows, dtype=value.dtype, device=value.device, requires_grad=True)
        self._leaves.append(leaf)
        return value + leaf

    def _coefficients(self, outputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor | None], Tensor | None]:
        """Return what autograd finds at each leaf, and at the full log-probabilities if they were asked for."""
        leaves = self._leaves + ([] if self._full_leaf is None else [self._full_leaf])
        reachable = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found: list[Tensor | None] = [None] * len(leaves)
        if leaves and reachable:
            outs, gs = zip(*reachable, strict=True)
            found = list(torch.autograd.grad(outs, leaves, gs, retain_graph=True, allow_unused=True))
        return (found, None) if self._full_leaf is None else (found[:-1], found[-1])


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
