"""``blockdraft export`` and ``blockdraft export-target``."""

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import near_target, precision

if TYPE_CHECKING:
    from blockdraft.export import EngineNote
    from blockdraft.targets import Target

Dtype = Annotated[
    str | None,
    typer.Option(
        help="The precision to write the weights in: float32, bfloat16 or float16.", show_default="as they are stored"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an export that exists.")]


def export(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="DRAFTER", help="The drafter: a shipped name, its folder, a run's folder, or a Hugging Face id."
        ),
    ] = None,
    flavour: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The format to write: flat (SGLang, vLLM) or speculators (vLLM).",
            show_default="the one it came in, also before it was trained further",
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
    dtype: Dtype = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written and all notes as JSON.")] = False,
) -> None:
    """Write a drafter for serving engines, or check an export.

    Afterwards it says what each engine does with the drafter, and which command serves it.
    """
    if check is not None:
        if flavour is not None or out is not None:
            raise typer.BadParameter("a check writes nothing, so it takes no --format or --out", param_hint="--check")
        _check(check, checkpoint, target, as_json)
        return
    from blockdraft.drafters import find_drafter, load_drafter
    from blockdraft.drafters.checkpoint import load_config, load_json, stored_dtype
    from blockdraft.drafters.formats import FORMATS
    from blockdraft.export import check_export, engine_notes, export_drafter, original_format, run_facts
    from blockdraft.export.card import STATE_SAMPLING

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
    model = _target(target or facts.target or _shipped_target(folder))
    load_config(folder, model.num_layers)
    drafter = load_drafter(folder, model, dtype=stored_dtype(folder))
    done = export_drafter(drafter, model, out, flavour, dtype=chosen, verifier=verifier, facts=facts, force=force)
    checked = check_export(out, target=model, checkpoint=folder)
    notes = engine_notes(drafter.config, flavour, done.verifier, str(out))
    if as_json:
        written = asdict(done) | {"folder": str(out), "checked": checked.lines}
        print(
            json.dumps(
                {"export": written, "engines": [asdict(each) for each in notes], "note": STATE_SAMPLING}, indent=2
            )
        )
        return
    print(f"{out}: {flavour}, {done.num_tensors} tensors of {done.dtype}, {done.num_bytes / 2**20:,.1f} MiB; checked")
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
    dtype: Dtype = None,
    force: Force = False,
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
    name = target or (None if original is None else run_facts(original).target or _shipped_target(original))
    model = _target(name) if name is not None or original is not None else None
    checked = check_export(folder, target=model, checkpoint=original)
    if as_json:
        print(json.dumps({"folder": str(folder), "format": checked.flavour, "checked": checked.lines}, indent=2))
        return
    print(f"{folder}: {checked.flavour}, as it must be")
    for line in checked.lines:
        print(f"  {line}")


def _shipped_target(folder: Path) -> str | None:
    """Return the target of a drafter that comes with the package; None for any other folder."""
    from blockdraft.evaluation.candidates import shipped_record

    record = shipped_record(folder)
    return None if record is None else record.target


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
