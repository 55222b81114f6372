"""The paper's figures, and three more, drawn with matplotlib: one drawing per target and subject."""

from collections.abc import Iterator
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockdraft.reports.drawing import Drawing, Look, drawing, kinds, legend, line, panels
from blockdraft.reports.inks import INKS, styles
from blockdraft.reports.merging import Comparison, Entry
from blockdraft.reports.seconds import autoregressive, phases, speculative
from blockdraft.verification import RULES, Rule


def figures(comparison: Comparison) -> Iterator[Drawing]:
    """Those that have something to show, one after the other."""
    look = styles(comparison)
    for target in comparison.targets:
        for draw in (retention, tasks, seconds, temperatures, dynamics):
            with drawing():
                drawn = draw(comparison, target, look)
            if drawn is not None:
                yield drawn


def retention(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Pr(accepted >= i), and given that the token before was kept; all tasks pooled, block verification if measured."""
    rules, entries = _measured(comparison, target)
    rule = max(rules, key=RULES.index, default=None)
    entries = [e for e in entries if rule and e.cells(rule, "paper")]
    if rule is None or not entries:
        return None
    figure, axes = panels(entries, 2, height=2.5)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for entry in members:
            kept = pooled_retention(entry, rule)
            after = [k / before if before > 0 else float("nan") for before, k in pairwise(kept)]
            positions = range(1, len(kept))
            line(row[0], positions, kept[1:], look(entry))
            line(row[1], positions, after, look(entry))
        row[0].set(title=f"{kind}: kept through position i", ylabel="of all rounds", ylim=(0, 1.02))
        row[1].set(title=f"{kind}: kept if i-1 was", ylabel="of rounds that got this far")
        row[1].set_ylim(top=1.01)
        for panel in row:
            panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            longest = max(entry.about.num_proposals for entry in members)
            panel.set_xticks(range(1, longest + 1, 1 if longest < 10 else 2))
    for panel in axes[-1]:
        panel.set_xlabel("position i in the block")
    legend(figure, entries, look)
    title = f"How far drafts survive, {target}"
    caption = f"Prefix retention, unconditional and conditional. {comparison.setting(rule)}, all tasks pooled."
    return Drawing(f"retention-{comparison.file_name(target)}", title, caption, figure)


def tasks(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Acceptance length of every task with its interval, by rule."""
    rules, entries = _measured(comparison, target)
    if not entries:
        return None
    names = [task.name for task in comparison.tasks(target)]
    titles = [task.title for task in comparison.tasks(target)]
    most = max(len(members) for members in kinds(entries).values())
    height = 0.8 + len(names) * max(0.26, 0.13 * most)
    figure, axes = panels(entries, len(rules), height=height, sharex=True, sharey=True)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for panel, rule in zip(row, rules, strict=True):
            for number, entry in enumerate(members):
                shift = (number - (len(members) - 1) / 2) * min(0.25, 0.75 / len(members))
                found = [(i, entry.cell(rule, "paper", name)) for i, name in enumerate(names)]
                points = [(i + shift, cell.acceptance_length) for i, cell in found if cell is not None]
                values = [e.value for _, e in points]
                spread = [[e.value - e.low for _, e in points], [e.high - e.value for _, e in points]]
                style = look(entry)
                panel.errorbar(
                    values, [y for y, _ in points], xerr=[[max(0.0, s) for s in side] for side in spread],
                    fmt=style.marker, color=style.colour, markersize=5, elinewidth=1.4, capsize=0,
                )  # fmt: skip
            panel.set(title=f"{kind}, {comparison.setting(rule)}")
            panel.set_yticks(range(len(names)), titles)
            panel.tick_params(axis="y", length=0)
            panel.grid(visible=False, axis="y")
            for between in range(1, len(names)):
                panel.axhline(between - 0.5, color=INKS["grid"][0], linewidth=0.8)
    axes[0][0].set_ylim(len(names) - 0.5, -0.5)
    for panel in axes[-1]:
        panel.set_xlabel("tokens per verification call, τ")
    legend(figure, entries, look, lines=False)
    title = f"Acceptance length by task, {target}"
    caption = "Bars are 95% intervals (bootstrap over prompts). Correction and bonus tokens count."
    return Drawing(f"tasks-{comparison.file_name(target)}", title, caption, figure)


def seconds(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Milliseconds per token by phase: autoregressive decoding, then every drafter."""
    del look  # phases have inks of their own
    rules, entries = _measured(comparison, target)
    if not entries:
        return None
    bars = {
        rule: autoregressive(entries, rule) | {e.title: speculative(e, rule) for e in entries if e.cells(rule, "paper")}
        for rule in rules
    }
    names = list(dict.fromkeys(name for found in bars.values() for name in found))
    shown = phases(spent for found in bars.values() for spent in found.values())
    figure = Figure(figsize=(0.8 + 3.2 * max(2, len(rules)), 1.15 + 0.27 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(rules), squeeze=False, sharey=True, sharex=True)[0]
    longest = max(1e3 * s.total / s.tokens for found in bars.values() for s in found.values() if s.tokens)
    for panel, rule in zip(axes, rules, strict=True):
        for place, name in enumerate(names):
            spent, left = bars[rule].get(name), 0.0
            if spent is None or not spent.tokens:
                continue
            for phase in shown:
                width = 1e3 * spent.per_token(phase)
                colour = INKS.get(phase, INKS["axis"])[0]
                label = phase if panel is axes[0] and place == 0 else None
                panel.barh(place, width, left=left, height=0.68, color=colour, label=label)
                left += width
            panel.text(left + 0.015 * longest, place, f"{left:.2f}", va="center", fontsize=8)
        panel.set(title=comparison.setting(rule), xlabel="milliseconds per token", xlim=(0, 1.17 * longest))
        panel.set_yticks(range(len(names)), names)
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
    axes[0].invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(shown), handlelength=1.2, handleheight=0.9)
    title = f"Where the time goes, {target}"
    caption = "Time per generated token by phase, all tasks together, prefill included."
    return Drawing(f"seconds-{comparison.file_name(target)}", title, caption, figure)


def temperatures(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Acceptance length predicted at every draft temperature tried, the best one ringed."""
    entries = [e for e in comparison.of(target) if len(e.about.temperatures) > 1]
    tried = {rule for e in entries for point in e.about.temperatures for rule in point.acceptance_length}
    rules = [rule for rule in RULES if rule in tried]
    if not rules:
        return None
    figure, axes = panels(entries, len(rules), height=2.5, sharex=True)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for panel, rule in zip(row, rules, strict=True):
            for entry in members:
                points = {
                    p.draft_temperature: p.acceptance_length[rule]
                    for p in sorted(entry.about.temperatures, key=lambda p: p.draft_temperature)
                    if rule in p.acceptance_length
                }
                style = look(entry)
                line(panel, list(points), list(points.values()), style)
                best = entry.about.best_draft_temperature.get(rule)
                if best in points:
                    panel.plot(best, points[best], "o", ms=11, mfc="none", mec=style.colour, mew=1.4)
            panel.set(title=f"{kind}, {rule} verification")
        row[0].set_ylabel("predicted τ")
    for panel in axes[-1]:
        panel.set_xlabel("draft temperature")
    legend(figure, entries, look)
    title = f"Draft temperature, {target}"
    caption = (
        "Acceptance length predicted from target paths, mean over the tasks. A ring marks the best temperature tried."
    )
    return Drawing(f"temperature-{comparison.file_name(target)}", title, caption, figure)


def dynamics(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Token accuracy and accepted draft length over training."""
    entries = [e for e in comparison.of(target) if e.dynamics]
    if not entries:
        return None
    figure, axes = panels(entries, 2, height=2.5, sharex=True)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for entry in members:
            points = entry.dynamics.points if entry.dynamics else []
            epochs = [p.epoch for p in points]
            line(row[0], epochs, [p.accuracy for p in points], look(entry))
            line(row[1], epochs, [p.draft_length for p in points], look(entry))
        row[0].set(title=f"{kind}: token accuracy", ylabel="argmax agrees with the text")
        row[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        row[1].set(title=f"{kind}: accepted draft length", ylabel="draft tokens per block")
    for panel in axes[-1]:
        panel.set_xlabel("epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    legend(figure, entries, look)
    title = f"Training dynamics, {target}"
    caption = (
        "Checkpoints on fixed blocks of training texts, block verification; correction and bonus tokens do not count."
    )
    return Drawing(f"dynamics-{comparison.file_name(target)}", title, caption, figure)


def pooled_retention(entry: Entry, rule: Rule) -> list[float]:
    """Pr(accepted >= i) for i = 0 .. B over the rounds of all tasks."""
    cells = entry.cells(rule, "paper")
    num_rounds = sum(cell.num_rounds for cell in cells)
    longest = max(len(cell.retention) for cell in cells)
    kept = [sum(c.num_rounds * c.retention[i] for c in cells if i < len(c.retention)) for i in range(longest)]
    return [1.0, *(k / num_rounds if num_rounds else 0.0 for k in kept)]


def _measured(comparison: Comparison, target: str) -> tuple[list[Rule], list[Entry]]:
    """Rules and drafters with cells at the paper's draft temperature."""
    entries = [e for e in comparison.of(target) if any(e.cells(rule, "paper") for rule in RULES)]
    return [rule for rule in RULES if any(e.cells(rule, "paper") for e in entries)], entries
