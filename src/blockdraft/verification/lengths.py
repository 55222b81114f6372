"""Expected accepted lengths in closed form, from drafted blocks.

The same expectations along target-generated paths, which training data are,
come from `blockdraft.losses.block_statistics`.
"""

import torch
from torch import Tensor

from blockdraft.overlap import overlap
from blockdraft.verification.rules import Rule, acceptance_states, drafted, probability_ratio


def expected_retention(
    rule: Rule, target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """``[N, B]`` estimates of Pr(num_accepted >= i), free of the verifier's randomness and of x_i's own.

    Averaged over blocks drawn from the drafter they are unbiased:

        block   E[a_i | x_<i]                 = S(a_{i-1}; p_i, q_i)
        token   prod_{j<i} min(1, p_j/q_j)(x_j) * S(1; p_i, q_i)
        greedy  1[x_j = argmax p_j for all j <= i]

    Summed over i they estimate the expected number of accepted draft tokens.
    Positions beyond a block's length hold 0. Tensors as for `law`.
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
