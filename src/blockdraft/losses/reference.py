"""This module restates every objective from its definition, slowly: scalars, loops, float64.

Nothing here shares code with the fast path. Gradients come from autograd
through the scalar arithmetic. At ties the conventions are the paper's: the
earliest minimum is the active one, and ``min(s p, q)`` sides with the target.
"""

import math

import torch
from torch import Tensor


def reference_loss(
    name: str,
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    *,
    temperature: float = 1.0,
    eta: float = 7.0,
    form: str = "log",
    estimator: str = "integrated",
    beta: float = 1.0,
    summand_floor: float | None = -80.0,
    length_floor: float | None = 1e-6,
    ramp_floor: float | None = None,
) -> Tensor:
    """Return the loss of ``objective(name, ...)`` on ``[N, B, V]`` logits."""
    numerator, denominator = draft_logits.new_zeros(()), 0.0
    for n in range(draft_logits.shape[0]):
        length = draft_logits.shape[1] if valid is None else int(valid[n].sum())
        if length == 0:
            continue
        p = [_softmax(target_logits[n, i] / temperature) for i in range(length)]
        q = [_softmax(draft_logits[n, i] / temperature) for i in range(length)]
        y = [int(labels[n, i]) for i in range(length)]
        if name != "bv":
            for i in range(length):
                weight = math.exp(-i / eta)
                numerator = numerator + weight * token_loss(name, p[i], q[i], y[i])
                denominator += weight
            continue
        sampled, integrated = reference_scores(p, q, y)
        scores = integrated if estimator == "integrated" else sampled
        if form == "linear":
            numerator = numerator + sum(1 - score for score in scores)
            denominator += length
        elif form == "population":
            numerator = numerator + sum(scores)
            denominator += length
        else:
            numerator = numerator + _block_log(scores, beta, summand_floor, length_floor, ramp_floor)
            denominator += 1
    if denominator == 0:
        return numerator
    if name == "bv" and form == "population":
        return math.log(denominator) - torch.log(numerator)
    return numerator / denominator


def token_loss(name: str, p: list[Tensor], q: list[Tensor], y: int) -> Tensor:
    """Return the loss of one position of a tokenwise objective."""
    vocab = range(len(p))
    if name == "ce":
        return -torch.log(q[y])
    if name == "kl":
        return _sum([p[v] * (torch.log(p[v]) - torch.log(q[v])) for v in vocab if p[v] > 0])
    if name == "rkl":
        return _sum([q[v] * (torch.log(q[v]) - torch.log(p[v])) for v in vocab if q[v] > 0])
    if name == "tv":
        return 1 - _sum([_min(p[v], q[v]) for v in vocab])
    if name == "lk":
        return -torch.log(_sum([_min(p[v], q[v]) for v in vocab]))
    raise ValueError(name)


def reference_scores(p: list[list[Tensor]], q: list[list[Tensor]], y: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scores a~_i and abar_i along one block."""
    one = torch.ones_like(q[0][0])
    r, lowest = one, one
    sampled, integrated = [], []
    for i, token in enumerate(y):
        integrated.append(_sum([_min(lowest * p[i][v], r * q[i][v]) for v in range(len(p[i]))]))
        r = r * q[i][token] / p[i][token]
        lowest = _min(lowest, r)
        sampled.append(lowest)
    return sampled, integrated


def _block_log(
    scores: list[Tensor], beta: float, summand_floor: float | None, length_floor: float | None, ramp_floor: float | None
) -> Tensor:
    """Return -log of the power mean of the scores, with the floors of the paper."""
    if beta == 1:
        kept = [
            s if summand_floor is None or s > math.exp(summand_floor) else _constant(s, math.exp(summand_floor))
            for s in scores
        ]
        total = _sum(kept)
        if length_floor is not None and total < length_floor:
            total = _constant(total, length_floor)
        return math.log(len(scores)) - torch.log(total)
    floored = [s if ramp_floor is None or s > ramp_floor else _constant(s, ramp_floor) for s in scores]
    if beta == 0:
        return -_sum([torch.log(s) for s in floored]) / len(floored)
    return -torch.log(_sum([s**beta for s in floored]) / len(floored)) / beta


def _softmax(logits: Tensor) -> list[Tensor]:
    exponentials = [torch.exp(z - logits.detach().max()) for z in logits]
    total = _sum(exponentials)
    return [e / total for e in exponentials]


def _min(first: Tensor, second: Tensor) -> Tensor:
    return second if second < first else first


def _sum(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum()


def _constant(like: Tensor, value: float) -> Tensor:
    return torch.full_like(like, value)
