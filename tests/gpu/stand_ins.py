"""Stand-ins for kernels that no tensor without storage can run: what they keep, and how often they are launched."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from blockdraft.decoding import rounds as decoding_rounds
from blockdraft.drafters import attention as drafter_attention
from blockdraft.drafters import drafter as drafter_module
from blockdraft.losses import fused
from blockdraft.targets import Target, decoder, loading
from blockdraft.targets import attention as target_attention
from blockdraft.targets import target as target_module
from blockdraft.training import trainer

from fake_device import pretend


class _Attended(torch.autograd.Function):
    """Stands in for compiled flex attention: one kernel forward, two backward, keeping what it keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query).zero_()
        log_sum = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        assert grad.shape == out.shape
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _flex(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
    assert query.dtype == key.dtype == value.dtype
    assert enable_gqa
    assert block_mask is not None
    result: Tensor = _Attended.apply(query, key, value)
    return result


def _block_mask(_visible: Any, _b: Any, _h: Any, num_queries: int, num_keys: int, device: str) -> dict[str, Tensor]:
    """Stands in for `create_block_mask`: counts and indices of tiles of 128 by 128, for both passes."""
    rows, columns = -(-num_queries // 128), -(-num_keys // 128)
    shapes = {"kv": (rows, columns), "full_kv": (rows, columns), "q": (columns, rows), "full_q": (columns, rows)}
    return {name: torch.zeros(1, 1, *shape, dtype=torch.int32, device=device) for name, shape in shapes.items()}


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor:
    """Stands in for attention over whole texts, behind a cache, or from one token of each of many texts to its slot.

    Behind a cache a mask has the queries' precision, and the sizes that kernels want.
    """
    assert query.dtype == key.dtype == value.dtype
    assert query.device == key.device == value.device
    assert is_causal or query.shape[1] == key.shape[1]  # keys are not repeated
    if attn_mask is not None:
        assert not is_causal
        assert attn_mask.device == query.device
        if attn_mask.dim() == 2:
            assert attn_mask.dtype == query.dtype
            assert attn_mask.shape == (query.shape[2], key.shape[2])
        else:
            assert attn_mask.dtype == torch.bool
            assert attn_mask.shape == (query.shape[0], 1, 1, key.shape[2])
    return torch.empty_like(query).zero_()


def _norm_in_decoding(x: Tensor, _shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    assert eps is not None
    assert weight is None or weight.dtype == x.dtype
    return torch.empty_like(x).zero_()


class _Normed(torch.autograd.Function):
    """Stands in for CUDA's fused RMSNorm: one kernel forward and two backward, keeping input and a scale per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device))
        return torch.empty_like(x).zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        assert grad.dtype == x.dtype
        return torch.zeros_like(x), torch.zeros_like(weight)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Do as CUDA does: autocast computes norms in float32; dtypes that differ take a slow path, which is refused."""
    assert weight is not None
    del shape, eps
    if torch.is_autocast_enabled("cuda"):
        x, weight = x.float(), weight.float()
    assert x.dtype == weight.dtype
    with torch.autocast("cuda", enabled=False):
        result: Tensor = _Normed.apply(x, weight)
    return result


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Stands in for `nn.Module._apply`, which swaps tensors that this device's storages forbid to swap."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[name] = nn.Parameter(fn(parameter), parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _enter_without_gradients(self: Any) -> None:
    """Stands in for entering inference mode, in which operators are not taken apart into those that are counted."""
    self.before = torch.is_grad_enabled()
    torch.set_grad_enabled(not self.mode and self.before)


def put_in_place() -> None:
    """Pretend a device, and put stand-ins where a kernel would run that no fake tensor can."""
    pretend()
    for checking in (fused, drafter_attention, decoder):
        checking.passes_check = lambda *_, **__: True
    drafter_attention._flex = lambda _compiled: _flex
    drafter_attention._make_mask = lambda _compiled: _block_mask
    target_attention.scaled_dot_product_attention = _sdpa
    decoder.rms_norm = _norm_in_decoding
    decoder._is_supported = lambda model: model.config.model_type in decoder.FAMILIES
    target_module.weights_key = drafter_module.weights_key = lambda _module: 0
    torch.tensor = _tensor
    torch.inference_mode.__enter__ = _enter_without_gradients  # type: ignore[method-assign]
    torch.inference_mode.__exit__ = lambda self, *_: torch.set_grad_enabled(self.before)  # type: ignore
    decoding_rounds.Generator = lambda _device=None: torch.Generator()  # there is none of the fake device
    decoding_rounds.Streams.seed = lambda *_: None
    trainer.Trainer.save = lambda *_: None
    nn.functional.rms_norm = _rms_norm
    nn.Module._apply = _apply  # type: ignore[method-assign]
    Target._refuse_unfaithful = lambda _self: None
    target_module._refuse_non_finite = lambda _model, _name: None
    loading.weights_fingerprint = lambda _module: "0" * 16
    FakeTensor.tolist = lambda self: (self.flatten()[0].item(), [False] * self.numel())[1]
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Stands in for `torch.tensor`, which would ask the device for memory."""
    made = _make_tensor(data, **options)
    return made if device is None else made.to(device)


_make_tensor = torch.tensor
