"""Predictions of one drafter, written per data folder, read together."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockdraft.data import Completion
from blockdraft.evaluation.prediction import Predictor, Rounds
from blockdraft.evaluation.protocol import Protocol
from blockdraft.evaluation.results import TemperaturePoint
from blockdraft.evaluation.tasks import Task
from blockdraft.files import atomic_write
from blockdraft.verification import Rule


def write_expected(
    file: Path,
    rows: Sequence[Completion],
    predictor: Predictor,
    rules: Sequence[Rule],
    draft_temperatures: Sequence[float],
) -> None:
    """Predict every row."""
    lines = []
    for row in rows:
        found = predictor.predict(row, rules, draft_temperatures)
        rounds = {rule: [[each.num, each.tokens] for each in values] for rule, values in found.items()}
        lines.append({"prompt": row.id.rpartition("#")[0], "rounds": rounds})
    with atomic_write(file) as unfinished:
        unfinished.write_text(json.dumps(lines))


class Expected:
    """Expected rounds of every prompt, all its turns together, by rule and draft temperature."""

    def __init__(self, files: Sequence[Path], protocol: Protocol) -> None:
        self.protocol = protocol
        self._sums: dict[tuple[str, str, int], Rounds] = {}
        for file in files:
            for line in json.loads(file.read_text()):
                for rule, values in line["rounds"].items():
                    for index, (num, tokens) in enumerate(values):
                        key = (line["prompt"], rule, index)
                        self._sums[key] = self._sums.get(key, Rounds(0.0, 0.0)) + Rounds(num, tokens)

    def of(self, task: Task, rule: Rule, draft_temperature: float) -> tuple[list[float], list[float]]:
        """Tokens and rounds of every prompt of a task."""
        index = 0 if rule == "greedy" else self.protocol.grid.index(draft_temperature)
        found = [self._sums[prompt.id, rule, index] for prompt in task.prompts]
        return [each.tokens for each in found], [each.num for each in found]

    def temperatures(self, tasks: Sequence[Task]) -> list[TemperaturePoint]:
        """Predicted acceptance length over the grid, mean over the tasks."""
        points = []
        for temperature in self.protocol.grid if self.protocol.sampled_rules else ():
            lengths = {}
            for rule in self.protocol.sampled_rules:
                pooled = [self.of(task, rule, temperature) for task in tasks]
                lengths[str(rule)] = float(np.mean([sum(t) / sum(r) if sum(r) else 0.0 for t, r in pooled]))
            points.append(TemperaturePoint(draft_temperature=temperature, acceptance_length=lengths))
        return points


def best_of(points: Sequence[TemperaturePoint], rule: str) -> float:
    """The draft temperature of the longest predicted length; of equal ones the highest."""
    return max(points, key=lambda p: (p.acceptance_length[rule], p.draft_temperature)).draft_temperature
