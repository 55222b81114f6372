"""Make the paper's tables, and a few more, from whatever was evaluated.

What was not measured is an en dash; a column or table with nothing to show is left out. The paper's layouts are those
of `main`, `token_verification`, `annealing`, `full` for each target, and `objectives`. As in the paper, BV without
annealing is a row of `annealing` and of no other of these.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import get_args

from blockdraft.evaluation.candidates import THEN, TITLES
from blockdraft.evaluation.metrics import COMPARED_LENGTHS
from blockdraft.evaluation.results import Average, Cell, Interval, Quantity, TaskAbout, TemperatureChoice
from blockdraft.reports.comparison import GROUPS, Comparison, Entry, Gain, Spent, slug
from blockdraft.reports.retention import retention_table
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

ABLATION = {"CE": "Baseline (CE)", "BV": "BV with annealing"}
"""Names two rows as the paper's table of annealing does; other variants of BV keep their labels."""

OBJECTIVES = "objectives"
"""The one table that holds nothing measured."""

UNANNEALED = "w/o annealing"
COUNTED = "τ counts tokens per verification call, correction or bonus token included."
BEST = "Bold is the best of a column within a target."
COMPARED_HEADS: dict[Quantity, str] = {
    "predicted_length": "τ predicted",
    "acceptance_length": "τ measured",
    "speedup": "Speed-up",
}


@dataclass(frozen=True)
class Aim:
    """Says what an objective trains for, in the terms of the paper's comparison of objectives.

    target: whether it uses the target's probabilities. verification: whether it follows from a rule of verification.
    block: whether the positions of a block count together.
    """

    words: str
    target: bool
    verification: bool
    block: bool


AIMS = {
    "ce": Aim("Maximize log-likelihood", False, False, False),
    "kl": Aim("Minimize KL divergence", True, False, False),
    "rkl": Aim("Minimize KL divergence", True, False, False),
    "tv": Aim("Maximize token acceptance", True, True, False),
    "lk": Aim("Maximize token acceptance", True, True, False),
    "dpace": Aim("Maximize log-likelihood, weighted by confidence in the prefix", False, False, True),
    "dspark": Aim("Maximize log-likelihood and token acceptance", True, True, False),
    "e2e-tv": Aim("Maximize the product of token acceptances", True, True, True),
    "lk-hybrid": Aim("Minimize KL divergence, then maximize token acceptance", True, True, False),
    "rounds": Aim("Minimize the number of verification calls", True, True, True),
    "token-bv": Aim("Maximize acceptance length under token verification", True, True, True),
    "bv": Aim("Maximize block acceptance length", True, True, True),
}
"""The paper's objectives as it describes them, and those of other projects and our own in the same terms."""


@dataclass(frozen=True)
class Metric:
    """Describes a column for every drafter: its heading, its name in CSV, and how it is taken from measurements."""

    head: str
    key: str
    interval: bool
    of: Callable[[Average | Cell], CellValue]

    def column(self, heads: tuple[str, ...], key: str = "") -> Column:
        """Make a column of it, under some headings."""
        return Column((*heads, self.head), "_".join(filter(None, (key, self.key))), self.interval)

    def value(self, measured: Average | Cell | None) -> CellValue:
        """Take it from a measurement; an en dash if there is none."""
        return MISSING if measured is None else self.of(measured)


TAU = Metric("τ", "tau", True, lambda m: length(m.acceptance_length))
PREDICTED = Metric("τ predicted", "predicted_tau", True, lambda m: length(m.predicted_length))
SPEEDUP = Metric("Speed-up", "speedup", True, lambda m: times(m.speedup))
DRAFT_TEMPERATURE = Metric(
    "Draft T", "draft_temperature", False, lambda m: plain(round(m.draft_temperature, 2), "{:g}")
)
LENGTHS = (
    DRAFT_TEMPERATURE,
    Metric("τ predicted", "predicted_tau", True, lambda m: with_interval(m.predicted_length)),
    Metric("τ measured", "tau", True, lambda m: with_interval(m.acceptance_length)),
    Metric("Drafts only", "draft_length", True, lambda m: with_interval(m.draft_length)),
    Metric("Whole blocks", "whole_block_rate", False, lambda m: plain(m.whole_block_rate, "{:.1%}")),
)


def tables(comparison: Comparison) -> list[Table]:
    """Make all that have something to show, the main one first."""
    found = [
        main_table(comparison),
        gains_table(comparison),
        best_temperature_table(comparison),
        one_hot_table(comparison),
    ]
    found += [token_verification_table(comparison), annealing_table(comparison)]
    found += [gains_by_task_table(comparison, target) for target in comparison.targets]
    found += [full_table(comparison, target) for target in comparison.targets]
    found.append(objectives_table(comparison))
    found += [retention_table(comparison, target) for target in comparison.targets]
    found += [lengths_table(comparison), seconds_table(comparison)]
    shown = [table for table in map(_without_empty_columns, found) if table.columns]
    return [t if t.name == OBJECTIVES else replace(t, caption=comparison.caption(t.caption)) for t in shown]


def main_table(comparison: Comparison) -> Table:
    """Show mean acceptance length and speed-up, greedy and block verification: rows are losses, columns drafters."""
    columns, rows = _losses_by_drafters(
        comparison, ("greedy", "block"), "paper", (TAU, SPEEDUP), without=_elsewhere(comparison)
    )
    caption = (
        f"Means over the tasks. {comparison.evaluated()} {COUNTED} Speed-up is over autoregressive decoding in the "
        f"same run. {BEST}"
    )
    return Table("main", "Main results", caption, ("Target", "Loss"), columns, rows)


def gains_table(comparison: Comparison) -> Table:
    """Show every drafter over its baseline, where an evaluation compared them prompt by prompt."""
    rows = []
    for target, rule, choice in _settings(comparison):
        for entry, other in _compared(comparison, target):
            ratios = [entry.over(other, rule, choice, what) for what in COMPARED_HEADS]
            if any(ratios):
                labels = (target, comparison.setting(rule, choice), entry.title, other.title)
                rows.append(TableRow(labels, tuple(map(_gain, ratios))))
    columns = tuple(Column((head,), f"{what}_gain", interval=True) for what, head in COMPARED_HEADS.items())
    caption = (
        f"Gain in the mean over the tasks, with its 95% interval ({comparison.interval_basis}): both drafters are "
        f"compared on the same prompts. {comparison.evaluated()} Where the interval contains zero, no gain is printed."
    )
    labels = ("Target", "Setting", "Drafter", "Over")
    return Table("gains", "Gains over a baseline", caption, labels, columns, tuple(rows))


def gains_by_task_table(comparison: Comparison, target: str) -> Table:
    """Show every drafter of a target over its baseline, task by task and in the mean, predicted and measured."""
    tasks = comparison.tasks(target)
    rows = []
    for _, rule, choice in (each for each in _settings(comparison) if each[0] == target):
        for entry, other in _compared(comparison, target):
            for what in COMPARED_LENGTHS:
                by_task = [entry.over(other, rule, choice, what, task.name) for task in tasks]
                if any(by_task):
                    labels = (comparison.setting(rule, choice), entry.title, other.title, COMPARED_HEADS[what])
                    values = map(_gain, (*by_task, entry.over(other, rule, choice, what)))
                    rows.append(TableRow(labels, tuple(values)))
    columns = [Column(_heads(task), f"{slug(task.name, '_')}_gain", interval=True) for task in tasks]
    columns.append(Column(("", "Avg."), "average_gain", interval=True))
    caption = (
        f"Gain in tokens per verification call, with its 95% interval ({comparison.interval_basis}): both drafters are "
        f"compared on the same prompts. Avg. is the gain in the mean over the tasks. "
        f"{comparison.evaluated(comparison.of(target))} Where the interval contains zero, no gain is printed."
    )
    name, title = f"gains-{comparison.file_name(target)}", f"Gains over a baseline by task, {target}"
    return Table(name, title, caption, ("Setting", "Drafter", "Over", "Quantity"), tuple(columns), tuple(rows))


def best_temperature_table(comparison: Comparison) -> Table:
    """Show the main quantities at the draft temperature that suits each drafter best."""
    metrics = (DRAFT_TEMPERATURE, PREDICTED, TAU, SPEEDUP)
    columns, rows = _losses_by_drafters(comparison, ("block", "token"), "best", metrics)
    caption = (
        "Each drafter at the draft temperature where its predicted acceptance length is largest. "
        f"{comparison.evaluated()} {COUNTED} {BEST}{comparison.edges()}"
    )
    return Table("best-temperature", "Best draft temperature", caption, ("Target", "Loss"), columns, rows)


def one_hot_table(comparison: Comparison) -> Table:
    """Show the main quantities with argmax drafts under a sampling target."""
    columns, rows = _losses_by_drafters(comparison, ("block", "token"), "one-hot", (PREDICTED, TAU, SPEEDUP))
    caption = (
        "The target samples, the drafter proposes its most probable token (draft temperature 0), so each token is kept "
        f"with the probability that the target gives it. Engines do this by default. {comparison.evaluated()} "
        f"{COUNTED} {BEST}"
    )
    return Table("one-hot", "Argmax drafts", caption, ("Target", "Loss"), columns, rows)


def token_verification_table(comparison: Comparison) -> Table:
    """Show mean acceptance length under token verification: rows are drafters, columns losses."""
    elsewhere = _elsewhere(comparison)
    measured = {
        e.label for e in comparison.entries if e.average("token", "paper") and (e.target, e.label) not in elsewhere
    }
    labels = [label for label in comparison.labels() if label in measured]
    heading = f"τ, {comparison.setting('token')}"
    columns = tuple(Column((heading, label), f"{slug(label, '_')}_tau", interval=True) for label in labels)
    rows = []
    for target, kind in _drafters(comparison):
        averages = [
            None if (target, label) in elsewhere else _average(comparison.find(target, kind, label), "token", "paper")
            for label in labels
        ]
        rows.append(TableRow((target, kind), tuple(TAU.value(average) for average in averages)))
    caption = (
        f"The drafters of the main table. Means over the tasks. {comparison.evaluated()} {COUNTED} Bold is the best of "
        "a row."
    )
    title = "Token verification"
    return Table("token-verification", title, caption, ("Target", "Drafter"), columns, best_in_rows(rows))


def annealing_table(comparison: Comparison) -> Table:
    """Show CE and all variants of BV, for targets that have one without annealing and something to compare it with."""
    compared = _ablation(comparison)
    targets = {e.target for e in compared}
    rules = _present(comparison, ("greedy", "block"), "paper")
    places = [(t, k, rule) for t, k in _drafters(comparison) if t in targets for rule in rules]
    columns = tuple(
        Column((t, k, comparison.setting(r).partition(" ")[0]), f"{slug(t, '_')}_{k.lower()}_{r}_tau", interval=True)
        for t, k, r in places
    )
    titles = {e.label: e.label.replace(e.about.label, ABLATION.get(e.about.label, e.about.label), 1) for e in compared}
    rows = []
    for label, title in titles.items():
        averages = [_average(comparison.find(t, k, label), r, "paper") for t, k, r in places]
        rows.append(TableRow((title,), tuple(TAU.value(average) for average in averages)))
    caption = (
        f'BV loss with and without annealing: "BV with annealing" is the paper\'s schedule, other variants say in what '
        f"they differ. Means over the tasks. {comparison.evaluated()} {COUNTED} Sampled columns are under block "
        "verification."
    )
    return Table("annealing", "Annealing", caption, ("Training loss",), columns, best_in_columns(rows, 0))


def full_table(comparison: Comparison, target: str) -> Table:
    """Show every task of one target, under every rule."""
    tasks = comparison.tasks(target)
    metrics = (SPEEDUP, TAU)
    columns = [metric.column(_heads(task), slug(task.name, "_")) for task in tasks for metric in metrics]
    columns += [metric.column(("", "Avg."), "average") for metric in metrics]
    elsewhere = _elsewhere(comparison)
    shown = [e for e in comparison.of(target) if (target, e.label) not in elsewhere]
    rows = []
    for rule in RULES:
        for entry in (e for e in shown if e.cells(rule, "paper")):
            measured = [*(entry.cell(rule, "paper", task.name) for task in tasks), entry.average(rule, "paper")]
            values = [metric.value(m) for m in measured for metric in metrics]
            rows.append(TableRow((comparison.setting(rule), entry.kind, entry.label), tuple(values)))
    caption = (
        f"{comparison.evaluated(comparison.of(target))} {COUNTED} Avg. is the mean over the tasks. Bold is the best of "
        "a column within a setting and drafter."
    )
    name, title, labels = f"full-{comparison.file_name(target)}", f"All tasks, {target}", ("Setting", "Drafter", "Loss")
    return Table(name, title, caption, labels, tuple(columns), best_in_columns(rows, 2))


def objectives_table(comparison: Comparison) -> Table:
    """Show what the objectives of the drafters train for, as the paper compares them."""
    entries = sorted((e for e in comparison.entries if e.about.objective), key=lambda e: e.rank)
    rows = []
    for name in dict.fromkeys(str(e.about.objective) for e in entries):
        aim = AIMS.get(name)
        facts = () if aim is None else (aim.target, aim.verification, aim.block)
        values = (MISSING,) * 4 if aim is None else (plain(aim.words), *(plain("yes" if f else "no") for f in facts))
        rows.append(TableRow((TITLES.get(name, name.upper()),), values))
    columns = (
        Column(("Training objective",), "aim"),
        Column(("Uses the target's probabilities?",), "uses_target_probabilities"),
        Column(("Verification-aware?",), "verification_aware"),
        Column(("Block-aware?",), "block_aware"),
    )
    caption = (
        "What the objectives of this report train for. Verification-aware: it follows from a rule of verification. "
        "Block-aware: the positions of a block count together. The rows of CE, KL, RKL, TV, LK and BV are the paper's."
    )
    return Table(OBJECTIVES, "Training objectives", caption, ("Drafter loss",), columns, tuple(rows))


def lengths_table(comparison: Comparison) -> Table:
    """Show how many tokens a call yields, predicted and measured, at every choice of draft temperature."""
    rows = []
    for target, rule, choice in _settings(comparison):
        for entry in comparison.of(target):
            average = entry.average(rule, choice)
            if average is not None:
                values = tuple(metric.value(average) for metric in LENGTHS)
                rows.append(TableRow((target, comparison.setting(rule, choice), entry.kind, entry.label), values))
    caption = (
        f"Means over the tasks with 95% intervals ({comparison.interval_basis}). {comparison.evaluated()} Predicted: "
        "from the target's own texts, without the luck of decoding. Drafts only: without correction and bonus tokens. "
        f"Whole blocks: rounds that kept every proposal.{comparison.edges()}"
    )
    columns = tuple(metric.column(()) for metric in LENGTHS)
    labels = ("Target", "Setting", "Drafter", "Loss")
    return Table("lengths", "Accepted lengths, predicted and measured", caption, labels, columns, tuple(rows))


def seconds_table(comparison: Comparison) -> Table:
    """Show where the time goes, all tasks together, beside autoregressive decoding."""
    timed: list[tuple[tuple[str, ...], Spent]] = []
    for target, rule, choice in _settings(comparison):
        if choice == "paper":
            entries = [e for e in comparison.of(target) if e.cells(rule, "paper")]
            setting = comparison.setting(rule)
            baselines = comparison.autoregressive(target, rule)
            timed += [((target, setting, name, ""), spent) for name, spent in baselines.items()]
            timed += [((target, setting, e.kind, e.label), e.spent(rule)) for e in entries]
    phases = Spent.pooled((spent.seconds for _, spent in timed), 0).phases
    columns = [Column((phase.capitalize(),), f"{phase}_seconds") for phase in phases]
    columns += [
        Column(("Total",), "seconds"),
        Column(("Tokens",), "tokens"),
        Column(("Tokens/s",), "tokens_per_second"),
    ]
    rows = []
    for names, spent in timed:
        values = [plain(spent.seconds.get(phase), "{:.2f}") for phase in phases]
        values += [plain(spent.total, "{:.2f}"), plain(round(spent.tokens), "{:,}")]
        values.append(plain(spent.tokens / spent.total if spent.total else None, "{:.1f}"))
        rows.append(TableRow(names, tuple(values)))
    caption = "Seconds, summed over all generations of all tasks, beside autoregressive decoding in the same run."
    labels = ("Target", "Setting", "Drafter", "Loss")
    return Table("seconds", "Seconds by phase", caption, labels, tuple(columns), tuple(rows))


def _without_empty_columns(table: Table) -> Table:
    """Return a table without the columns in which nothing was measured."""
    kept = [i for i in range(len(table.columns)) if any(row.values[i] != MISSING for row in table.rows)]
    rows = (replace(row, values=tuple(row.values[i] for i in kept)) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=tuple(rows))


def _ablation(comparison: Comparison) -> list[Entry]:
    """Return the drafters of the table of annealing: CE, then BV without annealing, then its other variants."""
    found = [e for e in comparison.entries if e.about.label == "CE" or e.is_bv]
    labels = {target: {e.label for e in found if e.target == target} for target in comparison.targets}
    targets = {e.target for e in found if _is_unannealed(e) and len(labels[e.target]) > 1}
    compared = [e for e in found if e.target in targets]
    return sorted(compared, key=lambda e: (e.about.label != "CE", not _is_unannealed(e), e.rank))


def _is_unannealed(entry: Entry) -> bool:
    return entry.is_bv and UNANNEALED in entry.about.label.split(THEN)[-1]


def _elsewhere(comparison: Comparison) -> set[tuple[str, str]]:
    """Return targets and labels of drafters that only the table of annealing has a row for, as in the paper."""
    shown = [e for e in _ablation(comparison) if e.average("greedy", "paper") or e.average("block", "paper")]
    return {(e.target, e.label) for e in shown if _is_unannealed(e)}


def _losses_by_drafters(
    comparison: Comparison,
    rules: tuple[Rule, ...],
    choice: TemperatureChoice,
    metrics: tuple[Metric, ...],
    *,
    without: Set[tuple[str, str]] = frozenset(),
) -> tuple[tuple[Column, ...], tuple[TableRow, ...]]:
    """Make rows of targets and losses, but for those left out, and columns of rules, drafters and metrics."""
    places = [(rule, kind) for rule in _present(comparison, rules, choice) for kind in comparison.kinds]
    columns = tuple(
        metric.column((comparison.setting(rule), kind), f"{rule}_{kind.lower()}")
        for rule, kind in places
        for metric in metrics
    )
    rows = []
    for target in comparison.targets:
        for label in (each for each in comparison.labels(target) if (target, each) not in without):
            averages = [_average(comparison.find(target, kind, label), rule, choice) for rule, kind in places]
            rows.append(TableRow((target, label), tuple(metric.value(a) for a in averages for metric in metrics)))
    return columns, best_in_columns(rows, 1)


def _heads(task: TaskAbout) -> tuple[str, str]:
    """Return the headings of a task's columns: its group, its title."""
    return GROUPS.get(task.group, task.group.capitalize()), task.title


def _compared(comparison: Comparison, target: str) -> list[tuple[Entry, Entry]]:
    """Return the drafters of a target with each of their baselines; two that are each other's are one pair."""
    pairs = [(entry, other) for entry in comparison.of(target) for other in comparison.baselines(entry)]
    return [(e, o) for e, o in pairs if e.rank >= o.rank or (o, e) not in pairs]


def _gain(ratio: Interval | None) -> CellValue:
    if ratio is None:
        return MISSING
    shown = Gain.paired(ratio).figure or "undecided"
    if ratio.bounds is None:
        return CellValue(shown, ratio.value - 1)
    low, high = ratio.low - 1, ratio.high - 1
    return CellValue(f"{shown} [{low:+.1%}, {high:+.1%}]", ratio.value - 1, (low, high))


def _drafters(comparison: Comparison) -> list[tuple[str, str]]:
    return list(dict.fromkeys((e.target, e.kind) for e in comparison.entries))


def _present(comparison: Comparison, rules: tuple[Rule, ...], choice: TemperatureChoice) -> list[Rule]:
    """Return those of the rules under which anything was measured."""
    return [rule for rule in rules if any(e.average(rule, choice) for e in comparison.entries)]


def _settings(comparison: Comparison) -> list[tuple[str, Rule, TemperatureChoice]]:
    """List targets, rules and choices of the draft temperature; greedy verification leaves no choice."""
    choices: tuple[TemperatureChoice, ...] = get_args(TemperatureChoice)
    return [
        (target, rule, choice)
        for target in comparison.targets
        for rule in RULES
        for choice in (choices[:1] if rule == "greedy" else choices)
    ]


def _average(entry: Entry | None, rule: Rule, choice: TemperatureChoice) -> Average | None:
    return None if entry is None else entry.average(rule, choice)
