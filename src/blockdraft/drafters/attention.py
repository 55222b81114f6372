"""Let many blocks attend to their contexts, in three ways that must agree.

Block a sits on row ``row[a]`` of the context. It sees the context positions
``start[a] <= t < anchor[a]`` of that row, its own slots, and nothing else: not
the anchor's feature, not later context, not another block.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from blockdraft.selfcheck import compare, passes_check

PART = "flex attention"
FLEX_DEVICES = ("cuda",)
"""Here flex attention is tried; elsewhere groups of blocks attend by SDPA."""

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Products in float32 may round their factors to ten bits on a GPU."""


@dataclass(frozen=True)
class Anchors:
    """Say where A blocks stand in N rows of T context positions.

    row: ``[A]`` row of each block.
    position: ``[A]`` index of the anchor in its row; the block's context ends just before it.
    start: ``[A]`` index where the block's own sequence begins in its row (0 unless rows are packed).
    """

    row: Tensor
    position: Tensor
    start: Tensor

    @classmethod
    def of(cls, row: Tensor, position: Tensor, start: Tensor | None = None) -> "Anchors":
        """Return anchors whose sequences begin at index 0 of their rows unless ``start`` says otherwise."""
        return cls(row, position, torch.zeros_like(position) if start is None else start)

    def __len__(self) -> int:
        return self.row.shape[0]


class BlockAttention(ABC):
    """Define how A blocks of S slots attend."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        """Attend with q ``[A, heads, S, d]`` to k, v ``[A, kv_heads, S, d]`` and the context's ``[N, kv_heads, T, d]``.

        Returns ``[A, heads, S, d]``.
        """


class ReferenceAttention(BlockAttention):
    """Attend by the definition: one block at a time, softmax written out."""

    def __init__(self, anchors: Anchors) -> None:
        self.anchors = anchors

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        outputs = []
        groups = q.shape[1] // k.shape[1]
        for a in range(len(self.anchors)):
            row, end, start = (int(x[a]) for x in (self.anchors.row, self.anchors.position, self.anchors.start))
            keys = torch.cat([context_k[row, :, start:end], k[a]], 1).repeat_interleave(groups, 0)
            values = torch.cat([context_v[row, :, start:end], v[a]], 1).repeat_interleave(groups, 0)
            scores = q[a] @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
            outputs.append(scores.softmax(-1) @ values)
        return torch.stack(outputs) if outputs else q


class GroupedAttention(BlockAttention):
    """Attend with plain SDPA over groups of blocks of one text.

    A group of up to G blocks, neighbours in their text, attends to one copy of the context that its last
    block sees and to its own G * S slots under one mask: the waste are foreign slots and context that only
    later blocks see, the gain is one copy of the context for G blocks. Groups of about equally much context
    share a call, so that little of it is padding. It is for CPUs, whose SDPA takes four times as long in bfloat16
    as in float32, so it computes in float32 whatever it is given.
    """

    def __init__(
        self, anchors: Anchors, num_slots: int, context_length: int, group_size: int = 4, num_calls: int = 4
    ) -> None:
        blocks, filled = _grouped(anchors, context_length, group_size)
        seen = anchors.position - anchors.start
        by_width = torch.argsort(seen[blocks].amax(1), stable=True)
        parts = [part for part in by_width.tensor_split(num_calls) if len(part)]
        self.calls = [_Call.of(anchors, blocks[part], num_slots, context_length) for part in parts]
        self.num_slots = num_slots
        places = filled[by_width].flatten().nonzero().squeeze(1)
        self.place = torch.empty_like(anchors.row)
        self.place[blocks[by_width].flatten()[places]] = places  # where block a comes out

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        dtype = q.dtype
        if dtype in (torch.bfloat16, torch.float16):
            q, k, v, context_k, context_v = (x.float() for x in (q, k, v, context_k, context_v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [A, S, heads, d], as they lie in memory
        context_k, context_v = (x.transpose(1, 2).flatten(0, 1) for x in (context_k, context_v))  # [N * T, kv_heads, d]
        with torch.autocast(q.device.type, enabled=False):
            outputs = [call(q, k, v, context_k, context_v).unflatten(1, (-1, self.num_slots)) for call in self.calls]
        if not outputs:
            return q.transpose(1, 2).to(dtype)
        cells = torch.cat([out.flatten(0, 1) for out in outputs])
        return cells.index_select(0, self.place).transpose(1, 2).to(dtype)


@dataclass(frozen=True)
class _Call:
    """Attend with n groups of G blocks at once, to W context positions at most.

    blocks: ``[n * G]`` which ones; an empty place repeats the first of its group.
    context: ``[n * W]`` positions, rows of the context end to end.
    mask: ``[n, 1, G * S, W + G * S]``.
    """

    blocks: Tensor
    context: Tensor
    mask: Tensor

    @classmethod
    def of(cls, anchors: Anchors, blocks: Tensor, num_slots: int, context_length: int) -> "_Call":
        """Prepare the call for these blocks ``[n, G]``."""
        num_groups, group_size = blocks.shape
        seen = (anchors.position - anchors.start)[blocks]  # [n, G]
        t = torch.arange(max(1, int(seen.max())), device=blocks.device)
        begins = (anchors.row * context_length + anchors.start)[blocks[:, :1]]
        context = begins + torch.minimum(t, seen.amax(1, keepdim=True))  # an anchor's own position is in the context
        visible = (t < seen.unsqueeze(-1)).repeat_interleave(num_slots, 1)
        owner = torch.arange(group_size, device=blocks.device).repeat_interleave(num_slots)
        own = (owner[:, None] == owner).expand(num_groups, -1, -1)
        return cls(blocks.flatten(), context.flatten(), torch.cat([visible, own], -1).unsqueeze(1))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        """Attend with blocks ``[A, S, heads, d]`` to a context ``[N * T, kv_heads, d]``; ``[n, G * S, heads, d]``."""
        num_groups = len(self.mask)

        def of_groups(x: Tensor, index: Tensor) -> Tensor:
            return x.index_select(0, index).reshape(num_groups, -1, *x.shape[-2:])

        keys = torch.cat([of_groups(context_k, self.context), of_groups(k, self.blocks)], 1)
        values = torch.cat([of_groups(context_v, self.context), of_groups(v, self.blocks)], 1)
        query, keys, values = (x.transpose(1, 2) for x in (of_groups(q, self.blocks), keys, values))
        out: Tensor = scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2)


def _grouped(anchors: Anchors, context_length: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Return blocks ``[groups, G]``, those of a text together and in order, and which places hold one."""
    text = anchors.row * context_length + anchors.start
    order = torch.argsort(text * context_length + anchors.position, stable=True)
    counts = torch.unique_consecutive(text[order], return_counts=True)[1]
    rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    groups = (counts + group_size - 1) // group_size  # of each text
    group = (groups.cumsum(0) - groups).repeat_interleave(counts) + rank // group_size
    blocks = order.new_full((int(groups.sum()), group_size), -1)
    blocks[group, rank % group_size] = order
    filled = blocks >= 0
    return torch.where(filled, blocks, blocks[:, :1]), filled


class FlexAttention(BlockAttention):
    """Attend with flex attention over all blocks at once; compiled on a GPU, it computes only the visible tiles."""

    def __init__(self, anchors: Anchors, num_slots: int, num_rows: int, context_length: int) -> None:
        row, position, start = anchors.row, anchors.position, anchors.start
        num_context = num_rows * context_length

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // num_slots
            t = key % context_length
            in_context = (key < num_context) & (key // context_length == row[block])
            in_context = in_context & (t >= start[block]) & (t < position[block])
            in_block = (key >= num_context) & ((key - num_context) // num_slots == block)
            return in_context | in_block

        num_queries = len(anchors) * num_slots
        self.mask: BlockMask = _make_mask(row.is_cuda)(
            visible, None, None, num_queries, num_context + num_queries, device=str(row.device)
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys = torch.cat([_line_up(context_k), _line_up(k)], 2)
        values = torch.cat([_line_up(context_v), _line_up(v)], 2)
        keys, query = keys.to(values.dtype), _line_up(q).to(values.dtype)  # autocast leaves norms in float32
        out: Tensor = _flex(q.is_cuda)(query, keys, values, block_mask=self.mask, enable_gqa=True)
        num_blocks, heads, num_slots, width = q.shape
        return out.view(heads, num_blocks, num_slots, width).transpose(0, 1)


def _line_up(x: Tensor) -> Tensor:
    """Line blocks ``[A, h, S, d]`` up as one row, ``[1, h, A * S, d]``."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


@functools.cache
def _make_mask(compiled: bool) -> Any:
    """Return what makes the mask of visible tiles; compiled, it never exists in full, as it must not on a GPU."""
    return torch.compile(create_block_mask) if compiled else create_block_mask


@functools.cache
def _flex(compiled: bool) -> Any:
    """Return flex attention; compiled, it computes only the visible tiles, as it must on a GPU."""
    return torch.compile(flex_attention) if compiled else flex_attention


def default_attention(
    anchors: Anchors,
    num_slots: int,
    num_rows: int,
    context_length: int,
    heads: tuple[int, int, int] = (4, 2, 64),
    dtype: torch.dtype = torch.float32,
) -> BlockAttention:
    """Choose flex attention on a GPU, where on first use it must agree with the definition, and SDPA elsewhere.

    Args:
        anchors, num_slots, num_rows, context_length: as for `FlexAttention`.
        heads: of queries, of keys and values, and their width: kernels differ by them, and so do checks.
        dtype: of the products.
    """
    device = anchors.row.device
    if device.type in FLEX_DEVICES:
        check = functools.partial(check_flex, device, num_slots, heads, dtype)
        if passes_check(PART, device, check, key=(num_slots, heads, str(dtype))):
            return FlexAttention(anchors, num_slots, num_rows, context_length)
    return GroupedAttention(anchors, num_slots, context_length)


def check_flex(device: torch.device, num_slots: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Raise unless flex attention and the definition agree on four blocks in two rows: output, and gradients."""
    num_heads, num_kv_heads, width = heads
    num_rows, length, results = 2, 200, []
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        places = torch.tensor([[0, 0, 1, 1], [3, 150, 60, 199], [0, 0, 0, 70]]).to(device)
        anchors = Anchors(*places)
        of_blocks, of_context = (4, num_kv_heads, num_slots, width), (num_rows, num_kv_heads, length, width)
        shapes = [(4, num_heads, num_slots, width), of_blocks, of_blocks, of_context, of_context]
        generator = torch.Generator().manual_seed(0)
        *given, weight = (torch.randn(x, generator=generator).to(device, dtype) for x in (*shapes, shapes[0]))
        for attend in (FlexAttention(anchors, num_slots, num_rows, length), ReferenceAttention(anchors)):
            inputs = [x.clone().requires_grad_() for x in given]
            out = attend(*inputs)
            results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)])
    names = ("the output", *(f"the gradient of {name}" for name in ("q", "k", "v", "the context's k", "its v")))
    for name, found, expected in zip(names, *results, strict=True):
        compare(name, found, expected, TOLERANCE.get(dtype, 1e-2))
