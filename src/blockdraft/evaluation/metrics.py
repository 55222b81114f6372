"""From generations to numbers: pooled per task, averaged over tasks, with intervals from a bootstrap over prompts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockdraft.decoding import Generation
from blockdraft.evaluation.results import Interval

PHASES = ("prefill", "draft", "verify", "rest")
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """What is kept of one generation.

    tokens: the new ones, cropped to the budget.
    accepted: drafted tokens kept, by round; added: tokens that the round added, correction or bonus included,
        before cropping. The prefill's token is in neither.
    seconds: by phase.
    """

    tokens: list[int]
    accepted: list[int]
    added: list[int]
    seconds: dict[str, float]

    @classmethod
    def of(cls, generation: Generation) -> "Record":
        rounds = generation.rounds
        seconds = {"prefill": generation.prefill_seconds}
        seconds |= {phase: sum(each.seconds[phase] for each in rounds) for phase in PHASES[1:]}
        return cls(
            generation.tokens, [each.accepted for each in rounds], [len(each.tokens) for each in rounds], seconds
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Sums:
    """Sums over the generations of one prompt, from which every pooled ratio is made.

    retained: ``[B]`` rounds that kept at least i.
    """

    rounds: int
    added: int
    accepted: int
    tokens: int
    seconds: dict[str, float]
    retained: NDArray[np.int64]

    @classmethod
    def of(cls, records: Sequence[Record], num_proposals: int) -> "Sums":
        accepted = np.array([k for record in records for k in record.accepted], dtype=np.int64)
        reach = np.arange(1, num_proposals + 1)
        return cls(
            rounds=len(accepted),
            added=sum(sum(record.added) for record in records),
            accepted=int(accepted.sum()),
            tokens=sum(len(record.tokens) for record in records),
            seconds={phase: sum(record.seconds[phase] for record in records) for phase in PHASES},
            retained=(accepted[:, None] >= reach).sum(0),
        )

    @property
    def total_seconds(self) -> float:
        """Of all phases, prefill included."""
        return sum(self.seconds.values())


class Bootstrap:
    """The same resampled prompts for every quantity of a task, so that ratios of them stay paired."""

    def __init__(self, num_prompts: int, num_samples: int, seed: int, stream: int) -> None:
        rng = np.random.default_rng([seed, stream])
        drawn = rng.integers(num_prompts, size=(num_samples, num_prompts))
        self.weights = np.ones((1 + num_samples, num_prompts))  # the first one is no resample
        for sample, indices in enumerate(drawn, 1):
            self.weights[sample] = np.bincount(indices, minlength=num_prompts)

    def ratio(self, numerator: Sequence[float], denominator: Sequence[float]) -> Numbers:
        """Pooled ratio of the whole (first) and of every resample."""
        above, below = (self.weights @ np.asarray(each, dtype=np.float64) for each in (numerator, denominator))
        return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def estimate(samples: Numbers) -> Interval:
    """The first of the samples, with the interval of the others."""
    low, high = np.quantile(samples[1:], [0.025, 0.975]) if len(samples) > 1 else (samples[0], samples[0])
    return Interval(value=float(samples[0]), low=float(low), high=float(high))


def mean_over_tasks(samples: Sequence[Numbers]) -> Interval:
    """Tasks have equal weight; their resamples are independent."""
    return estimate(np.mean(samples, 0))


def conditional(retention: Sequence[float]) -> list[float | None]:
    """Pr(accepted >= i | accepted >= i - 1); None where the condition was never met."""
    before = [1.0, *retention[:-1]]
    return [kept / base if base > 0 else None for kept, base in zip(retention, before, strict=True)]


def column(sums: Sequence[Sums], value: Callable[[Sums], float]) -> list[float]:
    """One number of every prompt."""
    return [value(each) for each in sums]
