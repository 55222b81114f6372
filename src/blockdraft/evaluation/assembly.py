"""From records and predictions to results."""

from collections.abc import Mapping, Sequence

import numpy as np

from blockdraft.evaluation.about import Candidate
from blockdraft.evaluation.conversation import DecodingSetup
from blockdraft.evaluation.expected import Expected, best_of
from blockdraft.evaluation.metrics import (
    Bootstrap,
    Numbers,
    Record,
    Sums,
    column,
    conditional,
    estimate,
    mean_over_tasks,
)
from blockdraft.evaluation.protocol import Protocol
from blockdraft.evaluation.results import Average, Cell, DrafterAbout, TemperaturePoint
from blockdraft.evaluation.tasks import Task

Records = Mapping[tuple[str, str], list[Record]]
"""By prompt and key of the way."""


class Assembly:
    """Cells, and averages over the tasks, of all ways that have a drafter."""

    def __init__(self, tasks: Sequence[Task], candidates: Sequence[Candidate], protocol: Protocol) -> None:
        self.tasks, self.protocol = tasks, protocol
        self.num_proposals = {each.name: each.drafter.config.num_proposals for each in candidates}

    def assemble(
        self, ways: Sequence[DecodingSetup], records: Records, expected: Mapping[str, Expected]
    ) -> tuple[list[Cell], list[Average]]:
        """All cells task by task, and the averages."""
        cells: dict[DecodingSetup, list[Cell]] = {way: [] for way in ways if way.drafter is not None}
        samples: dict[DecodingSetup, list[dict[str, Numbers]]] = {way: [] for way in cells}
        for number, task in enumerate(self.tasks):
            resampled = Bootstrap(len(task.prompts), self.protocol.num_bootstrap, self.protocol.seed, number)
            for way in cells:
                assert way.drafter is not None
                drawn, cell = self._cell(task, way, records, resampled, expected[way.drafter])
                cells[way].append(cell)
                samples[way].append(drawn)
        averages = [_average(way, cells[way], samples[way]) for way in cells]
        by_task = [group[number] for number in range(len(self.tasks)) for group in cells.values()]
        return by_task, averages

    def _cell(
        self, task: Task, way: DecodingSetup, records: Records, resampled: Bootstrap, expected: Expected
    ) -> tuple[dict[str, Numbers], Cell]:
        assert way.drafter is not None
        ids = [prompt.id for prompt in task.prompts]
        baseline = self.protocol.baseline(way.rule)
        sums = [Sums.of(records[each, way.key], self.num_proposals[way.drafter]) for each in ids]
        base = [Sums.of(records[each, baseline.key], 0) for each in ids]
        rounds = column(sums, lambda s: s.rounds)
        rate = resampled.ratio(column(sums, lambda s: s.tokens), column(sums, lambda s: s.total_seconds))
        base_rate = resampled.ratio(column(base, lambda s: s.tokens), column(base, lambda s: s.total_seconds))
        drawn = {
            "acceptance_length": resampled.ratio(column(sums, lambda s: s.added), rounds),
            "draft_length": resampled.ratio(column(sums, lambda s: s.accepted), rounds),
            "predicted_length": resampled.ratio(*expected.of(task, way.rule, way.draft_temperature)),
            "speedup": np.divide(rate, base_rate, out=np.zeros_like(rate), where=base_rate > 0),
        }
        num_rounds = sum(each.rounds for each in sums)
        retention = (np.sum([each.retained for each in sums], 0) / max(1, num_rounds)).tolist()
        seconds, base_seconds = (
            {phase: sum(each.seconds[phase] for each in group) for phase in group[0].seconds} for group in (sums, base)
        )
        return drawn, Cell(
            drafter=way.drafter, rule=way.rule, choice=way.choice, draft_temperature=way.draft_temperature,
            task=task.name, num_generations=sum(len(records[each, way.key]) for each in ids), num_rounds=num_rounds,
            num_tokens=sum(each.tokens for each in sums), retention=retention, conditional=conditional(retention),
            whole_block_rate=retention[-1], tokens_per_second=float(rate[0]),
            baseline_tokens_per_second=float(base_rate[0]), seconds=seconds, baseline_seconds=base_seconds,
            acceptance_length=estimate(drawn["acceptance_length"]), draft_length=estimate(drawn["draft_length"]),
            predicted_length=estimate(drawn["predicted_length"]), speedup=estimate(drawn["speedup"]),
        )  # fmt: skip


def _average(way: DecodingSetup, cells: Sequence[Cell], drawn: Sequence[dict[str, Numbers]]) -> Average:
    assert way.drafter is not None
    means = {name: mean_over_tasks([each[name] for each in drawn]) for name in drawn[0]}
    return Average(
        drafter=way.drafter, rule=way.rule, choice=way.choice, draft_temperature=way.draft_temperature,
        acceptance_length=means["acceptance_length"], draft_length=means["draft_length"],
        whole_block_rate=float(np.mean([cell.whole_block_rate for cell in cells])),
        predicted_length=means["predicted_length"], speedup=means["speedup"],
    )  # fmt: skip


def about(candidate: Candidate, points: Sequence[TemperaturePoint], protocol: Protocol) -> DrafterAbout:
    """A drafter as results tell it."""
    config = candidate.drafter.config
    return DrafterAbout(
        name=candidate.name, label=candidate.label, path=str(candidate.path), kind=config.kind,
        objective=candidate.objective, num_proposals=config.num_proposals, num_layers=config.num_layers,
        num_parameters=sum(parameter.numel() for parameter in candidate.drafter.parameters()), step=candidate.step,
        best_draft_temperature={rule: best_of(points, rule) for rule in protocol.sampled_rules},
        temperatures=list(points),
        recipe=None if candidate.run is None else candidate.run.recipe.model_dump(mode="json"),
    )  # fmt: skip
