"""The one vocabulary-sized primitive of block verification.

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
    """S(s; p, q) = sum_v min(s p(v), q(v)), differentiable in all three.

    Args:
        scale: s, ``[...]``, nonnegative.
        p: target probabilities ``[..., V]``.
        q: draft probabilities ``[..., V]``.

    Returns:
        S ``[...]``. At a tie ``s p(v) = q(v)`` the target's side counts as the
        smaller one, so that q = p is a stationary point.
    """
    value: Tensor = _Overlap.apply(scale, p, q)
    return value


def overlap_and_slope(scale: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """S(s; p, q) and dS/ds = sum of p(v) over the v with s p(v) <= q(v), both ``[...]``."""
    scaled = p * scale.unsqueeze(-1)
    below = _draft_below(scaled, q).sum(-1)
    value = torch.minimum(scaled, q, out=scaled).sum(-1)
    # S is A + s * slope, with A the draft mass below the scaled target: no second masked sum is needed.
    return value, torch.where(scale > 0, (value - below) / scale, p.sum(-1))


def overlap_logit_gradient(scale: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """dS/dz for draft logits z with q = softmax(z), ``[..., V]``.

    dS/dz_v = q_v (1[q_v < s p_v] - sum over {u : q_u < s p_u} of q_u)
    """
    below = _draft_below(p * scale.unsqueeze(-1), q)
    return below.addcmul_(q, below.sum(-1, keepdim=True), value=-1)


def _draft_below(scaled: Tensor, q: Tensor) -> Tensor:
    """q where q < s p, else 0. The backward of a threshold is this select, several times faster than `torch.where`."""
    selected: Tensor = torch.ops.aten.threshold_backward(q, scaled - q, 0)
    return selected


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
