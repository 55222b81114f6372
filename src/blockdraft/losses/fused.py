"""This module fuses the head product with an objective: no ``[N*B, V]`` tensor is made.

Logits are made for a few whole blocks at a time, in two buffers that every
chunk reuses. The gradient of a chunk's logits takes the place of its draft
log-probabilities and is at once multiplied back onto the hidden states and,
where they train, the head and the Markov factors. Gradients are ready after the forward pass.

On a GPU, Triton kernels take the sums of an objective once they have solved a
small case as the plain path does: one of the very objective, dtypes and kind of
vocabulary that are about to run, so that it compiles the same kernels, which are
then there.
"""

import functools
import importlib.util
import operator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from blockdraft.losses.head_products import HeadProduct, LogitBuffers, TargetIndex, TargetLogits, largest_chunk
from blockdraft.losses.objective import BlockStatistics, Objective, ObjectiveValue, measure
from blockdraft.losses.reduced import OUTSIDE, ReducedTarget
from blockdraft.losses.rounds import run_bounds, whole_runs
from blockdraft.losses.rows import Rows, RowSums, computing_dtype
from blockdraft.losses.rows_triton import DTYPES, TritonRows
from blockdraft.losses.scores import Blocks, check_labels
from blockdraft.selfcheck import SelfCheckError, compare, passes_check

CHUNK_BYTES = 2**27
"""On a CPU, one buffer of logits is kept below this size, unless a single block is larger."""

ACCELERATOR_CHUNK_BYTES = 2**30
"""The same on an accelerator with memory to spare, where a product of a few hundred rows would only wait for memory."""

PART = "the objective's Triton kernels"
KERNEL_DEVICES = ("cuda",)
"""Here the kernels are tried without being asked for."""

CHECK_VOCABULARY = 5_008
"""The small case has this many tokens or up to 15 more: several tiles of the kernels, the last one not full."""

VALUE_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Both paths compute in float32; the gradient is then rounded to the dtype of the logits."""


def chunk_bytes(device: torch.device) -> int:
    """Return the largest size of one buffer of logits on this device.

    On an accelerator it is an eighth of the memory that is free, as a power of two, so that it seldom changes.
    """
    if device.type == "cpu":
        return CHUNK_BYTES
    if device.type != "cuda":
        return ACCELERATOR_CHUNK_BYTES
    free, _total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    largest = max(CHUNK_BYTES, free // 8)
    return min(ACCELERATOR_CHUNK_BYTES, 1 << (largest.bit_length() - 1))


def fused_linear_objective(
    objective: Objective,
    draft_hidden: Tensor,
    target_hidden: Tensor | None,
    draft_head: Tensor,
    target_head: Tensor | None,
    labels: Tensor,
    valid: Tensor | None = None,
    markov: tuple[Tensor, Tensor] | None = None,
    chunk_blocks: int | None = None,
    *,
    stats: bool = True,
    reduced: ReducedTarget | None = None,
    segments: Tensor | None = None,
    target_index: TargetIndex | None = None,
    checked: bool = False,
    kernels: bool | None = None,
) -> ObjectiveValue:
    """Evaluate ``objective`` on the logits ``draft_hidden @ draft_head.T`` and ``target_hidden @ target_head.T``.

    Args:
        objective: any objective of this package.
        draft_hidden, target_hidden: ``[N, B, H]`` (each with the width of its own head); the target's are ``[P, H]``
            with a ``target_index``.
        draft_head, target_head: ``[V, H]``. The products run in the head's dtype, all
            else in float32 (float64 for float64 heads). Only ``draft_hidden``, ``draft_head``
            and ``markov`` receive gradients, each only if it requires them.
        labels, valid: as for the objective.
        markov: ``(prev_embedding [N, B, r], w2 [V, r])``, DSpark's low-rank bias:
            ``prev_embedding @ w2.T`` is added to the draft logits.
        chunk_blocks: blocks per chunk; by default what keeps one buffer below `chunk_bytes` of the device.
        stats: also return acceptance statistics from the same pass. Without them, an
            objective that needs no target (CE) takes None for the target's two arguments.
        reduced: for a drafter over a reduced vocabulary D: the target's normaliser and argmax over its whole
            vocabulary. ``draft_head`` is then ``[Vd, H]``, ``target_head`` the rows of D, ``markov`` has
            ``w2 [Vd, r]``, and labels are indices into D (see `restrict_labels` and `restrict_target`).
        segments: ``[N]`` the run of consecutive anchors that each block belongs to; None for none. A chunk never
            splits a run, so with an objective that looks at runs the longest one must fit into memory.
        target_index: which row of ``target_hidden`` each position reads, where blocks overlap. What depends on the
            target alone is then done once for each of its rows, and not once for each block that covers it.
        checked: labels, mask and segments are known to be right. Checking them makes the host wait for the device.
        kernels: None takes Triton kernels on a GPU, if on first use they solve a small case of this objective as
            the plain path does there; True takes them or raises `SelfCheckError`; False takes the plain path.

    Returns:
        An `ObjectiveValue`; ``numerator`` and ``loss`` carry gradients, ``per_block`` does not.
    """
    _check(draft_hidden, draft_head, labels, "draft")
    if objective.needs_target or stats:
        if target_hidden is None or target_head is None:
            raise ValueError(f"objective {objective.name!r} with stats={stats} needs target_hidden and target_head")
        if target_index is None:
            _check(target_hidden, target_head, labels, "target")
        else:
            target_index.check(target_hidden, target_head, labels)
        _check_vocabulary(draft_head, target_head)
    else:
        target_hidden = target_head = target_index = None
    prev, w2 = markov if markov is not None else (None, None)
    if markov is not None:
        if prev is None or w2 is None:
            raise ValueError("markov must be (prev_embedding [N, B, r], w2 [V, r]); one of them is None")
        _check(prev, w2, labels, "markov")
        _check_vocabulary(draft_head, w2)
    if checked:
        labels = labels if valid is None else torch.where(valid, labels, 0)
    else:
        _, labels = check_labels(labels, valid, draft_head.shape[0], is_reduced=reduced is not None)
    if chunk_blocks is not None and chunk_blocks < 1:
        raise ValueError(f"chunk_blocks must be at least 1, got {chunk_blocks}")
    trains = tuple(
        torch.is_grad_enabled() and t is not None and t.requires_grad for t in (draft_hidden, draft_head, prev, w2)
    )
    segments = segments if objective.couples_blocks else None
    kind = LogitKind(
        draft_dtype=draft_head.dtype,
        target_dtype=None if target_head is None else target_head.dtype,
        vocab_size=draft_head.shape[0],
        device=draft_head.device,
        stats=stats,
        is_partial=reduced is not None,
        is_indexed=target_index is not None,
    )
    rows = choose_rows(objective, kind, kernels)
    batch = _Batch(
        objective, target_hidden, target_head, target_index, labels, valid, reduced, segments, chunk_blocks, checked,
        stats, trains, rows,
    )  # fmt: skip
    with torch.autocast(draft_head.device.type, enabled=False):
        total, numerator, denominator = _FusedLinear.apply(draft_hidden, draft_head, prev, w2, batch)
    return replace(objective.value(numerator, denominator, total, batch.statistics), survival=batch.survival)


@dataclass
class _Batch:
    """_Batch holds what the pass needs beside the tensors that train; the pass leaves its statistics here.

    Labels and mask have been checked, and labels are zero outside the mask.
    """

    objective: Objective
    target_hidden: Tensor | None
    target_head: Tensor | None
    target_index: TargetIndex | None
    labels: Tensor
    valid: Tensor | None
    reduced: ReducedTarget | None
    segments: Tensor | None
    chunk_blocks: int | None
    runs_checked: bool
    stats: bool
    trains: tuple[bool, ...]
    rows: type[RowSums]
    statistics: BlockStatistics | None = None
    survival: Tensor | None = None

    def target_logits(self, chunks: list[slice]) -> TargetLogits | None:
        """Return what makes the target's logits, or None if they are not needed."""
        if self.target_hidden is None or self.target_head is None:
            return None
        block_size = self.labels.shape[1]
        return TargetLogits(self.target_hidden, self.target_head, chunks, block_size, self.valid, self.target_index)

    def chunks(self, head: Tensor) -> list[slice]:
        """Return slices of whole blocks and whole runs, as equal as they can be."""
        num_blocks, block_size = self.labels.shape
        vocab_size, size = head.shape[0], chunk_bytes(head.device)
        itemsize = (computing_dtype(head.dtype) if self.rows is Rows else head.dtype).itemsize
        limit = self.chunk_blocks or max(1, size // max(1, block_size * vocab_size * itemsize))
        if self.segments is not None:
            return whole_runs(run_bounds(self.segments, num_blocks), limit)
        num_chunks = -(-num_blocks // limit)
        step = -(-num_blocks // num_chunks) if num_chunks else 1
        return [slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step)]


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, prev: Tensor | None, w2: Tensor | None, batch: _Batch) -> Any:
        products = [HeadProduct(hidden, head, batch.valid, *batch.trains[0:2])]
        if prev is not None and w2 is not None:
            products.append(HeadProduct(prev, w2, batch.valid, *batch.trains[2:4]))
        chunks = batch.chunks(head)
        buffers = LogitBuffers(products, batch.target_logits(chunks), largest_chunk(chunks) * batch.labels.shape[1])
        results = [_chunk(batch, chunk, buffers) for chunk in chunks]
        if batch.stats:
            statistics = [result.statistics for result in results if result.statistics is not None]
            batch.statistics = functools.reduce(operator.add, statistics) if statistics else _no_statistics(batch, head)
            survival = [result.survival for result in results if result.survival is not None]
            batch.survival = torch.cat(survival) if survival else None
        gradients = [g for product in products for g in (product.hidden_gradient, product.head_gradient)]
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [hidden.dtype, head.dtype, *(t.dtype for t in (prev, w2) if t is not None)]
        empty = torch.zeros(2, 0, dtype=computing_dtype(head.dtype), device=head.device)
        numerators, denominators = torch.cat([empty, *(result.sums for result in results)], 1)
        ctx.mark_non_differentiable(numerators, denominators)
        return numerators.sum(), numerators, denominators

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if g is None else (g * grad).to(dtype) for g, dtype in gradients]
        return (*scaled, *[None] * (5 - len(scaled)))


@dataclass(frozen=True)
class _ChunkResult:
    """_ChunkResult is what outlives a chunk: sums ``[2, n]``, and with statistics also survival ``[n, B]``."""

    sums: Tensor
    statistics: BlockStatistics | None
    survival: Tensor | None


def _chunk(batch: _Batch, chunk: slice, buffers: LogitBuffers) -> _ChunkResult:
    """Evaluate one chunk and add its gradients to the products; all else of it is freed before the next one."""
    blocks = _blocks(buffers.draft_logits(chunk), *buffers.target_logits(chunk), batch, chunk)
    with torch.enable_grad():
        numerator, denominator = batch.objective.sums(blocks)
    statistics, survival = None, None
    if batch.stats:
        statistics, survival = measure(blocks), blocks.log_sampled.detach().exp()
    if any(batch.trains):
        gradient = blocks.rows.draft_gradient([numerator], [torch.ones_like(numerator)])
        buffers.accumulate(gradient, chunk)
    return _ChunkResult(torch.stack([numerator.detach(), denominator.detach()]), statistics, survival)


def _blocks(
    draft_logits: Tensor, target_logits: Tensor | None, target_index: Tensor | None, batch: _Batch, chunk: slice
) -> Blocks:
    labels = batch.labels[chunk]
    shape = (*labels.shape, draft_logits.shape[-1])
    return Blocks(
        draft_logits.view(shape),
        target_logits if target_logits is None or target_index is not None else target_logits.view(shape),
        labels,
        None if batch.valid is None else batch.valid[chunk],
        temperature=batch.objective.temperature,
        reduced=None if batch.reduced is None else batch.reduced[chunk],
        segments=None if batch.segments is None else batch.segments[chunk],
        target_index=target_index,
        overwrite=True,
        checked=True,
        runs_checked=batch.runs_checked,
        for_statistics=batch.stats,
        rows=batch.rows,
    )


def _no_statistics(batch: _Batch, head: Tensor) -> BlockStatistics:
    """Return the statistics of an empty batch."""
    empty = head.new_zeros(0, batch.labels.shape[1], head.shape[0])
    return measure(Blocks(empty, empty, batch.labels, batch.valid))


def _check(hidden: Tensor, head: Tensor, labels: Tensor, which: str) -> None:
    if hidden.dim() != 3 or hidden.shape[:2] != labels.shape:
        raise ValueError(
            f"{which} hidden states must be [N, B, H] with [N, B] = {list(labels.shape)}, got {list(hidden.shape)}"
        )
    if head.dim() != 2 or head.shape[1] != hidden.shape[2]:
        raise ValueError(f"the {which} head must be [V, {hidden.shape[2]}], got {list(head.shape)}")


def _check_vocabulary(draft_head: Tensor, other: Tensor) -> None:
    if draft_head.shape[0] != other.shape[0]:
        raise ValueError(f"the heads differ in vocabulary: {draft_head.shape[0]} and {other.shape[0]}")


@dataclass(frozen=True)
class LogitKind:
    """LogitKind says what logits an objective will be given.

    draft_dtype, target_dtype: of the buffers; no target, no dtype.
    vocab_size: V.
    device: of everything.
    stats: whether statistics will be taken from them, too.
    is_partial: whether the target's normaliser is given (a reduced vocabulary).
    is_indexed: whether positions share rows of the target.
    """

    draft_dtype: torch.dtype
    target_dtype: torch.dtype | None
    vocab_size: int
    device: torch.device
    stats: bool = True
    is_partial: bool = False
    is_indexed: bool = False

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Give the dtypes of all logits."""
        return [self.draft_dtype] + ([] if self.target_dtype is None else [self.target_dtype])


def choose_rows(objective: Objective, kind: LogitKind, kernels: bool | None = None) -> type[RowSums]:
    """Return `TritonRows` where they solve a small case as `Rows` do, and `Rows` otherwise.

    Args:
        objective: the objective.
        kind: its logits.
        kernels: None for kernels on a GPU and on logits of at most 32 bits; True for kernels, or an error;
            False for none.
    """
    if kernels is None:
        kernels, strict = kind.device.type in KERNEL_DEVICES and all(dtype in DTYPES for dtype in kind.dtypes), None
    else:
        strict = True
    if not kernels:
        return Rows
    choices = tuple(getattr(objective, field.name) for field in fields(objective))
    key = (
        type(objective), *(choice for choice in choices if isinstance(choice, str | bool)), *kind.dtypes, kind.stats,
        kind.is_partial, kind.is_indexed,
        kind.vocab_size if kind.vocab_size < CHECK_VOCABULARY else kind.vocab_size % 16,
    )  # fmt: skip
    usable = passes_check(PART, kind.device, lambda: check_kernels(objective, kind), key=key, strict=strict)
    return TritonRows if usable else Rows


def check_kernels(objective: Objective, kind: LogitKind) -> None:
    """Raise unless kernels and plain path agree on four blocks of four tokens: values, statistics, gradients."""
    if importlib.util.find_spec("triton") is None:
        raise SelfCheckError("Triton is not installed (pip install 'blockdraft[gpu]')")
    with torch.inference_mode(False), torch.autocast(kind.device.type, enabled=False):
        found, expected = (_check_results(objective, kind, rows) for rows in (TritonRows, Rows))
    for name, value in expected.items():
        tolerance = GRADIENT_TOLERANCE[kind.draft_dtype] if name == "the gradient" else VALUE_TOLERANCE
        compare(name, found[name], value, tolerance)


def _check_results(objective: Objective, kind: LogitKind, rows: type[RowSums]) -> dict[str, Tensor]:
    blocks = _check_case(kind, objective.temperature, rows)
    with torch.enable_grad():
        numerator, denominator = objective.sums(blocks)
    results = {"the numerator": numerator.detach(), "the denominator": denominator.detach()}
    if kind.stats:
        statistics = measure(blocks)
        results |= {f"the statistic {field.name}": getattr(statistics, field.name) for field in fields(statistics)}
    gradient = blocks.rows.draft_gradient([numerator], [torch.ones_like(numerator)])
    return results | {"the gradient": gradient.to(kind.draft_dtype)}


def _check_case(kind: LogitKind, temperature: float, rows: type[RowSums]) -> Blocks:
    """Make four blocks, one cut, one empty, one with a single token, with both outcomes of every comparison of tokens.

    Logits are multiples of 1/16, exact in every dtype: where q(v) is about s p(v), two correct paths may take
    different sides, and on a grid that is out of the question.
    """
    vocab_size = kind.vocab_size
    if vocab_size >= CHECK_VOCABULARY:
        vocab_size = CHECK_VOCABULARY + vocab_size % 16
    generator = torch.Generator().manual_seed(0)
    shape = (4, 4, vocab_size)
    target = (24 * torch.randn(shape, generator=generator)).round() / 16
    draft = target + (16 * torch.randn(shape, generator=generator)).round() / 16
    labels, best, other = torch.randint(vocab_size, (3, *shape[:2], 1), generator=generator)
    draft_best = torch.where(torch.tensor([[True, False, True, True]])[..., None], best, other)
    target.scatter_(-1, best, 8.0)
    draft.scatter_(-1, draft_best, 8.0)
    labels = torch.where(torch.tensor([[True, True, False, False]]), draft_best.squeeze(-1), labels.squeeze(-1))
    valid = torch.arange(4) < torch.tensor([[4], [3], [0], [1]])
    reduced = None
    if kind.is_partial:
        log_z = (target / temperature).logsumexp(-1) + 0.5
        reduced = ReducedTarget(log_z.to(kind.device), best.squeeze(-1).to(kind.device), temperature)
        labels[1, 2] = OUTSIDE
    index = None
    if kind.is_indexed and kind.target_dtype is not None:
        index = torch.randperm(16, generator=generator).view(4, 4)
        target = torch.empty_like(target).view(16, -1).index_copy(0, index.flatten(), target.flatten(0, 1))
    return Blocks(
        draft.to(kind.device, kind.draft_dtype),
        None if kind.target_dtype is None else target.to(kind.device, kind.target_dtype),
        labels.to(kind.device),
        valid.to(kind.device),
        temperature=temperature,
        reduced=reduced,
        target_index=None if index is None else index.to(kind.device),
        overwrite=True,
        for_statistics=kind.stats,
        rows=rows,
    )
