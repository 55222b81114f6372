"""Sample verdicts from the laws, and give the expected accepted lengths in closed form."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from blockdraft.overlap import overlap
from blockdraft.verification.rules import (
    Rule,
    acceptance_states,
    coins,
    drafted,
    probability_ratio,
    residual_law,
)


@dataclass(frozen=True)
class Verdict:
    """Holds what came of N blocks.

    num_accepted: ``[N]`` drafted tokens kept.
    next_token: ``[N]`` the correction, or the bonus token after a whole block.
    coins: ``[N, B]`` the uniform numbers that were thrown.
    thresholds: ``[N, B]`` h_i, below which a coin succeeds.
    """

    num_accepted: Tensor
    next_token: Tensor
    coins: Tensor
    thresholds: Tensor


def verify(
    rule: Rule,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    lengths: Tensor | None = None,
    generator: Generator | None = None,
    recovery_generator: Generator | None = None,
    *,
    check: bool = True,
) -> Verdict:
    """Verify N blocks; tensors as for `blockdraft.verification.law`.

    Coins and the recovery token come from separate random streams.
    ``generator`` throws the coins; ``recovery_generator`` draws the next token
    and is spawned from ``generator`` if not given. The tokens must have been
    drafted from yet another stream. ``check=False`` trusts the values that are given, as a decode loop can that made
    them itself; shapes are looked at in any case.
    """
    blocks = drafted(rule, target_probs, draft_probs, draft_tokens, lengths, check=check)
    device = blocks.p.device
    uniform = torch.rand(blocks.tokens.shape, generator=generator, dtype=blocks.p.dtype, device=device)
    if blocks.tokens.shape[1] == 0:  # autoregressive decoding: nothing to decide, the next token follows p
        num_accepted, residual, threshold = blocks.lengths, blocks.p[:, 0], uniform
    else:
        decided = coins(rule, blocks)
        num_accepted, threshold = decided.num_accepted(uniform), decided.threshold
        residual = residual_law(rule, blocks, decided.state, num_accepted[:, None]).squeeze(1)
    if rule == "greedy":
        return Verdict(num_accepted, residual.argmax(-1), uniform, threshold)
    recovery = recovery_generator or spawn(generator, device)
    return Verdict(num_accepted, draw(residual, recovery), uniform, threshold)


DRAW_BLOCK = 256
"""Tokens whose probabilities `invert` sums first where there are many."""


def draw(probs: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw one token from each row of probabilities ``[.., V]``; ``[..]``.

    `torch.multinomial` throws a number for every token, which takes longer than a drafter's pass, and looks at the
    values, for which the host would have to wait twice on a GPU. Here one uniform number a row decides; see `invert`.
    """
    return invert(probs, uniform_for(probs, generator))


def uniform_for(rows: Tensor, generator: Generator | None = None) -> Tensor:
    """Return one uniform number for each of the rows ``[.., V]``: ``[.., 1]``, in float64."""
    return torch.rand((*rows.shape[:-1], 1), generator=generator, dtype=torch.float64, device=rows.device)


def invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token v of each row with ``sum_{u <= v} p_u`` above the row's number; ``[.., V]`` to ``[..]``.

    This inverts the distribution function, in float64. Of a large vocabulary, first the block of tokens is found and
    then the token in it. The largest float64 below 1 times any number is below it also when rounded, so the last sum
    always lies above.

    Args:
        probs: ``[.., V]``; a row that does not sum to one is taken as if divided by its sum.
        uniform: ``[.., 1]`` in float64, in [0, 1).
    """
    vocab_size = probs.shape[-1]
    if vocab_size < DRAW_BLOCK**2 // 16:
        below = probs.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(below, uniform * below[..., -1:], right=True).squeeze(-1)
    padded = torch.nn.functional.pad(probs, (0, -vocab_size % DRAW_BLOCK)).unflatten(-1, (-1, DRAW_BLOCK))
    below = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    point = uniform * below[..., -1:]
    block = torch.searchsorted(below, point, right=True)
    inside = padded.gather(-2, block.unsqueeze(-1).expand(*block.shape, DRAW_BLOCK)).squeeze(-2)
    inside = inside.cumsum(-1, dtype=torch.float64)
    last = inside[..., -1:]
    rest = torch.minimum(point - (below.gather(-1, block) - last), torch.nextafter(last, torch.zeros_like(last)))
    return (block * DRAW_BLOCK + torch.searchsorted(inside, rest.clamp(min=0), right=True)).squeeze(-1)


def spawn(generator: Generator | None, device: torch.device) -> Generator:
    """Return a new random stream, seeded by a draw from an existing one."""
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return Generator(device).manual_seed(int(seed))


def expected_retention(
    rule: Rule, target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Return estimates ``[N, B]`` of Pr(num_accepted >= i), free of the verifier's randomness and of x_i's own.

    Averaged over blocks drawn from the drafter they are unbiased:

        block   E[a_i | x_<i]                 = S(a_{i-1}; p_i, q_i)
        token   prod_{j<i} min(1, p_j/q_j)(x_j) * S(1; p_i, q_i)
        greedy  1[x_j = argmax p_j for all j <= i]

    Summed over i they estimate the expected number of accepted draft tokens.
    Positions beyond a block's length hold 0. Tensors as for `law`. The same expectations along target-generated texts,
    which training data are, come from `blockdraft.losses.block_statistics`.
    """
    blocks = drafted(rule, target_probs, draft_probs, draft_tokens, lengths)
    p, q = blocks.p[:, :-1], blocks.q
    if rule == "greedy":
        retention = (p.argmax(-1) == blocks.tokens).to(p.dtype).cumprod(-1)
    else:
        ratio = probability_ratio(p, q, blocks.tokens)
        if rule == "block":
            retention = overlap(acceptance_states(ratio)[:, :-1], p, q)
        else:
            kept = torch.nn.functional.pad(ratio.clamp(max=1).cumprod(-1), (1, 0), value=1.0)[:, :-1]
            retention = kept * overlap(torch.ones_like(kept), p, q)
    return torch.where(blocks.inside, retention, 0)
