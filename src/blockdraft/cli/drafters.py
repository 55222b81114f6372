"""``blockdraft drafters ls`` lists what is shipped; ``export`` and ``export-target`` write folders for engines."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import AsJson, near_target, precision, print_json

if TYPE_CHECKING:
    from blockdraft.drafters import DrafterConfig
    from blockdraft.evaluation.candidates import ShippedDrafter
    from blockdraft.export import EngineNote
    from blockdraft.targets import Target

StoredDtype = Annotated[
    str | None,
    typer.Option(
        help="The precision to write the weights in: float32, bfloat16 or float16.", show_default="as they are stored"
    ),
]
ReplaceExport = Annotated[bool, typer.Option("--force", help="Replace an export that exists.")]


def list_drafters(as_json: AsJson = False) -> None:
    """List the drafters that come with blockdraft.

    Every --drafter takes these names. The last column is the predicted number of tokens per call of the target, under
    block verification at temperature 1, as a mean over the tasks of the model card.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from blockdraft.drafters import find_drafter
    from blockdraft.drafters.checkpoint import load_config
    from blockdraft.evaluation.candidates import shipped_drafters

    found = [(each, load_config(find_drafter(each.name))) for each in shipped_drafters()]
    if as_json:
        print_json([drafter_facts(record, config) for record, config in found])
        return
    if not found:
        print("this installation holds no drafters; blockdraft train makes one", file=sys.stderr)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("drafter", "target", "kind", "objective", "layers", "proposals", "size", "tokens/call"):
        table.add_column(name, justify="left" if name in ("drafter", "target", "kind", "objective") else "right")
    for each, config in found:
        length = None if each.measured is None else each.measured.length("block", "paper")
        table.add_row(
            Text(each.name), Text(each.target), config.kind, Text(each.label), str(config.num_layers),
            str(config.num_proposals), f"{each.num_bytes / 1e6:.1f} MB",
            "-" if length is None else f"{length.value:.2f}",
        )  # fmt: skip
    Console(highlight=False, width=max(80, Console(width=1000).measure(table).maximum)).print(table)


def drafter_facts(record: "ShippedDrafter", config: "DrafterConfig") -> dict[str, Any]:
    """Return what the list says of a drafter as plain values; it may propose fewer tokens than it was trained with."""
    lengths = [] if record.measured is None else record.measured.lengths
    return {
        "name": record.name, "target": record.target, "kind": config.kind, "objective": record.label,
        "num_layers": config.num_layers, "num_proposals": config.num_proposals, "num_bytes": record.num_bytes,
        "predicted_length": {each.rule: each.predicted_length.value for each in lengths if each.choice == "paper"},
    }  # fmt: skip


def export(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="DRAFTER",
            help="The drafter: a shipped name, its folder, a run's folder (or RUN@last), or a Hugging Face id.",
        ),
    ] = None,
    flavour: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The format to write: flat (SGLang, vLLM) or speculators (vLLM).",
            show_default="that of its folder or of the drafter it was trained from; required if neither has one",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The new folder to write.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Write nothing; check this export, against DRAFTER if it is given.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            callback=near_target,
            help="The drafter's target: pocket, smollm2, a Hugging Face id or a folder.",
            show_default="the one of the run that the drafter lies in",
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="The name or path under which the engine finds the target.", show_default="that of --target"),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            help="The folder of an evaluation of this drafter, whose lengths and acceptance by position go into the "
            "model card."
        ),
    ] = None,
    dtype: StoredDtype = None,
    force: ReplaceExport = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written and all notes as JSON.")] = False,
) -> None:
    """Write a drafter for serving engines, or check an export.

    Afterwards it says what each engine does with the drafter, and which command serves it.
    """
    if check is not None:
        if flavour is not None or out is not None or evaluation is not None:
            message = "a check writes nothing, so it takes no --format, --out or --evaluation"
            raise typer.BadParameter(message, param_hint="--check")
        _check(check, checkpoint, target, as_json)
        return
    from blockdraft.drafters import find_drafter, load_drafter
    from blockdraft.drafters.checkpoint import load_config, load_json, stored_dtype
    from blockdraft.drafters.formats import FORMATS
    from blockdraft.export import check_export, engine_notes, export_drafter, original_format, run_facts
    from blockdraft.export.card import evaluated
    from blockdraft.export.engines import STATE_SAMPLING, built_in_note

    if checkpoint is None or out is None:
        raise typer.BadParameter("say which DRAFTER to write and where with --out, or check an export with --check")
    if flavour is not None and flavour not in FORMATS:
        raise typer.BadParameter(f"{flavour!r} is not one of {', '.join(FORMATS)}", param_hint="--format")
    chosen, folder = precision(dtype), find_drafter(checkpoint)
    facts = run_facts(folder)
    flavour = flavour or original_format(folder, facts)
    if flavour is None:
        raise typer.BadParameter(f"say which: {' or '.join(FORMATS)}", param_hint="--format")
    load_json(folder)  # what is no drafter is refused before a target is loaded
    model = _target(target or facts.target)
    load_config(folder, model.num_layers)
    drafter = load_drafter(folder, model, dtype=stored_dtype(folder))
    if evaluation is not None:
        facts = replace(facts, evaluation=evaluated(evaluation, drafter))
    done = export_drafter(drafter, model, out, flavour, dtype=chosen, verifier=verifier, facts=facts, force=force)
    checked = check_export(out, target=model, checkpoint=folder)
    notes, on_target = engine_notes(drafter.config, flavour, done.verifier, str(out)), built_in_note(done.verifier)
    if as_json:
        written = asdict(done) | {"folder": str(out), "checked": checked.lines}
        said = {"target": on_target, "engines": [asdict(each) for each in notes], "note": STATE_SAMPLING}
        print(json.dumps({"export": written} | said, indent=2))
        return
    print(f"{out}: {flavour}, {done.num_tensors} tensors of {done.dtype}, {done.num_bytes / 2**20:,.1f} MiB; checked")
    if on_target is not None:
        print(f"\n{on_target}")
    for note in notes:
        print(f"\n{_in_words(note)}")
    print(f"\n{STATE_SAMPLING}")


def export_target(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            callback=near_target,
            help="The target: pocket, smollm2, a Hugging Face id or a folder.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new folder to write.")],
    dtype: StoredDtype = None,
    force: ReplaceExport = False,
) -> None:
    """Write a target as an ordinary Hugging Face folder.

    Any engine can load it.
    """
    from blockdraft.export import export_target as write
    from blockdraft.targets import load_target

    write(load_target(target, dtype=precision(dtype)), out, force=force)
    print(f"{out}: configuration, weights, tokenizer and chat template of {target}")


def _check(folder: Path, checkpoint: str | None, target: str | None, as_json: bool) -> None:
    from blockdraft.drafters import find_drafter
    from blockdraft.export import check_export, run_facts

    original = None if checkpoint is None else find_drafter(checkpoint)
    name = target or (None if original is None else run_facts(original).target)
    model = _target(name) if name is not None or original is not None else None
    checked = check_export(folder, target=model, checkpoint=original)
    if as_json:
        print(json.dumps({"folder": str(folder), "format": checked.flavour, "checked": checked.lines}, indent=2))
        return
    print(f"{folder}: {checked.flavour}, as it must be")
    for line in checked.lines:
        print(f"  {line}")


def _target(name: str | None) -> "Target":
    from blockdraft.targets import load_target

    if name is None:
        raise typer.BadParameter("the drafter's folder does not say which target it is for", param_hint="--target")
    return load_target(name)


def _in_words(note: "EngineNote") -> str:
    """Put what an engine does into lines for a terminal."""
    if note.command is None:
        return note.summary
    return "\n".join([note.summary, indent(note.command, "    "), *(f"  {each}" for each in note.notes)])
