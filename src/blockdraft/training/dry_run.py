"""Everything a run needs, tried out in a moment."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from blockdraft.distributed import Distributed
from blockdraft.drafters import load_drafter
from blockdraft.targets import Target
from blockdraft.training.estimate import GIB, estimate
from blockdraft.training.recipe import Recipe
from blockdraft.training.trainer import Trainer


def dry_run(recipe: Recipe, target: Target, processes: Distributed) -> Iterator[str]:
    """Check recipe, data and target, take two steps, write and read a checkpoint; a line for each."""
    yield f"recipe: {recipe.objective.name} on {recipe.drafter.kind}, valid"
    yield f"target: {target.name}, {target.num_layers} layers, vocabulary {target.vocab_size:,}"
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "record": recipe.record.model_copy(update={"tensorboard": False}),
            "data": recipe.data.model_copy(update={"features": "online"}),  # a cache may take hours
        }
        short = recipe.model_copy(update=changes)
        trainer = Trainer(short, target, Path(folder), processes)
        paths = trainer.paths
        yield f"data: {len(paths):,} texts, {len(paths.tokens):,} tokens, every checksum right"
        yield f"plan: {trainer.num_steps:,} steps, {trainer.plan.steps_per_epoch:,} an epoch"
        found = estimate(
            recipe,
            num_devices=processes.world_size,
            num_texts=len(paths),
            tokens_per_text=len(paths.tokens) / len(paths),
        )
        yield f"memory: about {found.device_bytes / GIB:.2f} GiB a device"
        for batches in trainer.feed.steps(0, min(2, trainer.num_steps)):
            metrics = trainer.take_step(batches)
            yield f"step {metrics['step']}: loss {metrics['loss']:.4f}, gradient {metrics['norm']:.4f}"
        trainer.save(trainer.evaluate().get("heldout_length_block"))
        if processes.is_main:
            again = load_drafter(Path(folder) / "checkpoint", target, dtype=torch.float32)
            if not processes.is_distributed:  # otherwise this process may hold a share of them
                ours = trainer.drafter.state_dict()
                if not all(torch.equal(ours[name], tensor) for name, tensor in again.state_dict().items()):
                    raise RuntimeError("the checkpoint does not hold the weights that were saved")
        yield "checkpoint: written and read"
