"""Join several evaluations: targets and drafters, each with a name of its own, and what was measured of them.

A gain of one drafter over another is a number only where its interval leaves no doubt about its sign: the interval of
the paired ratio if the evaluation has one, otherwise the two separate intervals, which must not overlap.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blockdraft.evaluation.metrics import PHASES
from blockdraft.evaluation.results import (
    Average,
    Cell,
    CheckpointName,
    DrafterAbout,
    Dynamics,
    EvaluationError,
    Interval,
    Quantity,
    Results,
    TaskAbout,
    TemperatureChoice,
    Traces,
    read_results,
    read_traces,
)
from blockdraft.verification import RULES, Rule

KINDS = {"dflash": "DFlash", "dspark": "DSpark"}
GROUPS = {"math": "Math", "code": "Code", "chat": "Chat"}
LABELS = ("CE", "KL", "RKL", "TV", "LK", "BV w/o annealing", "BV")
"""The objectives of the paper's tables, in their order. "BV" is the paper's form with the paper's schedule only."""

CHECKPOINTS: dict[CheckpointName | None, str] = {
    "last": "the final ones",
    "best": "the best ones by held-out length",
    None: "those in the folders given, not recorded as final or best",
}
CUT_SHORT: dict[CheckpointName | None, str] = {
    "last": "the last ones of unfinished runs",
    "best": "the best ones by held-out length of unfinished runs",
    None: "those in the folders given, from before the end of their runs",
}
TOO_FEW = "too few prompts for an interval"


@dataclass(frozen=True)
class LoadedEvaluation:
    """Holds one evaluation's folder, read. ``name`` tells it from the other folders of the report."""

    name: str
    folder: Path
    results: Results
    traces: Traces | None

    @property
    def num_seeds(self) -> int:
        """Give the number of seeds whose means it holds; 0 if it holds what was measured itself."""
        return len(self.results.settings.get("seeds", ()))

    @property
    def is_decoded(self) -> bool:
        """Tell whether any prompt was decoded, or lengths were only predicted."""
        return any(task.decoded_prompts for task in self.results.tasks)


@dataclass(frozen=True)
class Retention:
    """Says how far drafts were kept, over some rounds.

    kept: Pr(accepted >= i) for i = 1 .. B. Their sum is the mean number of drafted tokens kept.
    """

    num_rounds: int
    kept: tuple[float, ...]

    @classmethod
    def pooled(cls, cells: Sequence[Cell]) -> "Retention":
        """Weigh every round the same, whichever task it belongs to."""
        num_rounds = sum(cell.num_rounds for cell in cells)
        longest = max((len(cell.retention) for cell in cells), default=0)
        kept = (sum(c.num_rounds * c.retention[i] for c in cells if i < len(c.retention)) for i in range(longest))
        return cls(num_rounds, tuple(k / num_rounds if num_rounds else 0.0 for k in kept))

    def conditional(self, min_rounds: int = 1) -> list[float | None]:
        """Return Pr(accepted >= i | accepted >= i - 1); None where fewer than ``min_rounds`` rounds kept i - 1."""
        before = (1.0, *self.kept)[: len(self.kept)]
        seen = [round(self.num_rounds * share) for share in before]
        return [k / b if n >= min_rounds else None for k, b, n in zip(self.kept, before, seen, strict=True)]


@dataclass(frozen=True)
class Spent:
    """Says how long some generations took, by phase, and how many tokens they made."""

    seconds: Mapping[str, float]
    tokens: float

    @classmethod
    def pooled(cls, parts: Iterable[Mapping[str, float]], tokens: float) -> "Spent":
        """Sum the phases of all parts."""
        total: Counter[str] = Counter()
        for part in parts:
            total.update(part)
        return cls(dict(total), tokens)

    @property
    def total(self) -> float:
        """Give the seconds of all phases together."""
        return sum(self.seconds.values())

    @property
    def phases(self) -> list[str]:
        """Give the phases that were timed, in the order of a round."""
        return [*(p for p in PHASES if p in self.seconds), *sorted(set(self.seconds).difference(PHASES))]


@dataclass(frozen=True)
class Gain:
    """Says by how much one drafter is ahead of another one.

    ratio: of the two means; 1 is no difference. settled: whether there is no doubt which drafter is ahead.
    basis: what that rests on, in words. span: the 95% interval of the gain, if it is known.
    """

    ratio: float
    settled: bool
    basis: str
    span: str | None = None

    @classmethod
    def paired(cls, ratio: Interval) -> "Gain":
        """Take the ratio of two means over the same resampled prompts."""
        if ratio.bounds is None:
            return cls(ratio.value, False, TOO_FEW)
        span = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        return cls(ratio.value, ratio.low > 1 or ratio.high < 1, f"95% interval {span}", span)

    @classmethod
    def unpaired(cls, new: Interval, old: Interval) -> "Gain":
        """Compare two means of which only their own intervals are known."""
        ratio = new.value / old.value if old.value else float("nan")
        if new.bounds is None or old.bounds is None:
            return cls(ratio, False, TOO_FEW)
        apart = new.low > old.high or new.high < old.low
        return cls(ratio, apart, f"their 95% intervals {'do not ' if apart else ''}overlap")

    @property
    def figure(self) -> str | None:
        """Give the gain in percent, or None if it is not settled."""
        return f"{self.ratio - 1:+.1%}" if self.settled else None

    def __str__(self) -> str:
        return f"{self.figure or 'undecided'} ({self.basis})"


@dataclass(frozen=True)
class Entry:
    """Holds a drafter with everything that was measured of it.

    target: its target's title. label: its row in a table, unique among the drafters of its kind and target.
    """

    evaluation: LoadedEvaluation
    about: DrafterAbout
    target: str
    label: str

    @property
    def kind(self) -> str:
        """Name the kind: DFlash or DSpark."""
        return KINDS[self.about.kind]

    @property
    def title(self) -> str:
        """Give kind and label together, unique among all drafters of its target."""
        return f"{self.kind} {self.label}"

    @property
    def is_bv(self) -> bool:
        """Tell whether BV, in whatever form, was the last objective it was trained with."""
        return self.about.objective == "bv"

    @property
    def rank(self) -> tuple[int, str]:
        """Sort by the paper's order of objectives, with other ones before BV and drafters of unknown origin last."""
        label = self.about.label
        if label in LABELS:
            place = LABELS.index(label) + (10 if label.startswith("BV") else 0)
        else:
            place = 20 if self.about.objective is None else 9 if self.is_bv else 8
        return place, self.label

    def cells(self, rule: Rule, choice: TemperatureChoice) -> list[Cell]:
        """Return what was measured of it in decoding under one rule, a cell for each task."""
        name = self.about.name
        found = self.evaluation.results.cells
        return [c for c in found if (c.drafter, c.rule, c.choice) == (name, rule, choice) and c.num_generations]

    def cell(self, rule: Rule, choice: TemperatureChoice, task: str) -> Cell | None:
        """Return what was measured of it on one task, if there is anything."""
        return next((c for c in self.cells(rule, choice) if c.task == task), None)

    def average(self, rule: Rule, choice: TemperatureChoice) -> Average | None:
        """Return the mean over its tasks, if measured; where the paper's draft temperature is the best, one is both."""
        name = self.about.name
        found = self.evaluation.results.averages
        measured = {a.choice: a for a in found if (a.drafter, a.rule) == (name, rule)}
        paper = measured.get("paper")
        if choice == "best" and paper and self.about.best_draft_temperature.get(rule) == paper.draft_temperature:
            return measured.get("best", paper)
        return measured.get(choice)

    def retention(self, rule: Rule, task: str | None = None) -> Retention:
        """Return how far its drafts were kept at the paper's draft temperature, on one task or on all pooled."""
        return Retention.pooled([c for c in self.cells(rule, "paper") if task in (None, c.task)])

    def spent(self, rule: Rule) -> Spent:
        """Return the time its generations took on all tasks, at the paper's draft temperature."""
        cells = self.cells(rule, "paper")
        return Spent.pooled((c.seconds for c in cells), sum(c.num_tokens for c in cells))

    def baseline_spent(self, rule: Rule) -> Spent:
        """Return the time of decoding without a drafter on the same tasks; its tokens follow from its speed."""
        cells = self.cells(rule, "paper")
        tokens = sum((c.baseline_tokens_per_second or 0.0) * sum(c.baseline_seconds.values()) for c in cells)
        return Spent.pooled((c.baseline_seconds for c in cells), tokens)

    def over(
        self, other: "Entry", rule: Rule, choice: TemperatureChoice, what: Quantity, task: str | None = None
    ) -> Interval | None:
        """Return this drafter's mean over that of another one, if the two were compared prompt by prompt.

        task: compares on this one alone.
        """
        if other.evaluation is not self.evaluation:
            return None
        return self.evaluation.results.ratio(self.about.name, other.about.name, rule, choice, what, task)

    @property
    def dynamics(self) -> Dynamics | None:
        """Give its checkpoints over training, if they were measured."""
        found = self.evaluation.results.dynamics
        return next((d for d in found if d.drafter == self.about.name and d.points), None)


@dataclass(frozen=True)
class Comparison:
    """Holds all evaluations of a report, with their drafters named and ordered."""

    evaluations: tuple[LoadedEvaluation, ...]

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Give every drafter, by target, kind and label, in the order of the paper's tables."""
        titles = self._target_titles()
        drafters = [(e, d) for e in self.evaluations for d in e.results.drafters]
        found = [(e, d, titles[e.results.target_fingerprint, e.results.target]) for e, d in drafters]
        labels = _labels(found)
        entries = [Entry(e, d, target, label) for (e, d, target), label in zip(found, labels, strict=True)]
        order = list(dict.fromkeys(titles.values()))
        return tuple(sorted(entries, key=lambda e: (order.index(e.target), list(KINDS).index(e.about.kind), e.rank)))

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Give the titles of the targets, in the order they were given."""
        return tuple(dict.fromkeys(self._target_titles().values()))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Give the kinds of drafter that are present: DFlash, DSpark."""
        present = {e.kind for e in self.entries}
        return tuple(kind for kind in KINDS.values() if kind in present)

    def of(self, target: str, kind: str | None = None) -> list[Entry]:
        """Return the drafters of a target, of one kind or of all."""
        return [e for e in self.entries if e.target == target and kind in (None, e.kind)]

    def labels(self, target: str | None = None) -> list[str]:
        """Return the rows of a table: the drafters' labels, each once."""
        entries = sorted((e for e in self.entries if target in (None, e.target)), key=lambda e: e.rank)
        return list(dict.fromkeys(e.label for e in entries))

    def find(self, target: str, kind: str, label: str) -> Entry | None:
        """Return the drafter at one place of a table, if there is one."""
        return next((e for e in self.of(target, kind) if e.label == label), None)

    def baselines(self, entry: Entry) -> list[Entry]:
        """Return the drafters that a drafter was compared with prompt by prompt, as its evaluation lists them."""
        listed = {c.baseline for c in entry.evaluation.results.comparisons if c.drafter == entry.about.name}
        same = (e for e in self.of(entry.target) if e.evaluation is entry.evaluation)
        return [e for e in same if e.about.name in listed]

    def tasks(self, target: str) -> list[TaskAbout]:
        """Return the tasks of a target: Math, Code, Chat, then other groups."""
        found = {t.name: t for e in self.of(target) for t in e.evaluation.results.tasks}
        groups = list(dict.fromkeys([*GROUPS, *(t.group for t in found.values())]))
        return sorted(found.values(), key=lambda t: groups.index(t.group))

    def file_name(self, target: str) -> str:
        """Return a target's title as part of a file's name, unique in the report."""
        name = slug(target)
        same = [other for other in self.targets if slug(other) == name]
        return name if len(same) == 1 else f"{name}-{same.index(target) + 1}"

    def setting(self, rule: Rule, choice: TemperatureChoice = "paper") -> str:
        """Head what a table shows: the temperature, the rule, and the draft temperature if it is not the paper's."""
        if rule == "greedy":
            return "T=0 (greedy)"
        asked = {e.results.settings.get("temperature") for e in self.evaluations}
        temperature = asked.pop() if len(asked) == 1 else None
        sampled = f"T={temperature:g}" if isinstance(temperature, int | float) else "Sampled"
        more = {"paper": "", "best": ", best draft T", "one-hot": ", argmax drafts"}[choice]
        return f"{sampled} ({rule} verification){more}"

    @cached_property
    def over_seeds(self) -> str:
        """Say whose numbers are means over how many seeds: a sentence for captions, empty if there are none."""
        found: dict[int, list[str]] = {}
        for evaluation in self.evaluations:
            if evaluation.num_seeds:
                found.setdefault(evaluation.num_seeds, []).append(evaluation.name)
        of_all = len(found) == 1 and sum(map(len, found.values())) == len(self.evaluations)
        means = [f"{num} seeds" if of_all else f"{num} seeds ({', '.join(names)})" for num, names in found.items()]
        return f"Means over {' and '.join(means)}; rounds, tokens and seconds are sums over them." if means else ""

    @property
    def each_seed(self) -> str:
        """Say in captions what numbers of prompts and texts are for, if there are means over seeds."""
        return " for each seed" if self.over_seeds else ""

    def caption(self, text: str) -> str:
        """Return a caption of measured numbers, which says last whether they are means over seeds."""
        return " ".join(filter(None, (text, self.over_seeds)))

    @cached_property
    def interval_basis(self) -> str:
        """Say what the intervals are over: the prompts of an evaluation, or the seeds whose means it holds."""
        numbers = sorted({e.num_seeds for e in self.evaluations})
        return " or ".join(f"Student's t over {num} seeds" if num else "bootstrap over prompts" for num in numbers)

    def evaluated(self, entries: Sequence[Entry] | None = None) -> str:
        """Say which checkpoints of their runs drafters are, these or all: a sentence for captions."""
        entries = self.entries if entries is None else entries
        found: dict[str, list[str]] = {}
        for entry in entries:
            target = "" if all(e.target == entry.target for e in entries) else f"{entry.target} "
            found.setdefault(_checkpoint(entry.about), []).append(f"{target}{entry.title}")
        named = [f"{which} ({', '.join(names)})" if len(found) > 1 else which for which, names in found.items()]
        return f"Evaluated checkpoints: {'; '.join(named)}."

    def edges(self, entries: Sequence[Entry] | None = None) -> str:
        """Say where the best draft temperature of drafters, these or all, is the lowest or highest that was tried.

        This is a sentence for captions, behind a space; nothing if there is none.
        """
        entries = self.entries if entries is None else entries
        found: dict[str, list[str]] = {}
        for entry in entries:
            target = "" if all(e.target == entry.target for e in entries) else f"{entry.target} "
            for edge in ("lowest", "highest"):
                rules = [rule for rule in RULES if entry.about.edge_of_grid(rule) == edge]
                if rules:
                    found.setdefault(edge, []).append(f"{target}{entry.title} ({' and '.join(rules)} verification)")
        listed = "; ".join(f"the {edge} that was tried for {', '.join(names)}" for edge, names in found.items())
        return f" The best draft temperature is {listed}, so one beyond may be better." if listed else ""

    def autoregressive(self, target: str, rule: Rule) -> dict[str, Spent]:
        """Return the time of decoding without a drafter, for every evaluation of a target, by a name for its row.

        There are several of an evaluation if its drafters were not all decoded with the same speed settings.
        """
        entries = [e for e in reversed(self.of(target)) if e.cells(rule, "paper")]
        first = {(e.evaluation.name, tuple(e.about.speed_settings)): e for e in entries}
        times = Counter(name for name, _ in first)
        found = {}
        for (name, _), entry in reversed(first.items()):
            notes = [name] if len(times) > 1 else []
            notes += [f"beside {entry.title}"] if times[name] > 1 else []
            found["Autoregressive" + (f" ({', '.join(notes)})" if notes else "")] = entry.baseline_spent(rule)
        return found

    def _target_titles(self) -> dict[tuple[str, str], str]:
        """Title targets by fingerprint and name: the name, and more where two targets would share it."""
        keys = list(dict.fromkeys((e.results.target_fingerprint, e.results.target) for e in self.evaluations))
        short = [Path(name).name if "/" in name else name for _, name in keys]
        full = [name if short.count(s) > 1 else s for s, (_, name) in zip(short, keys, strict=True)]
        titles = [
            f"{title} {mark[:8]}" if full.count(title) > 1 else title
            for title, (mark, _) in zip(full, keys, strict=True)
        ]
        return dict(zip(keys, titles, strict=True))


def read_evaluations(folders: Sequence[str | Path]) -> Comparison:
    """Read the evaluations in these folders; an `EvaluationError` says which of them cannot be read, and why."""
    paths = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not paths:
        raise EvaluationError("a report needs the folder of at least one evaluation")
    named = zip(_names(paths), paths, strict=True)
    comparison = Comparison(tuple(LoadedEvaluation(n, p, read_results(p), read_traces(p)) for n, p in named))
    if not comparison.entries:
        raise EvaluationError(f"{', '.join(map(str, paths))}: no drafter was evaluated")
    return comparison


def ce_and_bv(entries: Sequence[Entry]) -> tuple[Entry, Entry] | None:
    """Return a drafter trained with CE and one with BV: the paper's BV if there is one, and of one evaluation."""
    pairs = [(ce, bv) for ce in entries if ce.about.label == "CE" for bv in entries if bv.is_bv]
    return min(pairs, key=lambda p: (p[1].about.label != "BV", p[0].evaluation is not p[1].evaluation), default=None)


def slug(text: str, joint: str = "-") -> str:
    """Keep lower case letters and digits and join the rest: for names of files and of CSV columns."""
    return re.sub(r"[^a-z0-9]+", joint, text.lower().replace("w/o", "without")).strip(joint) or "unnamed"


def _labels(found: list[tuple[LoadedEvaluation, DrafterAbout, str]]) -> list[str]:
    """Label the drafters; where a kind of a target has a label twice, add folder or name until it has not."""
    labels = [about.full_label for _, about, _ in found]
    more: tuple[Callable[[LoadedEvaluation, DrafterAbout], str], ...] = (
        lambda evaluation, about: f"{about.full_label} ({evaluation.name})",
        lambda _, about: f"{about.full_label} ({about.name})",
        lambda evaluation, about: f"{about.full_label} ({evaluation.name}/{about.name})",
    )
    for extend in more:
        places = Counter((target, a.kind, label) for (_, a, target), label in zip(found, labels, strict=True))
        twice = {(target, label) for (target, _, label), count in places.items() if count > 1}
        labels = [
            extend(e, a) if (target, label) in twice else label
            for (e, a, target), label in zip(found, labels, strict=True)
        ]
    return labels


def _checkpoint(about: DrafterAbout) -> str:
    """Say which checkpoint of its run a drafter is."""
    if about.unfinished:
        return f"{CUT_SHORT[about.checkpoint]}, step {about.progress}"
    return CHECKPOINTS[about.checkpoint]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that differ."""
    parts = [path.resolve().parts for path in paths]
    length = 1
    while len({p[-length:] for p in parts}) < len(parts):
        length += 1
    return ["/".join(p[-length:]) for p in parts]
