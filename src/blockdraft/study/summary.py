"""Turn the evaluations of all seeds into tables and a report: means, spreads, paired differences against a baseline.

The unit of the spread is the seed: a mean over tasks for each seed, then mean and standard deviation over seeds. A
paired difference compares two objectives with the same target, drafter, seed and prompts. A study of a single seed has
the intervals of its evaluations instead, which are over prompts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blockdraft.evaluation.results import (
    Cell,
    Interval,
    Quantity,
    Results,
    TemperatureChoice,
    read_results,
    read_traces,
    write_model,
)
from blockdraft.files import write_json
from blockdraft.reports import write_report
from blockdraft.reports.table import MISSING, CellValue, Column, Table, TableRow, plain, with_interval
from blockdraft.study.plan import StudyRecipe
from blockdraft.study.seeds import Spread, mean_over_seeds
from blockdraft.study.taken import cost_table
from blockdraft.verification import Rule

QUANTITIES: dict[Quantity, str] = {
    "predicted_length": "predicted τ",
    "acceptance_length": "measured τ",
    "speedup": "speed-up",
}
CHECKPOINTS = {"last": "Final checkpoints", "best": "Best checkpoints by held-out length"}
OVER_PROMPTS = "95% intervals over prompts (bootstrap)"
COUNTED = (("wins", "Ahead in"), ("of", "Of"))

AllResults = dict[tuple[str, int], Results]


@dataclass(frozen=True)
class Count:
    """Holds in how many comparisons something was ahead, and of how many."""

    wins: int
    of: int


@dataclass(frozen=True)
class Ahead:
    """Counts where an objective is ahead of the baseline: by predicted lengths, and by those measured in decoding.

    label, over: how tables call the two. A comparison is one target, drafter, seed, task and rule.
    """

    label: str
    over: str
    predicted: Count
    measured: Count


@dataclass(frozen=True)
class StudySummary:
    """Holds what a study found: its tables, the report's page, and where each objective is ahead of the baseline."""

    tables: list[Table]
    page: Path
    baseline: str | None
    wins: dict[str, Ahead]


def summarize(study: StudyRecipe, out: Path) -> StudySummary:
    """Read all evaluations of a study and write its report."""
    results = {
        (target, seed): read_results(out / "evaluations" / f"{target}-seed{seed}")
        for target in study.targets
        for seed in study.seeds
    }
    baseline = study.compared_with
    tables = [_lengths_table(study, results, quantity) for quantity in QUANTITIES]
    wins: dict[str, Ahead] = {}
    if baseline is not None and len(study.objectives) > 1:
        others = [name for name in study.objectives if name != baseline]
        wins = {name: _count_wins(study, results, name, baseline) for name in others}
        tables += [_gains_table(study, results, baseline, quantity) for quantity in QUANTITIES]
        tables.append(_wins_table(study, wins.values()))
    tables = [table for table in tables if table.columns]  # none of measured lengths if nothing was decoded
    over = None if baseline is None else _title(study, results, baseline)
    cost = cost_table(study, out, _labels(study, results), over)
    tables += [] if cost is None else [cost]
    folder = out / "report"
    for pattern in ("study-*-over-*", "study-wins.*", "study-cost.*"):  # the baseline may have been another one
        for stale in (folder / "tables").glob(pattern):
            stale.unlink()
    counted = {
        f"{name} ahead of {baseline}": {"predicted": asdict(each.predicted), "measured": asdict(each.measured)}
        for name, each in wins.items()
    }
    write_json(counted, folder / "wins.json")
    means = [_write_means(study, results, target, out) for target in study.targets]
    return StudySummary(tables, write_report(means, folder, study=tables).page, baseline, wins)


def _write_means(study: StudyRecipe, results: AllResults, target: str, out: Path) -> Path:
    """Write the evaluation of a target whose numbers are means over seeds, with the traces of the first seed."""
    folder = out / "report" / "means" / target
    write_model(mean_over_seeds({seed: results[target, seed] for seed in study.seeds}), folder / "results.json")
    traces = read_traces(out / "evaluations" / f"{target}-seed{study.seeds[0]}")
    if traces is not None:
        write_model(traces, folder / "traces.json", indent=None)
    return folder


def _labels(study: StudyRecipe, results: AllResults) -> dict[tuple[str, str, str], str]:
    """Name the rows, by target, drafter and objective: by the label of the evaluation, which says what BV it is.

    Where objectives of one target and drafter share a label, each has its name in the study behind it.
    """
    found: dict[tuple[str, str, str], str] = {}
    for target in study.targets:
        known = {each.name: each.label for each in results[target, study.seeds[0]].drafters}
        for drafter in study.drafters:
            labels = {name: known.get(f"{drafter}-{name}", name) for name in study.objectives}
            times = Counter(labels.values())
            for name, label in labels.items():
                found[target, drafter, name] = label if times[label] == 1 else f"{label} ({name})"
    return found


def _title(study: StudyRecipe, results: AllResults, objective: str) -> str:
    """Name an objective over all targets and drafters: by its label, or by its name if it has several labels."""
    labels = {label for (_, _, name), label in _labels(study, results).items() if name == objective}
    return labels.pop() if len(labels) == 1 else objective


def _of_seeds(
    study: StudyRecipe, results: AllResults, target: str, drafter: str, rule: str, choice: str, quantity: str
) -> list[Interval] | None:
    """Return the mean over tasks of one drafter in every seed; where no choice of temperature differs, the paper's."""
    found = []
    for seed in study.seeds:
        named = [a for a in results[target, seed].averages if (a.drafter, a.rule) == (drafter, rule)]
        measured: dict[str, Interval] = {a.choice: getattr(a, quantity) for a in named}
        value = measured.get(choice, measured.get("paper") if choice == "best" else None)
        if value is None:
            return None
        found.append(value)
    return found


def _shown(seeds: Sequence[Interval] | None) -> CellValue:
    """Return the mean with its standard deviation over seeds; a single seed has its interval over prompts."""
    if seeds is None:
        return MISSING
    if len(seeds) == 1:
        return with_interval(seeds[0])
    spread = Spread(tuple(each.value for each in seeds))
    return CellValue(f"{spread.mean:.2f} ± {spread.deviation:.2f}", spread.mean, spread.interval)


def _settings(study: StudyRecipe) -> list[tuple[Rule, TemperatureChoice, str]]:
    """Return the columns of a table: rule, choice of the draft temperature, heading."""
    found: list[tuple[Rule, TemperatureChoice, str]] = []
    for rule in study.evaluation.rules:
        if rule == "greedy":
            found.append(("greedy", "paper", "T=0"))
        else:
            choices: tuple[tuple[TemperatureChoice, str], ...]
            choices = (("paper", "draft T=1"), ("best", "best draft T"), ("one-hot", "argmax drafts"))
            if set(study.evaluation.draft_temperatures or ()) == {1.0}:  # none was sought
                choices = tuple(each for each in choices if each[0] != "best")
            found += [(rule, choice, f"T=1, {rule}, {words}") for choice, words in choices]
    return found


def _lengths_table(study: StudyRecipe, results: AllResults, quantity: Quantity) -> Table:
    """Build the table of one quantity: rows are objectives, columns rules and draft temperatures."""
    rows = []
    for (target, drafter, objective), label in _labels(study, results).items():
        name = f"{drafter}-{objective}"
        values = [_shown(_of_seeds(study, results, target, name, r, c, quantity)) for r, c, _ in _settings(study)]
        rows.append(TableRow((target, drafter, label), tuple(values)))
    num_seeds = len(study.seeds)
    caption = f"mean ± standard deviation over {num_seeds} seeds" if num_seeds > 1 else f"one seed, with {OVER_PROMPTS}"
    return _table(study, quantity, rows, f"{QUANTITIES[quantity]} by objective", caption)


def _gains_table(study: StudyRecipe, results: AllResults, baseline: str, quantity: Quantity) -> Table:
    """Build the table of paired gains over the baseline, with the 95% interval over seeds, or over prompts for one."""
    rows = []
    for (target, drafter, objective), label in _labels(study, results).items():
        if objective != baseline:
            pair = (f"{drafter}-{objective}", f"{drafter}-{baseline}")
            values = [_gain(study, results, target, pair, r, c, quantity) for r, c, _ in _settings(study)]
            rows.append(TableRow((target, drafter, label), tuple(values)))
    if len(study.seeds) > 1:
        caption = f"paired by seed and prompts, with 95% intervals over {len(study.seeds)} seeds (Student's t)"
    else:
        caption = f"one seed, paired by prompts, with {OVER_PROMPTS}"
        if any(v.number is not None and v.interval is None for row in rows for v in row.values):
            caption += " where the evaluation compared the two prompt by prompt"
    title = f"{QUANTITIES[quantity]} over {_title(study, results, baseline)}"
    return _table(study, f"{quantity}-over-{baseline}", rows, title, caption)


def _gain(
    study: StudyRecipe,
    results: AllResults,
    target: str,
    pair: tuple[str, str],
    rule: Rule,
    choice: TemperatureChoice,
    quantity: Quantity,
) -> CellValue:
    """Return the gain of the first of two drafters over the second, with its interval if it has one."""
    ours, theirs = (_of_seeds(study, results, target, each, rule, choice, quantity) for each in pair)
    if ours is None or theirs is None:
        return MISSING
    gain = Spread(tuple(a.value / b.value - 1 for a, b in zip(ours, theirs, strict=True)))
    interval = gain.interval
    if len(study.seeds) == 1:
        found = results[target, study.seeds[0]]
        ratio = found.ratio(*pair, rule, choice, quantity)
        if ratio is None and choice == "best":  # the paper's draft temperature is the best for both
            ratio = found.ratio(*pair, rule, "paper", quantity)
        if ratio is not None and ratio.bounds is not None:
            interval = ratio.low - 1, ratio.high - 1
    text = f"{gain.mean:+.1%}" + ("" if interval is None else f" [{interval[0]:+.1%}, {interval[1]:+.1%}]")
    return CellValue(text, gain.mean, interval)


def _wins_table(study: StudyRecipe, wins: Iterable[Ahead]) -> Table:
    """Build the table of the comparisons in which objectives are ahead of the baseline."""
    heads = (("predicted", "Predicted τ"), ("measured", "Measured τ"))
    columns = [Column((head, word), f"{key}_{name}") for key, head in heads for name, word in COUNTED]
    rows = []
    for each in wins:
        counts = [count if count.of else None for count in (each.predicted, each.measured)]
        values = [plain(None if count is None else getattr(count, name)) for count in counts for name, _ in COUNTED]
        rows.append(TableRow((each.label, each.over), tuple(values)))
    caption = (
        "In how many comparisons the acceptance length is above the baseline's, at the paper's draft temperature: "
        "one comparison for each target, drafter, seed, task and rule. The paper counts measured lengths; predicted "
        f"ones contain no noise from decoding. {CHECKPOINTS[study.evaluation.checkpoint]}."
    )
    title = f"{study.name}: comparisons won"
    return Table("study-wins", title, caption, ("Objective", "Over"), tuple(columns), tuple(rows))


def _table(study: StudyRecipe, name: str, rows: Sequence[TableRow], title: str, caption: str) -> Table:
    columns = tuple(
        Column((heading,), f"{rule}_{choice}".replace("-", "_"), interval=True)
        for rule, choice, heading in _settings(study)
    )
    kept = [i for i in range(len(columns)) if any(row.values[i].number is not None for row in rows)]
    rows = [TableRow(row.labels, tuple(row.values[i] for i in kept)) for row in rows]
    what = f"{CHECKPOINTS[study.evaluation.checkpoint]}, mean over tasks, {caption}."
    return Table(
        f"study-{name.replace('_', '-')}",
        f"{study.name}: {title}",
        what,
        ("Target", "Drafter", "Objective"),
        tuple(columns[i] for i in kept),
        tuple(rows),
    )


def _count_wins(study: StudyRecipe, results: AllResults, objective: str, baseline: str) -> Ahead:
    """Count the comparisons, one for each target, drafter, seed, task and rule, in which a length is ahead."""
    pairs: list[tuple[Cell, Cell]] = []
    for found in results.values():
        cells = {(c.drafter, c.rule, c.task): c for c in found.cells if c.choice == "paper"}
        for drafter in study.drafters:
            for (name, rule, task), cell in cells.items():
                other = cells.get((f"{drafter}-{baseline}", rule, task))
                if name == f"{drafter}-{objective}" and other is not None:
                    pairs.append((cell, other))
    predicted = [ours.predicted_length.value > theirs.predicted_length.value for ours, theirs in pairs]
    measured = [
        ours.acceptance_length.value > theirs.acceptance_length.value
        for ours, theirs in pairs
        if ours.acceptance_length and theirs.acceptance_length and ours.num_rounds and theirs.num_rounds
    ]
    titles = (_title(study, results, objective), _title(study, results, baseline))
    return Ahead(*titles, Count(sum(predicted), len(predicted)), Count(sum(measured), len(measured)))
