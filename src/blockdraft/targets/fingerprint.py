"""Which target is this: a hash that names its weights, whatever their device or precision."""

import hashlib

import torch
from torch import nn

from blockdraft.targets.target import Target

SAMPLES = 1024
"""Values read of each tensor, evenly spaced."""


def fingerprint(target: Target) -> str:
    """Sixteen hexadecimal digits over the names, shapes and sampled values of all weights.

    The values are rounded to bfloat16, so that one checkpoint has one fingerprint
    in float32 and in bfloat16; a fine-tuned or requantised one has another.
    """
    return weights_fingerprint(target.model)


def weights_fingerprint(module: nn.Module) -> str:
    """The same of any module."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().flatten()
        step = max(1, flat.numel() // SAMPLES)
        values = flat[::step][:SAMPLES].to(torch.bfloat16).cpu()
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def template_fingerprint(target: Target) -> str | None:
    """The same over the chat template; None without one."""
    template = None if target.tokenizer is None else target.tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]
