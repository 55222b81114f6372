"""Compute greedy, token and block verification as exact laws over given blocks.

Every rule is three things: a threshold h_i for an independent uniform coin at
each drafted position, a way to read the coins, and the law of the token that
follows the accepted ones.

    rule    h_i                                         num_accepted
    greedy  1[x_i = argmax p_i]                         tokens before the first failed coin
    token   min(1, p_i(x_i) / q_i(x_i))                 tokens before the first failed coin
    block   Z_i / (Z_i + 1 - a_i) for i < L, a_L at L   position of the last coin that succeeds

with, for block verification (Sun et al., ICLR 2025),

    a_0 = 1,  a_i = min(1, a_{i-1} p_i(x_i) / q_i(x_i)),
    Z_i = sum_v max(a_i p_{i+1}(v) - q_{i+1}(v), 0) = a_i - S(a_i; p_{i+1}, q_{i+1}).

L is the length of the block, B unless it was cut. The next token follows
``max(a_k p_{k+1} - q_{k+1}, 0) / Z_k`` after k < L accepted tokens (with a_k = 1
under token verification) and ``p_{L+1}`` after all of them; under greedy
verification it is the target's argmax.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from blockdraft.overlap import overlap

Rule = Literal["greedy", "token", "block"]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Drafted:
    """Holds N blocks as a rule sees them: p ``[N, B+1, V]``, q ``[N, B, V]``, tokens ``[N, B]``, lengths ``[N]``.

    inside: ``[N, B]`` the positions within each block's length; tokens elsewhere are 0.
    """

    p: Tensor
    q: Tensor
    tokens: Tensor
    lengths: Tensor
    inside: Tensor


@dataclass(frozen=True)
class Coins:
    """Says how a rule decides on given blocks.

    threshold: ``[N, B]`` h_i; 0 beyond a block's length.
    state: ``[N, B+1]`` the factor of p in the residual after k accepted tokens.
    last_success: read the coins from the end (block) or up to the first failure (greedy, token).
    """

    threshold: Tensor
    state: Tensor
    last_success: bool

    def num_accepted(self, uniform: Tensor) -> Tensor:
        """Return the number ``[N]`` of accepted tokens for uniforms ``[N, B]`` in [0, 1)."""
        success = uniform < self.threshold
        if not self.last_success:
            return success.long().cumprod(-1).sum(-1)
        positions = torch.arange(1, success.shape[1] + 1, device=success.device)
        return torch.nn.functional.pad(positions * success, (1, 0)).amax(-1)

    def accept_law(self) -> Tensor:
        """Return Pr(num_accepted = k | block), ``[N, B+1]``."""
        h = self.threshold
        if self.last_success:
            fails_after = torch.nn.functional.pad((1 - h).flip(-1).cumprod(-1).flip(-1), (0, 1), value=1.0)
            return torch.nn.functional.pad(h, (1, 0), value=1.0) * fails_after
        kept = torch.nn.functional.pad(h.cumprod(-1), (1, 0), value=1.0)
        return kept * torch.nn.functional.pad(1 - h, (0, 1), value=1.0)


def coins(rule: Rule, blocks: Drafted) -> Coins:
    """Return the coins of ``rule`` on N blocks."""
    p, q, inside = blocks.p, blocks.q, blocks.inside
    one = torch.ones(p.shape[:2], dtype=p.dtype, device=p.device)
    if rule == "greedy":
        matches = p[:, :-1].argmax(-1) == blocks.tokens
        return Coins((matches & inside).to(p.dtype), one, last_success=False)
    ratio = probability_ratio(p[:, :-1], q, blocks.tokens)
    if rule == "token":
        return Coins(torch.where(inside, ratio.clamp(max=1), 0), one, last_success=False)
    state = acceptance_states(ratio)
    a = state[:, 1:]
    # a sum(p) - S is sum max(a p - q, 0) also where rounding keeps the probabilities from summing to one
    residual = (a[:, :-1] * p[:, 1:-1].sum(-1) - overlap(a[:, :-1], p[:, 1:-1], q[:, 1:])).clamp(min=0)
    threshold = a.clone()
    threshold[:, :-1] = _share(residual, residual + 1 - a[:, :-1])
    is_end = torch.arange(1, a.shape[1] + 1, device=p.device) == blocks.lengths[:, None]
    threshold = torch.where(is_end, a, threshold)
    return Coins(torch.where(inside, threshold, 0), state, last_success=True)


def law(
    rule: Rule, target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return exact acceptance probabilities and residual laws on N given blocks.

    Args:
        rule: ``"greedy"``, ``"token"`` or ``"block"``.
        target_probs: p, ``[N, B+1, V]``; row i is the law of position i+1 after x_1, .., x_i.
        draft_probs: q, ``[N, B, V]``, exactly what the tokens were sampled from; greedy ignores it.
        draft_tokens: x, ``[N, B]``.
        lengths: ``[N]`` tokens to consider, for blocks cut at EOS or by a confidence
            rule (the rule may look at kept tokens only). Whatever lies beyond is ignored.

    Returns:
        accept: ``[N, B+1]`` Pr(num_accepted = k | this block).
        residual: ``[N, B+1, V]`` the law of the next token given k accepted ones; rows
            beyond a block's length repeat the one at its length.
    """
    blocks = drafted(rule, target_probs, draft_probs, draft_tokens, lengths)
    decided = coins(rule, blocks)
    num_accepted = torch.arange(blocks.p.shape[1], device=blocks.p.device).expand(blocks.p.shape[0], -1)
    return decided.accept_law(), residual_law(rule, blocks, decided.state, num_accepted)


def residual_law(rule: Rule, blocks: Drafted, state: Tensor, num_accepted: Tensor) -> Tensor:
    """Return the laws ``[N, K, V]`` of the next token after ``num_accepted`` ``[N, K]`` tokens.

    A residual without mass, which only rounding can reach, falls back to p.
    """
    at = torch.minimum(num_accepted, blocks.lengths[:, None])
    target = _row(blocks.p, at)
    if rule == "greedy":
        return torch.nn.functional.one_hot(target.argmax(-1), target.shape[-1]).to(target.dtype)
    if blocks.q.shape[1] == 0:
        return target
    draft = _row(blocks.q, at.clamp(max=blocks.q.shape[1] - 1))
    residual = (state.gather(1, at).unsqueeze(-1) * target - draft).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    whole_block = (at == blocks.lengths[:, None]).unsqueeze(-1)
    return torch.where(whole_block | (mass <= 0), target, residual / mass.clamp(min=torch.finfo(mass.dtype).tiny))


def _row(probs: Tensor, at: Tensor) -> Tensor:
    """Return ``probs[n, at[n, k]]``, ``[N, K, V]``."""
    return probs.gather(1, at.unsqueeze(-1).expand(-1, -1, probs.shape[-1]))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, with 0/0 = 1."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), 1)


def acceptance_states(ratio: Tensor) -> Tensor:
    """Return a_0, .., a_B ``[N, B+1]`` from the ratios p_i(x_i)/q_i(x_i) ``[N, B]``: a_i = min(1, a_{i-1} ratio_i).

    That is the least of the products of ratios j + 1 to i over j = 0, .., i, the empty one being 1: a handful of
    operations instead of three for each position.
    """
    num = ratio.shape[1]
    steps = torch.arange(num + 1, device=ratio.device)
    inside = steps[1:] > steps[:, None]  # [j, i]
    products = torch.where(inside, ratio.unsqueeze(1), 1).cumprod(-1)  # [N, j, i]: 1 for i <= j
    least = products.nan_to_num_(nan=torch.inf, posinf=torch.inf).amin(1)  # a product that overflowed, times 0
    return torch.nn.functional.pad(least, (1, 0), value=1.0)


def probability_ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Return p(x)/q(x) ``[N, B]``. A token that q cannot draw gets the limit: very large if p > 0, else 0."""
    p_x = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    q_x = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    tiny = torch.finfo(p.dtype).tiny
    limit = (p_x > 0).to(p.dtype) / tiny
    return torch.where(q_x > 0, p_x / q_x.clamp(min=tiny), limit).clamp(max=1 / tiny)


def drafted(
    rule: str,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    lengths: Tensor | None,
    *,
    check: bool = True,
) -> Drafted:
    """Return the blocks in float32 (float64 if p is); refuse shapes that do not fit and, if ``check``, values."""
    if rule not in RULES:
        raise ValueError(f"unknown verification rule {rule!r}; known: {', '.join(RULES)}")
    if draft_tokens.dim() != 2:
        raise ValueError(f"draft_tokens must be [N, B], got {list(draft_tokens.shape)}")
    num_blocks, block_size = draft_tokens.shape
    if target_probs.dim() != 3 or target_probs.shape[:2] != (num_blocks, block_size + 1):
        raise ValueError(
            f"target_probs must be [N, B+1, V] = [{num_blocks}, {block_size + 1}, V], got {list(target_probs.shape)}"
        )
    vocab_size = target_probs.shape[-1]
    if rule == "greedy":
        draft_probs = target_probs[:, :-1]  # greedy verification never asks what q was
    expected = (num_blocks, block_size, vocab_size)
    if draft_probs is None or draft_probs.shape != expected:
        got = None if draft_probs is None else list(draft_probs.shape)
        raise ValueError(f"{rule} verification needs draft_probs [N, B, V] = {list(expected)}, got {got}")
    if lengths is None:
        lengths = torch.full((num_blocks,), block_size, device=target_probs.device)
    elif lengths.shape != (num_blocks,) or (check and bool(((lengths < 0) | (lengths > block_size)).any())):
        raise ValueError(f"lengths must be [N] = [{num_blocks}] and lie between 0 and {block_size}")
    inside = torch.arange(block_size, device=target_probs.device) < lengths[:, None]
    tokens = torch.where(inside, draft_tokens, 0)
    if check:
        if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
            raise ValueError(f"a draft token lies outside the vocabulary of {vocab_size}")
        kept_rows = torch.arange(block_size + 1, device=target_probs.device) <= lengths[:, None]
        for name, probs, kept in (("target_probs", target_probs, kept_rows), ("draft_probs", draft_probs, inside)):
            if not bool(((probs.sum(-1, dtype=torch.float32) - 1).abs() < 0.02)[kept].all()):
                raise ValueError(f"{name} must be probabilities: a row does not sum to one")
    dtype = torch.float64 if target_probs.dtype == torch.float64 else torch.float32
    return Drafted(target_probs.to(dtype), draft_probs.to(dtype), tokens, lengths.long(), inside)
