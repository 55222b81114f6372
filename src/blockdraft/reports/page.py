"""The report as one HTML file that needs nothing else."""

import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import Any

import yaml

from blockdraft.reports.drawing import Drawing
from blockdraft.reports.explorer import explorer
from blockdraft.reports.headlines import Headline, headlines
from blockdraft.reports.inks import css, styles
from blockdraft.reports.merging import GROUPS, Comparison, LoadedEvaluation
from blockdraft.reports.table import Column, Table, TableRow, plain


def page(comparison: Comparison, tables: Sequence[Table], drawings: Iterable[Drawing]) -> str:
    """HTML. All text is escaped, styles and script are inlined, data is JSON that no markup can leave."""
    traced = explorer(comparison, styles(comparison))
    found = headlines(comparison)
    return Template(_asset("report.html")).substitute(
        title=html.escape(f"blockdraft report: {', '.join(comparison.targets)}"),
        targets=html.escape(", ".join(comparison.targets)),
        css=css() + _asset("report.css"),
        js=_asset("report.js"),
        headlines="\n".join(map(_card, found)),
        notes="".join(f'<p class="note">{html.escape(note)}</p>' for note in comparison.differences),
        main=_section(tables[0]) if tables else "",
        explorer=_asset("explorer.html") if traced else "<p>These evaluations recorded no traces.</p>",
        figures="\n".join(map(_figure, drawings)),
        tables="\n".join(map(_section, tables[1:])),
        settings="\n".join(
            [*map(_section, (_tasks(comparison), _drafters(comparison))), *map(_about, comparison.evaluations)]
        ),
        data=json.dumps(traced, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c"),
    )


def _card(headline: Headline) -> str:
    gain = "" if headline.gain is None else f'<p class="gain">{headline.gain:+.1%}</p>'
    where = html.escape(f"{headline.target} · {headline.kind} · {headline.setting}")
    return f'<article class="card"><p class="where">{where}</p>{gain}<p>{html.escape(headline.sentence)}</p></article>'


def _section(table: Table) -> str:
    title, caption = html.escape(table.title), html.escape(table.caption)
    return (
        f'<section id="{table.name}" class="table"><h3>{title}</h3>\n<p class="caption">{caption}</p>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{table.html()}</div></section>'
    )


def _figure(drawing: Drawing) -> str:
    title = html.escape(drawing.title)
    points = 72 * drawing.figure.get_figwidth()
    attributes = f'role="img" aria-label="{title}" style="--points: {points:.0f}"'
    picture = drawing.inline().replace("<svg ", f"<svg {attributes} ", 1)
    return (
        f'<figure id="{drawing.name}"><figcaption><h3>{title}</h3><p class="caption">{html.escape(drawing.caption)}</p>'
        f'</figcaption>\n<div class="scroll" tabindex="0" role="region" aria-label="{title}">{picture}</div></figure>'
    )


def _tasks(comparison: Comparison) -> Table:
    rows = []
    for target in comparison.targets:
        for task in comparison.tasks(target):
            values = (plain(task.num_prompts, "{:,}"), plain(task.num_turns, "{:,}"), plain(task.source))
            rows.append(TableRow((target, GROUPS.get(task.group, task.group), task.title), values))
    columns = (Column(("Prompts",), "prompts"), Column(("Turns",), "turns"), Column(("Source",), "source"))
    return Table("tasks", "Tasks", "", ("Target", "Group", "Task"), columns, tuple(rows))


def _drafters(comparison: Comparison) -> Table:
    rows = []
    for entry in comparison.entries:
        about = entry.about
        best = ", ".join(f"{rule} {value:g}" for rule, value in about.best_draft_temperature.items())
        values = (
            plain(about.num_parameters / 1e6, "{:.1f} M"),
            plain(about.num_layers),
            plain(about.num_proposals),
            plain(about.step, "{:,}"),
            plain(best or None),
            plain(about.path),
        )
        rows.append(TableRow((entry.target, entry.kind, entry.label), values))
    heads = ("Parameters", "Layers", "Proposals", "Step", "Best draft T", "Path")
    columns = tuple(Column((head,), head.lower()) for head in heads)
    return Table("drafters", "Drafters", "", ("Target", "Drafter", "Loss"), columns, tuple(rows))


def _about(evaluation: LoadedEvaluation) -> str:
    results = evaluation.results
    known = {"folder": str(evaluation.folder), "target": results.target, "fingerprint": results.target_fingerprint}
    lists = (("LoadedEvaluation", known), ("Settings", results.settings), ("Provenance", results.provenance))
    parts = "".join(f"<h4>{title}</h4>{_definitions(values)}" for title, values in lists)
    recipes = "".join(
        f"<h4>Recipe of {html.escape(d.name)}</h4><pre>{html.escape(yaml.safe_dump(d.recipe, sort_keys=False))}</pre>"
        for d in results.drafters
        if d.recipe
    )
    return f"<details><summary>{html.escape(evaluation.name)}</summary>{parts}{recipes}</details>"


def _definitions(values: dict[str, Any]) -> str:
    rows = "".join(f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(_shown(v))}</dd>" for k, v in values.items())
    return f"<dl>{rows}</dl>"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _asset(name: str) -> str:
    return files("blockdraft.reports").joinpath("assets", name).read_text(encoding="utf-8")
