"""The backbone that DFlash and DSpark share: Qwen3-style layers over a block, with the target's features as context.

Each layer takes keys and values from ``[context ; block]`` through the same
projections, queries from the block alone. The context, ``hidden_norm(fc(features))``,
is computed once for all layers and does not pass through their input norm.
Tensor names are those of the published checkpoints.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from blockdraft.drafters.config import DrafterConfig

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

    CUDA's autocast would return float32, and with it a residual stream of twice the size; its kernel sums in float32
    whatever it returns.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (x.is_cuda and torch.is_autocast_enabled("cuda") and self.weight is not None):
            return super().forward(x)
        with torch.autocast("cuda", enabled=False):
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


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


class ContextCache:
    """Keep keys and values of the context, layer by layer, in storage allocated once.

    The context is the same for all layers, so one product gives the keys and values of all of them. A block's own are
    written right behind the context and overwritten by whatever comes next: they are never part of the cache.
    """

    def __init__(self, config: DrafterConfig, capacity: int, layers: Sequence[Layer]) -> None:
        attentions = [layer.self_attn for layer in layers]
        self.projections = torch.cat([p.weight for a in attentions for p in (a.k_proj, a.v_proj)])
        self.norms = torch.stack([a.k_norm.weight for a in attentions])[:, None, None, None]
        self.eps = config.rms_norm_eps
        shape = (config.num_layers, 2, 1, config.num_kv_heads, capacity + config.num_slots, config.head_dim)
        self.storage = self.projections.new_empty(shape)
        self.capacity = capacity
        self.length = 0

    def extend(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> None:
        """Append context ``[1, T, H]``."""
        layers, two, _one, heads, _room, width = self.storage.shape
        projected = linear(context, self.projections).unflatten(-1, (layers, two, heads, width))
        k, v = projected.permute(3, 2, 0, 4, 1, 5)  # [layers, 1, heads, T, d]
        end = self.length + context.shape[1]
        self.storage[:, 0, :, :, self.length : end] = rotate(rms_norm(k, (width,), eps=self.eps) * self.norms, rotary)
        self.storage[:, 1, :, :, self.length : end] = v
        self.length = end

    def attend(self, layer: int) -> Attend:
        """Return the attention of one block to all of the context and to itself.

        Nothing is masked, so the query heads that share a key/value head stand in the place of query positions.
        """

        def run(q: Tensor, k: Tensor, v: Tensor, _context_k: Tensor, _context_v: Tensor) -> Tensor:
            end = self.length + k.shape[2]
            keys, values = self.storage[layer, :, :, :, :end]
            keys[:, :, self.length :] = k
            values[:, :, self.length :] = v
            folded = q.reshape(1, k.shape[1], -1, q.shape[3])
            return scaled_dot_product_attention(folded, keys, values).view(q.shape)

        return run
