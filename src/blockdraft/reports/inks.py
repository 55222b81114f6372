"""Colours: one for each objective, the same in every figure, on paper and on a dark screen.

They differ in lightness as well as in hue, and come with a marker each, so that nothing depends on seeing colours.
Figures are drawn with the light ones; a page turns those into CSS variables and sets the variables by colour scheme.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

from blockdraft.reports.merging import LABELS, Comparison, Entry

INKS = {
    "text": ("#1d2733", "#e4e9ef"),
    "axis": ("#8693a0", "#7c8a99"),
    "grid": ("#e3e8ec", "#2b343f"),
    "ce": ("#64748a", "#9fb0c5"),
    "kl": ("#3b78b0", "#6fb1ea"),
    "rkl": ("#1f8550", "#56c98c"),
    "tv": ("#a98600", "#e2bf3c"),
    "lk": ("#12a3b4", "#5ad6e3"),
    "bv-plain": ("#9a3d86", "#dd8ccb"),
    "bv": ("#d4491c", "#ff8552"),
    "other-1": ("#5b4bb5", "#a99bf5"),
    "other-2": ("#7d5a3c", "#cfa684"),
    "other-3": ("#2f5d50", "#8fc9b6"),
    "prefill": ("#a9b9c6", "#5d7083"),
    "draft": ("#e0a82e", "#d9a53a"),
    "verify": ("#33597d", "#7fa9d1"),
    "rest": ("#d3d9de", "#3d4854"),
}
"""By name: on light and on dark ground. No two light ones are equal."""

OBJECTIVES = dict(zip(LABELS, ("ce", "kl", "rkl", "tv", "lk", "bv-plain", "bv"), strict=True))
MARKERS = {"ce": "o", "kl": "s", "rkl": "^", "tv": "v", "lk": "P", "bv-plain": "X", "bv": "D"}
OTHERS = {"other-1": "<", "other-2": ">", "other-3": "p"}
Dash = Literal["-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = get_args(Dash)


@dataclass(frozen=True)
class Style:
    """How a drafter is drawn: the ink's name, a marker, a line."""

    ink: str
    marker: str
    dash: Dash

    @property
    def colour(self) -> str:
        """On light ground."""
        return INKS[self.ink][0]


def styles(comparison: Comparison) -> Callable[[Entry], Style]:
    """Ink and marker tell the objective; the dash tells drafters of one objective, kind and target apart."""
    others = cycle(OTHERS)
    inks: dict[str, str] = {}
    for entry in comparison.entries:
        label = entry.about.label
        if label not in inks:
            inks[label] = OBJECTIVES.get(label) or next(others)

    def style(entry: Entry) -> Style:
        ink = inks[entry.about.label]
        same = [e.label for e in comparison.of(entry.target, entry.kind) if inks[e.about.label] == ink]
        return Style(ink, (MARKERS | OTHERS)[ink], DASHES[same.index(entry.label) % len(DASHES)])

    return style


def css() -> str:
    """The variables, for both colour schemes."""
    light, dark = ("".join(f"--ink-{name}:{pair[i]};" for name, pair in INKS.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def with_variables(svg: str) -> str:
    """A drawing whose colours are the page's."""
    names = {light: f"var(--ink-{name})" for name, (light, _) in INKS.items()}
    return re.sub("|".join(names), lambda found: names[found.group()], svg)
