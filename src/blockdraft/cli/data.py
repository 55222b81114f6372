"""``blockdraft data``: from prompts to training data."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from blockdraft.data.selection import Summary

data = typer.Typer(no_args_is_help=True, help="Prompts and training data.")


@data.command()
def prompts(
    source: Annotated[
        str, typer.Option("--from", help="pocket, open-perfectblend, a JSON-lines file, a folder or a Hugging Face id.")
    ],
    out: Annotated[Path, typer.Option(help="The JSON-lines file to write.")],
    num: Annotated[int | None, typer.Option(min=1, help="How many to keep; all if not given.")] = None,
    heldout: Annotated[int, typer.Option(min=0, help="How many to hold out, in a file of their own.")] = 0,
    heldout_out: Annotated[Path | None, typer.Option(help="That file; else OUT's name with .heldout.jsonl.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice, and of pocket's generator.")] = 0,
    split: Annotated[str | None, typer.Option(help="Of a data set; train if not given.")] = None,
    family: Annotated[str | None, typer.Option(help="Of pocket: math, code or chat; all if not given.")] = None,
    min_chars: Annotated[int, typer.Option(min=1, help="Drop prompts with fewer characters.")] = 1,
    max_chars: Annotated[int | None, typer.Option(min=1, help="Drop prompts with more characters.")] = None,
    min_turns: Annotated[int, typer.Option(min=1, help="Drop prompts with fewer user messages.")] = 1,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Drop prompts with more user messages.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON to stdout.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Choose prompts: without repetition, within limits, the same ones for the same seed, some held out."""
    from blockdraft.data import write_prompts
    from blockdraft.data.selection import Limits, draw, select
    from blockdraft.data.sources import POCKET, pocket_prompts, read_source

    if heldout_out is not None and not heldout:
        raise typer.BadParameter("nothing is held out; say how many with --heldout", param_hint="--heldout-out")
    heldout_out = heldout_out or out.with_name(f"{out.stem}.heldout.jsonl")
    _check_paths(source, out, heldout_out)
    limits = Limits(min_chars, max_chars, min_turns, max_turns)
    if source == POCKET:
        if num is None:
            raise typer.BadParameter("pocket's generator never ends; say how many prompts to keep", param_hint="--num")
        if split is not None:
            raise typer.BadParameter("only data sets have splits", param_hint="--split")
        chosen = draw(pocket_prompts(seed, family), num=num, heldout=heldout, limits=limits)
    else:
        if family is not None:
            raise typer.BadParameter("only pocket has families", param_hint="--family")
        chosen = select(read_source(source, split=split), num=num, heldout=heldout, seed=seed, limits=limits)
    write_prompts({out: chosen.kept, heldout_out: chosen.heldout}, force=force)
    if as_json:
        files = {"out": str(out), "heldout_out": str(heldout_out) if heldout else None}
        json.dump(chosen.summary.to_dict() | files, sys.stdout, indent=2)
        print()
    else:
        _show(chosen.summary, out, heldout_out)
    if num is not None and chosen.summary.num_kept < num:
        print(f"note: {num} were asked for, {chosen.summary.num_kept} is all there is", file=sys.stderr)


def _check_paths(source: str, out: Path, heldout_out: Path) -> None:
    if out.resolve() == heldout_out.resolve():
        raise typer.BadParameter(f"{out} is the file for the kept prompts", param_hint="--heldout-out")
    for name, path in (("--out", out), ("--heldout-out", heldout_out)):
        if Path(source).is_file() and path.resolve() == Path(source).resolve():
            raise typer.BadParameter(f"{path} is the file to read from; name another", param_hint=name)


def _show(summary: "Summary", out: Path, heldout_out: Path) -> None:
    """What was kept and dropped, and why, as a table on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows", justify="right")
    table.add_column("what became of them", overflow="fold")
    table.add_row(str(summary.num_read), "read")
    table.add_row(str(summary.num_kept), f"kept in {out}")
    if summary.num_heldout:
        table.add_row(str(summary.num_heldout), f"held out in {heldout_out}")
    for reason, count in summary.dropped.items():
        table.add_row(str(count), f"dropped: {reason}", style="dim")
    Console(stderr=True, highlight=False, markup=False).print(table)
