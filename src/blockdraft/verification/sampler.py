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
) -> Verdict:
    """Verify N blocks; tensors as for `blockdraft.verification.law`.

    Coins and the recovery token come from separate random streams.
    ``generator`` throws the coins; ``recovery_generator`` draws the next token
    and is spawned from ``generator`` if not given. The tokens must have been
    drafted from yet another stream.
    """
    blocks = drafted(rule, target_probs, draft_probs, draft_tokens, lengths)
    decided = coins(rule, blocks)
    device = blocks.p.device
    uniform = torch.rand(blocks.tokens.shape, generator=generator, dtype=blocks.p.dtype, device=device)
    num_accepted = decided.num_accepted(uniform)
    residual = residual_law(rule, blocks, decided.state, num_accepted[:, None]).squeeze(1)
    if rule == "greedy":
        return Verdict(num_accepted, residual.argmax(-1), uniform, decided.threshold)
    recovery = recovery_generator or spawn(generator, device)
    next_token = torch.multinomial(residual, 1, generator=recovery).squeeze(1)
    return Verdict(num_accepted, next_token, uniform, decided.threshold)


def spawn(generator: Generator | None, device: torch.device) -> Generator:
    """A new random stream, seeded by a draw from an existing one."""
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return Generator(device).manual_seed(int(seed))
