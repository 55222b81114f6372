"""``blockdraft drafters`` lists the drafters that are shipped; ``blockdraft doctor`` examines those of others."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import AsJson, Device, Dtype, Seed, precision, print_json

if TYPE_CHECKING:
    from blockdraft.doctor import Diagnosis
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


STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def doctor(
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="The drafter: its folder, a run's folder, or a Hugging Face id.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The target it should draft for: pocket, smollm2, a Hugging Face id or a folder.",
            show_default="the one of the run that the drafter lies in",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A data folder of the target, to check and to measure on.",
            show_default="texts are sampled on the spot",
        ),
    ] = None,
    texts: Annotated[int, typer.Option(metavar="N", min=2, help="How many texts to measure on.")] = 8,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="How many tokens of each text to measure on.")
    ] = 64,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure how the drafter drafts under other readings.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 2 if anything is wrong.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find out what is wrong with a drafter's folder.

    It reads folders of blockdraft, z-lab, DeepSpec and speculators, checks all that is known to go wrong without an
    error, and measures predicted tokens per call under the plausible readings of each ambiguous field.
    """
    from blockdraft.doctor import examine
    from blockdraft.drafters import CheckpointError, find_drafter
    from blockdraft.export import run_facts
    from blockdraft.targets import load_target

    name = target or run_facts(find_drafter(drafter)).target
    if name is None:
        raise typer.BadParameter("the drafter's folder does not say which target it is for", param_hint="--target")
    model = load_target(name, device=device, dtype=precision(dtype))
    found = examine(
        drafter, model, data=data, num_texts=texts, max_new_tokens=max_new_tokens, seed=seed, measure=measure
    )
    if as_json:
        print_json(found.to_dict())
    else:
        show(found)
    if strict and not found.healthy:
        more = f" (and {len(found.wrong) - 1} more)" if len(found.wrong) > 1 else ""
        raise CheckpointError(f"{drafter}: {found.wrong[0].check}: {found.wrong[0].found}{more}")


def show(found: "Diagnosis") -> None:
    """Print the findings as a table, and the measured readings as another."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table("", "check", "found", "what to do", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for each in found.findings:
        table.add_row(Text(each.level, STYLES[each.level]), each.check, each.found, each.advice)
    console.print(table)
    if found.measured:
        console.print(f"Predicted tokens per call under block verification, over {found.texts}:")
        lengths = Table("field", "read as", "tokens", "", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for one in found.measured:
            marks = ", ".join(word for word, is_so in (("given", one.given), ("fits", one.fits)) if is_so)
            lengths.add_row(one.field, one.reading, f"{one.length:.2f}", marks, style="bold" if one.fits else "dim")
        console.print(lengths)
    warnings = sum(each.level == "warning" for each in found.findings)
    state = f"{len(found.wrong)} wrong" if found.wrong else "nothing is wrong"
    console.print(f"{found.drafter}: {state}, {warnings} warning{'' if warnings == 1 else 's'}")
