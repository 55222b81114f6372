"""Write the report: one HTML file that needs nothing else, and its folder with the tables and figures as files.

Its headlines say what was shown in a few sentences: predicted lengths, measured ones, then speed, each with its
interval.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from blockdraft.evaluation.results import (
    AnswerTrace,
    Average,
    Interval,
    Quantity,
    TracedRound,
    TracedToken,
    training_budget,
)
from blockdraft.files import atomic_write
from blockdraft.reports.comparison import GROUPS, TOO_FEW, Comparison, Entry, Gain, LoadedEvaluation, read_evaluations
from blockdraft.reports.figures import figures, missing_dynamics
from blockdraft.reports.notes import notes
from blockdraft.reports.paper_tables import tables
from blockdraft.reports.style import Drawing, Look, css, styles
from blockdraft.reports.table import Column, Table, TableRow, plain
from blockdraft.verification import RULES, Rule

Averages = Sequence[tuple[Entry, Average]]


@dataclass(frozen=True)
class Contrast:
    """Holds a quantity of a drafter, and that of the baseline if there is one. what: a heading for it."""

    what: str
    unit: str
    new: Interval
    old: Interval | None
    gain: Gain | None


@dataclass(frozen=True)
class Headline:
    """Says what was shown of one kind of drafter on one target.

    new, old: labels of the drafter and of the baseline, None if there is none.
    findings: predicted length; measured length and speed-up if anything was decoded.
    note: what a reader must know beside.
    """

    target: str
    kind: str
    setting: str
    new: str
    old: str | None
    findings: tuple[Contrast, ...]
    note: str | None

    @property
    def figure(self) -> str:
        """Say what is printed large: the gain in predicted length, if it is settled, or the predicted length alone."""
        first = self.findings[0]
        return (first.gain.figure or "undecided") if first.gain else f"{first.new.value:.2f}"

    @property
    def settled(self) -> bool:
        """Tell whether the large figure is a number."""
        gain = self.findings[0].gain
        return gain is None or gain.settled

    @property
    def claim(self) -> str:
        """Say what the large figure is."""
        who = f"with {self.new}" if self.old is None else f"{self.new} over {self.old}"
        return f"predicted tokens per verification call, {who}"

    @property
    def basis(self) -> str:
        """Say what the large figure rests on."""
        first = self.findings[0]
        if first.gain:
            return first.gain.basis
        return f"95% interval {first.new.low:.2f} to {first.new.high:.2f}" if first.new.bounds else TOO_FEW

    @property
    def sentences(self) -> list[str]:
        """Give the findings in words."""
        forms = (
            ("Predicted from the target's own texts, {} yields {} tokens per verification call", " and"),
            ("Measured in decoding, {} yields {}", " and"),
            ("Decoding with {} is {} as fast as without a drafter", ", with"),
        )
        said = []
        for (form, joint), found in zip(forms, self.findings, strict=False):
            beside = "" if found.old is None else f"{joint} {self.old} {found.old.shown(found.unit)}: {found.gain}"
            said.append(form.format(self.new, found.new.shown(found.unit)) + beside)
        return [*(f"{sentence}." for sentence in said), *([self.note] if self.note else [])]

    def __str__(self) -> str:
        return f"{self.target}, {self.kind}, {self.setting}. {' '.join(self.sentences)}"


@dataclass(frozen=True)
class ReportFiles:
    """Names what was written: the page, files of tables and figures, the tables themselves and the results in words."""

    page: Path
    table_files: list[Path]
    figure_files: list[Path]
    tables: list[Table]
    headlines: list[Headline]


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    on_file: Callable[[Path], None] = lambda _: None,
    *,
    study: Sequence[Table] = (),
) -> ReportFiles:
    """Read evaluations, write ``out/report.html``, ``out/tables`` and ``out/figures``.

    Args:
        folders: of evaluations, each with a ``results.json`` and perhaps a ``traces.json``.
        out: made if it is not there; files of the same names are replaced.
        on_file: called with each file after it was written.
        study: tables of the study that the evaluations belong to, written and shown beside the report's own.
    """
    comparison, out = read_evaluations(folders), Path(out)
    table_files: list[Path] = []
    figure_files: list[Path] = []

    def write(file: Path, content: str | bytes, written: list[Path]) -> None:
        with atomic_write(file) as unfinished:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        written.append(file)
        on_file(file)

    found = tables(comparison)
    for table in (*found, *study):
        for ending, content in (("md", table.markdown()), ("tex", table.latex()), ("csv", table.csv())):
            write(out / "tables" / f"{table.name}.{ending}", content, table_files)
    drawings: list[Drawing] = []
    for drawing in figures(comparison):
        write(out / "figures" / f"{drawing.name}.png", drawing.png(), figure_files)
        write(out / "figures" / f"{drawing.name}.svg", drawing.svg(), figure_files)
        drawings.append(drawing)
    write(out / "report.html", page(comparison, found, drawings, study), [])
    return ReportFiles(out / "report.html", table_files, figure_files, found, headlines(comparison))


def page(
    comparison: Comparison, tables: Sequence[Table], drawings: Sequence[Drawing], study: Sequence[Table] = ()
) -> str:
    """Write the HTML: all text is escaped, styles and script are inlined, data is JSON that no markup can leave."""
    return (
        _environment()
        .get_template("report.html")
        .render(
            targets=", ".join(comparison.targets),
            variables=css(),
            headlines=headlines(comparison),
            notes=notes(comparison),
            tables=tables,
            study=study,
            drawings=drawings,
            missing=missing_dynamics(comparison),
            settings=(_tasks(comparison), _drafters(comparison)),
            evaluations=comparison.evaluations,
            traces=explorer(comparison, styles(comparison)),
        )
    )


def table_html(table: Table) -> str:
    """Write a ``<table>``; intervals show when the pointer rests on a number."""
    return str(_environment().get_template("table.html").module.grid(table))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TracedText:
    """Holds a prompt and what every drafter did with it."""

    target: str
    task: str
    id: str
    prompt: str
    traces: list[tuple[Entry, AnswerTrace]]


def traced_texts(comparison: Comparison) -> list[TracedText]:
    """Return the traced prompts, each once, with the drafters of all evaluations that traced it."""
    found: dict[tuple[str, ...], TracedText] = {}
    for evaluation in comparison.evaluations:
        entries = {e.about.name: e for e in comparison.entries if e.evaluation is evaluation}
        for traced in evaluation.traces.prompts if evaluation.traces else []:
            for trace in traced.traces:
                if trace.drafter in entries:
                    entry = entries[trace.drafter]
                    key = (entry.target, traced.task, traced.id, traced.prompt)
                    found.setdefault(key, TracedText(*key, [])).traces.append((entry, trace))
    return list(found.values())


def explorer(comparison: Comparison, look: Look) -> list[dict[str, Any]]:
    """Return what the block explorer needs, as plain values: prompts with the rounds of every drafter and rule."""
    titles = {t: {task.name: task.title for task in comparison.tasks(t)} for t in comparison.targets}
    return [
        {
            "target": text.target,
            "task": titles[text.target].get(text.task, text.task),
            "id": text.id,
            "prompt": text.prompt,
            "traces": [
                {
                    "drafter": entry.title,
                    "ink": look(entry).ink,
                    "size": entry.about.num_proposals,
                    "rule": trace.rule,
                    "temperature": trace.draft_temperature,
                    "first": trace.first_text,
                    "rounds": [_round(r) for r in trace.rounds],
                }
                for entry, trace in text.traces
            ],
        }
        for text in traced_texts(comparison)
    ]


def _round(record: TracedRound) -> dict[str, Any]:
    return {
        "tokens": [_token(token) for token in record.drafted],
        "kept": record.accepted,
        "tokenKept": record.token_accepted,
        "next": record.next_text,
    }


def _token(token: TracedToken) -> list[Any]:
    """Give text; p, q, alpha, threshold, coin, rounded; whether the coin succeeds, which rounding must not change."""
    numbers = (token.p, token.q, token.alpha, token.threshold, token.coin)
    return [token.text, *(float(f"{n:.6g}") for n in numbers), int(token.coin < token.threshold)]


def _tasks(comparison: Comparison) -> Table:
    rows = []
    for target in comparison.targets:
        for task in comparison.tasks(target):
            values = (plain(task.num_prompts, "{:,}"), plain(task.num_turns, "{:,}"), plain(task.source))
            rows.append(TableRow((target, GROUPS.get(task.group, task.group), task.title), values))
    columns = (Column(("Prompts",), "prompts"), Column(("Turns",), "turns"), Column(("Source",), "source"))
    caption = f"Numbers{comparison.each_seed}." if comparison.each_seed else ""
    return Table("tasks", "Tasks", caption, ("Target", "Group", "Task"), columns, tuple(rows))


def _drafters(comparison: Comparison) -> Table:
    rows = []
    for entry in comparison.entries:
        about = entry.about
        best = ", ".join(f"{rule} {value:g}" for rule, value in about.best_draft_temperature.items())
        values = (
            plain(about.num_parameters / 1e6, "{:.1f} M"),
            plain(about.num_layers),
            plain(about.num_proposals),
            plain(about.progress),
            plain(best or None),
            plain(about.path),
        )
        rows.append(TableRow((entry.target, entry.kind, entry.label), values))
    heads = ("Parameters", "Layers", "Proposals", "Step", "Best draft T", "Path")
    columns = tuple(Column((head,), head.lower()) for head in heads)
    caption = f"Step and path tell which checkpoint of a run was evaluated.{comparison.edges()}"
    return Table("drafters", "Drafters", caption, ("Target", "Drafter", "Loss"), columns, tuple(rows))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("blockdraft.reports", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["asset"] = _asset
    environment.filters |= {"facts": _facts, "shown": _shown, "yaml": lambda v: yaml.safe_dump(v, sort_keys=False)}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


def _asset(name: str) -> str:
    return files("blockdraft.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _facts(evaluation: LoadedEvaluation) -> list[tuple[str, dict[str, Any]]]:
    """List what is known of an evaluation, under headings."""
    results = evaluation.results
    known = {"folder": str(evaluation.folder), "target": results.target, "fingerprint": results.target_fingerprint}
    return [("Evaluation", known), ("Settings", results.settings), ("Provenance", results.provenance)]


def _shown(value: Any) -> str:
    """Write a setting for a reader."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def headlines(comparison: Comparison) -> list[Headline]:
    """Compare BV with CE for every target and kind, among drafters that were trained alike; else say what one does."""
    found = []
    for target in comparison.targets:
        for kind in comparison.kinds:
            entries = comparison.of(target, kind)
            rule = max((r for r in RULES if any(e.average(r, "paper") for e in entries)), key=RULES.index, default=None)
            if rule is not None:
                measured = [(e, a) for e in entries if (a := e.average(rule, "paper")) is not None]
                found += [_headline(comparison, rule, group) for group in _alike(measured)]
    return found


def _alike(measured: Averages) -> list[Averages]:
    """Group drafters by training budget, or not at all if that would leave BV without a CE to compare with."""
    groups: list[tuple[Any, list[tuple[Entry, Average]]]] = []
    for each in measured:
        key = _budget(each[0], measured)
        same = next((group for other, group in groups if other == key), None)
        if same is None:
            groups.append((key, [each]))
        else:
            same.append(each)

    def comparable(group: Averages) -> bool:
        labels = {entry.about.label for entry, _ in group}
        return "CE" in labels and any(entry.is_bv for entry, _ in group)

    split: list[Averages] = [group for _, group in groups]
    return [measured] if comparable(measured) and not any(map(comparable, split)) else split


def _budget(entry: Entry, compared: Averages) -> dict[str, Any]:
    """Return what must agree for a comparison of objectives to be one of objectives alone.

    Texts go by their identity, or by their folder if an evaluation of an earlier version leaves one identity open.
    """
    about = entry.about
    known = all(each.about.data for each, _ in compared if each.about.recipe)
    budget = training_budget(about.recipe or {}, about.data if known else None)
    return budget | {"steps taken": about.step if about.unfinished else None}


def _headline(comparison: Comparison, rule: Rule, group: Averages) -> Headline:
    new, of_new = _best(group)
    baselines = [m for m in group if m[0].about.label == "CE" and m[0] is not new]
    old, of_old = max(baselines, key=lambda m: m[1].predicted_length.value, default=(None, None))

    def contrast(what: str, quantity: Quantity, unit: str = "") -> Contrast | None:
        ours: Interval | None = getattr(of_new, quantity)
        theirs: Interval | None = getattr(of_old, quantity, None)
        if ours is None:
            return None
        if old is None or theirs is None:
            return Contrast(what, unit, ours, None, None)
        ratio = new.over(old, rule, "paper", quantity)
        gain = Gain.unpaired(ours, theirs) if ratio is None else Gain.paired(ratio)
        return Contrast(what, unit, ours, theirs, gain)

    findings = [
        contrast("Tokens per call, predicted", "predicted_length"),
        contrast("Tokens per call, measured", "acceptance_length"),
        contrast("Speed-up", "speedup", "×"),
    ]
    differ = [what for what, value in _budget(new, group).items() if old and value != _budget(old, group)[what]]
    note = f"They were trained differently ({', '.join(differ)}), so the loss is not all that differs."
    return Headline(
        new.target,
        new.kind,
        comparison.setting(rule),
        new.label,
        old.label if old else None,
        tuple(filter(None, findings)),
        note if differ else None,
    )


def _best(group: Averages) -> tuple[Entry, Average]:
    """Take BV if there is one, else a variant of BV, else any; of several the one with the largest predicted length."""
    exact = [m for m in group if m[0].about.label == "BV"]
    variants = [m for m in group if m[0].is_bv]
    return max(exact or variants or group, key=lambda m: m[1].predicted_length.value)
