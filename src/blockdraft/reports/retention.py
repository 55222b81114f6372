"""Show how far drafts are kept, position by position: a table, a figure by kind of drafter, the paper's figure 3."""

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from blockdraft.evaluation.results import TaskAbout
from blockdraft.reports.comparison import Comparison, Entry, Retention, ce_and_bv
from blockdraft.reports.style import Drawing, Look, Style, legend, plot_line
from blockdraft.reports.table import MISSING, CellValue, Column, Table, TableRow, best_in_columns, plain, share
from blockdraft.verification import RULES, Rule

MIN_ROUNDS = 10
"""A conditional rate that rests on fewer rounds says nothing, and is not drawn."""

PAPER_TASK = "gsm8k"


def retention_table(comparison: Comparison, target: str) -> Table:
    """Show how often a draft is kept up to every position, task by task, the pooled rounds of all tasks last."""
    entries = comparison.of(target)
    rule = _rule(entries) or RULES[0]
    entries = [e for e in entries if e.cells(rule, "paper")]
    longest = max((e.about.num_proposals for e in entries), default=1)
    rows = []
    for title, task in _places(comparison, target):
        for entry in entries:
            found = entry.retention(rule, task)
            rows.append(TableRow((title, entry.kind, entry.label), _retained(found, longest)))
    places = tuple(Column(("Kept up to position", str(i)), f"kept_{i}") for i in range(1, longest + 1))
    columns = (Column(("Rounds",), "rounds"), Column(("Drafts only",), "draft_length"), *places)
    caption = (
        f"{comparison.setting(rule)}: the share of rounds that kept every drafted token up to a position. Drafts only: "
        "the sum of these shares, which is the mean number of drafted tokens kept. "
        f"{comparison.evaluated(entries)} {_prompts(comparison, entries)} Bold is the best of a column within a task "
        "and drafter."
    )
    name, title = f"retention-{comparison.file_name(target)}", f"Retention by position, {target}"
    return Table(name, title, caption, ("Task", "Drafter", "Loss"), columns, best_in_columns(rows, 2))


def _places(comparison: Comparison, target: str) -> list[tuple[str, str | None]]:
    """Return titles and names of the tasks, and of all of them together, whose name is None, if there are several."""
    tasks: list[tuple[str, str | None]] = [(task.title, task.name) for task in comparison.tasks(target)]
    return [*tasks, ("All tasks pooled", None)] if len(tasks) > 1 else tasks


def _retained(found: Retention, longest: int) -> tuple[CellValue, ...]:
    """Show rounds, drafted tokens kept, and the share kept up to each position; en dashes if there was no round."""
    if not found.num_rounds:
        return (MISSING,) * (2 + longest)
    kept = [share(k) for k in found.kept] + [MISSING] * (longest - len(found.kept))
    return (plain(found.num_rounds, "{:,}"), plain(sum(found.kept), "{:.2f}"), *kept)


def figure_3(comparison: Comparison, look: Look) -> Drawing | None:
    """Draw the paper's figure 3: retention, and conditional retention beside it, of CE and BV on one task.

    That is the first target and kind of drafter with both, under block verification. The task is GSM8K, or else the
    first one.
    """
    for target, kind in itertools.product(comparison.targets, comparison.kinds):
        for task in sorted(comparison.tasks(target), key=lambda task: task.name != PAPER_TASK):
            measured = [e for e in comparison.of(target, kind) if e.cell("block", "paper", task.name)]
            pair = ce_and_bv(measured)
            if pair is not None:
                return _figure_3(comparison, pair, task, look)
    return None


def _figure_3(comparison: Comparison, pair: tuple[Entry, Entry], task: TaskAbout, look: Look) -> Drawing:
    figure = Figure(figsize=(7.4, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = [entry.retention("block", task.name) for entry in pair]
    lowest = min(_plot(left, right, each, look(entry)) for each, entry in zip(found, pair, strict=True))
    for panel in (left, right):
        _scale(panel, max(len(each.kept) for each in found))
        panel.set_xlabel("position i in the block")
    left.set(title="Kept up to i", ylabel="of all rounds", ylim=(-0.03, 1.03))
    right.set(title="Kept i, given i-1", ylabel="of rounds that kept i-1", ylim=_conditional_limits(lowest))
    legend(figure, pair, look)
    ce, bv = (f"{sum(each.kept):.2f} with {entry.label}" for each, entry in zip(found, pair, strict=True))
    caption = (
        f"In the layout of the paper's figure 3, on {_num_decoded(pair, task.title)} prompts of {task.title}"
        f"{comparison.each_seed}, {comparison.setting('block')}. Left: share of all rounds that kept every token up to "
        f"position i. These shares add up to the mean number of drafted tokens kept: {ce}, {bv}. Right: of "
        f"the rounds that kept i-1, the share that kept i too, where at least {MIN_ROUNDS} rounds got that far. "
        f"{comparison.evaluated(pair)}"
    )
    return Drawing(
        "figure-3", f"Retention by position, {pair[0].target}, {pair[0].kind}, {task.title}", caption, figure
    )


def retention_figure(comparison: Comparison, target: str, kind: str, look: Look) -> Drawing | None:
    """Draw Pr(accepted >= i), and Pr(accepted >= i | accepted >= i - 1) below it, task by task and pooled.

    The rule is block verification if it was measured.
    """
    rule = _rule(comparison.of(target))
    entries = [e for e in comparison.of(target, kind) if rule and e.cells(rule, "paper")]
    if rule is None or not entries:
        return None
    places = _places(comparison, target)
    num_columns = min(4, max(2, len(places)))
    num_lines = -(-len(places) // num_columns)
    figure = Figure(figsize=(0.7 + 2.55 * num_columns, 4.3 * num_lines + 0.35), layout="constrained")
    grid = figure.subplots(2 * num_lines, num_columns, squeeze=False, sharex=True)
    lowest = 1.0
    for number, (title, task) in enumerate(places):
        above, below = (grid[2 * (number // num_columns) + i][number % num_columns] for i in (0, 1))
        for entry in entries:
            lowest = min(lowest, _plot(above, below, entry.retention(rule, task), look(entry)))
        above.set(title=title, ylim=(-0.03, 1.03))
    _finish_retention(grid.tolist(), len(places), lowest, max(e.about.num_proposals for e in entries))
    legend(figure, entries, look)
    pooled = " The last panels pool the rounds of all tasks." if len(places) > 1 else ""
    caption = (
        f"{comparison.setting(rule)}. Top: share of all rounds that kept every token up to position i. Bottom: of the "
        f"rounds that kept i-1, the share that kept i too, where at least {MIN_ROUNDS} rounds got that far.{pooled} "
        f"{_prompts(comparison, entries)} {comparison.evaluated(entries)}"
    )
    name = f"retention-{comparison.file_name(target)}-{kind.lower()}"
    return Drawing(name, f"How far drafts are kept, {target}, {kind}", caption, figure)


def _finish_retention(grid: list[list[Axes]], num_places: int, lowest: float, num_proposals: int) -> None:
    """Give the panels of a row the same axis, label the outermost ones and take the empty ones away."""
    num_columns = len(grid[0])
    for number, row in enumerate(grid):
        for column, panel in enumerate(row):
            place = number // 2 * num_columns + column
            if place >= num_places:
                panel.remove()
                continue
            _scale(panel, num_proposals)
            panel.tick_params(labelleft=column == 0, labelbottom=False)
            if number % 2:
                panel.set_ylim(_conditional_limits(lowest))
            if number % 2 and place + num_columns >= num_places:
                panel.set_xlabel("position i in the block")
                panel.tick_params(labelbottom=True)
        row[0].set_ylabel("kept up to i" if number % 2 == 0 else "kept i, given i-1")


def _rule(entries: Sequence[Entry]) -> Rule | None:
    """Return block verification, or the last rule in the order of the tables that was measured."""
    return max((rule for rule in RULES if any(e.cells(rule, "paper") for e in entries)), key=RULES.index, default=None)


def _prompts(comparison: Comparison, entries: Sequence[Entry]) -> str:
    """Say how many prompts of each task were decoded with these drafters: a sentence for captions."""
    titles = dict.fromkeys(task.title for entry in entries for task in entry.evaluation.results.tasks)
    counts = ", ".join(f"{_num_decoded(entries, title)} of {title}" for title in titles)
    return f"Decoded prompts{comparison.each_seed}: {counts}."


def _num_decoded(entries: Sequence[Entry], title: str) -> str:
    """Give the number of prompts of a task that were decoded, or two of them if evaluations differ."""
    tasks = [task for entry in entries for task in entry.evaluation.results.tasks]
    counts = sorted({task.decoded_prompts for task in tasks if task.title == title})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _plot(kept: Axes, conditional: Axes, found: Retention, style: Style) -> float:
    """Draw a drafter's two curves, and return the lowest conditional rate."""
    positions = range(1, len(found.kept) + 1)
    plot_line(kept, positions, found.kept, style)
    rates = [float("nan") if rate is None else rate for rate in found.conditional(MIN_ROUNDS)]
    plot_line(conditional, positions, rates, style)
    return min((rate for rate in rates if rate == rate), default=1.0)


def _scale(panel: Axes, num_proposals: int) -> None:
    """Give a panel percents upwards and positions to the right."""
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_xlim(0.5, num_proposals + 0.5)
    panel.set_xticks(range(1, num_proposals + 1, 1 if num_proposals < 9 else 2))


def _conditional_limits(lowest: float) -> tuple[float, float]:
    return max(-0.03, lowest - 0.05), 1.02
