"""The result in words: what the drafter accepts per call, and how much more that is than with cross-entropy."""

from dataclasses import dataclass

from blockdraft.evaluation.results import Average
from blockdraft.reports.merging import Comparison, Entry
from blockdraft.verification import RULES, Rule


@dataclass(frozen=True)
class Headline:
    """One kind of drafter on one target. gain: over CE, None if there is nothing to compare with."""

    target: str
    kind: str
    setting: str
    entry: Entry
    sentence: str
    gain: float | None


def headlines(comparison: Comparison) -> list[Headline]:
    """For every target and kind: BV against CE if both are there, else the best drafter against CE, else it alone."""
    found = []
    for target in comparison.targets:
        for kind in comparison.kinds:
            entries = comparison.of(target, kind)
            rule = max((r for r in RULES if any(e.average(r, "paper") for e in entries)), key=RULES.index, default=None)
            if rule is not None:
                measured = [(e, a) for e in entries if (a := e.average(rule, "paper")) is not None]
                found.append(_headline(comparison, rule, measured))
    return found


def _headline(comparison: Comparison, rule: Rule, measured: list[tuple[Entry, Average]]) -> Headline:
    exact = [m for m in measured if m[0].about.label == "BV"]
    new, of_new = _best(exact or [m for m in measured if m[0].about.objective == "bv"] or measured)
    baselines = [m for m in measured if m[0].about.label == "CE" and m[0] is not new]
    text = f"{new.label} accepts {of_new.acceptance_length.value:.2f} tokens per verification call"
    gain = None
    if baselines:
        old, of_old = _best(baselines)
        before, after = of_old.acceptance_length, of_new.acceptance_length
        gain = after.value / before.value - 1
        text += f", {old.label} {before.value:.2f}: {gain:+.1%}."
        if after.low <= before.high and before.low <= after.high:
            text += " Their 95% intervals overlap."
        faster, then = of_new.speedup.value, of_old.speedup.value
        text += f" Decoding is {faster:.2f}× as fast as without a drafter, with {old.label} {then:.2f}×."
    else:
        text += f" and decodes {of_new.speedup.value:.2f}× as fast as the target alone."
    return Headline(new.target, new.kind, comparison.setting(rule), new, text, gain)


def _best(measured: list[tuple[Entry, Average]]) -> tuple[Entry, Average]:
    return max(measured, key=lambda m: m[1].acceptance_length.value)
