"""Decide how figures look: an ink and a marker for each objective, and drawings saved for paper and page.

Inks differ in lightness as well as in hue, and come with a marker each, so that nothing depends on seeing colours.
Figures are drawn with the light ones; a page turns those into CSS variables and sets the variables by colour scheme.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, get_args

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from blockdraft.reports.comparison import LABELS, Comparison, Entry

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
    "other-4": ("#b3406b", "#f09ab8"),
    "other-5": ("#6b8f1a", "#b5d65f"),
    "other-6": ("#27408b", "#8aa6f0"),
    "prefill": ("#a9b9c6", "#5d7083"),
    "draft": ("#e0a82e", "#d9a53a"),
    "verify": ("#33597d", "#7fa9d1"),
    "rest": ("#d3d9de", "#3d4854"),
}
"""Colours by name, on light and on dark ground. No two light ones are equal."""

OBJECTIVE_INKS = dict(zip(LABELS, ("ce", "kl", "rkl", "tv", "lk", "bv-plain", "bv"), strict=True))
MARKERS = {"ce": "o", "kl": "s", "rkl": "^", "tv": "v", "lk": "P", "bv-plain": "X", "bv": "D"}
OTHERS = {"other-1": "<", "other-2": ">", "other-3": "p", "other-4": "h", "other-5": "d", "other-6": "*"}
Dash = Literal["-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = get_args(Dash)

RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": INKS["axis"][0],
    "axes.grid": True,
    "axes.labelcolor": INKS["text"][0],
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INKS["text"][0],
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.1,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": INKS["grid"][0],
    "grid.linewidth": 0.8,
    "legend.columnspacing": 1.4,
    "legend.edgecolor": "none",
    "legend.facecolor": "none",
    "legend.fontsize": 9,
    "legend.labelcolor": INKS["text"][0],
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "blockdraft",
    "text.color": INKS["text"][0],
    "text.parse_math": False,
    "xtick.color": INKS["axis"][0],
    "xtick.labelcolor": INKS["text"][0],
    "xtick.labelsize": 8.5,
    "ytick.color": INKS["axis"][0],
    "ytick.labelcolor": INKS["text"][0],
    "ytick.labelsize": 8.5,
}


@dataclass(frozen=True)
class Style:
    """Says how a drafter is drawn: the ink's name, a marker, a line."""

    ink: str
    marker: str
    dash: Dash

    @property
    def colour(self) -> str:
        """Give the ink on light ground."""
        return INKS[self.ink][0]


Look = Callable[[Entry], Style]


def styles(comparison: Comparison) -> Look:
    """Give every objective its ink and marker; a dash tells drafters of one objective, kind and target apart.

    A variant, such as ``BV (beta to 0.5)``, is drawn as its objective if that is not there itself. Objectives that are
    not the paper's have inks of their own, and once these are used up those of the paper's that are not there.
    """
    labels = list(dict.fromkeys(entry.about.label for entry in comparison.entries))
    inks = {label: OBJECTIVE_INKS[label] for label in labels if label in OBJECTIVE_INKS}
    for label in labels:
        ink = OBJECTIVE_INKS.get(label.partition(" (")[0])
        if label not in inks and ink is not None and ink not in inks.values():
            inks[label] = ink
    others = cycle([*OTHERS, *(ink for ink in MARKERS if ink not in inks.values())])
    for label in labels:
        if label not in inks:
            inks[label] = next(others)

    def style(entry: Entry) -> Style:
        ink = inks[entry.about.label]
        same = [e.label for e in comparison.of(entry.target, entry.kind) if inks[e.about.label] == ink]
        return Style(ink, (MARKERS | OTHERS)[ink], DASHES[same.index(entry.label) % len(DASHES)])

    return style


def css() -> str:
    """Write the inks as CSS variables, for both colour schemes."""
    light, dark = ("".join(f"--ink-{name}:{pair[i]};" for name, pair in INKS.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


@dataclass(frozen=True)
class Drawing:
    """Holds a figure with the name of its files, its title and its caption."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def points(self) -> int:
        """Give its width in points."""
        return round(72 * self.figure.get_figwidth())

    def png(self) -> bytes:
        """Save it on white with its title, at 200 dots per inch."""
        return self._saved("png", title=self.title, facecolor="white", dpi=200, metadata={"Software": None})

    def svg(self) -> str:
        """Save it on white with its title, as the same bytes every time."""
        return self._saved("svg", title=self.title, facecolor="white", metadata=_NO_METADATA).decode()

    def inline(self) -> str:
        """Save it for a page: no ground, the page's colours, ids that no other drawing has, nothing external."""
        svg = self._saved("svg", metadata=_NO_METADATA).decode()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        svg = re.sub(r"font(-family)?: ([\d.a-z ]*)'DejaVu Sans'[^;\"]*", r"font\1: \2var(--sans)", svg)
        variables = {light: f"var(--ink-{name})" for name, (light, _) in INKS.items()}
        return re.sub("|".join(variables), lambda found: variables[found.group()], svg)

    def _saved(self, form: str, title: str = "", **options: Any) -> bytes:
        file = io.BytesIO()
        with drawing():
            self.figure.suptitle(title, x=0.005, ha="left", fontsize=11.5, fontweight="bold")
            self.figure.savefig(file, format=form, **options)
        return file.getvalue()


_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@contextmanager
def drawing() -> Iterator[None]:
    """Let matplotlib draw as these figures do, for as long as the context lasts."""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        yield


def kinds(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Sort drafters by kind."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.kind, []).append(entry)
    return found


def panels(
    entries: Sequence[Entry], num_columns: int, height: float, *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """Make a row of panels for each kind of drafter."""
    num_rows = len(kinds(entries))
    figure = Figure(figsize=(0.6 + 3.4 * max(2, num_columns), height * num_rows + 0.35), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=sharex, sharey=sharey)
    return figure, [list(row) for row in grid]


BANDS = " Bands are one standard deviation over seeds to either side."
"""What captions say of `plot_line` with deviations."""


def plot_line(
    panel: Axes, x: Sequence[float], y: Sequence[float], style: Style, deviations: Sequence[float | None] = ()
) -> None:
    """Draw a drafter's points, joined; many points are smaller ones. Deviations are a band, if every point has one."""
    size = 4.5 if len(x) <= 10 else 3.2
    panel.plot(x, y, style.dash, color=style.colour, marker=style.marker, markersize=size)
    spreads = [each for each in deviations if each is not None]
    if spreads and len(spreads) == len(x):
        low, high = ([value + sign * each for value, each in zip(y, spreads, strict=True)] for sign in (-1, 1))
        panel.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)


def legend(figure: Figure, entries: Sequence[Entry], look: Look, *, lines: bool = True) -> None:
    """Name each label once, under the panels, in the order of the tables; kinds have panels of their own."""
    handles: dict[str, Line2D] = {}
    for entry in sorted(entries, key=lambda e: e.rank):
        style = look(entry)
        handle = Line2D([], [], color=style.colour, marker=style.marker, label=entry.label)
        handle.set_linestyle(style.dash if lines else "none")
        handles.setdefault(entry.label, handle)
    fitting = max(1, int(figure.get_figwidth() / (0.6 + 0.08 * max(map(len, handles)))))  # inches, about 0.08 a letter
    num_rows = -(-len(handles) // min(7, fitting))
    num_columns = -(-len(handles) // num_rows)
    figure.set_figheight(figure.get_figheight() + 0.2 * (num_rows - 1))  # a long legend takes nothing from the panels
    by_column = [handle for column in range(num_columns) for handle in list(handles.values())[column::num_columns]]
    figure.legend(handles=by_column, loc="outside lower center", ncols=num_columns)
