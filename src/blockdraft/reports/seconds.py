"""Seconds by phase, pooled over tasks: of drafters, and of autoregressive decoding beside them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blockdraft.evaluation.metrics import PHASES
from blockdraft.reports.merging import Entry
from blockdraft.verification import Rule


@dataclass(frozen=True)
class Spent:
    """What some generations took, by phase, and how many tokens they made."""

    seconds: Mapping[str, float]
    tokens: float

    @property
    def total(self) -> float:
        """All phases."""
        return sum(self.seconds.values())

    def per_token(self, phase: str) -> float:
        """Seconds of a phase for one token."""
        return self.seconds.get(phase, 0.0) / self.tokens if self.tokens else 0.0


def speculative(entry: Entry, rule: Rule) -> Spent:
    """A drafter at the paper's draft temperature."""
    cells = entry.cells(rule, "paper")
    return Spent(_sum(c.seconds for c in cells), sum(c.num_tokens for c in cells))


def autoregressive(entries: Iterable[Entry], rule: Rule) -> dict[str, Spent]:
    """By evaluation: decoding without a drafter on the same tasks. Its tokens follow from its speed."""
    found: dict[str, Spent] = {}
    for entry in entries:
        cells = entry.cells(rule, "paper")
        if cells and entry.evaluation.name not in found:
            tokens = sum(c.baseline_tokens_per_second * sum(c.baseline_seconds.values()) for c in cells)
            found[entry.evaluation.name] = Spent(_sum(c.baseline_seconds for c in cells), tokens)
    return {f"Autoregressive ({n})" if len(found) > 1 else "Autoregressive": spent for n, spent in found.items()}


def phases(spent: Iterable[Spent]) -> list[str]:
    """The phases that took any time, in the order of a round."""
    seen = {phase for s in spent for phase in s.seconds}
    return [*(p for p in PHASES if p in seen), *sorted(seen.difference(PHASES))]


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for phase, seconds in part.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total
