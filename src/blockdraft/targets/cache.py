"""A key/value cache with room for the whole text from the start, and rollback by length."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVCache(Cache):
    """Keys and values of every layer, in storage allocated once.

    A forward pass writes behind what is there; `rollback` forgets everything
    from some length on by moving that length, and copies nothing.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self._held = [_Layer(self) for _ in range(num_layers)]
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        super().__init__(layers=list(self._held))

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.get_seq_length()

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} tokens back to {length}")
        for layer in self._held:
            layer.length = length

    def write(self, num_rows: int, shape: tuple[int, int], like: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Make room for so many tokens of one text and return where they go, and all that is held with them.

        Args:
            num_rows: T, tokens to be written.
            shape: key/value heads and their width d.
            like: a tensor of the right dtype on the right device.

        Returns:
            Keys and values of each layer in turn: ``[kv_heads, T, d]`` to be written to, and ``[1, kv_heads, L, d]``.
        """
        start, end = self.length, self.room_until(self.length + num_rows)
        keys, values = self.storage([(1, *shape)] * 2, like)
        new = [part[:, 0, :, start:end].unbind(0) for part in (keys, values)]
        held = [part[:, :, :, :end].unbind(0) for part in (keys, values)]
        for layer in self._held:
            layer.length = end
        return _in_turn(new), _in_turn(held)

    def room_until(self, end: int) -> int:
        """Return ``end``, refused if it lies beyond the capacity."""
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; {end} were needed")
        return end

    def storage(self, shapes: Sequence[tuple[int, int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all layers, ``[layers, N, heads, capacity, d]``; allocated when first used."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                like.new_empty(len(self._held), batch, heads, self.capacity, width) for batch, heads, width in shapes
            )
            for layer, k, v in zip(self._held, self._keys, self._values, strict=True):
                layer.keys, layer.values, layer.is_initialized = k, v, True
        return self._keys, self._values


def _in_turn(pair: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [part for both in zip(*pair, strict=True) for part in both]


class _Layer(CacheLayerMixin):
    is_sliding = False
    is_croppable = True

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in (key_states, value_states)]
        self.cache.storage(shapes, key_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.length, self.cache.room_until(self.length + key_states.shape[-2])
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.cache.capacity

    def reset(self) -> None:
        self.length = 0
