"""A report's folder: tables, figures and the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.files import atomic_write
from blockdraft.reports.drawing import Drawing
from blockdraft.reports.figures import figures
from blockdraft.reports.merging import read_evaluations
from blockdraft.reports.page import page
from blockdraft.reports.paper_tables import tables
from blockdraft.reports.table import Table


@dataclass(frozen=True)
class ReportFiles:
    """What was written: the page, the files of tables and figures, and the tables themselves."""

    page: Path
    table_files: list[Path]
    figure_files: list[Path]
    tables: list[Table]


def write_report(
    folders: Sequence[str | Path], out: str | Path, on_file: Callable[[Path], None] = lambda _: None
) -> ReportFiles:
    """Read evaluations, write ``out/report.html``, ``out/tables`` and ``out/figures``.

    Args:
        folders: of evaluations, each with a ``results.json`` and perhaps a ``traces.json``.
        out: made if it is not there; files of the same names are replaced.
        on_file: called with each file after it was written.
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
    for table in found:
        for ending, content in (("md", table.markdown()), ("tex", table.latex()), ("csv", table.csv())):
            write(out / "tables" / f"{table.name}.{ending}", content, table_files)
    drawings: list[Drawing] = []
    for drawing in figures(comparison):
        write(out / "figures" / f"{drawing.name}.png", drawing.png(), figure_files)
        write(out / "figures" / f"{drawing.name}.svg", drawing.svg(), figure_files)
        drawings.append(drawing)
    write(out / "report.html", page(comparison, found, drawings), [])
    return ReportFiles(out / "report.html", table_files, figure_files, found)
