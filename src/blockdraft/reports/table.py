"""Write tables with grouped headings and rows as Markdown, LaTeX and CSV; ``assets/table.html`` makes HTML of them."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from blockdraft.evaluation.results import Interval

WIDE = 11  # columns from which LaTeX shrinks a table to the width of the text


@dataclass(frozen=True)
class CellValue:
    """Holds a cell of a table.

    text: as shown. number: as computed, for CSV. interval: 95%. ranked: takes part in the search for the best one.
    best: set by that search.
    """

    text: str
    number: float | int | str | None = None
    interval: tuple[float, float] | None = None
    ranked: bool = False
    best: bool = False


MISSING = CellValue("–")


@dataclass(frozen=True)
class Column:
    """Describes a column of values.

    heads: its headings, the outermost first; neighbours that share one stand under it together.
    key: its name in CSV. interval: whether CSV gives ``key_low`` and ``key_high`` too.
    """

    heads: tuple[str, ...]
    key: str
    interval: bool = False


@dataclass(frozen=True)
class TableRow:
    """Holds a row: labels on the left, then one value per column."""

    labels: tuple[str, ...]
    values: tuple[CellValue, ...]


@dataclass(frozen=True)
class Table:
    """Holds a table that knows what it says, and writes it in several forms.

    name: of its files. labels: headings of the label columns. A label like the one above it is not repeated.
    """

    name: str
    title: str
    caption: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    def markdown(self) -> str:
        """Write a GitHub table under its title; headings of several levels become lines of one cell."""
        heads = [_markdown(label) for label in self.labels]
        heads += ["<br>".join(_markdown(head) for head in column.heads if head) for column in self.columns]
        lines = [heads, ["---"] * len(self.labels) + ["---:"] * len(self.columns)]
        for row, new in zip(self.rows, self._new_labels(), strict=True):
            labels = [_markdown(label) if shown else "" for label, shown in zip(row.labels, new, strict=True)]
            lines.append(labels + [f"**{v.text}**" if v.best else _markdown(v.text) for v in row.values])
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{_markdown(self.title)}.** {_markdown(self.caption)}\n\n{body}\n"

    def csv(self) -> str:
        """Write full precision, every label in every row, and nothing where nothing was measured."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        header = [label.lower().replace(" ", "_") for label in self.labels]
        for column in self.columns:
            header += [column.key] + ([f"{column.key}_low", f"{column.key}_high"] if column.interval else [])
        writer.writerow(header)
        for row in self.rows:
            line: list[object] = list(row.labels)
            for column, value in zip(self.columns, row.values, strict=True):
                line += [value.number, *((value.interval or (None, None)) if column.interval else ())]
            writer.writerow("" if item is None else item for item in line)
        return file.getvalue()

    def latex(self) -> str:
        """Write a ``table`` for ``\\input``, in booktabs' style; wide ones are shrunk to the width of the text."""
        num_labels, num_columns = len(self.labels), len(self.labels) + len(self.columns)
        wide = num_columns >= WIDE
        lines = [f"% needs booktabs{' and graphicx' if wide else ''}", r"\begin{table}[t]", r"\centering", r"\small"]
        lines += [f"\\caption{{{_latex(f'{self.title}. {self.caption}')}}}", f"\\label{{tab:{self.name}}}"]
        if wide:
            lines += [r"\setlength{\tabcolsep}{3pt}", r"\resizebox{\textwidth}{!}{%"]
        lines += [f"\\begin{{tabular}}{{@{{}}{'l' * num_labels}{'r' * len(self.columns)}@{{}}}}", r"\toprule"]
        for level in range(self.depth):
            last = level == self.depth - 1
            cells = [_latex(label) if last else "" for label in self.labels]
            rules = []
            place = num_labels + 1
            for head, span in self._heads(level):
                cells.append(f"\\multicolumn{{{span}}}{{c}}{{{_latex(head)}}}" if span > 1 or last else _latex(head))
                if head and not last:
                    rules.append(f"\\cmidrule(lr){{{place}-{place + span - 1}}}")
                place += span
            lines += [" & ".join(cells) + r" \\", *([" ".join(rules)] if rules else [])]
        for row, new in zip(self.rows, self._new_labels(), strict=True):
            if row is self.rows[0] or (new[0] and len(new) > 1):
                lines.append(r"\midrule")
            elif any(new[1:-1]):
                lines.append(f"\\cmidrule(lr){{2-{num_columns}}}")
            labels = [_latex(label) if shown else "" for label, shown in zip(row.labels, new, strict=True)]
            values = [f"\\textbf{{{_latex(v.text)}}}" if v.best else _latex(v.text) for v in row.values]
            lines.append(" & ".join(labels + values) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}" + ("}" if wide else ""), r"\end{table}"]
        return "\n".join(lines) + "\n"

    def head(self) -> list[list[tuple[str, int]]]:
        """Return the headings of the value columns, level by level, each with the number of columns it stands over."""
        return [self._heads(level) for level in range(self.depth)]

    def body(self) -> list[tuple[bool, list[tuple[str, int]], tuple[CellValue, ...]]]:
        """Return the rows: whether a group begins, the labels that are new with the rows each spans, the values."""
        rows = []
        for number, (row, new) in enumerate(zip(self.rows, self._new_labels(), strict=True)):
            labels = [(label, self._label_span(number, i)) for i, label in enumerate(row.labels) if new[i]]
            begins = number > 0 and len(new) > 1 and any(new[:-1])
            rows.append((begins, labels, row.values))
        return rows

    @property
    def depth(self) -> int:
        """Say how many levels of headings there are."""
        return max(len(column.heads) for column in self.columns)

    def _heads(self, level: int) -> list[tuple[str, int]]:
        """Return the headings of one level with the number of columns under each."""
        padded = [("",) * (self.depth - len(c.heads)) + c.heads for c in self.columns]
        return [(heads[level], len(list(group))) for heads, group in groupby(padded, lambda h: h[: level + 1])]

    def _new_labels(self) -> list[list[bool]]:
        """Tell which labels of each row differ from the row above, or stand right of one that does."""
        above: tuple[str, ...] = ()
        found = []
        for row in self.rows:
            found.append([row.labels[: i + 1] != above[: i + 1] for i in range(len(row.labels))])
            above = row.labels
        return found

    def _label_span(self, number: int, level: int) -> int:
        """Count the rows from ``number`` on that share the labels up to ``level``."""
        same = self.rows[number].labels[: level + 1]
        num = 1
        while number + num < len(self.rows) and self.rows[number + num].labels[: level + 1] == same:
            num += 1
        return num


def length(estimate: Interval | None) -> CellValue:
    """Show tokens with two decimals."""
    return _ranked(estimate, "{:.2f}".format)


def times(estimate: Interval | None) -> CellValue:
    """Show a factor: 3.71×."""
    return _ranked(estimate, "{:.2f}×".format)


def with_interval(estimate: Interval | None) -> CellValue:
    """Show tokens and the 95% interval: 4.95 [4.80, 5.10]."""
    return MISSING if estimate is None else CellValue(estimate.shown(), estimate.value, estimate.bounds)


def plain(number: float | int | str | None, form: str = "{}") -> CellValue:
    """Show anything that has no interval and is not compared."""
    return MISSING if number is None else CellValue(form.format(number), number)


def share(number: float) -> CellValue:
    """Show a share of all rounds in percent, compared with its neighbours."""
    return CellValue(f"{number:.1%}", number, ranked=True)


def best_in_columns(rows: Sequence[TableRow], num_labels: int) -> tuple[TableRow, ...]:
    """Mark the largest number of each column among rows that share their first labels; as shown, ties included."""
    marked: list[TableRow] = []
    for _, group in groupby(rows, lambda row: row.labels[:num_labels]):
        members = list(group)
        columns = [_mark([row.values[i] for row in members]) for i in range(len(members[0].values))]
        marked += [replace(row, values=tuple(c[n] for c in columns)) for n, row in enumerate(members)]
    return tuple(marked)


def best_in_rows(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Mark the largest number of each row."""
    return tuple(replace(row, values=tuple(_mark(row.values))) for row in rows)


def _mark(values: Sequence[CellValue]) -> list[CellValue]:
    ranked = [value for value in values if value.ranked]
    if len(ranked) < 2:
        return list(values)
    top = max(_shown(value) for value in ranked)
    return [replace(value, best=value.ranked and _shown(value) == top) for value in values]


def _shown(value: CellValue) -> float:
    return float(value.text.rstrip("×%"))


def _ranked(estimate: Interval | None, form: Callable[[float], str]) -> CellValue:
    if estimate is None:
        return MISSING
    return CellValue(form(estimate.value), estimate.value, estimate.bounds, ranked=True)


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "×": r"$\times$", "τ": r"$\tau$", "–": "--", "\n": " ",
}  # fmt: skip


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"\bT=([\d.]*\d)", r"$T=\1$", escaped)
