"""Try everything that a training run needs once, before it is launched: a dry run."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from blockdraft.distributed import Distributed
from blockdraft.drafters import load_drafter
from blockdraft.recipes import Recipe
from blockdraft.targets import Target
from blockdraft.training.resources import GIB, estimate
from blockdraft.training.trainer import Trainer


def dry_run(recipe: Recipe, target: Target, distributed: Distributed) -> Iterator[str]:
    """Check recipe, data and target, take two steps, write and read a checkpoint; yields a line for each."""
    yield f"recipe: {recipe.objective.name} on {recipe.drafter.kind}, valid"
    yield f"target: {target.name}, {target.num_layers} layers, vocabulary {target.vocab_size:,}"
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "logging": recipe.logging.model_copy(update={"tensorboard": False}),
            "data": recipe.data.model_copy(update={"features": "online"}),  # a cache may take hours
        }
        trainer = Trainer(recipe.model_copy(update=changes), target, Path(folder), distributed)
        dataset = trainer.sampler.dataset
        num_texts, num_tokens = len(dataset), len(dataset.tokens)
        yield f"data: {num_texts:,} texts to train on, {num_tokens:,} tokens, every checksum right"
        if trainer.coverage is not None:
            yield str(trainer.coverage)
        yield f"plan: {trainer.num_steps:,} steps, {trainer.sampler.steps_per_epoch:,} an epoch"
        found = estimate(
            recipe, num_devices=distributed.world_size, num_texts=num_texts, tokens_per_text=num_tokens / num_texts
        )
        yield f"memory: about {found.device_bytes / GIB:.2f} GiB a device"
        for batches in trainer.loader.steps(0, min(2, trainer.num_steps)):
            metrics = trainer.take_step(batches)
            yield f"step {metrics['step']}: loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.4f}"
        trainer.save(trainer.evaluate().get("heldout_length_block"))
        if distributed.is_main:
            again = load_drafter(trainer.run.checkpoint("last"), target, dtype=torch.float32)
            if not distributed.is_distributed:  # otherwise this process may hold a shard of the weights
                ours = trainer.drafter.state_dict()
                if not all(torch.equal(ours[name], tensor) for name, tensor in again.state_dict().items()):
                    raise RuntimeError("the checkpoint does not hold the weights that were saved")
        yield "checkpoint: written and read"
