"""``blockdraft recipes`` says what to train, ``estimate`` what it will take, and ``train`` does it."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import AsJson, Assignments, Device, Dtype, RecipeName, precision, print_json

if TYPE_CHECKING:
    from blockdraft.training import ResourceEstimate

H100_TFLOPS = 989.0
RECIPES = Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Names of shipped recipes, or YAML files.")]


def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that are shipped with blockdraft.

    They are named by target, drafter and objective.
    """
    from blockdraft.recipes import shipped_names

    if as_json:
        print_json(shipped_names())
    else:
        print("\n".join(shipped_names()))


def show_recipe(recipe: RecipeName, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Print a recipe with every field resolved and explained, as YAML."""
    from blockdraft.recipes import load_recipe, to_yaml

    loaded = load_recipe(recipe, assignments).resolved()
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        print(to_yaml(loaded, explain=True), end="")


def validate_recipes(recipes: RECIPES, as_json: AsJson = False) -> None:
    """Check recipes without running them.

    The exit code is 2 if one of them is wrong.
    """
    from blockdraft.cli.app import one_line
    from blockdraft.errors import BlockdraftError
    from blockdraft.recipes import load_recipe

    errors: dict[str, str | None] = {}
    for name in recipes:
        try:
            load_recipe(name)
            errors[name] = None
        except BlockdraftError as error:
            errors[name] = str(error)
    if as_json:
        print_json([{"recipe": name, "valid": why is None, "error": why} for name, why in errors.items()])
    for name, why in errors.items():
        if why is not None:
            print(f"error: {one_line(why)}", file=sys.stderr)
        elif not as_json:
            print(f"{name}: valid")
    if any(errors.values()):
        raise typer.Exit(2)


def estimate(
    recipe: RecipeName,
    assignments: Assignments = None,
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="How many devices train together.")] = 1,
    tflops: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.001,
            help="The peak rate of a device in TFLOP/s; by default runtime.peak_tflops, or else 989, that of an H100.",
        ),
    ] = None,
    efficiency: Annotated[
        float, typer.Option(metavar="X", min=0.001, max=1.0, help="The share of the peak rate to assume.")
    ] = 0.4,
    texts: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many texts to assume if the recipe sets no data.path.")
    ] = 100_000,
    tokens_per_text: Annotated[
        float,
        typer.Option(
            metavar="X", min=1, help="The mean length of a text, prompt included, to assume if there is no data.path."
        ),
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """Compute the disk, memory and steps that a recipe will take.

    Nothing is loaded or launched.
    """
    from blockdraft.data import read_manifest
    from blockdraft.recipes import load_recipe
    from blockdraft.training import estimate as compute

    loaded = load_recipe(recipe, assignments)
    if loaded.data.path is not None:
        texts, tokens_per_text = read_manifest(loaded.data.path).totals.texts_and_length
    found = compute(loaded, num_devices=devices, num_texts=texts, tokens_per_text=tokens_per_text)
    tflops = tflops or loaded.runtime.peak_tflops or H100_TFLOPS
    if as_json:
        hours = found.hours(tflops, efficiency)
        print_json(asdict(found) | {"device_bytes": found.device_bytes, "hours": hours})
    else:
        _show_estimate(found, texts, tokens_per_text)
        hours = found.hours(tflops, efficiency)
        print(f"about {hours:,.1f} hours at an assumed {efficiency:.0%} of {tflops:g} TFLOP/s a device")


def train(
    recipe: RecipeName,
    assignments: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the run: a new one, or one that an interrupted run left.", show_default="runs/RECIPE"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, take two steps, write and read a checkpoint, and exit."),
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Train a drafter from a recipe.

    Stop it whenever you like: the same command resumes. --device and --dtype set the recipe's runtime.device and
    target.dtype. For several processes: torchrun --nproc-per-node N -m blockdraft train ...
    """
    from blockdraft.cli.progress import Stages
    from blockdraft.data import read_manifest
    from blockdraft.distributed import Distributed
    from blockdraft.recipes import load_recipe
    from blockdraft.targets import load_target
    from blockdraft.training import Progress, StoppedError, Trainer, TrainingError, fit
    from blockdraft.training import dry_run as check
    from blockdraft.training.resources import device_memory

    where = {"runtime.device": device, "target.dtype": dtype}
    chosen = [f"{field}={value}" for field, value in where.items() if value is not None]
    loaded = load_recipe(recipe, [*(assignments or []), *chosen])
    distributed = Distributed(loaded.runtime.device)
    memory = device_memory(distributed.device)
    if memory is not None and loaded.data.path is not None:
        texts, tokens_per_text = read_manifest(loaded.data.path).totals.texts_and_length
        asked = loaded.batch.gradient_accumulation_steps
        loaded = fit(
            loaded, memory, num_devices=distributed.world_size, num_texts=texts, tokens_per_text=tokens_per_text
        )
        steps = loaded.batch.gradient_accumulation_steps
        if steps != asked and distributed.is_main:
            print(f"batch.gradient_accumulation_steps={steps}, so that a step fits into the device", file=sys.stderr)
    run = out or Path("runs") / Path(recipe).stem
    try:
        with distributed.in_turn():
            target = load_target(
                loaded.target.name, dtype=precision(loaded.target.dtype), device=distributed.device,
                mask_token_id=loaded.target.mask_token_id,
            )  # fmt: skip
        if dry_run:
            for line in check(loaded, target, distributed):
                if distributed.is_main:
                    print(line)
            return
        with Stages(shown=distributed.is_main) as stages:

            def show_features(done: int, of: int) -> None:
                stages.show("features of the target", done, of)

            trainer = Trainer(loaded, target, run, distributed, show_features)
        if trainer.coverage is not None and distributed.is_main:
            print(trainer.coverage, file=sys.stderr)
        with Stages(shown=distributed.is_main) as stages:

            def show(progress: Progress) -> None:
                stages.show(run.name, progress.step, progress.num_steps, note=_note(progress.metrics))

            stages.show(run.name, trainer.step, trainer.num_steps)
            measured = trainer.train(show)
    except StoppedError as stopped:
        if distributed.is_main:
            print(stopped, file=sys.stderr)
        raise typer.Exit(143) from None
    except TrainingError as error:
        if distributed.is_main:
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        distributed.close()
    if not distributed.is_main:
        return
    if as_json:
        print_json({"run": str(run), "step": trainer.step} | measured)
        return
    print(f"{run}: {trainer.step} steps")
    if measured:
        for rule in ("greedy", "token", "block"):
            length = measured[f"heldout_length_{rule}"]
            print(f"  {length:.2f} of {trainer.config.num_proposals} accepted, {rule} verification")
        accuracy = measured["heldout_token_accuracy"]
        print(f"  {accuracy:.3f} token accuracy, on {trainer.num_heldout:,} held-out texts")
    if trainer.decoded is not None:
        length = measured["decoded_length_block"]
        print(f"  {length:.2f} tokens per verification call, decoding {len(trainer.decoded.prompts)} of their prompts")


def _note(metrics: dict[str, Any]) -> str:
    """Return what the last step measured, the most telling number first."""
    return (
        f"loss {metrics['loss']:.3f}, accepted {metrics['length_block']:.2f}, "
        f"{metrics['blocks_per_second']:,.0f} blocks/s, "
        f"lr {metrics['learning_rate']:.1e}, waiting {metrics['waiting_for_data']:.0%}"
    )


def _show_estimate(found: "ResourceEstimate", texts: int, tokens_per_text: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from blockdraft.files import size_in_words as size

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    table.add_row("texts", f"{texts:,}", f"{tokens_per_text:,.0f} tokens each")
    table.add_row("steps", f"{found.num_steps:,}", f"{found.num_tokens:,} tokens through the target, all epochs")
    table.add_row("target", f"{found.target_parameters / 1e6:,.1f} M", "parameters")
    table.add_row("drafter", f"{found.drafter_parameters / 1e6:,.1f} M", "parameters")
    table.add_section()
    table.add_row("data on disk", size(found.data_bytes), "uncompressed; the files are about half of it")
    table.add_row("feature cache", size(found.cache_bytes), "only if data.features is cached")
    checkpoints = size(found.num_checkpoints * found.checkpoint_bytes)
    table.add_row("checkpoints", checkpoints, f"the {found.num_checkpoints} that stay when the run has ended")
    table.add_section()
    devices = f"on each of {found.num_devices} devices" if found.num_devices > 1 else "on one device"
    table.add_row("target weights", size(found.target_bytes), devices)
    table.add_row("drafter weights", size(found.drafter_bytes), "float32, and a copy in the computing precision")
    table.add_row("optimizer", size(found.optimizer_bytes), "gradients and two moments")
    table.add_row("activations", size(found.activation_bytes), "of one micro-batch")
    table.add_row("backward pass", size(found.backward_bytes), "beside them, at one time; or")
    table.add_row("logits, fused", size(found.fused_bytes), f"{size(found.unfused_bytes)} if they were not fused")
    table.add_row("peak", size(found.device_bytes), f"{devices}; allocator's waste and CUDA context not counted")
    Console(highlight=False, markup=False, soft_wrap=True).print(table)
