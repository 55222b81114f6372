"""Say who sees whom in a pass of a target, and where its tokens stand: attention, positions, angles and masks.

Inside a transformers model we attend in our own way: no mask is built, the layout of the batch says who sees whom.

Behind a cache, the position of a token is known to the host or to the device. Known to the host, a pass reads and
writes slices as long as the text is, which is the least work. Known to the device alone, every tensor has the size of
the cache, and a mask hides what is not there: then the shapes of a round do not depend on how much was accepted, the
host need not wait to learn it, and a CUDA graph can hold the round.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from blockdraft.selfcheck import cpu_multiplies_bfloat16

NAME = "blockdraft"


class TargetAttention(ABC):
    """Decides how the tokens of one pass attend to each other."""

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend from query ``[N, heads, T, d]`` to key and value ``[N, kv_heads, L, d]``: ``[N, T, heads, d]``."""


class SlotAttention(TargetAttention):
    """Attends causally within whole new texts, or from one token per text to ``seen`` ``[N, 1, 1, L]``.

    For one token, the query heads that share a key/value head stand in the place
    of query positions, so that keys and values are not repeated.
    """

    def __init__(self, seen: Tensor | None) -> None:
        self.seen = seen

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        if self.seen is None:
            return _causal(query, key, value, scale)
        num, heads, _one, width = query.shape
        grouped = query.view(num, key.shape[1], heads // key.shape[1], width)
        if multiplies_whole_rows(key) and key.is_contiguous() and value.is_contiguous():
            out = _by_products(grouped, key, value, self.seen, scale)
        else:
            out = scaled_dot_product_attention(grouped, key, value, attn_mask=self.seen, scale=scale)
        return out.reshape(num, 1, heads, width)


def multiplies_whole_rows(x: Tensor) -> bool:
    """Return whether one token per text attends fastest by two batched products over all of the storage.

    In bfloat16 on a CPU that has such arithmetic this takes less than half of the time of PyTorch's fused attention,
    but only over tensors without gaps: slices would be copied.
    """
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu_multiplies_bfloat16()


def _by_products(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    """Attend from query ``[N, kv_heads, G, d]`` to ``seen`` positions, with the softmax in float32 or finer."""
    products = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).view(*query.shape[:3], -1)
    scores = products.to(torch.promote_types(query.dtype, torch.float32))
    scores = scores.mul_(query.shape[3] ** -0.5 if scale is None else scale).masked_fill_(~seen, -torch.inf)
    probs = scores.softmax(-1).to(value.dtype)
    return torch.bmm(probs.flatten(0, 1), value.flatten(0, 1)).view_as(query)


@dataclass(frozen=True)
class Span:
    """Says where a text lies in a batch of packed rows: at positions ``start <= t < end`` of a row."""

    row: int
    start: int
    end: int


def span_positions(spans: Sequence[Span], num_rows: int, length: int) -> Tensor:
    """Return positions ``[N, T]`` counted from the start of each span, 0 outside."""
    positions = torch.zeros(num_rows, length, dtype=torch.long)
    for span in spans:
        positions[span.row, span.start : span.end] = torch.arange(span.end - span.start)
    return positions


class SpanAttention(TargetAttention):
    """Attends causally within each span and never between them; positions outside all spans give zeros."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        num, heads, length, width = query.shape
        out = query.new_zeros(num, length, heads, width)
        for span in self.spans:
            row, part = slice(span.row, span.row + 1), slice(span.start, span.end)
            out[row, part] = _causal(query[row, :, part], key[row, :, part], value[row, :, part], scale)
        return out


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    out: Tensor = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _dispatch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers calls this; what is in force was set by `attending`."""
    del module, attention_mask
    unknown = [name for name in ("sliding_window", "softcap", "s_aux") if others.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)} is not what blockdraft computes")
    return _in_force[-1](query, key, value, scaling), None


_in_force: list[TargetAttention] = []
AttentionInterface.register(NAME, _dispatch)


@contextmanager
def attending(model: PreTrainedModel, attention: TargetAttention) -> Iterator[None]:
    """Give the model this attention, and its own one back afterwards."""
    config = model.config
    usual = config._attn_implementation
    config._attn_implementation = NAME
    _in_force.append(attention)
    try:
        yield
    finally:
        _in_force.pop()
        config._attn_implementation = usual


Store = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""Write keys and values of T tokens, ``[kv_heads, T, d]`` each; return all to attend to, ``[1, kv_heads, L, d]``."""

MASKED_ROWS = 64
"""Up to this number of rows behind a cache share a mask that is made once."""


class Positions(ABC):
    """Holds the places of T tokens that follow each other in a text."""

    @abstractmethod
    def of(self, table: Tensor) -> Tensor:
        """Return their rows ``[T, ..]`` of a table over all positions."""

    @abstractmethod
    def put(self, storage: Tensor, values: Tensor) -> None:
        """Write values ``[.., T, d]`` to their places in storage ``[.., capacity, d]``."""

    @abstractmethod
    def stores(self, keys: Tensor, values: Tensor) -> list[Store]:
        """Return for each layer of storage ``[layers, 1, kv_heads, capacity, d]`` how it is written and read."""


class HostPositions(Positions):
    """Holds the places ``start <= t < end``; what lies behind them is not read."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def of(self, table: Tensor) -> Tensor:
        return table[self.start : self.end]

    def put(self, storage: Tensor, values: Tensor) -> None:
        storage[..., self.start : self.end, :] = values

    def stores(self, keys: Tensor, values: Tensor) -> list[Store]:
        new = (part[:, 0, :, self.start : self.end].unbind(0) for part in (keys, values))
        held = (part[:, :, :, : self.end].unbind(0) for part in (keys, values))
        return [functools.partial(_append, *parts) for parts in zip(*new, *held, strict=True)]


class DevicePositions(Positions):
    """Holds the T places from ``first`` ``[1]`` on; all of the storage is read, under a mask."""

    def __init__(self, first: Tensor, num_rows: int) -> None:
        self.at = first + torch.arange(num_rows, device=first.device)

    def of(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.at)

    def put(self, storage: Tensor, values: Tensor) -> None:
        storage.index_copy_(-2, self.at, values)

    def stores(self, keys: Tensor, values: Tensor) -> list[Store]:
        return [functools.partial(self._insert, *parts) for parts in zip(keys.unbind(0), values.unbind(0), strict=True)]

    def _insert(self, all_keys: Tensor, all_values: Tensor, keys: Tensor, values: Tensor) -> Sequence[Tensor]:
        self.put(all_keys[0], keys)
        self.put(all_values[0], values)
        return all_keys, all_values


def _append(
    new_keys: Tensor, new_values: Tensor, all_keys: Tensor, all_values: Tensor, keys: Tensor, values: Tensor
) -> Sequence[Tensor]:
    new_keys.copy_(keys)
    new_values.copy_(values)
    return all_keys, all_values


class RotaryTable:
    """Keep cos and sin of all positions, ``[P, 1, d]``, the signs of the rotation in the sines."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[-1] // 2
        self.cos = cos.unsqueeze(1).contiguous()
        self.sin = torch.cat([-sin[:, :half], sin[:, half:]], -1).unsqueeze(1)

    def at(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the positions."""
        return positions.of(self.cos), positions.of(self.sin)


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``[T, heads, d]`` by the rows of a `RotaryTable`: ``x cos + [-x_2 ; x_1] sin``."""
    cos, sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Mask:
    """Say who sees whom in a pass: everybody everything, causally from the start, or by a mask ``[T * groups, L]``."""

    def __init__(self, values: Tensor | None = None, *, is_causal: bool = False) -> None:
        self.values, self.is_causal = values, is_causal


class TextAttention:
    """Attends from new tokens of one text to what its cache holds and to each other.

    store: writes keys and values behind those that are held, and returns all. mask: who sees whom.
    """

    def __init__(self, store: Store, mask: Mask) -> None:
        self.store, self.mask = store, mask

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with queries ``[T, heads, d]``, keys and values ``[T, kv_heads, d]``; ``[T, heads * d]``.

        The query heads that share a key/value head stand in the place of query positions, so that keys and values
        are not repeated.
        """
        num_rows, kv_heads, width = keys.shape
        all_keys, all_values = self.store(keys.transpose(0, 1), values.transpose(0, 1))
        if self.mask.is_causal:
            query = queries.transpose(0, 1).unsqueeze(0)
            return _causal(query, all_keys, all_values, None)[0].flatten(1)
        grouped = queries.view(num_rows, kv_heads, -1, width)
        folded = grouped.transpose(0, 1).reshape(1, kv_heads, -1, width)
        out: Tensor = scaled_dot_product_attention(folded, all_keys, all_values, attn_mask=self.mask.values)
        return out.view(kv_heads, num_rows, -1, width).transpose(0, 1).reshape(num_rows, -1)


class Masks:
    """Make the masks of T rows behind any number of held tokens; most of them are slices of one tensor.

    groups: query heads that share a key/value head, and stand in the mask one under the other.
    like: a tensor of the stream's dtype on its device.
    """

    def __init__(self, groups: int, like: Tensor) -> None:
        self.groups, self.like = groups, like
        self._capacity, self._whole = 0, like.new_empty(0)

    def causal(self, positions: Positions, capacity: int) -> Mask:
        """Let each row see what stands before it, and itself."""
        if isinstance(positions, DevicePositions):
            return Mask(self._hiding(positions.at, capacity))
        assert isinstance(positions, HostPositions)
        start, end = positions.start, positions.end
        num_rows = end - start
        if num_rows == 1:
            return Mask()
        if start == 0:
            return Mask(is_causal=True)
        steps = torch.arange(num_rows, device=self.like.device)
        if num_rows > MASKED_ROWS:
            return Mask(self._hiding(start + steps, end))
        if capacity > self._capacity:
            steps = torch.arange(MASKED_ROWS, device=self.like.device)
            self._capacity, self._whole = capacity, self._hiding(capacity + steps, capacity + MASKED_ROWS)
        shift = self._capacity - start
        mask = self._whole[: num_rows * self.groups, shift : shift + end]
        return Mask(mask if mask.device.type == "cpu" else mask.contiguous())  # kernels on GPUs want it aligned

    def whole(self, positions: Positions, capacity: int) -> Mask:
        """Let all rows see what stands before them, and each other."""
        if isinstance(positions, DevicePositions):
            return Mask(self._hiding(positions.at[-1:].expand(len(positions.at)), capacity))
        return Mask()

    def _hiding(self, last: Tensor, num_columns: int) -> Tensor:
        """Return ``[T * groups, columns]`` in which row t sees the columns up to ``last[t]``."""
        columns = torch.arange(num_columns, device=self.like.device)
        hidden = columns > last[:, None].expand(-1, self.groups).reshape(-1, 1)
        return torch.zeros(hidden.shape, dtype=self.like.dtype, device=self.like.device).masked_fill_(
            hidden, -torch.inf
        )
