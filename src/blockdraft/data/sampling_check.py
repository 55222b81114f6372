r"""Check whether tokens were sampled from the target's own distribution.

At temperature 1 over the whole vocabulary, a sampled token's log-probability is
on average minus the entropy of its distribution:

    E[log p_t(y_t)] = -H_t,   Var[log p_t(y_t)] = sum_v p_t(v) log^2 p_t(v) - H_t^2,

so ``z = sum_t (log p_t(y_t) + H_t) / sqrt(sum_t Var_t)`` is close to a standard
normal variable. Cooler or truncated sampling gives a z far above zero. What was
done instead is then found by likelihood: among temperatures, alone or with the
tightest top-k or top-p that leaves no observed token impossible, the one under
which the tokens are most probable.

Few tokens tell little. Tokens sampled at temperature T would gain, on average,

    sum_t KL(p_t^(T) || p_t)

in log-likelihood over temperature 1; if that is less than the gain that is asked
for before T is believed, a check that finds nothing has shown nothing.
"""

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from blockdraft.data.store import TextDataset
from blockdraft.targets import Sampling, Target

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
Z_LIMIT = 4.0
EVIDENCE_LIMIT = 10.0
"""Log-likelihood that another distribution must gain before it is preferred to the plain one."""
USUAL = 0.7
"""The temperature that a check should at least be able to see."""
CHUNK_BYTES = 2**27
TOP = 1024
"""Tokens of a distribution that are kept for telling how it was cut off."""


@dataclass(frozen=True)
class SamplingCheck:
    """Says what a sample of tokens tells of how they were sampled.

    num_tokens: the number of tokens looked at.
    mean_log_prob, mean_entropy: of the target's distribution at temperature 1, in nats per token.
    z: the standardised distance between the two.
    best: the distribution under which the tokens are most probable.
    evidence: its gain in log-likelihood over temperature 1 with the whole vocabulary.
    power: the gain that as many tokens sampled at temperature 0.7 would have shown on average.
    stated: the distribution that the data folder's manifest states, if there is one.
    """

    num_tokens: int
    mean_log_prob: float
    mean_entropy: float
    z: float
    best: Sampling
    evidence: float
    power: float
    stated: Sampling | None = None

    @property
    def plain(self) -> bool:
        """Tell whether temperature 1 over the whole vocabulary explains the tokens, and nothing else is stated."""
        explained = abs(self.z) < Z_LIMIT and self.evidence < EVIDENCE_LIMIT
        return explained and self.stated in (None, Sampling())

    @property
    def verdict(self) -> str:
        """Give the outcome in words."""
        if self.plain:
            said = "as sampled at temperature 1 over the whole vocabulary"
            few = f", but {self.num_tokens:,} tokens are too few to tell that from temperature {USUAL:g}"
            return said + (few if self.power < EVIDENCE_LIMIT else "")
        if self.stated not in (None, Sampling()):
            return f"sampled with {_named(self.stated)}, as the manifest states; BV loss assumes {_named(Sampling())}"
        if self.best == Sampling():
            return "not sampled from this target's distribution; another model, or another template, wrote them"
        return f"not as sampled at {_named(Sampling())}; most like {_named(self.best, ' or a little more')}"


def check_sampling(dataset: TextDataset, target: Target, *, num_tokens: int = 20_000, seed: int = 0) -> SamplingCheck:
    """Compare a sample of stored responses with the target's own distribution.

    Args:
        dataset: the texts.
        target: the model that should have written them.
        num_tokens: how many response tokens to look at, in whole responses.
        seed: the seed of the choice of responses.
    """
    seen = _observe(target, *_sample(dataset, target, num_tokens, seed))
    scores = _likelihoods(seen)
    best = max(scores, key=lambda each: scores[each] - 2 * _num_choices(each))
    return SamplingCheck(
        num_tokens=len(seen.rank),
        mean_log_prob=float(seen.log_prob.mean()),
        mean_entropy=float(seen.entropy.mean()),
        z=float((seen.log_prob + seen.entropy).sum()) / math.sqrt(max(float(seen.variance.sum()), 1e-12)),
        best=best,
        evidence=scores[best] - scores[Sampling()],
        power=_power(seen, USUAL),
        stated=None if dataset.manifest is None else dataset.manifest.identity.sampling,
    )


def _named(sampling: Sampling, vague: str = "") -> str:
    if sampling == Sampling():
        return "temperature 1 over the whole vocabulary"
    parts = [f"temperature {sampling.temperature:g}" if sampling.temperature else "greedily, temperature 0"]
    if sampling.top_k:
        parts.append(f"top-k {sampling.top_k}{vague}")
    if sampling.top_p < 1:
        parts.append(f"top-p {sampling.top_p:.2f}{vague}")
    return ", ".join(parts)


@dataclass(frozen=True)
class _Seen:
    """Holds n tokens and the distributions they were drawn from, as much as the candidates need.

    logit, rank, log_prob, entropy, variance: ``[n]``; the last three at temperature 1.
    top: ``[n, M]`` the largest logits, in falling order.
    log_z: ``[n, temperatures]`` the log of the normaliser.
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
    """Return the log-likelihood of the tokens under every distribution considered."""
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


def _power(seen: _Seen, temperature: float) -> float:
    """Return ``sum_t KL(p_t^(T) || p_t)`` over the M most probable tokens of each position."""
    cooler = seen.top / temperature - seen.log_z[:, TEMPERATURES.index(temperature), None]
    plain = seen.top - seen.log_z[:, TEMPERATURES.index(1.0), None]
    return float((cooler.exp() * (cooler - plain)).sum())


def _num_choices(sampling: Sampling) -> int:
    return (sampling.temperature != 1) + (sampling.top_k > 0) + (sampling.top_p < 1)


def _sample(dataset: TextDataset, target: Target, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return hidden states ``[n, H]`` that predict response tokens ``[n]``, of whole responses in random order."""
    hidden, tokens, found = [], [], 0
    for text in np.random.default_rng(seed).permutation(len(dataset)):
        ids = torch.from_numpy(dataset[int(text)].astype(np.int64))
        begin = int(dataset.prompt_lengths[text])
        hidden.append(target.forward(ids[None].to(target.device)).hidden[0, begin - 1 : -1])
        tokens.append(ids[begin:].to(target.device))
        found += len(tokens[-1])
        if found >= num_tokens:
            break
    return torch.cat(hidden), torch.cat(tokens)
