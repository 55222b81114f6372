"""Run a forward pass of our own for decoding with Llama, Qwen2 and Qwen3, one text at a time.

Transformers takes about 0.6 ms of operators and Python for each layer, whatever its width; a small target spends most
of its time there. This pass takes the model's weights, does the same arithmetic in fewer operations, and is compared
with transformers' own when it is made. Other families, packed texts and batches go through transformers.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.selfcheck import compare, passes_check
from blockdraft.targets.cache import KVCache
from blockdraft.targets.layers import FusedLayer, Product, norm_of
from blockdraft.targets.positions import HostPositions, Masks, RotaryTable

FAMILIES = ("llama", "qwen2", "qwen3")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose angles depend on the position alone."""

COPIED_BYTES = 2**30
"""Models up to this size are copied into fused, transposed and packed weights, at up to three times their memory."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Differences from transformers that rounding explains, as a share of the largest value."""

_checks = itertools.count()


class Decoder:
    """Run a target over tokens that follow what a cache holds."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, decoder = model.config, model.model
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.shape = (kv_heads, width)
        self.embedding: Tensor = decoder.embed_tokens.weight
        copy = sum(p.numel() * p.element_size() for p in model.parameters()) <= COPIED_BYTES
        self.layers = [FusedLayer(layer, heads, kv_heads, width, copy=copy) for layer in decoder.layers]
        self.norm = norm_of(decoder.norm)
        self.head = Product(_weight(model.get_output_embeddings()), copy=copy)
        self._rotary_embedding = decoder.rotary_emb
        self._rotary = [RotaryTable(*(self.embedding.new_empty(0, width) for _ in range(2)))]
        self._masks = Masks(heads // kv_heads, self.embedding)

    def forward(
        self, tokens: Tensor, cache: KVCache, layers: Sequence[int], at: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map tokens ``[T]`` to hidden states after the final norm, ``[T, H]``, and features ``[T, K * H]``.

        ``at`` ``[1]`` is the first token's position if only the device knows it; see `KVCache.write`.
        """
        positions, stores = cache.write(len(tokens), self.shape, self.embedding, at)
        end = positions.end if isinstance(positions, HostPositions) else cache.capacity
        rotary = self._table(end).at(positions)
        mask = self._masks.causal(positions, cache.capacity)
        x = torch.nn.functional.embedding(tokens, self.embedding)
        streams = {}
        for i, (layer, store) in enumerate(zip(self.layers, stores, strict=True)):
            x = streams[i] = layer(x, rotary, store, mask)
        features = torch.cat([streams[i] for i in layers], -1) if layers else None
        return self.norm(x), features

    def _table(self, end: int) -> RotaryTable:
        """Return the angles of at least ``end`` positions."""
        known = self._rotary[-1].cos.shape[0]
        if end > known:
            positions = torch.arange(max(end, 2 * known, 256), device=self.embedding.device)
            cos, sin = self._rotary_embedding(self.embedding, positions[None])
            self._rotary.append(RotaryTable(cos[0], sin[0]))  # the others stay: a CUDA graph may read them
        return self._rotary[-1]


@torch.no_grad()
def decoder_of(model: PreTrainedModel) -> Decoder | None:
    """Return a decoder for this model, or None if it must go through transformers."""
    if not _is_supported(model):
        return None
    decoder = Decoder(model)
    probe = torch.arange(7, device=decoder.embedding.device) % decoder.embedding.shape[0]
    is_right = passes_check(
        "the package's own forward pass",
        probe.device,
        lambda: _check(decoder, model, probe),
        key=(next(_checks),),  # every model has its own
    )
    return decoder if is_right else None


def _check(decoder: Decoder, model: PreTrainedModel, probe: Tensor) -> None:
    """Compare hidden states and a feature with transformers', for a first pass, a block behind it and one token."""
    expected = model.model(probe[None], output_hidden_states=True)
    cache = KVCache(len(decoder.layers), len(probe))
    parts = [decoder.forward(part, cache, [0]) for part in probe.split([3, 3, 1])]
    tolerance = TOLERANCE[decoder.embedding.dtype]
    wanted = {"the last hidden state": expected.last_hidden_state, "a feature": expected.hidden_states[1]}
    if len(decoder.layers) == 1:
        del wanted["a feature"]  # it would be normalised
    for i, (name, value) in enumerate(wanted.items()):
        if value.isfinite().all():  # damaged weights are found when they are used
            compare(name, torch.cat([_given(part[i]) for part in parts]), value[0], tolerance)


def _is_supported(model: PreTrainedModel) -> bool:
    """Return whether the model is of a known family, and as it left the library."""
    config, decoder = model.config, model.model
    parameters = list(model.parameters())
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and getattr(config, "hidden_act", None) == "silu"
        and config._attn_implementation in ("sdpa", "eager")
        and rope.get("rope_type", "default") in STATIC_ROTARY
        and rope.get("partial_rotary_factor", 1) == 1
        and getattr(config, "pretraining_tp", 1) == 1
        and not getattr(config, "mlp_bias", False)
        and all(type(p) in (Tensor, nn.Parameter) for p in parameters)
        and len({(p.device, p.dtype) for p in parameters}) == 1
        and parameters[0].dtype in TOLERANCE
        and all(_is_plain(module) for module in decoder.modules())
    )


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module does what its class says: nothing is hooked in, replaced or quantized."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers leaves hooks behind that only look, once hidden states were asked for
    changed = "forward" in module.__dict__ or any("output_capturing" not in hook.__module__ for hook in hooks)
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return not changed and (not is_matrix or type(module) in (nn.Linear, nn.Embedding))


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight
