"""Where a drafter's first weights come from: chance, the target's own last layers, or another drafter."""

from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.data import TextDataset
from blockdraft.drafters import CheckpointError, Drafter, DrafterConfig, build_drafter, load_drafter
from blockdraft.drafters.config import recorded_fingerprint
from blockdraft.recipes import Recipe, RecipeError
from blockdraft.targets import Target
from blockdraft.training.vocabulary import choose_draft_ids


def new_drafter(recipe: Recipe, target: Target, dataset: TextDataset | None = None) -> Drafter:
    """Build a drafter for the target in float32; its weights depend on the recipe's seed, or the folder it names.

    A reduced draft vocabulary is chosen from the texts of ``dataset``; a drafter that is trained further keeps its own.
    """
    if recipe.drafter.initial == "required":
        raise RecipeError("this recipe trains a drafter further: name it, as in drafter.initial=FOLDER")
    if recipe.drafter.initial not in ("scratch", "target"):
        return continue_from(recipe, target)
    options = recipe.drafter.config_options()
    draft_ids: Tensor | None = None
    if recipe.drafter.vocab_size is not None:
        assert dataset is not None
        chosen = choose_draft_ids(dataset, target.vocab_size, recipe.drafter.vocab_size)
        draft_ids = torch.from_numpy(chosen)
        options["draft_vocab_size"] = len(chosen)
    config = DrafterConfig.for_target(recipe.drafter.kind, target, **options)
    torch.manual_seed(recipe.seed)
    drafter = build_drafter(config).float()
    if draft_ids is not None:
        drafter.draft_ids = draft_ids
    initialise(drafter)
    if recipe.drafter.initial == "target":
        copy_last_layers(drafter, target)
    return drafter


def continue_from(recipe: Recipe, target: Target) -> Drafter:
    """Load a drafter to train further, ours or anyone's, with its own shape.

    What the recipe itself states must be so, except for the number of proposals, which may change: no tensor depends on
    it. What it leaves to defaults is the drafter's. A confidence head is left behind, since training does not keep it
    true.
    """
    part = recipe.drafter
    try:
        there = load_drafter(part.initial, target, dtype=torch.float32, same_target=False)
    except CheckpointError as error:
        raise RecipeError(f"drafter.initial: {error}") from error
    config = there.config
    stated: dict[str, Any] = {
        "kind": config.kind,
        "num_layers": config.num_layers,
        "num_features": len(config.target_layers),
    }
    if config.kind == "dspark":
        stated |= {"markov_head": config.markov_head, "markov_rank": config.markov_rank}
    asked = {name: getattr(part, name) for name in stated if name in part.model_fields_set or name == "kind"}
    wrong = [name for name, value in asked.items() if value is not None and value != stated[name]]
    if wrong:
        has = ", ".join(f"{name} {stated[name]}, not {asked[name]}" for name in wrong)
        fix = " ".join(f"drafter.{name}={stated[name]}" for name in wrong)
        raise RecipeError(f"the drafter in {part.initial} has {has}; set {fix}")
    num = part.num_proposals if "num_proposals" in part.model_fields_set else config.num_proposals
    changes = {"num_proposals": num, "confidence_head": False}
    drafter = build_drafter(config.replace(**changes, target_fingerprint=recorded_fingerprint(target)))
    tensors = {name: tensor for name, tensor in there.state_dict().items() if not name.startswith("confidence_head.")}
    drafter.load_state_dict(tensors)
    return drafter.float()


def with_shape(recipe: Recipe, config: DrafterConfig) -> Recipe:
    """Return a recipe that states the shape of the drafter it trains, which it may have left to the folder."""
    shape: dict[str, Any] = {"num_layers": config.num_layers, "num_proposals": config.num_proposals}
    if recipe.drafter.initial not in ("scratch", "target"):
        shape["num_features"] = len(config.target_layers)
    if config.kind == "dspark":
        shape |= {"markov_head": config.markov_head, "markov_rank": config.markov_rank}
    return recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update=shape)})


@torch.no_grad()
def initialise(drafter: Drafter, std: float = 0.02) -> None:
    """Draw normal weights for matrices and set norms to one; a Markov head starts without effect."""
    for name, parameter in drafter.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name == "markov_head.markov_w2.weight":
            parameter.zero_()
        else:
            nn.init.normal_(parameter, std=std)


@torch.no_grad()
def copy_last_layers(drafter: Drafter, target: Target) -> None:
    """Copy the last layers of the target, and its final norm, wherever names and shapes agree.

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
