"""Join the evaluations of several seeds: means over seeds, and what their spread says.

The evaluations of several seeds become one whose numbers are means over them. Every interval becomes that of the mean
over seeds, by Student's t; with a single seed nothing changes. Every seed weighs the same, but for counts and seconds,
which are summed.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeVar

from blockdraft.evaluation.metrics import conditional
from blockdraft.evaluation.results import (
    Average,
    Cell,
    DrafterAbout,
    Dynamics,
    DynamicsPoint,
    HeldOutPoint,
    Interval,
    PairedRatio,
    Results,
    TemperaturePoint,
    best_temperature,
)
from blockdraft.reports.comparison import Spent
from blockdraft.verification import Rule

T_975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t distribution for 0 to 10 degrees of freedom."""

Item = TypeVar("Item")
Measured = TypeVar("Measured", Cell, Average, PairedRatio)


@dataclass(frozen=True)
class Spread:
    """Holds values over seeds: their mean, standard deviation (None for one seed), and how many there are."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Give the mean over seeds."""
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Give the standard deviation over seeds; None for a single one."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Give the 95% interval of the mean by Student's t over seeds; None for a single seed."""
        if self.deviation is None:
            return None
        half = _students_quantile(len(self.values) - 1) * self.deviation / math.sqrt(len(self.values))
        return self.mean - half, self.mean + half


def _students_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t: tabulated, or by its expansion around the normal one."""
    if freedom < len(T_975):
        return T_975[freedom]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean_over_seeds(results: Mapping[int, Results]) -> Results:
    """Join evaluations of the same target, tasks and drafters, given by seed; what a seed lacks is left out."""
    found = list(results.values())
    first = found[0]
    if len(found) == 1:
        return first
    return first.model_copy(
        update={
            "settings": first.settings | {"seeds": list(results)},
            "drafters": [_drafter(each) for each in _aligned([r.drafters for r in found], lambda d: d.name)],
            "cells": [
                _cell(each)
                for each in _aligned(
                    [_with_best(r.cells) for r in found], lambda c: (c.drafter, c.rule, c.choice, c.task)
                )
            ],
            "averages": [
                _average(each)
                for each in _aligned([_with_best(r.averages) for r in found], lambda a: (a.drafter, a.rule, a.choice))
            ],
            "comparisons": [
                each[0].model_copy(update={"ratio": _interval(c.ratio for c in each)})
                for each in _aligned(
                    [_with_best(r.comparisons) for r in found],
                    lambda c: (c.drafter, c.baseline, c.rule, c.choice, c.quantity, c.task),
                )
            ],
            "dynamics": [_dynamics(each) for each in _aligned([r.dynamics for r in found], lambda d: d.drafter)],
            "dynamics_obstacles": {
                name: f"{reason} (seed {seed})"
                for seed, each in reversed(list(results.items()))
                for name, reason in each.dynamics_obstacles.items()
            },
        }
    )


def _aligned(seeds: Sequence[Sequence[Item]], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return the items that all seeds have, in the order of the first one, each with its counterparts."""
    by_key = [{key(item): item for item in items} for items in seeds]
    return [[items[name] for items in by_key] for name in by_key[0] if all(name in items for items in by_key)]


def _with_best(items: Sequence[Measured]) -> list[Measured]:
    """Add what was not measured a second time: where the paper's draft temperature is the best one, it is both."""

    def place(item: Measured) -> tuple[object, ...]:
        return tuple(getattr(item, name, None) for name in ("drafter", "baseline", "rule", "task", "quantity"))

    has_best = {place(item) for item in items if item.choice == "best"}
    sampled = [item for item in items if item.choice == "paper" and item.rule != "greedy"]
    missing: list[Measured] = [
        item.model_copy(update={"choice": "best"}) for item in sampled if place(item) not in has_best
    ]
    return list(items) + missing


def _interval(values: Iterable[Interval]) -> Interval:
    spread = Spread(tuple(each.value for each in values))
    low, high = spread.interval or (spread.mean, spread.mean)
    return Interval(value=spread.mean, low=low, high=high)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the means, place by place, of rows of one length."""
    return [fmean(each) for each in zip(*rows, strict=True)]


def _by_rule(seeds: Sequence[TemperaturePoint] | Sequence[HeldOutPoint], name: str) -> dict[str, Any]:
    """Return the means of a point's lengths by rule, and their standard deviations."""
    first: dict[Rule, float] = getattr(seeds[0], name)
    spreads = {rule: Spread(tuple(getattr(point, name)[rule] for point in seeds)) for rule in first}
    return {
        name: {rule: each.mean for rule, each in spreads.items()},
        "deviation": {rule: each.deviation for rule, each in spreads.items()},
    }


def _drafter(seeds: Sequence[DrafterAbout]) -> DrafterAbout:
    """Describe a drafter by its first seed, with predicted lengths that are means; its weights are no single ones."""
    first = seeds[0]
    points = [
        TemperaturePoint(
            draft_temperature=same[0].draft_temperature,
            **_by_rule(same, "acceptance_length"),
        )
        for same in _aligned([each.temperatures for each in seeds], lambda point: point.draft_temperature)
    ]
    tried = set[str]().union(*(point.acceptance_length for point in points))  # greedy drafts have no temperature
    best = {rule: best_temperature(points, rule) for rule in first.best_draft_temperature if rule in tried}
    lengths = {
        rule: _means([each.lengths_by_proposals[rule] for each in seeds])
        for rule in first.lengths_by_proposals
        if all(rule in each.lengths_by_proposals for each in seeds)
    }
    curve = [
        HeldOutPoint(
            step=same[0].step,
            num_blocks=round(fmean(point.num_blocks for point in same)),
            accuracy=fmean(point.accuracy for point in same),
            **_by_rule(same, "draft_length"),
        )
        for same in _aligned([each.learning_curve for each in seeds], lambda point: point.step)
    ]
    return first.model_copy(
        update={
            "path": f"{first.path} and {len(seeds) - 1} more",
            "temperatures": points,
            "best_draft_temperature": first.best_draft_temperature | best,
            "lengths_by_proposals": lengths,
            "learning_curve": curve,
            "fingerprint": None,
            "proposal_choice": None,
            "speed_settings": list(dict.fromkeys(each for about in seeds for each in about.speed_settings)),
        }
    )


def _cell(seeds: Sequence[Cell]) -> Cell:
    first = seeds[0]
    if not all(each.num_generations for each in seeds):
        return first.model_copy(update=_lengths(seeds))
    retention = _means([each.retention for each in seeds])
    num_tokens = sum(each.num_tokens for each in seeds)
    baseline_tokens = sum((c.baseline_tokens_per_second or 0.0) * sum(c.baseline_seconds.values()) for c in seeds)
    spent = Spent.pooled((each.seconds for each in seeds), num_tokens)
    baseline = Spent.pooled((each.baseline_seconds for each in seeds), baseline_tokens)
    return first.model_copy(
        update={
            **_lengths(seeds),
            "num_generations": sum(each.num_generations for each in seeds),
            "num_rounds": sum(each.num_rounds for each in seeds),
            "num_tokens": num_tokens,
            "retention": retention,
            "conditional": conditional(retention),
            "tokens_per_second": _rate(spent),
            "baseline_tokens_per_second": _rate(baseline),
            "seconds": dict(spent.seconds),
            "baseline_seconds": dict(baseline.seconds),
        }
    )


def _rate(spent: Spent) -> float:
    return spent.tokens / spent.total if spent.total else 0.0


def _average(seeds: Sequence[Average]) -> Average:
    return seeds[0].model_copy(update=_lengths(seeds))


def _lengths(seeds: Sequence[Cell] | Sequence[Average]) -> dict[str, object]:
    """Return the means of what cells and averages share; None of what a seed lacks, as it does without decoding."""
    quantities = ("acceptance_length", "draft_length", "predicted_length", "speedup")
    lengths = {name: [getattr(each, name) for each in seeds] for name in quantities}
    whole = [each.whole_block_rate for each in seeds if each.whole_block_rate is not None]
    return {
        **{name: None if None in each else _interval(each) for name, each in lengths.items()},
        "draft_temperature": fmean(each.draft_temperature for each in seeds),
        "whole_block_rate": fmean(whole) if len(whole) == len(seeds) else None,
    }


def _dynamics(seeds: Sequence[Dynamics]) -> Dynamics:
    points = []
    for same in _aligned([each.points for each in seeds], lambda point: point.step):
        accuracy, length = (Spread(tuple(getattr(each, x) for each in same)) for x in ("accuracy", "draft_length"))
        points.append(
            DynamicsPoint(
                step=same[0].step,
                epoch=fmean(point.epoch for point in same),
                accuracy=accuracy.mean,
                accuracy_deviation=accuracy.deviation,
                draft_length=length.mean,
                draft_length_deviation=length.deviation,
            )
        )
    return seeds[0].model_copy(update={"points": points})
