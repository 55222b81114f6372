"""``blockdraft drafters``: list the drafters that come with the package."""

import sys
from typing import TYPE_CHECKING, Any

from blockdraft.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from blockdraft.evaluation.candidates import ShippedDrafter


def list_drafters(as_json: AsJson = False) -> None:
    """List the drafters that come with blockdraft.

    Every --drafter takes these names. The last column is the predicted number of tokens per call of the target, under
    block verification at temperature 1, as a mean over the tasks of the model card.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from blockdraft.evaluation.candidates import shipped_drafters

    found = shipped_drafters()
    if as_json:
        print_json([as_dict(each) for each in found])
        return
    if not found:
        print("this installation holds no drafters; blockdraft train makes one", file=sys.stderr)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("drafter", "target", "kind", "objective", "layers", "proposals", "size", "tokens/call"):
        table.add_column(name, justify="left" if name in ("drafter", "target", "kind", "objective") else "right")
    for each in found:
        length = None if each.measured is None else each.measured.length("block", "paper")
        table.add_row(
            Text(each.name), Text(each.target), each.recipe.drafter.kind, Text(each.label),
            str(each.recipe.drafter.num_layers), str(each.recipe.drafter.num_proposals),
            f"{each.num_bytes / 1e6:.1f} MB", "-" if length is None else f"{length.value:.2f}",
        )  # fmt: skip
    Console(highlight=False, width=max(80, Console(width=1000).measure(table).maximum)).print(table)


def as_dict(record: "ShippedDrafter") -> dict[str, Any]:
    """Return what the list says of a drafter as plain values."""
    lengths = [] if record.measured is None else record.measured.lengths
    return {
        "name": record.name, "target": record.target, "kind": record.recipe.drafter.kind, "objective": record.label,
        "num_layers": record.recipe.drafter.num_layers, "num_proposals": record.recipe.drafter.num_proposals,
        "num_bytes": record.num_bytes,
        "predicted_length": {each.rule: each.predicted_length.value for each in lengths if each.choice == "paper"},
    }  # fmt: skip
