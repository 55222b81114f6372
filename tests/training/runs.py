"""Small runs on a tiny target, for tests and for the processes they start."""

import torch

from blockdraft.data import GenerationSettings, LocalEngine, Prompt, regenerate
from blockdraft.recipes import Recipe, override, parse
from blockdraft.training import Trainer

from tiny import tiny_target

SMALL = [
    "drafter.num_layers=2", "drafter.num_proposals=4", "drafter.num_features=3", "drafter.markov_rank=6",
    "batch.num_texts=6", "batch.num_anchors=30", "optimizer.num_train_epochs=2", "optimizer.learning_rate=0.003",
    "data.num_heldout=6",
    "logging.heldout_blocks=40", "logging.logging_steps=1", "logging.save_steps=3", "logging.tensorboard=false",
]  # fmt: skip


def target():
    return tiny_target(dtype=torch.float32)


def make_data(folder, model=None, num=36, **changes):
    model = model or target()
    settings = GenerationSettings(max_new_tokens=16, max_length=60, **changes)
    prompts = [Prompt(f"p{i}", (f"w{5 + i % 30} w{6 + i % 7}",)) for i in range(num)]
    regenerate(prompts, model, settings, folder, engine=LocalEngine(model, 8), shard_size=20)
    return folder


def recipe(data, *assignments) -> Recipe:
    return parse(override({}, [*SMALL, f"data.path={data}", *assignments]), "test")


def train(data, run, *assignments, model=None, **options):
    trainer = Trainer(recipe(data, *assignments), model or target(), run, **options)
    trainer.train()
    return trainer


def weights(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.drafter.state_dict().items()}
