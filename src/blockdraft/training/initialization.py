"""Make the drafter that a run starts with: its first weights, and the tokens that it may propose.

Weights come from chance, the target's own last layers, or another drafter. A reduced draft vocabulary is chosen from
the training texts, and measured by how far it can carry a drafter.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockdraft.data import TextDataset
from blockdraft.drafters import CheckpointError, Drafter, DrafterConfig, build_drafter, load_drafter
from blockdraft.drafters.config import recorded_fingerprint
from blockdraft.recipes import Recipe, RecipeError
from blockdraft.recipes.schema import DrafterSection
from blockdraft.targets import Target


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
    refuse_other_shape(part, config)
    num = part.num_proposals if "num_proposals" in part.model_fields_set else config.num_proposals
    changes = {"num_proposals": num, "confidence_head": False}
    drafter = build_drafter(config.replace(**changes, target_fingerprint=recorded_fingerprint(target)))
    tensors = {name: tensor for name, tensor in there.state_dict().items() if not name.startswith("confidence_head.")}
    drafter.load_state_dict(tensors)
    return drafter.float()


def refuse_other_shape(part: DrafterSection, config: DrafterConfig) -> None:
    """Raise if a drafter to train further is not of the kind that is trained, or of another shape than is stated."""
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


def choose_draft_ids(dataset: TextDataset, vocab_size: int, wanted: float) -> NDArray[np.int64]:
    """Return the most frequent response tokens, in ascending order.

    Args:
        dataset: the texts that the drafter is trained on.
        vocab_size: V, the target's.
        wanted: how many tokens, or the share of all response tokens to cover if it is below 1.
    """
    counts = np.bincount(response_tokens(dataset), minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")  # of equally frequent ones, the smaller ids
    if wanted >= 1:
        num = min(int(wanted), vocab_size)
    else:
        covered = np.cumsum(counts[order]) / counts.sum()
        num = int(np.searchsorted(covered, wanted)) + 1
    return np.sort(order[:num])


def response_tokens(dataset: TextDataset) -> NDArray[np.int64]:
    """Return the response tokens of all texts, end to end."""
    parts = [dataset[i][dataset.prompt_lengths[i] :] for i in range(len(dataset))]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Coverage:
    """Says what a reduced vocabulary leaves of held-out texts.

    share: of response tokens that are in it.
    longest: the mean number of tokens that a block of B could have accepted at most: those before the first token
        that is not in it. Verification cannot keep more of any text, whatever the drafter learns.
    """

    num_tokens: int
    share: float
    longest: float
    num_proposals: int

    def __str__(self) -> str:
        return (
            f"draft vocabulary: {self.num_tokens:,} tokens cover {self.share:.2%} of held-out responses; at most "
            f"{self.longest:.2f} of {self.num_proposals} drafted tokens can be accepted"
        )


def coverage(dataset: TextDataset, draft_ids: NDArray[np.int64], vocab_size: int, num_proposals: int) -> Coverage:
    """Measure a draft vocabulary on texts: how many tokens it covers, and the bound on lengths that follows."""
    known = np.zeros(vocab_size, dtype=bool)
    known[draft_ids] = True
    inside = total = 0
    reach: list[int] = []
    for i in range(len(dataset)):
        covered = known[dataset[i][dataset.prompt_lengths[i] :]]
        inside, total = inside + int(covered.sum()), total + len(covered)
        run = 0
        for position in range(len(covered) - 1, 0, -1):  # the anchor before a block is a response token, too
            run = run + 1 if covered[position] else 0
            if position + num_proposals <= len(covered):
                reach.append(min(run, num_proposals))
    share = inside / total if total else math.nan
    return Coverage(len(draft_ids), share, float(np.mean(reach)) if reach else math.nan, num_proposals)
