"""``blockdraft study`` runs the paper's experiment at any size."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import Device, Dtype

if TYPE_CHECKING:
    from blockdraft.study import Study

CORES_OF_A_PROCESS = 4
"""A Slurm job asks for so many cores for each process: one computes, others read batches ahead and save."""


def study(
    recipe: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="The name of a shipped study, such as paper or pocket, or a YAML file."),
    ],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Fields of the study to change, such as seeds=[1,2]; objectives.NAME=null removes an objective, and "
            "targets.NAME=null a target.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder.", show_default="studies/STUDY")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many cells or evaluations run at once.",
            show_default="as many as the GPUs allow, none shared, or one per core if there is no GPU",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show cells, cost and commands, and run nothing.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the study with every field as YAML, and run nothing.")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="With --plan: print one sbatch line for each cell that is left to train.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many devices train each cell together, and evaluate, with a process for each.",
            show_default="the study's",
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
    from blockdraft.study import Study, StudyError, jobs_at_once, load_study

    loaded = load_study(recipe, assignments)
    if dtype is not None:
        loaded = loaded.model_copy(update={"set": [*loaded.set, f"target.dtype={dtype}"]})
    given = {"devices": devices, "tflops": tflops, "efficiency": efficiency, "tokens_per_text": tokens_per_text}
    hardware = loaded.hardware.model_copy(update={key: x for key, x in given.items() if x is not None})
    loaded = loaded.model_copy(update={"hardware": hardware})
    folder = out or Path("studies") / loaded.name
    if show:
        if plan:
            raise StudyError("--show prints a study, and --plan what it takes; give one of the two")
        print(loaded.to_yaml(), end="")
        return
    if plan:
        planned = Study(loaded, folder, device=device)
        planned.check(download=False)
        _hint_at_datasets(planned)
        (_show_slurm if slurm else _show_plan)(planned)
        return
    if slurm:
        raise StudyError("--slurm prints commands and runs nothing; give it together with --plan")
    gpus = _visible_gpus() if device in (None, "cuda") else []
    cores = (os.cpu_count() or 1) if device in (None, "cpu") else 1
    fitting = jobs_at_once(hardware.devices, num_gpus=len(gpus), num_cores=cores, device=device)
    num_jobs = jobs or fitting
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


def _hint_at_datasets(study: "Study") -> None:
    """Say that a package is missing; the plan may be for another machine."""
    from blockdraft.study.inputs import lacks_datasets

    if study.evaluations_left() and lacks_datasets(study.recipe.evaluation):
        print("to run it, install what downloads benchmarks: pip install 'blockdraft[datasets]'", file=sys.stderr)


def _show_plan(study: "Study") -> None:
    from rich.console import Console
    from rich.table import Table

    from blockdraft.files import size_in_words
    from blockdraft.study.cost import answers_to_decode, cell_costs, features_to_write, responses_to_sample

    left = [*study.data_jobs(), *study.jobs_left()]  # runs of another recipe are refused here
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cell", "steps", "done", "GiB a device", "GiB on disk", "hours left"):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True)
    costs, assumed = cell_costs(study), study.recipe.hardware
    for cost in costs:
        sizes = f"{cost.device_bytes / 2**30:.1f}", f"{cost.checkpoint_bytes / 2**30:.2f}"
        table.add_row(cost.cell.name, f"{cost.num_steps:,}", f"{cost.num_done:,}", *sizes, f"{cost.hours:.2f}")
    console = Console(highlight=False, markup=False, soft_wrap=True, width=10_000)  # names of cells stay whole
    console.print(table)
    num_done = len(costs) - len({cost.cell.name for cost in costs} & {job.name for job in left})
    hours = sum(cost.hours for cost in costs)
    together = f"{assumed.devices} {'devices' if assumed.devices > 1 else 'device'} each"
    console.print(
        f"{len(costs)} cells, {num_done} done, {hours:,.1f} hours of training left on {together}, at "
        f"{assumed.efficiency:.0%} of {assumed.tflops:g} TFLOP/s"
    )
    to_write = {
        "checkpoints": sum(cost.unwritten_bytes for cost in costs),
        "cached features": sum(features_to_write(study).values()),
    }
    if any(to_write.values()):
        words = " and ".join(f"{size_in_words(size)} of {what}" for what, size in to_write.items() if size)
        console.print(f"{words} to write to disk; checkpoints are the best, and the last or those of all epochs")
    sampled, decoded = responses_to_sample(study), answers_to_decode(study)
    if sampled.num:
        console.print(
            f"{sampled.num:,} responses to sample, {sampled.hours:,.1f} hours on one device, at an assumed "
            f"{assumed.sampling_rate:,g} tokens/s; until then, each counts as one text of {assumed.tokens_per_text:,g} "
            "tokens (a text is an assistant turn)"
        )
    if decoded.num:
        console.print(
            f"{decoded.num:,} answers left in evaluations, {decoded.hours:,.1f} hours on {together}, at an assumed "
            f"{assumed.decoding_rate:,g} tokens/s for a single text; scoring drafters is not counted"
        )
    console.print("\ncommands that are left, each of which resumes by itself:" if left else "\nnothing is left to run")
    for job in left:
        console.print(f"  {job}")


def _show_slurm(study: "Study") -> None:
    """Print an sbatch line for each cell that is left."""
    import shlex

    cells = {cell.name for cell in study.recipe.cells}
    for job in study.jobs_left():
        if job.name in cells:
            gpus = [] if study.device == "cpu" else [f"--gpus-per-node={job.num_processes}"]
            options = [f"--job-name={job.name}", *gpus, f"--cpus-per-task={CORES_OF_A_PROCESS * job.num_processes}"]
            print(" ".join(["sbatch", *options, "--wrap", shlex.quote(str(job))]))
    for job in study.data_jobs():
        print(f"first make the {job.name}: {job}", file=sys.stderr)
