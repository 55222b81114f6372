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


def draw(probs: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw one token from each row of probabilities ``[.., V]``; ``[..]``.

    Inverts the distribution function, in float64, at one uniform number a row: the first v with sum_{u <= v} p_u above
    it. `torch.multinomial` throws a number for every token instead, which takes longer than a drafter's pass where
    the vocabulary is large, and looks at the values, for which the host would have to wait twice on a GPU.
    """
    below = probs.cumsum(-1, dtype=torch.float64)
    total = below[..., -1:]
    uniform = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=probs.device)
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))  # or rounding reaches it
    return torch.searchsorted(below, point, right=True).squeeze(-1)


def spawn(generator: Generator | None, device: torch.device) -> Generator:
    """A new random stream, seeded by a draw from an existing one."""
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return Generator(device).manual_seed(int(seed))
