"""Verify slowly, from the definitions, as a reference: loops, float64, tiny vocabularies.

A model is a function from a prefix, a tuple of token ids, to the probabilities
``[V]`` of the next token. Nothing here shares code with the fast path.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Prefix = tuple[int, ...]
Model = Callable[[Prefix], Tensor]
Law = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(target_probs, draft_probs, draft_tokens, lengths) -> (accept, residual), as `blockdraft.verification.law`."""


def reference_law(rule: str, p: Tensor, q: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return accept ``[L+1]`` and residual ``[L+1, V]`` of one block: p ``[L+1, V]``, q ``[L, V]``, L tokens."""
    length, vocab_size = len(tokens), p.shape[1]
    accept, residual = torch.zeros(length + 1, dtype=p.dtype), torch.zeros(length + 1, vocab_size, dtype=p.dtype)
    if rule == "greedy":
        best = [max(range(vocab_size), key=lambda v, row=row: (float(row[v]), -v)) for row in p]  # type: ignore[misc]
        matched = 0
        while matched < length and tokens[matched] == best[matched]:
            matched += 1
        accept[matched] = 1.0
        for k in range(length + 1):
            residual[k, best[k]] = 1.0
        return accept, residual

    def leftover(scale: float, k: int) -> list[float]:
        return [max(scale * float(p[k, v]) - float(q[k, v]), 0.0) for v in range(vocab_size)]

    ratio = [float(p[i, x]) / float(q[i, x]) for i, x in enumerate(tokens)]
    if rule == "token":
        states = [1.0] * (length + 1)
        survive = 1.0
        for k in range(length):
            keep = min(1.0, ratio[k])
            accept[k] = survive * (1 - keep)
            survive *= keep
        accept[length] = survive
    else:
        states = [1.0]
        for i in range(length):
            states.append(min(1.0, states[-1] * ratio[i]))
        later_all_fail = 1.0
        for k in range(length, 0, -1):
            if k == length:
                h = states[k]
            else:
                mass = sum(leftover(states[k], k))
                h = mass / (mass + 1 - states[k]) if mass + 1 - states[k] > 0 else 1.0
            accept[k] = later_all_fail * h
            later_all_fail *= 1 - h
        accept[0] = later_all_fail
    for k in range(length):
        rest = leftover(states[k], k)
        total = sum(rest)
        residual[k] = torch.tensor([r / total for r in rest], dtype=p.dtype) if total > 0 else p[k]
    residual[length] = p[length]
    return accept, residual


@dataclass(frozen=True)
class Emitted:
    """Holds what one round of speculative decoding does, exactly.

    law: ``[V] * (B+1)`` joint law of the next B+1 tokens: those the round emits, then the target's own.
    target: the same under the target alone; a lossless rule has ``law == target``.
    survival: ``[B]`` Pr(num_accepted >= i).
    """

    law: Tensor
    target: Tensor
    survival: Tensor


def enumerate_round(
    law: Law,
    target: Model,
    drafter: Model,
    vocab_size: int,
    block_size: int,
    *,
    stop: Callable[[Prefix], bool] | None = None,
    reported: Model | None = None,
) -> Emitted:
    """Enumerate every block the drafter can propose, and every token that can follow.

    Args:
        law: the rule under test.
        target, drafter: the models.
        stop: if it holds for the tokens drafted so far (a non-empty prefix), the block ends there.
        reported: the q handed to the verifier, if it is not the one the tokens were drawn from.
    """
    reported = reported or drafter
    emitted = torch.zeros([vocab_size] * (block_size + 1), dtype=torch.float64)
    survival = torch.zeros(block_size, dtype=torch.float64)
    for block in itertools.product(range(vocab_size), repeat=block_size):
        chance = 1.0
        for i in range(block_size):
            chance *= float(drafter(block[:i])[block[i]])
        if chance == 0:
            continue
        ends = (i for i in range(1, block_size + 1) if stop is not None and stop(block[:i]))
        length = next(ends, block_size)
        p = torch.stack([target(block[:i]) for i in range(block_size + 1)])[None]
        q = torch.stack([reported(block[:i]) for i in range(block_size)])[None]
        accept, residual = law(p, q, torch.tensor([block]), torch.tensor([length]))
        for k in range(length + 1):
            mass = chance * float(accept[0, k])
            survival[:k] += mass
            for token in range(vocab_size):
                weight = mass * float(residual[0, k, token])
                if weight > 0:
                    prefix = (*block[:k], token)
                    emitted[prefix] += weight * joint_law(target, vocab_size, block_size + 1, prefix)
    return Emitted(emitted, joint_law(target, vocab_size, block_size + 1), survival)


def joint_law(model: Model, vocab_size: int, num_tokens: int, prefix: Prefix = ()) -> Tensor:
    """Return the joint law of the tokens after ``prefix``, ``num_tokens`` in all, with an axis ``[V]`` for each."""
    if len(prefix) == num_tokens:
        return torch.ones((), dtype=torch.float64)
    here = model(prefix)
    branches = [float(here[v]) * joint_law(model, vocab_size, num_tokens, (*prefix, v)) for v in range(vocab_size)]
    return torch.stack(branches)
