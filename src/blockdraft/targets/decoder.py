"""Run a forward pass of our own for decoding with Llama, Qwen2 and Qwen3.

Transformers takes about 0.6 ms of operators and Python for each layer, whatever its width; a small target spends most
of its time there. This pass takes the model's weights, does the same arithmetic in fewer operations, and is compared
with transformers' own when it is made. On a CPU, texts that grow side by side by one token each go through it, too.
Other families, packed texts and other batches go through transformers.

A round of speculative decoding passes 1 to 16 tokens through small matrices, so the number of operations and the layout
of the weights decide how long it takes. In a `FusedLayer`, which drafters use too, the products of queries, keys and
values are one, those of gate and up are one, residuals are added by the product before them, and on a CPU the weights
are packed once in the layout of oneDNN instead of at every call.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from blockdraft.selfcheck import compare, cpu_multiplies_bfloat16, passes_check
from blockdraft.targets.attention import HostPositions, Masks, RotaryTable, TextAttention, rotated
from blockdraft.targets.cache import KVCache

FAMILIES = ("llama", "qwen2", "qwen3")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose angles depend on the position alone."""

COPIED_BYTES = 2**30
"""Models up to this size are copied into fused, transposed and packed weights, at up to three times their memory."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Differences from transformers that rounding explains, as a share of the largest value."""

PACKED_ROWS = 8
"""The number of rows that packed weights are laid out for; they serve any other as well."""

PACKED_SIZE = 2**17
"""Weights in float32 with fewer numbers are not packed: calling oneDNN takes as long as it saves."""

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
        rotary, attentions = self.places(len(tokens), cache, at)
        x = torch.nn.functional.embedding(tokens, self.embedding)
        streams = {}
        for i, (layer, attend) in enumerate(zip(self.layers, attentions, strict=True)):
            x = streams[i] = layer(x, rotary, attend)
        features = torch.cat([streams[i] for i in layers], -1) if layers else None
        return self.norm(x), features

    def step(self, tokens: Tensor, positions: Tensor, attentions: "Sequence[Attend]") -> Tensor:
        """Map one token of each of N texts, ``[N]`` at positions ``[N]``, to hidden states ``[N, H]``.

        attentions: of each layer, how the texts attend to what a cache holds of them.
        """
        table = self._table(int(positions.max()) + 1)
        rotary = table.cos.index_select(0, positions), table.sin.index_select(0, positions)
        x = torch.nn.functional.embedding(tokens, self.embedding)
        for layer, attend in zip(self.layers, attentions, strict=True):
            x = layer(x, rotary, attend)
        return self.norm(x)

    def places(
        self, num_rows: int, cache: KVCache, at: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor], list[TextAttention]]:
        """Make room for the next tokens of a text; return their angles, and how they attend in each layer."""
        positions, stores = cache.write(num_rows, self.shape, self.embedding, at)
        end = positions.end if isinstance(positions, HostPositions) else cache.capacity
        mask = self._masks.causal(positions, cache.capacity)
        return self._table(end).at(positions), [TextAttention(store, mask) for store in stores]

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
    """Compare every layer with transformers' on the same input: for a first pass, a block behind it and one token.

    Layer by layer, because in low precision the rounding of a deep model may grow beyond any tolerance by its end,
    transformers' own as much as ours. What a whole pass gives as the first layer's feature is compared as well.
    """
    expected = model.model(probe[None], output_hidden_states=True)
    streams = [*(stream[0] for stream in expected.hidden_states[:-1]), expected.last_hidden_state[0]]
    tolerance, last, parts = TOLERANCE[decoder.embedding.dtype], len(decoder.layers) - 1, (3, 3, len(probe) - 6)
    cache = KVCache(len(decoder.layers), len(probe))
    outputs = [_run_layers(decoder, part, cache) for part in zip(*(x.split(parts) for x in streams[:-1]), strict=True)]
    for i, output in enumerate(map(torch.cat, zip(*outputs, strict=True))):
        if not (streams[i].isfinite().all() and streams[i + 1].isfinite().all()):
            return  # damaged weights are found when they are used
        name, found = ("the last hidden state", decoder.norm(output)) if i == last else (f"layer {i}", output)
        compare(name, found, streams[i + 1], tolerance)
    cache.rollback(0)
    passes = [decoder.forward(part, cache, [0]) for part in probe.split(parts)]
    if last > 0:
        features = [feature for _, feature in passes if feature is not None]
        compare("a feature", torch.cat(features), streams[1], tolerance)
    else:  # the output of a single layer is normalised
        compare("the last hidden state", torch.cat([hidden for hidden, _ in passes]), streams[1], tolerance)


def _run_layers(decoder: Decoder, streams: Sequence[Tensor], cache: KVCache) -> list[Tensor]:
    """Return the output of each layer for an input of its own, ``[T, H]`` each."""
    rotary, attentions = decoder.places(len(streams[0]), cache)
    layers = zip(decoder.layers, streams, attentions, strict=True)
    return [layer(x, rotary, attend) for layer, x, attend in layers]


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


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


# The layers, which targets and drafters share

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Keep keys and values of T tokens, ``[T, kv_heads, d]`` each, and attend with queries ``[T, heads, d]``; the result is
``[T, heads * d]``."""


class Product:
    """Compute ``x W^T + b`` for rows x ``[T, in]``, with W the given weights ``[out, in]`` one under the other.

    On a CPU, in float32, one row is fastest with W transposed in memory, and several are with W packed; in bfloat16,
    packed weights are the fastest for any number.
    """

    def __init__(self, *weights: Tensor, bias: Tensor | None = None, copy: bool = True) -> None:
        """Arrange the weights; without ``copy`` they stay where they are, and several are as many products."""
        self.weights, self.bias, self.copy = weights, bias, copy
        if copy and len(weights) > 1:
            self.weights = (torch.cat(weights),)
        self._across = [weight.t() for weight in self.weights]
        self._packed = _pack(self.weights[0]) if copy and can_pack(self.weights[0]) else None
        self._packed_from = 1 if self.weights[0].dtype == torch.bfloat16 else 2
        if copy and self.weights[0].device.type == "cpu" and (self._packed is None or self._packed_from > 1):
            self._across = [across.contiguous() for across in self._across]

    @property
    def weight(self) -> Tensor:
        """Give the weights as one matrix ``[out, in]``."""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles hold the weights; packed ones can do neither, and are made again."""
        return _product, (self.weights, self.bias, self.copy)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, out]``."""
        if self._packed is not None and x.shape[0] >= self._packed_from:
            out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")
            return out
        if len(self._across) > 1:
            parts = torch.cat([torch.mm(x, across) for across in self._across], -1)
            return parts if self.bias is None else parts + self.bias
        if self.bias is None:
            return torch.mm(x, self._across[0])
        return torch.addmm(self.bias, x, self._across[0])

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return ``residual + x W^T + b``."""
        if self._packed is not None and x.shape[0] >= self._packed_from:
            out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
            return out
        if self.bias is None and len(self._across) == 1:
            return torch.addmm(residual, x, self._across[0])
        return residual + self(x)


def _product(weights: Sequence[Tensor], bias: Tensor | None, copy: bool) -> Product:
    return Product(*weights, bias=bias, copy=copy)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def can_pack(weight: Tensor) -> bool:
    """Return whether products with this weight can use oneDNN's layout: on a CPU where it is fast, and right."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32 and weight.numel() < PACKED_SIZE:
        return False
    if weight.dtype == torch.bfloat16 and not cpu_multiplies_bfloat16():
        return False
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    check = functools.partial(_check_packing, weight.dtype)
    return passes_check("packing weights with oneDNN", weight.device, check, key=(weight.dtype,))


def _check_packing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((24, 40), (5, 40), (5, 24))
    weight, x, y = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    packed, expected = _pack(weight), x.float() @ weight.float().T
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    compare("a product", found, expected, tolerance)
    found = torch.ops.mkldnn._linear_pointwise.binary(x, y, packed, None, "add")
    compare("a product with a sum", found, y.float() + expected, tolerance)


class Norm:
    """Compute ``w x / sqrt(mean(x^2) + eps)`` over the last dimension; ``w`` is ``[.., d]``.

    A GPU has a kernel for it, which sums in float32. PyTorch has none on a CPU. There, in float32,
    ``sqrt(d) w x / hypot(|x|, sqrt(d eps))`` takes half the time; in other dtypes the mean is taken as transformers
    does, in float32, or in x's own precision.
    """

    def __init__(self, weight: Tensor, eps: float, *, in_float32: bool = False) -> None:
        width = weight.shape[-1]
        self.weight, self.eps, self.in_float32 = weight, eps, in_float32
        self._scaled = weight * width**0.5
        self._floor = weight.new_full((), (width * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            if self.weight.dim() == 1:
                return rms_norm(x, x.shape[-1:], self.weight, self.eps)
            return rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight
        if x.dtype == torch.float32:
            length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
            return (x / length).mul_(self._scaled)
        if not self.in_float32:
            return rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight
        y = x.float()
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * y.to(x.dtype)


class FusedLayer:
    """Computes a layer of attention and SwiGLU, made from the weights of a module with transformers' names."""

    def __init__(self, layer: Any, num_heads: int, num_kv_heads: int, head_dim: int, *, copy: bool = True) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [p.bias for p in projections if p.bias is not None]
        self.qkv = Product(*(p.weight for p in projections), bias=torch.cat(biases) if biases else None, copy=copy)
        self.output = Product(attention.o_proj.weight, bias=attention.o_proj.bias, copy=copy)
        self.gate_up = Product(mlp.gate_proj.weight, mlp.up_proj.weight, copy=copy)
        self.down = Product(mlp.down_proj.weight, copy=copy)
        self.input_norm, self.middle_norm = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        self.head_norm = None
        if hasattr(attention, "q_norm"):
            counts = ((attention.q_norm, num_heads), (attention.k_norm, num_kv_heads))
            weight = torch.cat([norm.weight.expand(count, -1) for norm, count in counts])
            self.head_norm = _norm(attention.q_norm, weight)

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Map a stream ``[T, H]`` to ``[T, H]``.

        Args:
            x: the stream.
            rotary: rows of a `RotaryTable`.
            attend: keeps the keys and values of these tokens, and attends with their queries.
        """
        num_rows, num_rotated = x.shape[0], self.num_heads + self.num_kv_heads
        states = self.qkv(self.input_norm(x)).view(num_rows, -1, self.head_dim)
        values = states[:, num_rotated:]
        states = states[:, :num_rotated]
        states = rotated(states if self.head_norm is None else self.head_norm(states), rotary)
        attended = attend(states[:, : self.num_heads], states[:, self.num_heads :], values)
        x = self.output.add_to(x, attended)
        gate, up = self.gate_up(self.middle_norm(x)).chunk(2, -1)
        return self.down.add_to(x, silu(gate).mul_(up))


def norm_of(module: Any) -> Norm:
    """Return the norm of an RMSNorm module, PyTorch's or transformers'."""
    return _norm(module, module.weight)


def _norm(module: Any, weight: Tensor) -> Norm:
    if hasattr(module, "variance_epsilon"):
        return Norm(weight, module.variance_epsilon, in_float32=True)
    return Norm(weight, module.eps)


def weights_key(module: nn.Module) -> tuple[object, ...]:
    """Return what changes with a module's weights: addresses and counts of changes in place."""
    return tuple(map(_weight_key, module.parameters()))


def _weight_key(weight: Tensor) -> object:
    if type(weight) not in (Tensor, nn.Parameter):  # sharded ones have no address
        return id(weight)
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
