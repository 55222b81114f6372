"""Build the backbone of DFlash and DSpark: Qwen3-style layers over a block, with the target's features as context.

Each layer takes keys and values from ``[context ; block]`` through the same
projections, queries from the block alone. The context, ``hidden_norm(fc(features))``,
is computed once for all layers and does not pass through their input norm.
DSpark's Markov and confidence heads are here too. Tensor names are those of the published checkpoints.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from blockdraft.drafters.config import DrafterConfig
from blockdraft.targets.attention import (
    DevicePositions,
    HostPositions,
    Masks,
    Positions,
    RotaryTable,
    TextAttention,
    rotated,
)
from blockdraft.targets.decoder import FusedLayer, Norm, Product, norm_of

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Rotary:
    """Give cos and sin of rotary positions, ``[..., d]`` for positions ``[...]``."""

    def __init__(self, config: DrafterConfig) -> None:
        # on the CPU even where a drafter is built without storage, on the device "meta"
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        self.frequencies = 1.0 / config.rope_theta**exponents
        self._on_device: Tensor | None = None

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._on_device is None or self._on_device.device != positions.device:
            self._on_device = self.frequencies.to(positions.device)  # once: the host waits for it
        angles = positions.unsqueeze(-1).float() * self._on_device
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class RMSNorm(nn.RMSNorm):
    """Normalise by the root mean square, in the precision of the input.

    Weights stay in float32 under autocast. CUDA's would then return float32, and with it a residual stream of twice
    the size, though its kernel sums in float32 whatever it returns; a CPU's has no kernel for two dtypes at once.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        autocast_widens = x.is_cuda and torch.is_autocast_enabled("cuda")
        if weight is None or (weight.dtype == x.dtype and not autocast_widens):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``[N, heads, T, d]`` by cos and sin ``[N, T, d]``."""
    cos, sin = (part.unsqueeze(1) for part in rotary)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attention(nn.Module):
    """Hold the projections and head norms of a layer; how blocks attend is given from outside."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries ``[N, heads, T, d]`` of hidden states ``[N, T, H]``."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)

    def keys_and_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values, ``[N, kv_heads, T, d]`` each; for the block and for the context alike."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rotary), self._heads(self.v_proj(x))

    def output(self, attended: Tensor) -> Tensor:
        """Map what the heads attended to, ``[N, heads, T, d]``, to hidden states ``[N, T, H]``."""
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Compute SwiGLU: ``down(silu(gate x) * up x)``."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    """Run pre-norm attention and MLP on the block's stream."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def context(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the context ``[N, T, H]``, which passes no norm of the layer."""
        return self.self_attn.keys_and_values(context, rotary)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        context: Tensor,
        context_rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Map a block's stream ``[A, S, H]`` to ``[A, S, H]``, given the context ``[N, T, H]``."""
        return self.block(x, rotary, self.context(context, context_rotary), attend)

    def block(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Do the same, given the context's keys and values."""
        normed = self.input_layernorm(x)
        k, v = self.self_attn.keys_and_values(normed, rotary)
        attended = attend(self.self_attn.queries(normed, rotary), k, v, *context)
        x = x + self.self_attn.output(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """Compute e_k from hidden states and previous tokens; ``markov_w2.weight`` ``[V, r]`` maps it to logits.

    The Markov head adds ``W2 e_k`` to the logits of position k, with e_k of low rank
    r made from the token before, ``x_{k-1}`` (x_0 is the anchor):

        vanilla   e_k = W1[x_{k-1}]
        gated     e_k = sigmoid(G [h_k ; W1 x_{k-1}]) * W1 x_{k-1}
        rnn       [g ; c ; o] = J [s ; W1 x_{k-1} ; h_k],  e_k = tanh(o),
                  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  s_0 = 0
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov_head
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_tokens, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def initial_state(self, hidden: Tensor) -> Tensor:
        """Return s_0 ``[A, r]``; heads without memory ignore it."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take one position: h_k ``[A, H]``, x_{k-1} ``[A]``, s ``[A, r]`` -> e_k ``[A, r]`` and the next s."""
        embedded = torch.embedding(self.markov_w1.weight, previous)
        if self.kind == "gated":
            return self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid() * embedded, state
        if self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            keep = gate.sigmoid()
            return output.tanh(), keep * state + (1 - keep) * candidate.tanh()
        return embedded, state

    def add_to(self, logits: Tensor, embedded: Tensor) -> Tensor:
        """Return ``logits + W2 e_k`` in float32, from logits ``[A, V]`` in float32 and e_k ``[A, r]``."""
        across = self.markov_w2.weight.t()
        if across.dtype == torch.float32:
            return torch.addmm(logits, embedded, across)
        return logits + (embedded @ across).float()

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Take all positions along known tokens: ``[A, B, H]``, ``[A, B]`` -> ``[A, B, r]``."""
        if self.kind != "rnn":
            return self.step(hidden, previous, hidden)[0]
        state, outputs = self.initial_state(hidden), []
        for k in range(hidden.shape[1]):
            output, state = self.step(hidden[:, k], previous[:, k], state)
            outputs.append(output)
        return torch.stack(outputs, 1)


class ConfidenceHead(nn.Module):
    """Estimate the chance that position k is kept, ``sigmoid(w [h_k ; W1 x_{k-1}] + b)``; trained on the overlap."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return logits of the confidence, ``[...]``, from h ``[..., H]`` and W1 x ``[..., r]``."""
        logits: Tensor = self.proj(torch.cat([hidden, embedded], -1)).squeeze(-1)
        return logits


class DraftingWeights:
    """Arrange a drafter's weights for drafting one block: fused, packed on a CPU, and copied, so not trained.

    The context is the same for all layers, so one product gives the keys and values of all of them.
    """

    def __init__(self, config: DrafterConfig, fc: nn.Linear, hidden_norm: nn.RMSNorm, layers: Sequence[Layer]) -> None:
        attentions = [layer.self_attn for layer in layers]
        self.fc, self.hidden_norm = Product(fc.weight), norm_of(hidden_norm)
        self.context = Product(*(p.weight for a in attentions for p in (a.k_proj, a.v_proj)))
        weights = torch.stack([a.k_norm.weight for a in attentions])  # [layers, d]
        self.key_norm = Norm(weights.repeat_interleave(config.num_kv_heads, 0), config.rms_norm_eps)
        self.layers = [FusedLayer(layer, config.num_heads, config.num_kv_heads, config.head_dim) for layer in layers]


class ContextCache:
    """Keep keys and values of the context, layer by layer, in storage allocated once.

    A block's own keys and values are written right behind the context and overwritten by whatever comes next: they
    are never part of the cache. Where the context ends is known to the host, as `length`, or given as ``at`` ``[1]``
    on the device; then `length` neither says nor learns it, and all of the storage is read under a mask.
    """

    def __init__(self, weights: DraftingWeights, config: DrafterConfig, capacity: int, rotary: Rotary) -> None:
        like = weights.fc.weight
        self.room = capacity + config.num_slots
        self.storage = like.new_empty(2, config.num_layers, config.num_kv_heads, self.room, config.head_dim)
        self.rotary = RotaryTable(*rotary(torch.arange(self.room, device=like.device), like.dtype))
        self.masks = Masks(config.num_heads // config.num_kv_heads, like)
        self.weights, self.capacity = weights, capacity
        self.length = 0

    def extend(self, features: Tensor, at: Tensor | None = None) -> None:
        """Append the context of features ``[T, K * H]``."""
        _two, layers, heads, _room, width = self.storage.shape
        positions = self._positions(len(features), at)
        context = self.weights.hidden_norm(self.weights.fc(features))
        projected = self.weights.context(context).view(len(features), layers, 2, heads, width)
        keys = self.weights.key_norm(projected[:, :, 0].flatten(1, 2))  # [T, layers * heads, d]
        keys = rotated(keys, self.rotary.at(positions)).unflatten(1, (layers, heads))
        positions.put(self.storage[0], keys.permute(1, 2, 0, 3))
        positions.put(self.storage[1], projected[:, :, 1].permute(1, 2, 0, 3))
        if at is None:
            self.length += len(features)

    def block(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """Run the layers over a block's stream ``[S, H]``, which sees all of the context and itself."""
        positions = self._positions(len(x), at)
        rotary, mask = self.rotary.at(positions), self.masks.whole(positions, self.room)
        stores = positions.stores(*self.storage.unsqueeze(2))
        for layer, store in zip(self.weights.layers, stores, strict=True):
            x = layer(x, rotary, TextAttention(store, mask))
        return x

    def clear_behind(self, length: int) -> None:
        """Fill the storage behind the kept tokens with zeros: what a mask hides must still be a number."""
        self.storage[..., length:, :].zero_()

    @property
    def num_bytes(self) -> int:
        """Give the memory that keys and values take."""
        return self.storage.numel() * self.storage.element_size()

    def _positions(self, num_rows: int, at: Tensor | None) -> Positions:
        if at is not None:
            return DevicePositions(at, num_rows)
        return HostPositions(self.length, self.length + num_rows)
