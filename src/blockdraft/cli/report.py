"""``blockdraft report``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from blockdraft.reports import Table


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="EVALUATION...", help="Folders written by evaluate.")],
    out: Annotated[Path, typer.Option(help="The folder to write the report to.")] = Path("report"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths of what was written as JSON.")] = False,
) -> None:
    """Write tables, figures and one page with a block explorer, from one evaluation or several together."""
    from blockdraft.reports import write_report  # raises MissingExtraError without the extra `reports`

    written = write_report(folders, out, on_file=lambda file: print(file, file=sys.stderr))
    if as_json:
        paths = {"tables": written.table_files, "figures": written.figure_files}
        listed = {"report": str(written.page)} | {name: list(map(str, files)) for name, files in paths.items()}
        json.dump(listed, sys.stdout, indent=2)
        print()
        return
    if written.tables:
        _show(written.tables[0])
    print(f"{written.page}: {len(written.tables)} tables, {len(written.figure_files) // 2} figures")


def _show(table: "Table") -> None:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    from blockdraft.cli.tables import print_whole

    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for label in table.labels:
        grid.add_column(Text(label), vertical="bottom")
    for column in table.columns:
        heads = "\n".join(column.heads).replace(" verification", "").replace(" (", "\n(")
        grid.add_column(Text(heads, justify="right"), justify="right", no_wrap=True)
    above = ""
    for row in table.rows:
        if above and row.labels[0] != above:
            grid.add_section()
        labels = ["" if row.labels[0] == above else row.labels[0], *row.labels[1:]]
        grid.add_row(*map(Text, labels), *(Text(v.text, style="bold" if v.best else "") for v in row.values))
        above = row.labels[0]
    print_whole(grid)
