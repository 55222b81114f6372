"""Whether the drafter's layers are compiled: on a GPU, if compiled ones then compute what they should."""

import torch
from torch import Tensor

from blockdraft.drafters.attention import Anchors, BlockAttention, ReferenceAttention
from blockdraft.drafters.backbone import Layer
from blockdraft.drafters.config import DrafterConfig, SlotLayout
from blockdraft.drafters.drafter import default_attention
from blockdraft.selfcheck import compare, passes_check

PART = "the drafter's compiled layers"
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
"""Products in float32 may round their factors to ten bits on a GPU."""


def compiles(asked: bool | None, device: torch.device, precision: torch.dtype) -> bool:
    """Return whether to compile: as asked; if not asked, on CUDA, where a small layer first has to pass a check.

    On CUDA a layer that is asked for and fails raises `SelfCheckError`.
    """
    if device.type != "cuda":
        return bool(asked)
    if asked is False:
        return False
    check = lambda: check_compiled(device, precision)  # noqa: E731
    return passes_check(PART, device, check, key=(str(precision),), strict=True if asked else None)


def check_compiled(device: torch.device, precision: torch.dtype) -> None:
    """Raise unless a compiled layer agrees with the definition of its attention: output, and gradients."""
    config = DrafterConfig(
        kind="dflash", slot_layout=SlotLayout.FILL_IN, num_proposals=7, num_layers=1, hidden_size=128,
        intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=10_000.0,
        vocab_size=32, mask_token_id=0, num_target_layers=8, target_layers=(1,),
    )  # fmt: skip
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        layer = Layer(config).to(device)
        x, context = (torch.randn(shape, device=device) for shape in ((5, 8, 128), (1, 300, 128)))
        position = torch.tensor([9, 40, 130, 200, 290], device=device)
        anchors = Anchors.of(torch.zeros_like(position), position)
        expected = _results(layer, x, context, ReferenceAttention(anchors), precision)
        compiled = Layer(config).to(device)
        compiled.load_state_dict(layer.state_dict())
        compiled.compile()
        found = _results(compiled, x, context, default_attention(anchors, 8, 1, 300), precision)
    for name, value in expected.items():
        compare(name, found[name], value, TOLERANCE[precision])


def _results(
    layer: Layer, x: Tensor, context: Tensor, attend: BlockAttention, precision: torch.dtype
) -> dict[str, Tensor]:
    x, context = x.clone().requires_grad_(), context.clone().requires_grad_()
    flat = [torch.ones(*each.shape[:2], 64, device=x.device) for each in (x, context)]
    rotary, context_rotary = ((each.cos(), each.sin()) for each in flat)
    with torch.autocast(x.device.type, precision, enabled=precision != torch.float32):
        out = layer(x.to(precision), rotary, context.to(precision), context_rotary, attend)
    out.float().square().mean().backward()
    assert x.grad is not None
    assert context.grad is not None
    gradients = {f"the gradient of {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"the output": out.detach(), "the gradient": x.grad, "the context's gradient": context.grad} | gradients
