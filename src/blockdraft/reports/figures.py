"""Draw the paper's figures, and four more, with matplotlib: one drawing per target and subject."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from blockdraft.reports.comparison import Comparison, Entry, Spent, ce_and_bv
from blockdraft.reports.retention import figure_3, retention_figure
from blockdraft.reports.style import BANDS, INKS, Drawing, Look, drawing, kinds, legend, panels, plot_line, styles
from blockdraft.verification import RULES, Rule


def figures(comparison: Comparison) -> Iterator[Drawing]:
    """Draw those that have something to show, one after the other."""
    return (replace(drawn, caption=comparison.caption(drawn.caption)) for drawn in _figures(comparison))


def _figures(comparison: Comparison) -> Iterator[Drawing]:
    look = styles(comparison)
    for of_the_paper in (figure_3, figure_4):
        with drawing():
            found = of_the_paper(comparison, look)
        if found is not None:
            yield found
    for target in comparison.targets:
        for kind in comparison.kinds:
            with drawing():
                kept = retention_figure(comparison, target, kind, look)
            if kept is not None:
                yield kept
        for draw in (tasks_figure, seconds_figure, temperatures_figure, learning_figure, dynamics_figure):
            with drawing():
                drawn = draw(comparison, target, look)
            if drawn is not None:
                yield drawn


def tasks_figure(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Draw the acceptance length of every task with its interval, by rule."""
    rules, entries = _measured(comparison, target)
    if not entries:
        return None
    names = [task.name for task in comparison.tasks(target)]
    titles = [task.title for task in comparison.tasks(target)]
    most = max(len(members) for members in kinds(entries).values())
    height = max(1.5, 0.8 + len(names) * max(0.26, 0.1 * most))
    figure, axes = panels(entries, len(rules), height=height, sharex=True, sharey=True)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for panel, rule in zip(row, rules, strict=True):
            for number, entry in enumerate(members):
                shift = (number - (len(members) - 1) / 2) * min(0.25, 0.75 / len(members))
                found = [(i, entry.cell(rule, "paper", name)) for i, name in enumerate(names)]
                points = [(i + shift, c.acceptance_length) for i, c in found if c and c.acceptance_length]
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
    caption = (
        f"Measured in decoding, with 95% intervals ({comparison.interval_basis}). Correction and bonus tokens count."
    )
    return Drawing(f"tasks-{comparison.file_name(target)}", title, caption, figure)


def seconds_figure(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Draw milliseconds per token by phase: autoregressive decoding, then every drafter."""
    del look  # phases have inks of their own
    rules, entries = _measured(comparison, target)
    if not entries:
        return None
    bars = {
        rule: comparison.autoregressive(target, rule)
        | {e.title: e.spent(rule) for e in entries if e.cells(rule, "paper")}
        for rule in rules
    }
    names = list(dict.fromkeys(name for found in bars.values() for name in found))
    everything = [spent for found in bars.values() for spent in found.values() if spent.tokens]
    phases = Spent.pooled((spent.seconds for spent in everything), 1).phases
    figure = Figure(figsize=(0.8 + 3.2 * max(2, len(rules)), 1.2 + 0.29 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(rules), squeeze=False, sharey=True, sharex=True)[0]
    longest = max((1e3 * s.total / s.tokens for s in everything), default=1.0)
    for panel, rule in zip(axes, rules, strict=True):
        for place, name in enumerate(names):
            spent, left = bars[rule].get(name), 0.0
            if spent is None or not spent.tokens:
                continue
            for phase in phases:
                width = 1e3 * spent.seconds.get(phase, 0.0) / spent.tokens
                colour = INKS.get(phase, INKS["axis"])[0]
                label = phase if panel is axes[0] and place == 0 else None
                panel.barh(place, width, left=left, height=0.66, color=colour, label=label)
                left += width
            panel.text(left + 0.015 * longest, place, f"{left:.2f}", va="center", fontsize=8)
        panel.set(title=comparison.setting(rule), xlabel="milliseconds per token", xlim=(0, 1.17 * longest))
        panel.set_yticks(range(len(names)), names)
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    figure.legend(loc="outside lower center", ncols=len(phases), handlelength=1.2, handleheight=0.9)
    title = f"Where the time goes, {target}"
    caption = "Time per generated token by phase, all tasks together, prefill included."
    return Drawing(f"seconds-{comparison.file_name(target)}", title, caption, figure)


def temperatures_figure(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Draw the acceptance length predicted at every draft temperature, the best one ringed, argmax drafts at 0."""
    entries = [e for e in comparison.of(target) if len(e.about.temperatures) > 1]
    tried = {rule for e in entries for point in e.about.temperatures for rule in point.acceptance_length}
    rules = [rule for rule in RULES if rule in tried]
    if not rules:
        return None
    figure, axes = panels(entries, len(rules), height=2.5, sharex=True)
    argmax = False
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for panel, rule in zip(row, rules, strict=True):
            for entry in members:
                tried_here = sorted(entry.about.temperatures, key=lambda p: p.draft_temperature)
                measured = [p for p in tried_here if rule in p.acceptance_length]
                points = {p.draft_temperature: p.acceptance_length[rule] for p in measured}
                style, deviations = look(entry), [p.deviation.get(rule) for p in measured]
                plot_line(panel, list(points), list(points.values()), style, deviations)
                best = entry.about.best_draft_temperature.get(rule)
                if best in points:
                    panel.plot(best, points[best], "o", ms=11, mfc="none", mec=style.colour, mew=1.4)
                hot = entry.average(rule, "one-hot")
                if hot is not None and hot.draft_temperature not in points:
                    at = (hot.draft_temperature, hot.predicted_length.value)
                    panel.plot(*at, style.marker, ms=5.5, mfc="none", mec=style.colour, mew=1.4)
                    argmax = True
            panel.set(title=f"{kind}, {rule} verification")
            panel.margins(y=0.12)
        row[0].set_ylabel("predicted τ")
    for panel in axes[-1]:
        panel.set_xlabel("draft temperature")
    legend(figure, entries, look)
    title = f"Draft temperature, {target}"
    caption = (
        "Acceptance length predicted from the target's own texts, mean over the tasks. A ring marks the best "
        "temperature tried." + (" Open markers at 0 are argmax drafts." if argmax else "") + comparison.edges(entries)
        + (BANDS if any(point.deviation for e in entries for point in e.about.temperatures) else "")
    )  # fmt: skip
    return Drawing(f"temperature-{comparison.file_name(target)}", title, caption, figure)


def learning_figure(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Draw the tokens per call expected on held-out texts against the blocks that a run had trained on, by rule."""
    entries = [e for e in comparison.of(target) if len(e.about.learning_curve) > 1]
    if not entries:
        return None
    figure, axes = panels(entries, len(RULES), height=2.5, sharex=True)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        for panel, rule in zip(row, RULES, strict=True):
            for entry in members:
                points = entry.about.learning_curve
                blocks, lengths = [p.num_blocks for p in points], [p.draft_length[rule] + 1 for p in points]
                plot_line(panel, blocks, lengths, look(entry), [p.deviation.get(rule) for p in points])
            panel.set(title=f"{kind}, {rule} verification")
            panel.xaxis.set_major_locator(MaxNLocator(4))
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        row[0].set_ylabel("tokens per call")
    for panel in axes[-1]:
        panel.set_xlabel("blocks trained on")
    legend(figure, entries, look)
    title = f"Learning curves, {target}"
    caption = (
        "Expected tokens per verification call at random positions of held-out texts: the accepted ones of a block and "
        "the one that the target adds. A curve ends at the checkpoint that was evaluated. "
        "Held-out blocks are the same for runs with the same data, seed, and numbers of held-out texts and proposals."
        + (BANDS if any(point.deviation for e in entries for point in e.about.learning_curve) else "")
    )  # fmt: skip
    return Drawing(f"learning-{comparison.file_name(target)}", title, caption, figure)


def dynamics_figure(comparison: Comparison, target: str, look: Look) -> Drawing | None:
    """Draw token accuracy and accepted draft length over training."""
    entries = [e for e in comparison.of(target) if e.dynamics]
    if not entries:
        return None
    figure, axes = panels(entries, 2, height=2.5, sharex=True)
    for row, (kind, members) in zip(axes, kinds(entries).items(), strict=True):
        _plot_dynamics(row, members, look)
        row[0].set_title(f"{kind}: token accuracy")
        row[1].set_title(f"{kind}: accepted draft length")
    for panel in axes[-1]:
        panel.set_xlabel("epoch")
    legend(figure, entries, look)
    title = f"Training dynamics, {target}"
    return Drawing(f"dynamics-{comparison.file_name(target)}", title, _dynamics_caption(comparison, entries), figure)


def figure_4(comparison: Comparison, look: Look) -> Drawing | None:
    """Draw the paper's figure 4: token accuracy, and accepted draft length beside it, of CE and BV over training.

    That is the first target and kind of drafter with the dynamics of both.
    """
    for target, kind in itertools.product(comparison.targets, comparison.kinds):
        pair = ce_and_bv([e for e in comparison.of(target, kind) if e.dynamics])
        if pair is not None:
            return _figure_4(comparison, pair, look)
    return None


def _figure_4(comparison: Comparison, pair: tuple[Entry, Entry], look: Look) -> Drawing:
    figure = Figure(figsize=(7.4, 3.1), layout="constrained")
    row = list(figure.subplots(1, 2))
    _plot_dynamics(row, pair, look)
    row[0].set(title="Token accuracy", xlabel="epoch")
    row[1].set(title="Accepted draft length", xlabel="epoch")
    legend(figure, pair, look)
    last = [(e.label, e.dynamics.points[-1]) for e in pair if e.dynamics]
    ends = ", ".join(f"{point.accuracy:.2%} and {point.draft_length:.2f} with {label}" for label, point in last)
    said = _dynamics_caption(comparison, pair)
    caption = f"In the layout of the paper's figure 4. {said} At the last checkpoint: {ends}."
    return Drawing("figure-4", f"Training dynamics, {pair[0].target}, {pair[0].kind}", caption, figure)


def _plot_dynamics(row: Sequence[Axes], entries: Sequence[Entry], look: Look) -> None:
    """Draw token accuracy on the left and accepted draft length on the right, over the epochs."""
    for entry in entries:
        points = entry.dynamics.points if entry.dynamics else []
        epochs, style = [p.epoch for p in points], look(entry)
        plot_line(row[0], epochs, [p.accuracy for p in points], style, [p.accuracy_deviation for p in points])
        plot_line(row[1], epochs, [p.draft_length for p in points], style, [p.draft_length_deviation for p in points])
    row[0].set_ylabel("argmax agrees with the text")
    row[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    row[1].set_ylabel("draft tokens per block")
    for panel in row:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _dynamics_caption(comparison: Comparison, entries: Sequence[Entry]) -> str:
    """Say what training dynamics were measured on, and what the two panels show."""
    measured = {(e.dynamics.num_texts, e.dynamics.num_blocks) for e in entries if e.dynamics}
    blocks = " or ".join(f"{num_blocks:,} blocks of {num_texts:,}" for num_texts, num_blocks in sorted(measured))
    points = [point for e in entries if e.dynamics for point in e.dynamics.points]
    return (
        f"Checkpoints on the same {blocks} training texts{comparison.each_seed}. Left: how often the drafter's most "
        "probable token is the text's. Right: drafted tokens kept under block verification; correction and bonus "
        "tokens do not count." + (BANDS if any(p.draft_length_deviation is not None for p in points) else "")
    )


def missing_dynamics(comparison: Comparison) -> list[str]:
    """Say, in a sentence for each reason, which drafters have no training dynamics although they were asked for."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in comparison.entries:
        reason = entry.evaluation.results.dynamics_obstacles.get(entry.about.name)
        if reason is not None:
            found.setdefault((entry.target, reason), []).append(entry.title)
    return [
        f"Training dynamics, {target}, were not measured for {', '.join(titles)}: {reason.rstrip('.')}."
        for (target, reason), titles in found.items()
    ]


def _measured(comparison: Comparison, target: str) -> tuple[list[Rule], list[Entry]]:
    """Return the rules and drafters that have cells at the paper's draft temperature."""
    entries = [e for e in comparison.of(target) if any(e.cells(rule, "paper") for rule in RULES)]
    return [rule for rule in RULES if any(e.cells(rule, "paper") for e in entries)], entries
