"""A key/value cache with room for the whole text from the start, and rollback by length."""

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
        self._held = [_Layer(capacity) for _ in range(num_layers)]
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


class _Layer(CacheLayerMixin):
    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, width)
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; {end} were needed")
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def reset(self) -> None:
        self.length = 0
