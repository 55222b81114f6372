"""Turn the evaluations of all seeds into tables: means, spreads, and paired differences against a baseline.

The unit of the spread is the seed: a mean over tasks for each seed, then mean and standard deviation over seeds. A
paired difference compares two objectives with the same target, drafter, seed and prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.evaluation import Results, read_results
from blockdraft.evaluation.results import read_traces, write_model
from blockdraft.files import atomic_write, write_json
from blockdraft.reports import write_report
from blockdraft.reports.table import CellValue, Column, Table, TableRow, plain
from blockdraft.study.plan import StudyRecipe
from blockdraft.study.seeds import Spread, mean_over_seeds

QUANTITIES = {"predicted_length": "predicted τ", "acceptance_length": "τ", "speedup": "speed-up"}


@dataclass(frozen=True)
class StudySummary:
    """Holds what a study found: its tables, the report's page, and the count of wins against the baseline."""

    tables: list[Table]
    page: Path
    wins: dict[str, tuple[int, int]]


def summarize(study: StudyRecipe, out: Path) -> StudySummary:
    """Read all evaluations of a study and write its report."""
    results = {
        (target, seed): read_results(out / "evaluations" / f"{target}-seed{seed}")
        for target in study.targets
        for seed in study.seeds
    }
    baseline = next((name for name, each in study.objectives.items() if each.recipe == "ce"), None)
    tables = [_lengths(study, results, quantity) for quantity in QUANTITIES]
    wins: dict[str, tuple[int, int]] = {}
    if baseline is not None and len(study.objectives) > 1:
        tables += [_gains(study, results, baseline, quantity) for quantity in QUANTITIES]
        others = [name for name in study.objectives if name != baseline]
        wins = {name: _count_wins(study, results, name, baseline) for name in others}
    folder = out / "report"
    for table in tables:
        for ending, content in (("md", table.markdown()), ("tex", table.latex()), ("csv", table.csv())):
            with atomic_write(folder / "tables" / f"study-{table.name}.{ending}") as unfinished:
                unfinished.write_text(content, encoding="utf-8")
    counted = {f"{name} ahead of {baseline}": {"wins": w, "of": of} for name, (w, of) in wins.items()}
    write_json(counted, folder / "wins.json")
    page = write_report([_write_means(study, results, target, out) for target in study.targets], folder).page
    return StudySummary(tables, page, wins)


def _write_means(study: StudyRecipe, results: "AllResults", target: str, out: Path) -> Path:
    """Write the evaluation of a target whose numbers are means over seeds, with the traces of the first seed."""
    folder = out / "report" / "means" / target
    write_model(mean_over_seeds({seed: results[target, seed] for seed in study.seeds}), folder / "results.json")
    traces = read_traces(out / "evaluations" / f"{target}-seed{study.seeds[0]}")
    if traces is not None:
        write_model(traces, folder / "traces.json", indent=None)
    return folder


AllResults = dict[tuple[str, int], Results]


def _of_seeds(
    study: StudyRecipe, results: AllResults, target: str, drafter: str, rule: str, choice: str, quantity: str
) -> Spread | None:
    """Return the mean over tasks of one drafter in every seed; where no choice of temperature differs, the paper's."""
    found = []
    for seed in study.seeds:
        named = [a for a in results[target, seed].averages if (a.drafter, a.rule) == (drafter, rule)]
        measured: dict[str, float] = {a.choice: getattr(a, quantity).value for a in named}
        value = measured.get(choice, measured.get("paper") if choice == "best" else None)
        if value is None:
            return None
        found.append(value)
    return Spread(tuple(found))


def _shown(spread: Spread) -> CellValue:
    """Return the mean with its standard deviation, as a cell of a table."""
    text = f"{spread.mean:.2f}"
    if spread.deviation is not None:
        text += f" ± {spread.deviation:.2f}"
    return CellValue(text, spread.mean, spread.interval)


def _settings(study: StudyRecipe) -> list[tuple[str, str, str]]:
    """Return the columns of a table: rule, choice of the draft temperature, heading."""
    found = []
    for rule in study.evaluation.rules:
        if rule == "greedy":
            found.append(("greedy", "paper", "T=0"))
        else:
            choices = (("paper", "draft T=1"), ("best", "best draft T"), ("one-hot", "one-hot drafts"))
            found += [(rule, choice, f"T=1, {rule}, {words}") for choice, words in choices]
    return found


def _lengths(study: StudyRecipe, results: AllResults, quantity: str) -> Table:
    """Build the table of one quantity: rows are objectives, columns rules and draft temperatures."""
    rows = []
    for target in study.targets:
        for drafter in study.drafters:
            for objective in study.objectives:
                spreads = [
                    _of_seeds(study, results, target, f"{drafter}-{objective}", rule, choice, quantity)
                    for rule, choice, _ in _settings(study)
                ]
                values = tuple(plain(None) if each is None else _shown(each) for each in spreads)
                rows.append(TableRow((target, drafter, objective), values))
    return _table(study, quantity, rows, f"{QUANTITIES[quantity]} by objective", "mean ± deviation over seeds")


def _gains(study: StudyRecipe, results: AllResults, baseline: str, quantity: str) -> Table:
    """Build the table of paired gains over the baseline, with the 95% interval over seeds."""
    rows = []
    for target in study.targets:
        for drafter in study.drafters:
            for objective in (name for name in study.objectives if name != baseline):
                values = []
                for rule, choice, _ in _settings(study):
                    ours, theirs = (
                        _of_seeds(study, results, target, f"{drafter}-{each}", rule, choice, quantity)
                        for each in (objective, baseline)
                    )
                    if ours is None or theirs is None:
                        values.append(plain(None))
                        continue
                    gain = Spread(tuple(a / b - 1 for a, b in zip(ours.values, theirs.values, strict=True)))
                    text = f"{gain.mean:+.1%}"
                    if gain.interval is not None:
                        text += f" [{gain.interval[0]:+.1%}, {gain.interval[1]:+.1%}]"
                    values.append(CellValue(text, gain.mean, gain.interval))
                rows.append(TableRow((target, drafter, objective), tuple(values)))
    caption = (
        f"paired differences with the same seed and prompts, 95% interval over {len(study.seeds)} seeds (Student's t)"
    )
    return _table(study, f"{quantity}-over-{baseline}", rows, f"{QUANTITIES[quantity]} over {baseline}", caption)


def _table(study: StudyRecipe, name: str, rows: Sequence[TableRow], title: str, caption: str) -> Table:
    columns = tuple(
        Column((heading,), f"{rule}_{choice}".replace("-", "_"), interval=True)
        for rule, choice, heading in _settings(study)
    )
    kept = [i for i in range(len(columns)) if any(row.values[i].number is not None for row in rows)]
    rows = [TableRow(row.labels, tuple(row.values[i] for i in kept)) for row in rows]
    what = f"{study.evaluation.checkpoint} checkpoint, mean over tasks, {caption}."
    slug = name.replace("_", "-")
    return Table(
        slug,
        f"{study.name}: {title}",
        what,
        ("Target", "Drafter", "Objective"),
        tuple(columns[i] for i in kept),
        tuple(rows),
    )


def _count_wins(study: StudyRecipe, results: AllResults, objective: str, baseline: str) -> tuple[int, int]:
    """Count the comparisons, one for each target, drafter, seed, task and rule, in which predicted τ is ahead."""
    wins = of = 0
    for found in results.values():
        cells = {(c.drafter, c.rule, c.task): c.predicted_length.value for c in found.cells if c.choice == "paper"}
        for drafter in study.drafters:
            for (name, rule, task), value in cells.items():
                other = cells.get((f"{drafter}-{baseline}", rule, task))
                if name == f"{drafter}-{objective}" and other is not None:
                    wins, of = wins + (value > other), of + 1
    return wins, of
