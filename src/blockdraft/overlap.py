"""This module holds the one vocabulary-sized primitive of block verification.

    S(s; p, q) = sum_v min(s p(v), q(v))

With ``s = 1`` it is the probability that token verification keeps a token
(one minus the total variation distance). With ``s = a``, the running
acceptance state of block verification, it is the mass that survives one more
position, and ``Z = a - S(a; p, q)`` is the residual mass the verifier needs.
The objectives of `blockdraft.losses` and the rules of
`blockdraft.verification` both stand on this file.
"""

from typing import Any

import torch
from torch import Tensor


def overlap(scale: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return S(s; p, q) = sum_v min(s p(v), q(v)), differentiable in all three.

    Args:
        scale: s, ``[...]``, nonnegative.
        p: target probabilities ``[..., V]``.
        q: draft probabilities ``[..., V]``.

    Returns:
        S ``[...]``. At a tie ``s p(v) = q(v)`` the target's side counts as the
        smaller one, so that q = p is a stationary point.
    """
    if not torch.is_grad_enabled():
        return torch.minimum(p * scale.unsqueeze(-1), q).sum(-1)
    value: Tensor = _Overlap.apply(scale, p, q)
    return value


Scratch = tuple[Tensor, Tensor]
"""A Scratch is two tensors like q that a function may write to, so that it allocates none of that size."""


def overlap_and_slope(scale: Tensor, p: Tensor, q: Tensor, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """Return S(s; p, q) and dS/ds = sum of p(v) over the v with s p(v) <= q(v), both ``[...]``."""
    scaled, below = _scaled_and_below(scale, p, q, scratch)
    mass_below = below.sum(-1)
    value = torch.minimum(scaled, q, out=scaled).sum(-1)
    # S is A + s * slope, with A the draft mass below the scaled target: no second masked sum is needed.
    return value, torch.where(scale > 0, (value - mass_below) / scale, p.sum(-1))


def overlap_logit_gradient(scale: Tensor, p: Tensor, q: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return dS/dz for draft logits z with q = softmax(z), ``[..., V]``.

    dS/dz_v = q_v (1[q_v < s p_v] - sum over {u : q_u < s p_u} of q_u)
    """
    _, below = _scaled_and_below(scale, p, q, scratch)
    return below.addcmul_(q, below.sum(-1, keepdim=True), value=-1)


def _scaled_and_below(scale: Tensor, p: Tensor, q: Tensor, scratch: Scratch | None) -> Scratch:
    """Return s p, and q where q < s p, else 0.

    The backward of a threshold is that very select, several times faster than `torch.where` on a CPU.
    """
    scaled, below = scratch or (torch.empty_like(q), torch.empty_like(q))
    torch.mul(p, scale.unsqueeze(-1), out=scaled)
    torch.sub(scaled, q, out=below)
    torch.ops.aten.threshold_backward.grad_input(q, below, 0, grad_input=below)
    return scaled, below


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, p: Tensor, q: Tensor) -> Tensor:
        value, slope = overlap_and_slope(scale, p, q)
        ctx.save_for_backward(scale, p, q, slope)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        scale, p, q, slope = ctx.saved_tensors
        wants_scale, wants_p, wants_q = ctx.needs_input_grad
        draft_is_smaller = q < p * scale.unsqueeze(-1)
        grad_p = torch.where(draft_is_smaller, 0, (grad * scale).unsqueeze(-1)) if wants_p else None
        grad_q = torch.where(draft_is_smaller, grad.unsqueeze(-1), 0) if wants_q else None
        return grad * slope if wants_scale else None, grad_p, grad_q
