"""``blockdraft export`` and ``blockdraft export-target``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.data import precision

if TYPE_CHECKING:
    from blockdraft.targets import Target

Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as it is if not given.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an export that is there.")]


def export(
    checkpoint: Annotated[Path | None, typer.Argument(help="A drafter's folder, of ours or of anyone's.")] = None,
    flavour: Annotated[str | None, typer.Option("--format", help="flat (SGLang, vLLM) or speculators (vLLM).")] = None,
    out: Annotated[Path | None, typer.Option(help="The new folder.")] = None,
    check: Annotated[Path | None, typer.Option(help="Check this export, against CHECKPOINT if given.")] = None,
    target: Annotated[str | None, typer.Option(help="pocket, smollm2, a Hugging Face id or a folder.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="How the engine finds the target; --target if not given.")
    ] = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Write a drafter as serving engines read it, or check what was written."""
    if check is not None:
        if flavour is not None or out is not None:
            raise typer.BadParameter("nothing is written by a check", param_hint="--check")
        _check(check, checkpoint, target)
        return
    from blockdraft.drafters import load_drafter
    from blockdraft.drafters.formats import FORMATS
    from blockdraft.export import check_export, export_drafter
    from blockdraft.export.run import run_facts

    if checkpoint is None or out is None:
        raise typer.BadParameter("say which CHECKPOINT and --out, or --check an export")
    if flavour not in FORMATS:
        raise typer.BadParameter(f"{flavour!r} is not one of {', '.join(FORMATS)}", param_hint="--format")
    facts = run_facts(checkpoint)
    model = _target(target or facts.target, None)
    drafter = load_drafter(checkpoint, model)
    done = export_drafter(
        drafter, model, out, flavour, dtype=precision(dtype), verifier=verifier, facts=facts, force=force
    )
    check_export(out, target=model, checkpoint=checkpoint)
    print(f"{out}: {flavour}, {done.num_tensors} tensors of {done.dtype}, {done.num_bytes / 2**20:,.1f} MiB; checked")


def export_target(
    target: Annotated[str, typer.Argument(help="pocket, smollm2, a Hugging Face id or a folder.")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Write a target as an ordinary Hugging Face folder, which any engine loads."""
    from blockdraft.export import export_target as write
    from blockdraft.targets import load_target

    write(load_target(target, dtype=precision(dtype)), out, force=force)
    print(f"{out}: config, weights, tokenizer and chat template of {target}")


def _check(folder: Path, checkpoint: Path | None, target: str | None) -> None:
    from blockdraft.export import check_export
    from blockdraft.export.run import run_facts

    name = target or (run_facts(checkpoint).target if checkpoint is not None else None)
    model = _target(name, None) if name is not None or checkpoint is not None else None
    checked = check_export(folder, target=model, checkpoint=checkpoint)
    print(f"{folder}: {checked.flavour}, as it must be")
    for line in checked.lines:
        print(f"  {line}")


def _target(name: str | None, dtype: str | None) -> "Target":
    from blockdraft.targets import load_target

    if name is None:
        raise typer.BadParameter("the folder does not tell its target", param_hint="--target")
    return load_target(name, dtype=precision(dtype))
