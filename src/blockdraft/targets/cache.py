"""Keep keys and values: of one text, with rollback by length, and of many texts side by side, one slot each."""

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from blockdraft.targets.attention import (
    DevicePositions,
    HostPositions,
    Positions,
    SlotAttention,
    Store,
    attending,
    multiplies_whole_rows,
)

if TYPE_CHECKING:
    from blockdraft.targets.target import Target

ROOM_AHEAD = 64
"""Tokens by which the storage of `BatchedKVCache` grows beyond what is needed, or of which it holds a multiple."""


class KVCache(Cache):
    """Holds keys and values of every layer, in storage allocated once.

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
        """Give the number of tokens that it holds."""
        return self.get_seq_length()

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} tokens back to {length}")
        for layer in self._held:
            layer.length = length

    def write(
        self, num_rows: int, shape: tuple[int, int], like: Tensor, at: Tensor | None = None
    ) -> tuple[Positions, list[Store]]:
        """Make room for new tokens of one text; return where they stand, and how each layer is written and read.

        Args:
            num_rows: T, tokens to be written.
            shape: key/value heads and their width d.
            like: a tensor of the right dtype on the right device.
            at: ``[1]`` where they begin, if only the device knows it. Then `length` neither says nor learns it, all of
                the capacity is attended to (see `clear_behind`), and whoever gives it sees to the room.
        """
        keys, values = self.storage([(1, *shape)] * 2, like)
        positions: Positions
        if at is not None:
            positions = DevicePositions(at, num_rows)
        else:
            positions = HostPositions(self.length, self.room_until(self.length + num_rows))
            for layer in self._held:
                layer.length = positions.end
        return positions, positions.stores(keys, values)

    def clear_behind(self, length: int) -> None:
        """Fill the storage behind the kept tokens with zeros: what a mask hides must still be a number."""
        for storage in (self._keys, self._values):
            if storage is not None:
                storage[..., length:, :].zero_()

    @property
    def num_bytes(self) -> int:
        """Give the memory that keys and values take."""
        return sum(x.numel() * x.element_size() for x in (self._keys, self._values) if x is not None)

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


class BatchedKVCache:
    """Runs a target over up to ``num_slots`` texts of up to ``capacity`` tokens, each at its own length.

    The texts in use fill the slots from the front without gaps, so that every pass
    works on slices of the storage. A text that ends gives its slot to the last one.
    The storage grows with the longest text that there was.

    On a CPU, steps of one token go through the package's own forward pass where there is one.
    """

    def __init__(self, target: "Target", num_slots: int, capacity: int) -> None:
        self.target, self.num_slots, self.capacity = target, num_slots, capacity
        self.lengths: list[int] = []
        self._layers = [_BatchedLayer(self) for _ in range(target.num_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._first = 0
        self._seen: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        self._decoder = target.make_decoder() if target.device.type == "cpu" else None
        self._whole_rows = multiplies_whole_rows(target.head)

    def __len__(self) -> int:
        """Return how many texts it holds."""
        return len(self.lengths)

    @torch.inference_mode()
    def add(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read new texts into the next free slots; ``[n, H]`` hidden states of their last tokens."""
        if len(self) + len(texts) > self.num_slots:
            raise ValueError(f"{len(self)} of {self.num_slots} slots are taken; {len(texts)} texts do not fit")
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        if longest > self.capacity:
            raise ValueError(f"a slot holds {self.capacity} tokens; a text has {longest}")
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        self._first, self._seen, self._places = len(self), None, None
        device = self.target.device
        positions = torch.arange(longest, device=device).expand(len(texts), -1)
        hidden = self._forward(_sent(tokens, device), positions)
        self.lengths += lengths
        last = _sent(torch.tensor(lengths) - 1, device)
        return hidden[torch.arange(len(texts), device=device), last]

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every text; ``[n, H]`` hidden states."""
        longest = max(self.lengths) + 1
        if longest > self.capacity:
            raise ValueError(f"a slot holds {self.capacity} tokens; a text needs {longest}")
        device = self.target.device
        new, lengths = _sent(torch.tensor([tokens, self.lengths]), device)
        self._first = 0
        self._seen = (torch.arange(self._span(longest), device=device) <= lengths[:, None])[:, None, None]
        self._places = torch.arange(len(self), device=device), lengths  # the same for every layer, sent once
        if self._decoder is not None:
            hidden = self._decoder.step(new, lengths, [layer.attend for layer in self._layers])
        else:
            hidden = self._forward(new[:, None], lengths[:, None])[:, 0]
        self.lengths = [length + 1 for length in self.lengths]
        return hidden

    def _span(self, longest: int) -> int:
        """Return how many positions a step reads: the longest text's, or all that are stored if that is faster."""
        room = self._layers[0].room
        if self._whole_rows and longest > room // 2:
            return max(room, self.room_for(longest, room))
        return longest

    def room_for(self, length: int, room: int) -> int:
        """Return how many positions to store for texts of this length, where there is ``room`` already."""
        wanted = ROOM_AHEAD * math.ceil(length / ROOM_AHEAD) if self._whole_rows else max(2 * room, length + ROOM_AHEAD)
        return min(self.capacity, wanted)

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        """Forget the text of a slot; the last text moves there."""
        last = len(self) - 1
        if slot != last:
            for layer in self._layers:
                layer.move(last, slot, self.lengths[last])
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        with attending(self.target.model, SlotAttention(self._seen)):
            hidden: Tensor = self.target.model.model(
                input_ids=tokens, position_ids=positions, past_key_values=self._cache, use_cache=True
            ).last_hidden_state
        return hidden


class _BatchedLayer(CacheLayerMixin):
    """Holds keys and values of one layer, ``[slots, kv_heads, room, d]``."""

    is_sliding = False

    def __init__(self, slots: BatchedKVCache) -> None:
        super().__init__()
        # a proxy: in a circle of references, gigabytes would wait for a collector that counts objects and not bytes
        self.slots: BatchedKVCache = weakref.proxy(slots)

    @property
    def room(self) -> int:
        """Give how many positions of each text it can hold as it is."""
        return 0 if self.keys is None else self.keys.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_empty(self.slots.num_slots, x.shape[1], 0, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        seen = self.slots._seen
        self._reserve(key_states.shape[2] if seen is None else seen.shape[-1])
        if seen is None or self.slots._places is None:
            rows = slice(self.slots._first, self.slots._first + key_states.shape[0])
            self.keys[rows, :, : key_states.shape[2]] = key_states
            self.values[rows, :, : key_states.shape[2]] = value_states
            return key_states, value_states
        rows_at, positions = self.slots._places
        self.keys[rows_at, :, positions] = key_states[:, :, 0]
        self.values[rows_at, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows_at), :, : seen.shape[-1]], self.values[: len(rows_at), :, : seen.shape[-1]]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append a token to each text, keys and values ``[N, kv_heads, d]``, and attend from it: ``[N, heads * d]``."""
        held = self.update(keys.unsqueeze(2), values.unsqueeze(2))
        attention = SlotAttention(self.slots._seen)
        return attention(queries.unsqueeze(2), *held, None).flatten(1)

    def _reserve(self, length: int) -> None:
        """Make room for texts of this length, zeros at first: what is masked must still be a number."""
        assert self.keys is not None
        assert self.values is not None
        if length > self.room:
            room = self.slots.room_for(length, self.room)
            self.keys, self.values = _widened(self.keys, room), _widened(self.values, room)

    def move(self, source: int, to: int, length: int) -> None:
        """Copy one text's keys and values to another slot."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[to, :, :length] = self.keys[source, :, :length]
        self.values[to, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions are given, and no mask is asked for

    def get_max_length(self) -> int:
        return self.slots.capacity


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device; a GPU fetches them while the host goes on."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _widened(held: Tensor, room: int) -> Tensor:
    wider = held.new_zeros(*held.shape[:2], room, held.shape[3])
    wider[:, :, : held.shape[2]] = held
    return wider
