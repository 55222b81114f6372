"""This module takes sums over the vocabulary, and their gradients, with bounded temporaries.

`RowSums` says what an objective may ask of R rows of logits, whoever takes the
sums: `Rows` takes them in PyTorch, on any device and in any precision;
`blockdraft.losses.rows_triton.TritonRows` takes them in Triton kernels. Both
return small ``[R]`` tensors on which autograd is cheap. To each of them a leaf
of zeros is added; what autograd finds at a leaf is the coefficient of that sum
in the loss, and `RowSums.draft_gradient` turns all coefficients into the
gradient of the draft logits in one sweep.

`Rows` holds the target and draft log-probabilities of R prediction positions.
Each of its methods costs one sweep over ``[R, V]``. A sweep visits a few rows at
a time and works in tiles of that size that are allocated once: they stay in
cache, no second vocabulary-sized tensor is made, and the C library has no large
blocks to hand back and fault in again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.overlap import overlap_and_slope, overlap_logit_gradient

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

    def overlaps(self, *scales: Tensor) -> list[Tensor]:
        """Return S(s; p, q) for each s ``[R]`` in one sweep, differentiable in s and in the draft logits."""
        return self._sweep(scales, with_kl=False)

    def kl(self) -> Tensor:
        """Return KL(p || q) = sum_v p (log p - log q), ``[R]``; of a partial target, the sum over its part."""
        return self._sweep((), with_kl=True)[0]

    def kl_and_overlaps(self, *scales: Tensor) -> list[Tensor]:
        """Return KL(p || q) and then S(s; p, q) for each s ``[R]``, all in one sweep."""
        return self._sweep(scales, with_kl=True)

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

    @abstractmethod
    def _sweep(self, scales: tuple[Tensor, ...], *, with_kl: bool) -> list[Tensor]:
        """Return KL(p || q) if it is wanted, and S(s; p, q) for each s, with terms for their gradients."""

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


CPU_TILE = 2**19
ACCELERATOR_TILE = 2**26


@dataclass(frozen=True)
class _Tile:
    """_Tile is a few rows in the gradient's sweep: q, the gradient ``out``, and tiles to work in, all ``[r, V]``."""

    rows: slice
    q: Tensor
    out: Tensor
    free: list[Tensor]


AddGradient = Callable[[_Tile, Tensor], None]
"""``add_gradient(tile, coefficient)`` adds coefficient ``[r, 1]`` * d(term)/dz to ``tile.out``.

It holds tensors, never the `Rows` that holds it: a reference cycle would keep vocabulary-sized storage until the
garbage collector runs.
"""


class _TargetRows:
    """_TargetRows gives sweeps the target's rows, tile by tile: one of its own for each row, or those an index names.

    Rows that are read again and again are exponentiated once, if fewer than half as many as their readers.
    """

    def __init__(self, log_probs: Tensor, index: Tensor | None) -> None:
        self.log_probs, self.index = log_probs, index
        self._probs: Tensor | None = None

    def log_probs_of(self, rows: slice, out: Tensor) -> Tensor:
        """Return log p of a tile of rows, in ``out`` if it must be put together."""
        if self.index is None:
            return self.log_probs[rows]
        return torch.index_select(self.log_probs, 0, self.index[rows], out=out)

    def probs_of(self, rows: slice, out: Tensor) -> Tensor:
        """Write p of a tile of rows to ``out`` and return it."""
        if self.index is None or 2 * len(self.log_probs) > len(self.index):
            return torch.exp(self.log_probs_of(rows, out), out=out)
        if self._probs is None:
            self._probs = self.log_probs.exp()
        return torch.index_select(self._probs, 0, self.index[rows], out=out)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return ``[R, ..]`` of values ``[P, ..]`` of the target's rows."""
        return values if self.index is None else values[self.index]


class Rows(RowSums):
    """Rows takes the sums in PyTorch, from log-probabilities in float32 (float64 for float64 logits).

    Storage is reused only where the logits are of that dtype. `draft_gradient` then takes the place of the
    draft log-probabilities.
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
        dtype, device = computing_dtype(draft_logits.dtype), draft_logits.device
        super().__init__(num_rows, vocab_size, temperature, dtype, device)
        self._target_is_partial = target_log_z is not None
        limit = CPU_TILE if device.type == "cpu" else ACCELERATOR_TILE
        self._tile_rows = max(1, limit // max(1, vocab_size))
        self._most_rows = max(num_rows, 0 if target_logits is None else len(target_logits))
        self._overwrite = overwrite
        self._scratch: list[Tensor] = []
        self._invalid = None if valid is None else (~valid).unsqueeze(-1)
        self._draft_log_probs = self._log_probs(draft_logits, self._invalid)
        self._known_target: _TargetRows | None = None
        if target_logits is not None:
            invalid = self._invalid if target_index is None else None
            self._known_target = _TargetRows(self._log_probs(target_logits, invalid, target_log_z), target_index)
        self._gradients: list[AddGradient] = []

    @property
    def draft_log_probs(self) -> Tensor:
        return self._draft_log_probs

    @property
    def target_log_probs(self) -> Tensor:
        return self._target.of_rows(self._target.log_probs)

    @property
    def _target(self) -> _TargetRows:
        if self._known_target is None:
            raise ValueError("this objective needs target logits, and none were given")
        return self._known_target

    def draft_label(self, labels: Tensor) -> Tensor:
        def add_gradient(tile: _Tile, coefficient: Tensor) -> None:
            tile.out.addcmul_(tile.q, coefficient, value=-1)
            tile.out.scatter_add_(1, labels[tile.rows, None], coefficient)

        value = self.draft_log_probs.gather(1, labels[:, None]).squeeze(1)
        return self._term(value, add_gradient).clamp(min=LOG_ZERO)

    def target_label(self, labels: Tensor) -> Tensor:
        target = self._target
        if target.index is None:
            return target.log_probs.gather(1, labels[:, None]).squeeze(1).clamp(min=LOG_ZERO)
        return target.log_probs[target.index, labels].clamp(min=LOG_ZERO)

    def reverse_kl(self) -> Tensor:
        draft, target = self.draft_log_probs, self._target
        value = draft.new_empty(self.num_rows)
        for rows, (q, *free) in self._tiles(3):
            surprise = _difference(draft[rows], target.log_probs_of(rows, free[1]), free)
            value[rows] = surprise.mul_(torch.exp(draft[rows], out=q)).sum(-1)

        def add_gradient(tile: _Tile, coefficient: Tensor) -> None:
            rows, free = tile.rows, tile.free
            surprise = _difference(draft[rows], target.log_probs_of(rows, free[1]), free)
            tile.out.addcmul_(surprise.sub_(value[rows, None]).mul_(tile.q), coefficient)

        return self._term(value, add_gradient)

    def draft_argmax(self) -> Tensor:
        return _first_argmax(self.draft_log_probs)

    def target_argmax(self) -> Tensor:
        return self._target.of_rows(_first_argmax(self._target.log_probs))

    @torch.no_grad()
    def draft_gradient(self, outputs: list[Tensor], grads: list[Tensor]) -> Tensor:
        coefficients, full = self._coefficients(outputs, grads)
        terms = [(add, c) for add, c in zip(self._gradients, coefficients, strict=True) if c is not None]
        result = self.draft_log_probs if self._overwrite else torch.empty_like(self.draft_log_probs)
        for rows, (q, out, *free) in self._tiles(5):
            tile = _Tile(rows, torch.exp(self.draft_log_probs[rows], out=q), out.zero_(), free)
            for add_gradient, coefficient in terms:
                add_gradient(tile, coefficient[rows, None] / self.temperature)
            if full is not None:
                direct = full[rows] / self.temperature
                out.add_(direct).addcmul_(q, direct.sum(-1, keepdim=True), value=-1)
            result[rows] = out
        return result

    def _sweep(self, scales: tuple[Tensor, ...], *, with_kl: bool) -> list[Tensor]:
        target, draft = self._target, self.draft_log_probs
        known = [scale.detach() for scale in scales]
        kl = draft.new_empty(self.num_rows)
        values, slopes = [torch.empty_like(s) for s in known], [torch.empty_like(s) for s in known]
        for rows, (p, q, *free) in self._tiles(4):
            target.probs_of(rows, p)
            if with_kl:
                surprise = _difference(target.log_probs_of(rows, free[0]), draft[rows], free)
                kl[rows] = surprise.mul_(p).sum(-1)
            if known:
                torch.exp(draft[rows], out=q)
            for scale, value, slope in zip(known, values, slopes, strict=True):
                value[rows], slope[rows] = overlap_and_slope(scale[rows], p, q, (free[0], free[1]))
        results = [self._term(kl, self._kl_gradient())] if with_kl else []
        for scale, at, value, slope in zip(scales, known, values, slopes, strict=True):
            results.append(self._term(value + slope * (scale - at), self._overlap_gradient(at)))
        return results

    def _kl_gradient(self) -> AddGradient:
        target, is_partial = self._target, self._target_is_partial

        def add_gradient(tile: _Tile, coefficient: Tensor) -> None:
            p = target.probs_of(tile.rows, tile.free[0])
            mass = coefficient * p.sum(-1, keepdim=True) if is_partial else coefficient
            tile.out.addcmul_(tile.q, mass).addcmul_(p, coefficient, value=-1)

        return add_gradient

    def _overlap_gradient(self, scale: Tensor) -> AddGradient:
        target = self._target

        def add_gradient(tile: _Tile, coefficient: Tensor) -> None:
            p, *free = tile.free
            target.probs_of(tile.rows, p)
            gradient = overlap_logit_gradient(scale[tile.rows], p, tile.q, (free[0], free[1]))
            tile.out.addcmul_(gradient, coefficient)

        return add_gradient

    def _term(self, value: Tensor, add_gradient: AddGradient) -> Tensor:
        self._gradients.append(add_gradient)
        return self._with_leaf(value)

    def _tiles(self, num_scratch: int, num_rows: int | None = None) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield slices of a few rows, each with scratch tiles ``[r, V]`` that the next slice uses again."""
        num_rows = self.num_rows if num_rows is None else num_rows
        while len(self._scratch) < num_scratch:
            shape = (min(self._tile_rows, self._most_rows), self.vocab_size)
            self._scratch.append(torch.empty(shape, dtype=self.dtype, device=self.device))
        for start in range(0, num_rows, self._tile_rows):
            rows = slice(start, min(start + self._tile_rows, num_rows))
            yield rows, [tile[: rows.stop - start] for tile in self._scratch[:num_scratch]]

    def _log_probs(self, logits: Tensor, invalid: Tensor | None, log_z: Tensor | None = None) -> Tensor:
        """Return log-probabilities in float32 (float64 if given float64), made tile by tile.

        They are normalised by ``log_z`` ``[R]``, or by their own sum if it is None; ``invalid`` rows are uniform.
        """
        logits = logits.detach()
        in_place = self._overwrite and logits.dtype == self.dtype
        result = logits if in_place else torch.empty_like(logits, dtype=self.dtype)
        for rows, (tile, scratch) in self._tiles(2, len(logits)):
            tile.copy_(logits[rows])
            if self.temperature != 1:
                tile.div_(self.temperature)
            if log_z is not None:
                tile.sub_(log_z[rows, None].to(self.dtype))
            else:
                tile.sub_(tile.amax(-1, keepdim=True))
                # sum() adds pairwise; over 150,000 terms in float32 that is worth a digit over torch.log_softmax
                tile.sub_(torch.exp(tile, out=scratch).sum(-1, keepdim=True).log_())
            if invalid is not None:
                tile.masked_fill_(invalid[rows], -math.log(self.vocab_size))
            result[rows] = tile
        return result


def _difference(log_a: Tensor, log_b: Tensor, scratch: list[Tensor]) -> Tensor:
    """Return log a - log b with zeros standing at `LOG_ZERO`, so that 0 * log 0 is 0 downstream."""
    first, second, *_ = scratch
    return torch.clamp(log_a, min=LOG_ZERO, out=first).sub_(torch.clamp(log_b, min=LOG_ZERO, out=second))


def _first_argmax(rows: Tensor, width: int = 64) -> Tensor:
    """Return ``rows.argmax(-1)``, in two levels: on a CPU `amax` is several times faster than `argmax`."""
    size = rows.shape[1]
    whole = size - size % width
    groups = rows[:, :whole].unflatten(1, (whole // width, width)).amax(-1)
    if whole < size:
        groups = torch.cat([groups, rows[:, whole:].amax(-1, keepdim=True)], 1)
    start: Tensor = groups.argmax(-1, keepdim=True) * width
    members = (start + torch.arange(width, device=rows.device)).clamp(max=size - 1)
    return start.squeeze(1).add_(rows.gather(1, members).argmax(-1))
