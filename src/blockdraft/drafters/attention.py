"""Attention of many blocks to their contexts, three ways that must agree.

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


@dataclass(frozen=True)
class Anchors:
    """Where A blocks stand in N rows of T context positions.

    row: ``[A]`` row of each block.
    position: ``[A]`` index of the anchor in its row; the block's context ends just before it.
    start: ``[A]`` index where the block's own sequence begins in its row (0 unless rows are packed).
    """

    row: Tensor
    position: Tensor
    start: Tensor

    @classmethod
    def of(cls, row: Tensor, position: Tensor, start: Tensor | None = None) -> "Anchors":
        return cls(row, position, torch.zeros_like(position) if start is None else start)

    def __len__(self) -> int:
        return self.row.shape[0]


class BlockAttention(ABC):
    """How A blocks of S slots attend."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        """Blocks' q ``[A, heads, S, d]``, k, v ``[A, kv_heads, S, d]``, context ``[N, kv_heads, T, d]`` -> as q."""


class ReferenceAttention(BlockAttention):
    """From the definition: one block at a time, softmax written out."""

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
    """Plain SDPA over groups of blocks that share a row.

    A group of G blocks attends to one copy of its row's context and to its own
    G * S slots under one mask; the waste is the G - 1 foreign blocks of the mask,
    the gain one copy of the context for G blocks.
    """

    def __init__(self, anchors: Anchors, num_slots: int, context_length: int, group_size: int = 8) -> None:
        device = anchors.row.device
        order = torch.argsort(anchors.row, stable=True)
        rows = anchors.row[order]
        counts = torch.bincount(rows) if len(rows) else rows
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        rank = torch.arange(len(rows), device=device) - first  # of a block among those of its row
        groups_per_row = (counts + group_size - 1) // group_size
        first_group = torch.repeat_interleave(groups_per_row.cumsum(0) - groups_per_row, counts)
        group, place = first_group + rank // group_size, rank % group_size
        num_groups = int(groups_per_row.sum()) if len(rows) else 0
        self.cell = torch.empty_like(order)
        self.cell[order] = group * group_size + place  # where block a sits
        self.num_cells, self.group_size, self.num_slots = num_groups * group_size, group_size, num_slots
        self.group_row = torch.zeros(num_groups, dtype=torch.long, device=device).scatter_(0, group, rows)

        t = torch.arange(context_length, device=device)
        sees = (t >= anchors.start[:, None]) & (t < anchors.position[:, None])  # [A, T]
        context = torch.zeros(self.num_cells, context_length, dtype=torch.bool, device=device)
        context[self.cell] = sees
        context = context.view(num_groups, group_size, 1, context_length).expand(-1, -1, num_slots, -1)
        block = torch.arange(group_size * num_slots, device=device) // num_slots
        own = (block[:, None] == block[None, :]).expand(num_groups, -1, -1)
        self.mask = torch.cat([context.flatten(1, 2), own], -1).unsqueeze(1)  # [groups, 1, G*S, T + G*S]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys = torch.cat([context_k[self.group_row], self._gather(k)], 2)
        values = torch.cat([context_v[self.group_row], self._gather(v)], 2)
        out: Tensor = scaled_dot_product_attention(self._gather(q), keys, values, attn_mask=self.mask, enable_gqa=True)
        groups, heads, _, width = out.shape
        cells = out.view(groups, heads, self.group_size, self.num_slots, width).transpose(1, 2).flatten(0, 1)
        return cells[self.cell]

    def _gather(self, x: Tensor) -> Tensor:
        """``[A, h, S, d]`` -> ``[groups, h, G * S, d]``, zeros in empty places."""
        cells = x.new_zeros(self.num_cells, *x.shape[1:]).index_copy(0, self.cell, x)
        return cells.view(-1, self.group_size, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


class FlexAttention(BlockAttention):
    """Flex attention over all blocks at once, for GPUs; compiled there, and only the visible tiles are computed."""

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
    """``[A, h, S, d]`` -> ``[1, h, A * S, d]``."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


@functools.cache
def _make_mask(compiled: bool) -> Any:
    """The mask of visible tiles; compiled it never exists in full, as it must not on a GPU."""
    return torch.compile(create_block_mask) if compiled else create_block_mask


@functools.cache
def _flex(compiled: bool) -> Any:
    """Flex attention; compiled it computes only the visible tiles, as it must on a GPU."""
    return torch.compile(flex_attention) if compiled else flex_attention
