"""``blockdraft doctor`` examines a drafter's folder, ours or anyone's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import AsJson, Device, Dtype, Seed, near_target, precision, print_json

if TYPE_CHECKING:
    from blockdraft.doctor import Diagnosis

LEVEL_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def doctor(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="The drafter: a shipped name, its folder, a run's folder (or RUN@last), or a Hugging Face id.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            callback=near_target,
            help="The target it should draft for: pocket, smollm2, a Hugging Face id or a folder.",
            show_default="the one of the run that the drafter lies in, or of a shipped drafter",
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
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts that the target answers, to measure on: JSON lines, as data prompts writes them.",
            show_default="a few questions, and for pocket its own held-out prompts",
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
    from blockdraft.cli.progress import Stages
    from blockdraft.data import read_prompts
    from blockdraft.doctor import examine
    from blockdraft.drafters import CheckpointError, find_drafter
    from blockdraft.export import run_facts
    from blockdraft.targets import load_target

    if data is not None and prompts is not None:
        raise typer.BadParameter("the texts of --data are there already; give one of the two", param_hint="--prompts")
    asked = None if prompts is None else [each.turns[0] for each in read_prompts(prompts)]
    name = target or run_facts(find_drafter(drafter)).target
    if name is None:
        raise typer.BadParameter("the drafter's folder does not say which target it is for", param_hint="--target")
    model = load_target(name, device=device, dtype=precision(dtype))
    with Stages() as stages:
        stages.show("examining the drafter", 0, 1)
        found = examine(
            drafter, model, data=data, prompts=asked, num_texts=texts, max_new_tokens=max_new_tokens, seed=seed,
            measure=measure,
        )  # fmt: skip
        stages.show("examining the drafter", 1, 1)
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
        table.add_row(Text(each.level, LEVEL_STYLES[each.level]), each.check, each.found, each.advice)
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
