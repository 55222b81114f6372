"""Where a drafter's weights come from: chance, or the target's own last layers."""

import torch
from torch import nn

from blockdraft.drafters import Drafter, DrafterConfig, build_drafter
from blockdraft.targets import Target
from blockdraft.training.recipe import Recipe, RecipeError


def new_drafter(recipe: Recipe, target: Target) -> Drafter:
    """A drafter for the target, in float32, its weights a function of the recipe's seed."""
    config = DrafterConfig.for_target(recipe.drafter.kind, target, **recipe.drafter.changes())
    torch.manual_seed(recipe.seed)
    drafter = build_drafter(config).float()
    initialise(drafter)
    if recipe.drafter.initial == "target":
        copy_last_layers(drafter, target)
    return drafter


@torch.no_grad()
def initialise(drafter: Drafter, std: float = 0.02) -> None:
    """Normal weights of the usual width for matrices, ones for norms; a Markov head starts without effect."""
    for name, parameter in drafter.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name == "markov_head.markov_w2.weight":
            parameter.zero_()
        else:
            nn.init.normal_(parameter, std=std)


@torch.no_grad()
def copy_last_layers(drafter: Drafter, target: Target) -> None:
    """Take over the last layers of the target, and its final norm, wherever names and shapes agree.

    Features are read as they are: ``fc`` begins as the mean of the features.
    """
    own = drafter.state_dict()
    theirs = target.model.model.state_dict()
    first = target.num_layers - drafter.config.num_layers
    if first < 0:
        raise RecipeError(
            f"{target.name} has {target.num_layers} layers; the drafter wants {drafter.config.num_layers}"
        )
    taken = 0
    for name, tensor in own.items():
        parts = name.split(".")
        source = ".".join(["layers", str(first + int(parts[1])), *parts[2:]]) if parts[0] == "layers" else name
        if source in theirs and theirs[source].shape == tensor.shape:
            tensor.copy_(theirs[source])
            taken += 1
    if taken == 0:
        raise RecipeError(f"no layer of {target.name} fits this drafter; use drafter.initial=scratch")
    num_features, width = len(drafter.config.target_layers), drafter.config.hidden_size
    drafter.fc.weight.copy_(torch.eye(width).repeat(1, num_features) / num_features)
