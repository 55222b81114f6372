"""``blockdraft train``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.data import precision
from blockdraft.cli.recipes import Assignments, RecipeName


def train(
    recipe: RecipeName,
    assignments: Assignments = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/RECIPE if not given.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, take two steps, write and read a checkpoint, leave.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last measurement as JSON to stdout.")] = False,
) -> None:
    """Train a drafter. An interrupted run goes on with the same command; also under torchrun."""
    from blockdraft.cli.progress import TrainingBar
    from blockdraft.distributed import Distributed
    from blockdraft.recipes import load_recipe
    from blockdraft.targets import load_target
    from blockdraft.training import StoppedError, Trainer, TrainingError
    from blockdraft.training import dry_run as check

    loaded = load_recipe(recipe, assignments)
    processes = Distributed(loaded.runtime.device)
    run = out or Path("runs") / Path(recipe).stem
    try:
        target = load_target(
            loaded.target.name, dtype=precision(loaded.target.dtype), device=processes.device,
            mask_token_id=loaded.target.mask_token_id,
        )  # fmt: skip
        if dry_run:
            for line in check(loaded, target, processes):
                if processes.is_main:
                    print(line)
            return
        trainer = Trainer(loaded, target, run, processes)
        with TrainingBar(run.name, trainer.num_steps, trainer.step, shown=processes.is_main) as bar:
            measured = trainer.train(bar.show)
    except StoppedError as stopped:
        if processes.is_main:
            print(stopped, file=sys.stderr)
        raise typer.Exit(143) from None
    except TrainingError as error:
        if processes.is_main:
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        processes.close()
    if not processes.is_main:
        return
    if as_json:
        json.dump({"run": str(run), "step": trainer.step} | measured, sys.stdout, indent=2)
        print()
        return
    print(f"{run}: {trainer.step} steps")
    if measured:
        for rule in ("greedy", "token", "block"):
            length = measured[f"heldout_length_{rule}"]
            print(f"  {length:.2f} of {trainer.config.num_proposals} accepted, {rule} verification")
        accuracy = measured["heldout_token_accuracy"]
        print(f"  {accuracy:.3f} token accuracy, on {trainer.recipe.data.num_heldout} held-out texts")
    if trainer.decoded is not None:
        length = measured["decoded_length_block"]
        print(f"  {length:.2f} tokens per verification call, decoding {len(trainer.decoded.prompts)} of their prompts")
