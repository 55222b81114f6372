r"""Were these tokens sampled from the target's own law?

At temperature 1 over the whole vocabulary, a sampled token's log-probability is
on average minus the entropy of its law:

    E[log p_t(y_t)] = -H_t,   Var[log p_t(y_t)] = sum_v p_t(v) log^2 p_t(v) - H_t^2,

so ``z = sum_t (log p_t(y_t) + H_t) / sqrt(sum_t Var_t)`` is close to a standard
normal variable. Cooler or truncated sampling gives a z far above zero. What was
done instead is then found by likelihood: among temperatures, alone or with the
tightest top-k or top-p that leaves no observed token impossible, the law under
which the tokens are most probable.
"""

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from blockdraft.data.paths import TextDataset
from blockdraft.targets import Sampling, Target

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
Z_LIMIT = 4.0
EVIDENCE_LIMIT = 10.0
"""Log-likelihood that another law must gain before it is preferred to the plain one."""
CHUNK_BYTES = 2**27
TOP = 1024
"""Tokens of a law kept for telling how it was cut off."""


@dataclass(frozen=True)
class SamplingCheck:
    """What a sample of tokens says.

    num_tokens: looked at.
    mean_log_prob, mean_entropy: of the target's law at temperature 1, in nats per token.
    z: standardised distance between the two.
    best: the law under which the tokens are most probable.
    evidence: its gain in log-likelihood over temperature 1 with the whole vocabulary.
    """

    num_tokens: int
    mean_log_prob: float
    mean_entropy: float
    z: float
    best: Sampling
    evidence: float

    @property
    def plain(self) -> bool:
        """Whether temperature 1 over the whole vocabulary explains the tokens."""
        return abs(self.z) < Z_LIMIT and self.evidence < EVIDENCE_LIMIT

    @property
    def verdict(self) -> str:
        """In words."""
        if self.plain:
            return "as sampled at temperature 1 over the whole vocabulary"
        if self.best == Sampling():
            return "not sampled from this target's law; another model, or another template, wrote them"
        parts = [f"temperature {self.best.temperature:g}" if self.best.temperature else "greedily, temperature 0"]
        if self.best.top_k:
            parts.append(f"top-k {self.best.top_k} or a little more")
        if self.best.top_p < 1:
            parts.append(f"top-p {self.best.top_p:.2f} or a little more")
        return "not as sampled at temperature 1 over the whole vocabulary; most like " + ", ".join(parts)


def check_sampling(paths: TextDataset, target: Target, *, num_tokens: int = 20_000, seed: int = 0) -> SamplingCheck:
    """Compare a sample of stored responses with the target's law."""
    seen = _observe(target, *_sample(paths, target, num_tokens, seed))
    scores = _likelihoods(seen)
    best = max(scores, key=lambda law: scores[law] - 2 * _num_choices(law))
    return SamplingCheck(
        num_tokens=len(seen.rank),
        mean_log_prob=float(seen.log_prob.mean()),
        mean_entropy=float(seen.entropy.mean()),
        z=float((seen.log_prob + seen.entropy).sum()) / math.sqrt(max(float(seen.variance.sum()), 1e-12)),
        best=best,
        evidence=scores[best] - scores[Sampling()],
    )


@dataclass(frozen=True)
class _Seen:
    """n tokens and the laws they were drawn from, as much as the candidates need.

    logit, rank, log_prob, entropy, variance: ``[n]``; the last three at temperature 1.
    top: ``[n, M]`` largest logits, in falling order.
    log_z: ``[n, temperatures]`` log of the normaliser.
    """

    logit: Tensor
    rank: Tensor
    log_prob: Tensor
    entropy: Tensor
    variance: Tensor
    top: Tensor
    log_z: Tensor


def _observe(target: Target, hidden: Tensor, tokens: Tensor) -> _Seen:
    parts = []
    size = max(1, CHUNK_BYTES // (4 * target.vocab_size))
    for states, ids in zip(hidden.split(size), tokens.split(size), strict=True):
        logits = target.logits(states).float()
        own = logits.gather(-1, ids[:, None])
        log_p = logits.log_softmax(-1)
        weighted = log_p.exp() * log_p
        entropy = -weighted.sum(-1)
        parts.append(
            _Seen(
                own[:, 0],
                (logits > own).sum(-1),
                log_p.gather(-1, ids[:, None])[:, 0],
                entropy,
                (weighted * log_p).sum(-1) - entropy.square(),
                logits.topk(min(TOP, logits.shape[-1])).values,
                torch.stack([(logits / temperature).logsumexp(-1) for temperature in TEMPERATURES], -1),
            )
        )
    return _Seen(*(torch.cat([getattr(p, f.name) for p in parts]).double() for f in fields(_Seen)))


def _likelihoods(seen: _Seen) -> dict[Sampling, float]:
    """Log-likelihood of the tokens under every law considered."""
    scores: dict[Sampling, float] = {}
    highest = int(seen.rank.max())
    if highest == 0:
        scores[Sampling(0.0)] = 0.0
    for number, temperature in enumerate(TEMPERATURES):
        log_prob = seen.logit / temperature - seen.log_z[:, number]
        plain = scores[Sampling(temperature)] = float(log_prob.sum())
        if highest >= seen.top.shape[1]:
            continue  # a token from so far down: nothing was cut off that could be told from nothing
        p = (seen.top / temperature - seen.log_z[:, number, None]).exp()
        above = p.cumsum(-1) - p  # mass of the tokens more probable than each
        most = float(above.gather(-1, seen.rank.long()[:, None]).max())
        kept_k = p[:, : highest + 1].sum(-1)
        kept_p = p.masked_fill(above > most, 0).sum(-1)
        scores[Sampling(temperature, top_k=highest + 1)] = plain - float(kept_k.clamp(max=1).log().sum())
        scores[Sampling(temperature, top_p=min(1.0, most + 1e-6))] = plain - float(kept_p.clamp(max=1).log().sum())
    return scores


def _num_choices(law: Sampling) -> int:
    return (law.temperature != 1) + (law.top_k > 0) + (law.top_p < 1)


def _sample(paths: TextDataset, target: Target, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hidden states ``[n, H]`` that predict response tokens ``[n]``, of whole responses in random order."""
    hidden, tokens, found = [], [], 0
    for text in np.random.default_rng(seed).permutation(len(paths)):
        ids = torch.from_numpy(paths[int(text)].astype(np.int64))
        begin = int(paths.prompt_lengths[text])
        hidden.append(target.forward(ids[None].to(target.device)).hidden[0, begin - 1 : -1])
        tokens.append(ids[begin:].to(target.device))
        found += len(tokens[-1])
        if found >= num_tokens:
            break
    return torch.cat(hidden), torch.cat(tokens)
