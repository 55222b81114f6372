"""This module restates every objective from its definition, slowly: scalars, loops, float64.

Nothing here shares code with the fast path. Gradients come from autograd
through the scalar arithmetic. At ties the conventions are the paper's: the
earliest minimum is the active one, and ``min(s p, q)`` sides with the target.

A drafter over a reduced vocabulary is one with q = 0 outside of it. What is
then infinite for every drafter is left out: the cross-entropy of a token with
q = 0, the terms of KL with q = 0, the logarithm of a score that is 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Probabilities = list[Tensor]
"""A distribution over the vocabulary, as one scalar tensor per token."""


@dataclass(frozen=True)
class Options:
    """Options holds every option of every objective, at its default."""

    temperature: float = 1.0
    eta: float = 7.0
    form: str = "log"
    estimator: str = "integrated"
    beta: float = 1.0
    summand_floor: float | None = -80.0
    length_floor: float | None = 1e-6
    ramp_floor: float | None = None
    mix: float = 0.5
    decay: float = 3.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9


def reference_loss(
    name: str,
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    **options: float | str | None,
) -> Tensor:
    """Return the loss of ``objective(name, ...)`` on ``[N, B, V]`` logits."""
    chosen = Options(**options)  # type: ignore[arg-type]
    numerator, denominator = draft_logits.new_zeros(()), 0.0
    for n in range(draft_logits.shape[0]):
        length = draft_logits.shape[1] if valid is None else int(valid[n].sum())
        if length == 0:
            continue
        p = [_softmax(target_logits[n, i] / chosen.temperature) for i in range(length)]
        q = [_softmax(draft_logits[n, i] / chosen.temperature) for i in range(length)]
        y = [int(labels[n, i]) for i in range(length)]
        above, below = block_sums(name, p, q, y, chosen)
        numerator, denominator = numerator + above, denominator + below
    if denominator == 0:
        return numerator
    if chosen.form == "population":
        return math.log(denominator) - torch.log(numerator)
    return numerator / denominator


def block_sums(
    name: str, p: list[Probabilities], q: list[Probabilities], y: list[int], options: Options
) -> tuple[Tensor, float]:
    """Return what one block adds to the numerator and to the denominator."""
    zero, length = torch.zeros_like(q[0][0]), len(y)
    if name == "dpace":
        return _dpace(q, y, options.mix), 1.0
    if name == "e2e-tv":
        lost, kept = zero, zero + 1
        for i in range(length):
            kept = kept * _overlap(p[i], q[i])
            lost = lost + 1 - kept
        return lost, float(length)
    if name in ("bv", "token-bv"):
        return _prefix_sums(_prefix_scores(name, p, q, y, options.estimator), options)
    above, below = zero, 0.0
    for i in range(length):
        weight = math.exp(-i / options.eta)
        if name == "ce" and q[i][y[i]] == 0:
            continue
        above = above + weight * token_loss(name, p[i], q[i], y[i], options)
        below += weight
    return above, below


def token_loss(name: str, p: Probabilities, q: Probabilities, y: int, options: Options) -> Tensor:
    """Return the loss of one position of a tokenwise objective."""
    vocab = range(len(p))
    if name == "ce":
        return -torch.log(q[y])
    if name == "kl":
        return _sum([p[v] * (torch.log(p[v]) - torch.log(q[v])) for v in vocab if p[v] > 0 and q[v] > 0])
    if name == "rkl":
        return _sum([q[v] * (torch.log(q[v]) - torch.log(p[v])) for v in vocab if q[v] > 0])
    if name == "tv":
        return 1 - _overlap(p, q)
    if name == "lk":
        return -torch.log(_overlap(p, q))
    if name == "lk-hybrid":
        share = math.exp(-options.decay * _overlap(p, q).item())
        return share * token_loss("kl", p, q, y, options) + (1 - share) * token_loss("tv", p, q, y, options)
    if name == "dspark":
        distance = _sum([p[v] - q[v] if p[v] >= q[v] else q[v] - p[v] for v in vocab])
        loss = options.l1_weight * distance
        return loss if q[y] == 0 else loss - options.ce_weight * torch.log(q[y])
    raise ValueError(name)


def reference_scores(p: list[Probabilities], q: list[Probabilities], y: list[int]) -> tuple[list[Tensor], list[Tensor]]:
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


def _prefix_scores(
    name: str, p: list[Probabilities], q: list[Probabilities], y: list[int], estimator: str
) -> list[Tensor]:
    if name == "bv":
        sampled, integrated = reference_scores(p, q, y)
        return integrated if estimator == "integrated" else sampled
    kept, scores = torch.ones_like(q[0][0]), []
    for i, token in enumerate(y):
        scores.append(kept * _overlap(p[i], q[i]))
        kept = kept * _min(torch.ones_like(kept), q[i][token] / p[i][token])
    return scores


def _prefix_sums(scores: list[Tensor], options: Options) -> tuple[Tensor, float]:
    if options.form == "linear":
        return _sum([1 - score for score in scores]), float(len(scores))
    if options.form == "population":
        return _sum(scores), float(len(scores))
    if options.beta == 1:
        lowest = 0.0 if options.summand_floor is None else math.exp(options.summand_floor)
        total = _sum([s if s > lowest else _constant(s, lowest) for s in scores])
        if options.length_floor is not None and total < options.length_floor:
            total = _constant(total, options.length_floor)
        return (math.log(len(scores)) - torch.log(total), 1.0) if total > 0 else (torch.zeros_like(total), 0.0)
    lowest = 0.0 if options.ramp_floor is None else options.ramp_floor
    scores = [s if s > lowest else _constant(s, lowest) for s in scores]
    positive = [s for s in scores if s > 0]
    if not positive:
        return torch.zeros_like(scores[0]), 0.0
    if options.beta == 0:
        return -_sum([torch.log(s) for s in positive]) / len(positive), 1.0
    return -torch.log(_sum([s**options.beta for s in positive]) / len(scores)) / options.beta, 1.0


def _dpace(q: list[Probabilities], y: list[int], mix: float) -> Tensor:
    loss = torch.zeros_like(q[0][0])
    for j in range(len(y)):
        weight = 0.0
        for i in range(j, len(y)):
            reach = 1.0
            for k in range(i + 1):
                reach *= (1 - mix) * q[k][y[k]].item() + mix
            weight += reach
        if q[j][y[j]] > 0:
            loss = loss - weight * torch.log(q[j][y[j]])
    return loss


def _overlap(p: Probabilities, q: Probabilities) -> Tensor:
    return _sum([_min(p[v], q[v]) for v in range(len(p))])


def _softmax(logits: Tensor) -> Probabilities:
    exponentials = [torch.exp(z - logits.detach().max()) for z in logits]
    total = _sum(exponentials)
    return [e / total for e in exponentials]


def _min(first: Tensor, second: Tensor) -> Tensor:
    return second if second < first else first


def _sum(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum()


def _constant(like: Tensor, value: float) -> Tensor:
    return torch.full_like(like, value)
