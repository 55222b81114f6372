"""The paper's tables from whatever was evaluated; what is missing is an en dash, and an empty table is left out."""

from collections.abc import Callable
from dataclasses import dataclass

from blockdraft.evaluation.results import Average, Cell
from blockdraft.reports.merging import GROUPS, Choice, Comparison, Entry, rank, slug
from blockdraft.reports.seconds import autoregressive, phases, speculative
from blockdraft.reports.table import (
    MISSING,
    CellValue,
    Column,
    Table,
    TableRow,
    best_in_columns,
    best_in_rows,
    length,
    plain,
    times,
    with_interval,
)
from blockdraft.verification import RULES, Rule

ABLATION = {"CE": "Baseline (CE)", "BV w/o annealing": "BV w/o annealing", "BV": "BV with annealing"}
COUNTED = "τ counts tokens per verification call, correction or bonus token included."
BEST = "Bold is the best of a column within a target."


@dataclass(frozen=True)
class Metric:
    """A column for every drafter: its heading, its name in CSV, and how it is taken from what was measured."""

    head: str
    key: str
    interval: bool
    of: Callable[[Average | Cell], CellValue]

    def column(self, heads: tuple[str, ...], key: str = "") -> Column:
        """Under some headings."""
        return Column((*heads, self.head), "_".join(filter(None, (key, self.key))), self.interval)

    def value(self, measured: Average | Cell | None) -> CellValue:
        """Or an en dash."""
        return MISSING if measured is None else self.of(measured)


TAU = Metric("τ", "tau", True, lambda m: length(m.acceptance_length))
SPEEDUP = Metric("Speed-up", "speedup", True, lambda m: times(m.speedup))
DRAFT_TEMPERATURE = Metric("Draft T", "draft_temperature", False, lambda m: plain(m.draft_temperature, "{:g}"))
LENGTHS = (
    DRAFT_TEMPERATURE,
    Metric("Drafts only", "draft_length", True, lambda m: with_interval(m.draft_length)),
    Metric("Whole blocks", "whole_block_rate", False, lambda m: plain(m.whole_block_rate, "{:.1%}")),
    Metric("τ predicted", "predicted_tau", True, lambda m: with_interval(m.predicted_length)),
    Metric("τ measured", "tau", True, lambda m: with_interval(m.acceptance_length)),
)


def tables(comparison: Comparison) -> list[Table]:
    """All that have something to show, the main one first."""
    found = [main(comparison), best_temperature(comparison), token_verification(comparison), annealing(comparison)]
    found += [full(comparison, target) for target in comparison.targets]
    found += [lengths(comparison), seconds(comparison)]
    return [table for table in found if any(v != MISSING for row in table.rows for v in row.values)]


def main(comparison: Comparison) -> Table:
    """Mean acceptance length and speed-up, greedy and block verification: rows are losses, columns drafters."""
    columns, rows = _losses_by_drafters(comparison, ("greedy", "block"), "paper", (TAU, SPEEDUP))
    caption = f"Means over the tasks. {COUNTED} Speed-up is over autoregressive decoding in the same run. {BEST}"
    return Table("main", "Main results", caption, ("Target", "Loss"), columns, rows)


def best_temperature(comparison: Comparison) -> Table:
    """The same at the draft temperature that suits each drafter best."""
    columns, rows = _losses_by_drafters(comparison, ("block", "token"), "best", (DRAFT_TEMPERATURE, TAU, SPEEDUP))
    caption = f"Each drafter at the draft temperature where its predicted acceptance length is largest. {BEST}"
    return Table("best-temperature", "Best draft temperature", caption, ("Target", "Loss"), columns, rows)


def token_verification(comparison: Comparison) -> Table:
    """Mean acceptance length under token verification: rows are drafters, columns losses."""
    measured = {e.label for e in comparison.entries if e.average("token", "paper")}
    labels = [label for label in comparison.labels() if label in measured]
    heading = f"τ, {comparison.setting('token')}"
    columns = tuple(Column((heading, label), f"{slug(label, '_')}_tau", interval=True) for label in labels)
    rows = []
    for target, kind in _drafters(comparison):
        averages = [_average(comparison.find(target, kind, label), "token", "paper") for label in labels]
        rows.append(TableRow((target, kind), tuple(TAU.value(average) for average in averages)))
    caption = f"The drafters of the main table. Means over the tasks. {COUNTED} Bold is the best of a row."
    title = "Token verification"
    return Table("token-verification", title, caption, ("Target", "Drafter"), columns, best_in_rows(rows))


def annealing(comparison: Comparison) -> Table:
    """CE, BV without and with annealing, for targets that have a drafter without."""
    entries = [e for e in comparison.entries if e.about.label in ABLATION]
    targets = {e.target for e in entries if e.about.label == "BV w/o annealing"}
    rules = _present(comparison, ("greedy", "block"), "paper")
    places = [(t, k, rule) for t, k in _drafters(comparison) if t in targets for rule in rules]
    columns = tuple(
        Column((t, k, comparison.setting(r).partition(" ")[0]), f"{slug(t, '_')}_{k.lower()}_{r}_tau", interval=True)
        for t, k, r in places
    )
    compared = sorted((e for e in entries if e.target in targets), key=rank)
    titles = {e.label: e.label.replace(e.about.label, ABLATION[e.about.label], 1) for e in compared}
    rows = []
    for label, title in titles.items():
        averages = [_average(comparison.find(t, k, label), r, "paper") for t, k, r in places]
        rows.append(TableRow((title,), tuple(TAU.value(average) for average in averages)))
    caption = f"BV loss with and without annealing. {COUNTED} Sampled columns are under block verification."
    comparable = rows if len(rows) > 1 else ()
    return Table("annealing", "Annealing", caption, ("Training loss",), columns, best_in_columns(comparable, 0))


def full(comparison: Comparison, target: str) -> Table:
    """Every task of one target, under every rule."""
    tasks = comparison.tasks(target)
    metrics = (SPEEDUP, TAU)
    columns = [
        metric.column((GROUPS.get(task.group, task.group.capitalize()), task.title), slug(task.name, "_"))
        for task in tasks
        for metric in metrics
    ]
    columns += [metric.column(("", "Avg."), "average") for metric in metrics]
    rows = []
    for rule in RULES:
        for entry in (e for e in comparison.of(target) if e.cells(rule, "paper")):
            measured = [*(entry.cell(rule, "paper", task.name) for task in tasks), entry.average(rule, "paper")]
            values = [metric.value(m) for m in measured for metric in metrics]
            rows.append(TableRow((comparison.setting(rule), entry.kind, entry.label), tuple(values)))
    caption = f"{COUNTED} Avg. is the mean over the tasks. Bold is the best of a column within a setting and drafter."
    name, title, labels = f"full-{comparison.file_name(target)}", f"All tasks, {target}", ("Setting", "Drafter", "Loss")
    return Table(name, title, caption, labels, tuple(columns), best_in_columns(rows, 2))


def lengths(comparison: Comparison) -> Table:
    """How long drafts live, and how well target paths predict it."""
    rows = []
    for target, rule, choice in _settings(comparison):
        setting = comparison.setting(rule) + (", best draft T" if choice == "best" else "")
        for entry in comparison.of(target):
            average = entry.average(rule, choice)
            if average is not None:
                values = tuple(metric.value(average) for metric in LENGTHS)
                rows.append(TableRow((target, setting, entry.kind, entry.label), values))
    caption = (
        "Means over the tasks with 95% intervals (bootstrap over prompts). Drafts only: without correction and bonus "
        "tokens. Whole blocks: rounds that kept every proposal. Predicted: from target paths, without decoding."
    )
    columns = tuple(metric.column(()) for metric in LENGTHS)
    labels = ("Target", "Setting", "Drafter", "Loss")
    return Table("lengths", "Accepted lengths, predicted and measured", caption, labels, columns, tuple(rows))


def seconds(comparison: Comparison) -> Table:
    """Where the time goes, all tasks together, beside autoregressive decoding."""
    timed = []
    for target, rule, choice in _settings(comparison):
        if choice == "paper":
            entries = [e for e in comparison.of(target) if e.cells(rule, "paper")]
            setting = comparison.setting(rule)
            timed += [((target, setting, name, ""), s) for name, s in autoregressive(entries, rule).items()]
            timed += [((target, setting, e.kind, e.label), speculative(e, rule)) for e in entries]
    shown = phases(spent for _, spent in timed)
    columns = [Column((phase.capitalize(),), f"{phase}_seconds") for phase in shown]
    columns += [
        Column(("Total",), "seconds"),
        Column(("Tokens",), "tokens"),
        Column(("Tokens/s",), "tokens_per_second"),
    ]
    rows = []
    for names, spent in timed:
        values = [plain(spent.seconds.get(phase), "{:.2f}") for phase in shown]
        values += [plain(spent.total, "{:.2f}"), plain(round(spent.tokens), "{:,}")]
        values.append(plain(spent.tokens / spent.total if spent.total else None, "{:.1f}"))
        rows.append(TableRow(names, tuple(values)))
    caption = "Seconds, summed over all generations of all tasks, beside autoregressive decoding in the same run."
    labels = ("Target", "Setting", "Drafter", "Loss")
    return Table("seconds", "Seconds by phase", caption, labels, tuple(columns), tuple(rows))


def _losses_by_drafters(
    comparison: Comparison, rules: tuple[Rule, ...], choice: Choice, metrics: tuple[Metric, ...]
) -> tuple[tuple[Column, ...], tuple[TableRow, ...]]:
    """Rows are targets and losses; columns are rules, drafters and metrics."""
    places = [(rule, kind) for rule in _present(comparison, rules, choice) for kind in comparison.kinds]
    columns = tuple(
        metric.column((comparison.setting(rule), kind), f"{rule}_{kind.lower()}")
        for rule, kind in places
        for metric in metrics
    )
    rows = []
    for target in comparison.targets:
        for label in comparison.labels(target):
            averages = [_average(comparison.find(target, kind, label), rule, choice) for rule, kind in places]
            rows.append(TableRow((target, label), tuple(metric.value(a) for a in averages for metric in metrics)))
    return columns, best_in_columns(rows, 1)


def _drafters(comparison: Comparison) -> list[tuple[str, str]]:
    return list(dict.fromkeys((e.target, e.kind) for e in comparison.entries))


def _present(comparison: Comparison, rules: tuple[Rule, ...], choice: Choice) -> list[Rule]:
    """Those of the rules under which anything was measured."""
    return [rule for rule in rules if any(e.average(rule, choice) for e in comparison.entries)]


def _settings(comparison: Comparison) -> list[tuple[str, Rule, Choice]]:
    choices: tuple[Choice, ...] = ("paper", "best")
    return [(target, rule, choice) for target in comparison.targets for rule in RULES for choice in choices]


def _average(entry: Entry | None, rule: Rule, choice: Choice) -> Average | None:
    return None if entry is None else entry.average(rule, choice)
