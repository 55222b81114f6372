"""``blockdraft study`` runs the paper's experiment at any size."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import Device, Dtype

if TYPE_CHECKING:
    from blockdraft.study import Study, StudyHardware


def study(
    recipe: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="The name of a shipped study, such as paper or pocket, or a YAML file."),
    ],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Fields of the study to change, such as seeds=[1,2]."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder.", show_default="studies/STUDY")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many cells or evaluations run at once.",
            show_default="one for each GPU, or for each core if there is none",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show cells, cost and commands, and run nothing.")] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many devices train each cell, for the plan.", show_default="the study's"
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.001,
            help="The peak rate of a device in TFLOP/s, for the plan's hours.",
            show_default="the study's",
        ),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.001,
            max=1.0,
            help="The share of the peak rate to assume in the plan.",
            show_default="the study's",
        ),
    ] = None,
    tokens_per_text: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=1,
            help="The mean length of a text in tokens, prompt included, to assume in the plan.",
            show_default="the study's",
        ),
    ] = None,
) -> None:
    """Run a whole experiment, over objectives and seeds.

    Every combination of targets, drafters, objectives and seeds is trained, evaluated and reported together.
    Stop it whenever you like: the same command resumes.
    """
    from blockdraft.cli.progress import Stages
    from blockdraft.study import Study, load_study

    loaded = load_study(recipe, assignments)
    if dtype is not None:
        loaded = loaded.model_copy(update={"set": [*loaded.set, f"target.dtype={dtype}"]})
    gpus = _visible_gpus() if device in (None, "cuda") else []
    cores = (os.cpu_count() or 1) if device in (None, "cpu") else 1
    num_jobs = jobs or len(gpus) or cores
    folder = out or Path("studies") / loaded.name
    if plan:
        given = {"devices": devices, "tflops": tflops, "efficiency": efficiency, "tokens_per_text": tokens_per_text}
        assumed = loaded.hardware.model_copy(update={key: x for key, x in given.items() if x is not None})
        _show_plan(Study(loaded, folder, device=device), assumed)
        return
    print(f"{loaded.name}: {len(loaded.cells)} cells in {folder}, {num_jobs} at a time", file=sys.stderr)
    with Stages() as stages:
        running = Study(loaded, folder, num_jobs=num_jobs, gpus=gpus, device=device, on_progress=stages.show)
        summary = running.run()
    for table in summary.tables:
        print(table.markdown())
    print(f"the report: {summary.page}")


def _visible_gpus() -> list[str]:
    """Return the GPUs that jobs may be shared out over, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    count, asked = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [each.strip() for each in asked.split(",")] if asked else [str(number) for number in range(count)]
    return names[:count]


def _show_plan(study: "Study", assumed: "StudyHardware") -> None:
    from rich.console import Console
    from rich.table import Table

    from blockdraft.data import read_manifest
    from blockdraft.data.manifest import MANIFEST
    from blockdraft.training import estimate

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cell", "steps", "done", "GiB a device", "hours"):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True)
    total = 0.0
    for cell in study.recipe.cells:
        target = study.recipe.targets[cell.target]
        num_texts, length = target.num_prompts * target.num_responses, assumed.tokens_per_text
        folder = study.data_folder(cell.target)
        if os.path.lexists(folder / MANIFEST):  # otherwise it is not made yet, and will be what the study asks for
            counts = read_manifest(folder).totals
            num_texts = max(1, counts.rows)
            length = (counts.prompt_tokens + counts.response_tokens) / num_texts
        found = estimate(cell.recipe, num_devices=assumed.devices, num_texts=num_texts, tokens_per_text=length)
        hours = found.hours(assumed.tflops, assumed.efficiency)
        total += hours
        done, _of = study.steps_done(cell)
        table.add_row(
            cell.name, f"{found.num_steps:,}", f"{done:,}", f"{found.device_bytes / 2**30:.1f}", f"{hours:.2f}"
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{len(study.recipe.cells)} cells, {total:,.1f} hours of training on {assumed.devices} "
        f"{'devices' if assumed.devices > 1 else 'device'} each, at {assumed.efficiency:.0%} of {assumed.tflops:g} "
        "TFLOP/s; data and evaluation are not counted"
    )
    console.print("\ncommands, each of which resumes by itself (torchrun -m blockdraft ... on several devices):")
    evaluations = [study.evaluation_job(target, seed) for seed in study.recipe.seeds for target in study.recipe.targets]
    for job in [*study.data_jobs(), *map(study.training_job, study.recipe.cells), *evaluations]:
        console.print(f"  {job}")
