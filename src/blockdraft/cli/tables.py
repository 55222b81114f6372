"""Tables on a terminal or in a pipe."""

from rich.console import Console
from rich.table import Table


def print_whole(table: Table) -> None:
    """To stdout, as wide as it is: a narrow terminal wraps lines, and no number loses a digit."""
    wide = Console(highlight=False, width=1000)
    Console(highlight=False, width=wide.measure(table).maximum).print(table)
