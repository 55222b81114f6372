"""A thin sampler on top of the laws."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from blockdraft.verification.rules import Rule, coins, drafted, residual_law


@dataclass(frozen=True)
class Verdict:
    """What came of N blocks.

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
    decided = coins(rule, blocks)
    device = blocks.p.device
    uniform = torch.rand(blocks.tokens.shape, generator=generator, dtype=blocks.p.dtype, device=device)
    num_accepted = decided.num_accepted(uniform)
    residual = residual_law(rule, blocks, decided.state, num_accepted[:, None]).squeeze(1)
    if rule == "greedy":
        return Verdict(num_accepted, residual.argmax(-1), uniform, decided.threshold)
    recovery = recovery_generator or spawn(generator, device)
    next_token = draw(residual, recovery)
    return Verdict(num_accepted, next_token, uniform, decided.threshold)


DRAW_BLOCK = 256
"""Tokens whose probabilities `draw` sums first where there are many."""


def draw(probs: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw one token from each row of probabilities ``[.., V]``; ``[..]``.

    Inverts the distribution function, in float64, at one uniform number a row: the first v with sum_{u <= v} p_u above
    it. Of a large vocabulary, first the block of tokens is found and then the token in it. `torch.multinomial` throws
    a number for every token instead, which takes longer than a drafter's pass, and looks at the values, for which the
    host would have to wait twice on a GPU. The largest float64 below 1 times any number is below it also when rounded,
    so the last sum always lies above.
    """
    uniform = torch.rand((*probs.shape[:-1], 1), generator=generator, dtype=torch.float64, device=probs.device)
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
    """A new random stream, seeded by a draw from an existing one."""
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return Generator(device).manual_seed(int(seed))
