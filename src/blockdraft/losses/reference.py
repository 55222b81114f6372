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
"""A distribution over the vocabulary is one scalar tensor per token."""

Block = tuple[list[Probabilities], list[Probabilities], list[int]]
"""A block is p and q at each of its positions, and its labels."""


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
    control_variate: bool = False
    mix: float = 0.5
    decay: float = 3.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    start: str = "anywhere"


def reference_loss(
    name: str,
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    **options: float | str | None,
) -> Tensor:
    """Return the loss of ``objective(name, ...)`` on ``[N, B, V]`` logits."""
    chosen = Options(**options)  # type: ignore[arg-type]
    numerator, denominator = draft_logits.new_zeros(()), 0.0
    runs: dict[int, list[Block]] = {}
    for n in range(draft_logits.shape[0]):
        length = draft_logits.shape[1] if valid is None else int(valid[n].sum())
        if length == 0:
            continue
        p = [_softmax(target_logits[n, i] / chosen.temperature) for i in range(length)]
        q = [_softmax(draft_logits[n, i] / chosen.temperature) for i in range(length)]
        y = [int(labels[n, i]) for i in range(length)]
        if name == "rounds":
            runs.setdefault(n if segments is None else int(segments[n]), []).append((p, q, y))
            continue
        above, below = block_sums(name, p, q, y, draft_logits.shape[1], chosen)
        numerator, denominator = numerator + above, denominator + below
    for run in runs.values():
        above, below = run_sums(run, draft_logits.shape[1], chosen)
        numerator, denominator = numerator + above, denominator + below
    if denominator == 0:
        return numerator
    if chosen.form == "population":
        return math.log(denominator) - torch.log(numerator)
    return numerator / denominator


def block_sums(
    name: str, p: list[Probabilities], q: list[Probabilities], y: list[int], block_size: int, options: Options
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
        above, below = _prefix_sums(_prefix_scores(name, p, q, y, options.estimator), options)
        if options.control_variate:
            above = above + _control_variate(p, q, y, block_size, options)
        return above, below
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


def expected_rounds(scores: Tensor, beyond: float = 0.0) -> Tensor:
    """Return V ``[A + 1]``, the expected number of rounds from each of A consecutive anchors, and V(A) = 0.

    From anchor a, a round keeps exactly k tokens with probability s_a(k) - s_a(k + 1) (s_a(0) = 1, s_a(B + 1) = 0)
    and the next one starts at anchor a + k + 1. It is differentiable in the scores.

    Args:
        scores: ``[A, B]`` s_a(i), the chance of keeping i tokens or more; 0 behind the end of the text.
        beyond: what a token behind the last anchor is worth: V(A + j) = -j beyond. With 0 the text ends there.
    """
    num_anchors, block_size = scores.shape
    values = [scores.new_tensor(-beyond * j) for j in range(block_size + 1)]  # V from the first anchor not yet done
    for a in reversed(range(num_anchors)):
        survival = [scores.new_ones(()), *scores[a], scores.new_zeros(())]
        chances = [survival[k] - survival[k + 1] for k in range(block_size + 1)]
        values.insert(0, 1 + _sum([chances[k] * values[k] for k in range(block_size + 1)]))
    return torch.stack(values[: num_anchors + 1])


def occupancies(scores: list[list[float]], first: list[float]) -> list[float]:
    """Return the probability that a round starts at each anchor; ``first`` is that of the first round, by anchor."""
    found = [first[a] if a < len(first) else 0.0 for a in range(len(scores))]
    for a, kept in enumerate(scores):
        survival = [1.0, *kept, 0.0]
        for k in range(len(kept) + 1):
            if a + k + 1 < len(found):
                found[a + k + 1] += found[a] * (survival[k] - survival[k + 1])
    return found


def run_sums(run: list[Block], block_size: int, options: Options) -> tuple[Tensor, float]:
    """Return what the blocks at consecutive anchors add to numerator and denominator of ``rounds``."""
    both = [reference_scores(*block) for block in run]
    kept = [[s.item() for s in sampled] + [0.0] * (block_size - len(sampled)) for sampled, _ in both]
    mean = [sum(k[i] for k in kept) / len(run) for i in range(block_size)]
    stationary = [1 / (1 + sum(mean)), *(m / (1 + sum(mean)) for m in mean)]
    occupancy = occupancies(kept, [1.0] if options.start == "round" else stationary)
    common = sum(occupancy) / sum(o * (1 + sum(k)) for o, k in zip(occupancy, kept, strict=True))
    values = expected_rounds(torch.tensor(kept, dtype=torch.float64), common).tolist()
    worth = [values[a] - values[a + 1] for a in range(len(run))] + [common] * block_size
    terms: list[tuple[float, Tensor]] = []
    for a, (sampled, integrated) in enumerate(both):
        for i in range(len(sampled)):
            credit = worth[a + i + 1]
            if options.estimator == "sampled":
                terms.append((occupancy[a] * credit, sampled[i]))
            else:
                terms.append((occupancy[a] * common, integrated[i]))
                terms.append((occupancy[a] * (credit - common), sampled[i]))
    if options.form == "linear":
        saved = _sum([w * s for w, s in terms])
        return sum(worth[: len(run)]) - (saved - saved.detach()), float(len(run))
    value = _signed_power_mean(terms, options.beta)
    return (torch.zeros_like(both[0][0][0]), 0.0) if value is None else (len(run) * value, float(len(run)))


def _signed_power_mean(terms: list[tuple[float, Tensor]], beta: float) -> Tensor | None:
    """Return -log of the power mean with weights |w|; the gradient of a score has the sign of its weight."""
    positive = [(w, s) for w, s in terms if w != 0 and s > 0]
    if not positive:
        return None
    if beta == 0:
        total = sum(abs(w) for w, _ in positive)
        shares = [abs(w) / total for w, _ in positive]
        value = -sum(share * math.log(s.item()) for share, (_, s) in zip(shares, positive, strict=True))
    else:
        power = sum(abs(w) * s.item() ** beta for w, s in positive)
        shares = [abs(w) * s.item() ** beta / power for w, s in positive]
        value = -math.log(power / sum(abs(w) for w, _ in terms)) / beta
    pairs = zip(shares, positive, strict=True)
    slope = -_sum([math.copysign(share, w) * torch.log(s) for share, (w, s) in pairs])
    return value + slope - slope.detach()


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


def _control_variate(
    p: list[Probabilities], q: list[Probabilities], y: list[int], block_size: int, options: Options
) -> Tensor:
    """Return 0 with the gradient of sum_j c^_j (KL_j + log q_j(y_j)); see `blockdraft.losses.bv.expected_credit`."""
    beta, floor = options.beta, options.ramp_floor or 0.0
    if beta == 1:
        floor = 0.0 if options.summand_floor is None else math.exp(options.summand_floor)
    sampled, integrated = reference_scores(p, q, y)
    control, r = torch.zeros_like(q[0][0]), 1.0
    for j, token in enumerate(y):
        state = (sampled[j - 1].item() if j > 0 else 1.0) / r
        known = [min(1.0, score.item()) for score in integrated[: j + 1]]
        later = [known[j] ** (i / (j + 1)) for i in range(j + 2, block_size + 1)]
        total = sum(max(score, floor) ** beta for score in (*known, *later))
        credit = state * sum(score**beta for score in later if score > floor) / total / (1 + beta)
        pairs = zip(p[j], q[j], strict=True)
        kl = _sum([target * torch.log(target / draft) for target, draft in pairs if target > 0 and draft > 0])
        control = control + credit * kl
        if q[j][token] > 0:
            control = control + credit * torch.log(q[j][token])
            r = r * (q[j][token] / p[j][token]).item()
    return control - control.detach()


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
