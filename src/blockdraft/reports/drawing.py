"""What the figures share: how they look, how they are saved, panels, lines and legends."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from blockdraft.reports.inks import INKS, Style, with_variables
from blockdraft.reports.merging import Entry

Look = Callable[[Entry], Style]

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
    "lines.markersize": 4.5,
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
class Drawing:
    """A figure with the name of its files."""

    name: str
    title: str
    caption: str
    figure: Figure

    def png(self) -> bytes:
        """On white, 200 dots per inch, titled."""
        return self._saved("png", title=self.title, facecolor="white", dpi=200, metadata={"Software": None})

    def svg(self) -> str:
        """On white, titled; the same bytes every time."""
        return self._saved("svg", title=self.title, facecolor="white", metadata=_NO_METADATA).decode()

    def inline(self) -> str:
        """For a page: no ground, colours from the page's variables, ids that no other drawing has, nothing external."""
        svg = self._saved("svg", metadata=_NO_METADATA).decode()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        svg = re.sub(r"font(-family)?: ([\d.a-z ]*)'DejaVu Sans'[^;\"]*", r"font\1: \2var(--sans)", svg)
        return with_variables(svg)

    def _saved(self, form: str, title: str = "", **options: Any) -> bytes:
        file = io.BytesIO()
        with drawing():
            self.figure.suptitle(title, x=0.005, ha="left", fontsize=11.5, fontweight="bold")
            self.figure.savefig(file, format=form, **options)
        return file.getvalue()


_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@contextmanager
def drawing() -> Iterator[None]:
    """Within it, matplotlib draws as these figures do."""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        yield


def kinds(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The drafters by kind."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.kind, []).append(entry)
    return found


def panels(
    entries: Sequence[Entry], num_columns: int, height: float, *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A row of panels for each kind of drafter."""
    num_rows = len(kinds(entries))
    figure = Figure(figsize=(0.6 + 3.4 * max(2, num_columns), height * num_rows + 0.35), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=sharex, sharey=sharey)
    return figure, [list(row) for row in grid]


def line(panel: Axes, x: Sequence[float], y: Sequence[float], style: Style) -> None:
    """A drafter's points, joined."""
    panel.plot(x, y, style.dash, color=style.colour, marker=style.marker)


def legend(figure: Figure, entries: Sequence[Entry], look: Look, *, lines: bool = True) -> None:
    """Labels once, under the panels; kinds have panels of their own."""
    handles: dict[str, Line2D] = {}
    for entry in entries:
        style = look(entry)
        handle = Line2D([], [], color=style.colour, marker=style.marker, label=entry.label)
        handle.set_linestyle(style.dash if lines else "none")
        handles.setdefault(entry.label, handle)
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=min(7, len(handles)))
