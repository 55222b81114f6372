"""Several evaluations as one: which targets, which drafters, and a name for each that no other one has."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from blockdraft.evaluation.results import (
    Average,
    Cell,
    DrafterAbout,
    Dynamics,
    EvaluationError,
    Results,
    TaskAbout,
    Trace,
    Traces,
    read_results,
    read_traces,
)
from blockdraft.verification import Rule

Choice = Literal["paper", "best"]

KINDS = {"dflash": "DFlash", "dspark": "DSpark"}
GROUPS = {"math": "Math", "code": "Code", "chat": "Chat"}
LABELS = ("CE", "KL", "RKL", "TV", "LK", "BV w/o annealing", "BV")


@dataclass(frozen=True)
class LoadedEvaluation:
    """One folder. ``name`` tells it from the other folders of the report."""

    name: str
    folder: Path
    results: Results
    traces: Traces | None


@dataclass(frozen=True)
class Entry:
    """A drafter with everything that was measured of it.

    target: its target's title. label: its row in a table, unique among the drafters of its kind and target.
    """

    evaluation: LoadedEvaluation
    about: DrafterAbout
    target: str
    label: str

    @property
    def kind(self) -> str:
        """DFlash or DSpark."""
        return KINDS[self.about.kind]

    @property
    def title(self) -> str:
        """Unique among all drafters of its target."""
        return f"{self.kind} {self.label}"

    def cells(self, rule: Rule, choice: Choice) -> list[Cell]:
        """Its tasks under one rule."""
        name = self.about.name
        found = self.evaluation.results.cells
        return [c for c in found if (c.drafter, c.rule, c.choice) == (name, rule, choice)]

    def cell(self, rule: Rule, choice: Choice, task: str) -> Cell | None:
        """One task, if it was measured."""
        return next((c for c in self.cells(rule, choice) if c.task == task), None)

    def average(self, rule: Rule, choice: Choice) -> Average | None:
        """The mean over its tasks, if it was measured; where the paper's draft temperature is the best, one is both."""
        name = self.about.name
        found = self.evaluation.results.averages
        measured = {a.choice: a for a in found if (a.drafter, a.rule) == (name, rule)}
        paper = measured.get("paper")
        if choice == "best" and paper and self.about.best_draft_temperature.get(rule) == paper.draft_temperature:
            return measured.get("best", paper)
        return measured.get(choice)

    @property
    def dynamics(self) -> Dynamics | None:
        """Its checkpoints, if they were measured."""
        found = self.evaluation.results.dynamics
        return next((d for d in found if d.drafter == self.about.name and d.points), None)


@dataclass(frozen=True)
class TracedText:
    """A prompt and what every drafter did with it."""

    target: str
    task: str
    id: str
    prompt: str
    traces: list[tuple[Entry, Trace]]


@dataclass(frozen=True)
class Comparison:
    """All evaluations of a report."""

    evaluations: tuple[LoadedEvaluation, ...]

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every drafter, by target, kind and label, in the order of the paper's tables."""
        titles = self._target_titles()
        found = [(e, d, titles[e.results.target_fingerprint, e.results.target]) for e, d in self._drafters()]
        labels = _labels(found)
        entries = [Entry(e, d, target, label) for (e, d, target), label in zip(found, labels, strict=True)]
        order = list(dict.fromkeys(titles.values()))
        return tuple(sorted(entries, key=lambda e: (order.index(e.target), list(KINDS).index(e.about.kind), rank(e))))

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Titles of the targets, in the order they were given."""
        return tuple(dict.fromkeys(self._target_titles().values()))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """DFlash, DSpark: those present."""
        present = {e.kind for e in self.entries}
        return tuple(kind for kind in KINDS.values() if kind in present)

    def of(self, target: str, kind: str | None = None) -> list[Entry]:
        """The drafters of a target."""
        return [e for e in self.entries if e.target == target and kind in (None, e.kind)]

    def labels(self, target: str | None = None) -> list[str]:
        """Rows of a table: the drafters' labels, each once."""
        entries = sorted((e for e in self.entries if target in (None, e.target)), key=rank)
        return list(dict.fromkeys(e.label for e in entries))

    def find(self, target: str, kind: str, label: str) -> Entry | None:
        """The drafter at one place of a table."""
        return next((e for e in self.of(target, kind) if e.label == label), None)

    def tasks(self, target: str) -> list[TaskAbout]:
        """The tasks of a target: Math, Code, Chat, then other groups."""
        found = {t.name: t for e in self.of(target) for t in e.evaluation.results.tasks}
        groups = list(dict.fromkeys([*GROUPS, *(t.group for t in found.values())]))
        return sorted(found.values(), key=lambda t: groups.index(t.group))

    def file_name(self, target: str) -> str:
        """A target's title as part of a file's name, unique in the report."""
        name = slug(target)
        same = [other for other in self.targets if slug(other) == name]
        return name if len(same) == 1 else f"{name}-{same.index(target) + 1}"

    def setting(self, rule: Rule) -> str:
        """T=0, or T=1 and the rule: how a table heads what it shows."""
        if rule == "greedy":
            return "T=0 (greedy)"
        asked = {e.results.settings.get("temperature") for e in self.evaluations}
        temperature = asked.pop() if len(asked) == 1 else None
        sampled = f"T={temperature:g}" if isinstance(temperature, int | float) else "Sampled"
        return f"{sampled} ({rule} verification)"

    @cached_property
    def differences(self) -> list[str]:
        """What a reader must know before comparing rows of different evaluations of one target."""
        notes = []
        for target in self.targets:
            involved = {e.evaluation.name: e.evaluation for e in self.of(target)}.values()
            for what, of in _COMPARABLE.items():
                if len({repr(of(e)) for e in involved}) > 1:
                    listed = "; ".join(f"{e.name}: {of(e)}" for e in involved)
                    notes.append(f"Evaluations of {target} differ in {what} ({listed}).")
        return notes

    @cached_property
    def texts(self) -> list[TracedText]:
        """Traced prompts, each once, with the drafters of all evaluations that traced it."""
        found: dict[tuple[str, ...], TracedText] = {}
        for evaluation in self.evaluations:
            entries = {e.about.name: e for e in self.entries if e.evaluation is evaluation}
            for traced in evaluation.traces.prompts if evaluation.traces else []:
                for trace in traced.traces:
                    if trace.drafter in entries:
                        entry = entries[trace.drafter]
                        key = (entry.target, traced.task, traced.id, traced.prompt)
                        found.setdefault(key, TracedText(*key, [])).traces.append((entry, trace))
        return list(found.values())

    def _drafters(self) -> Iterable[tuple[LoadedEvaluation, DrafterAbout]]:
        return ((e, d) for e in self.evaluations for d in e.results.drafters)

    def _target_titles(self) -> dict[tuple[str, str], str]:
        """By fingerprint and name: the name, and more where two targets would share it."""
        keys = list(dict.fromkeys((e.results.target_fingerprint, e.results.target) for e in self.evaluations))
        short = [Path(name).name if "/" in name else name for _, name in keys]
        full = [name if short.count(s) > 1 else s for s, (_, name) in zip(short, keys, strict=True)]
        titles = [
            f"{title} {mark[:8]}" if full.count(title) > 1 else title
            for title, (mark, _) in zip(full, keys, strict=True)
        ]
        return dict(zip(keys, titles, strict=True))


def read_evaluations(folders: Sequence[str | Path]) -> Comparison:
    """The evaluations in these folders; an `EvaluationError` says which of them cannot be read, and why."""
    paths = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not paths:
        raise EvaluationError("a report needs at least one evaluation's folder")
    loaded = [
        LoadedEvaluation(n, p, read_results(p), read_traces(p)) for n, p in zip(_names(paths), paths, strict=True)
    ]
    comparison = Comparison(tuple(loaded))
    if not comparison.entries:
        raise EvaluationError(f"{', '.join(map(str, paths))}: no drafter was evaluated")
    return comparison


def rank(entry: Entry) -> tuple[int, str]:
    """The paper's order of objectives; then by label."""
    label = entry.about.label
    return (LABELS.index(label) if label in LABELS else len(LABELS), entry.label)


def slug(text: str, joint: str = "-") -> str:
    """Lower case letters and digits, the rest joined: for names of files and of CSV columns."""
    return re.sub(r"[^a-z0-9]+", joint, text.lower().replace("w/o", "without")).strip(joint) or "unnamed"


def _labels(found: list[tuple[LoadedEvaluation, DrafterAbout, str]]) -> list[str]:
    """The drafters' labels; where a kind of a target has one twice, with folder or name added until it has not."""
    labels = [about.label for _, about, _ in found]
    more: tuple[Callable[[LoadedEvaluation, DrafterAbout], str], ...] = (
        lambda evaluation, about: f"{about.label} ({evaluation.name})",
        lambda _, about: f"{about.label} ({about.name})",
        lambda evaluation, about: f"{about.label} ({evaluation.name}/{about.name})",
    )
    for extend in more:
        places = Counter((target, a.kind, label) for (_, a, target), label in zip(found, labels, strict=True))
        twice = {(target, label) for (target, _, label), count in places.items() if count > 1}
        labels = [
            extend(e, a) if (target, label) in twice else label
            for (e, a, target), label in zip(found, labels, strict=True)
        ]
    return labels


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that differ."""
    parts = [path.resolve().parts for path in paths]
    length = 1
    while len({p[-length:] for p in parts}) < len(parts):
        length += 1
    return ["/".join(p[-length:]) for p in parts]


def _settings(key: str) -> Callable[[LoadedEvaluation], object]:
    return lambda evaluation: evaluation.results.settings.get(key)


_COMPARABLE: dict[str, Callable[[LoadedEvaluation], object]] = {
    "tasks": lambda e: {t.name: t.num_prompts for t in e.results.tasks},
    "temperature": _settings("temperature"),
    "budget": _settings("max_new_tokens"),
    "seed": _settings("seed"),
}
