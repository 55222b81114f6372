"""Say what was shown in a few sentences: predicted lengths, measured ones, then speed, each with its interval.

A gain is printed only where its interval leaves no doubt about its sign: the interval of the paired ratio if the
evaluation has one, otherwise the two separate intervals, which must not overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.evaluation.results import Average, Interval, Quantity
from blockdraft.reports.comparison import Comparison, Entry
from blockdraft.verification import RULES, Rule

BUDGET = ("data", "batch", "optimizer")
"""Sections of a recipe that must agree for a comparison of objectives to be one of objectives alone."""


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


TOO_FEW = "too few prompts for an interval"


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
    findings: predicted length, measured length, speed-up. note: what a reader must know beside.
    """

    target: str
    kind: str
    setting: str
    new: str
    old: str | None
    findings: tuple[Contrast, Contrast, Contrast]
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
        shown = [found.new.shown(found.unit) for found in self.findings]
        said = [
            f"Predicted from the target's own texts, {self.new} yields {shown[0]} tokens per verification call",
            f"Measured in decoding, {self.new} yields {shown[1]}",
            f"Decoding with {self.new} is {shown[2]} as fast as without a drafter",
        ]
        for number, (joint, found) in enumerate(zip((" and", " and", ", with"), self.findings, strict=True)):
            if found.old is not None:
                said[number] += f"{joint} {self.old} {found.old.shown(found.unit)}: {found.gain}"
        return [*(f"{sentence}." for sentence in said), *([self.note] if self.note else [])]

    def __str__(self) -> str:
        return f"{self.target}, {self.kind}, {self.setting}. {' '.join(self.sentences)}"


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


Averages = Sequence[tuple[Entry, Average]]


def _alike(measured: Averages) -> list[Averages]:
    """Group drafters by training budget and seed, or not at all if that would leave BV without a CE to compare with."""
    groups: list[tuple[Any, list[tuple[Entry, Average]]]] = []
    for each in measured:
        key = _budget(each[0]), (each[0].about.recipe or {}).get("seed")
        same = next((group for other, group in groups if other == key), None)
        if same is None:
            groups.append((key, [each]))
        else:
            same.append(each)

    def comparable(group: Averages) -> bool:
        labels = {entry.about.label for entry, _ in group}
        return "CE" in labels and any(label.startswith("BV") for label in labels)

    split: list[Averages] = [group for _, group in groups]
    return [measured] if comparable(measured) and not any(map(comparable, split)) else split


def _budget(entry: Entry) -> dict[str, Any]:
    return {section: (entry.about.recipe or {}).get(section) for section in BUDGET}


def _headline(comparison: Comparison, rule: Rule, group: Averages) -> Headline:
    new, of_new = _best(group)
    baselines = [m for m in group if m[0].about.label == "CE" and m[0] is not new]
    old, of_old = max(baselines, key=lambda m: m[1].predicted_length.value, default=(None, None))

    def contrast(what: str, quantity: Quantity, unit: str = "") -> Contrast:
        ours: Interval = getattr(of_new, quantity)
        if old is None:
            return Contrast(what, unit, ours, None, None)
        theirs: Interval = getattr(of_old, quantity)
        ratio = new.over(old, rule, "paper", quantity)
        gain = Gain.unpaired(ours, theirs) if ratio is None else Gain.paired(ratio)
        return Contrast(what, unit, ours, theirs, gain)

    findings = (
        contrast("Tokens per call, predicted", "predicted_length"),
        contrast("Tokens per call, measured", "acceptance_length"),
        contrast("Speed-up", "speedup", "×"),
    )
    differ = [section for section in BUDGET if old and _budget(new)[section] != _budget(old)[section]]
    note = f"They were trained differently ({', '.join(differ)}), so the loss is not all that differs."
    return Headline(
        new.target,
        new.kind,
        comparison.setting(rule),
        new.label,
        old.label if old else None,
        findings,
        note if differ else None,
    )


def _best(group: Averages) -> tuple[Entry, Average]:
    """Take BV if there is one, else a variant of BV, else any; of several the one with the largest predicted length."""
    exact = [m for m in group if m[0].about.label == "BV"]
    variants = [m for m in group if m[0].about.label.startswith("BV")]
    return max(exact or variants or group, key=lambda m: m[1].predicted_length.value)
