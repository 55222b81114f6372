"""Attend in our own way inside a transformers model: no mask is built, the layout of the batch says who sees whom."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

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
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=self.seen, scale=scale)
        return out.reshape(num, 1, heads, width)


@dataclass(frozen=True)
class Span:
    """Says where a text lies in a batch of packed rows: at positions ``start <= t < end`` of a row."""

    row: int
    start: int
    end: int


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


def span_positions(spans: Sequence[Span], num_rows: int, length: int) -> Tensor:
    """Return positions ``[N, T]`` counted from the start of each span, 0 outside."""
    positions = torch.zeros(num_rows, length, dtype=torch.long)
    for span in spans:
        positions[span.row, span.start : span.end] = torch.arange(span.end - span.start)
    return positions
