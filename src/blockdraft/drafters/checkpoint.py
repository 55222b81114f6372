"""Drafters on disk: ``config.json`` and ``model.safetensors``, every name and shape checked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.drafters.config import DrafterConfig
from blockdraft.drafters.drafter import Drafter, build_drafter
from blockdraft.drafters.foreign import read_config
from blockdraft.drafters.formats import format_of, frozen_names
from blockdraft.errors import BlockdraftError
from blockdraft.files import atomic_write
from blockdraft.targets import Target

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class CheckpointError(BlockdraftError):
    """A folder that is not a drafter for this target, with the reason."""


def save_drafter(drafter: Drafter, folder: str | Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights, the drafter's own unless given; each file appears whole or not at all."""
    folder = Path(folder)
    write_tensors(drafter.state_dict() if tensors is None else tensors, folder)
    write_json(drafter.config.to_dict(), folder)


def load_drafter(folder: str | Path, target: Target) -> Drafter:
    """Load a drafter for ``target``, on its device, in evaluation mode.

    The folder is one of ours, one of z-lab's or DeepSpec's, or one of the package speculators. Copies of the
    target's embedding and head in it must be copies of this target's.
    """
    folder = Path(folder)
    config = load_config(folder, target.num_layers)
    _check_target(config, target, folder)
    tensors = load_tensors(folder)
    if format_of(load_json(folder)) is not None:
        take_frozen(tensors, target, folder)
    drafter = build_drafter(config)
    check_tensors(drafter.state_dict(), tensors, folder)
    drafter.load_state_dict(tensors)
    return drafter.to(target.device).eval()


def load_config(folder: Path, num_target_layers: int | None = None) -> DrafterConfig:
    """The configuration of a drafter's folder, in any format."""
    values = load_json(folder)
    try:
        if format_of(values) is None:
            return DrafterConfig.from_dict(values)
        return read_config(values, num_target_layers)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_json(folder: Path) -> dict[str, Any]:
    """``config.json`` as it stands."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; a drafter's folder holds {CONFIG} and {WEIGHTS}")
    try:
        values = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder}: {CONFIG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder}: {CONFIG} holds no keys")
    return values


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of one file or of several with an index."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder}: {INDEX} cannot be read: {error}") from error
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}; a drafter's folder holds {CONFIG} and {WEIGHTS}")
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error}") from error
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """``model.safetensors``, whole or not at all."""
    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with atomic_write(folder / WEIGHTS) as unfinished:
        save_file(whole, unfinished, metadata={"format": "pt"})


def write_json(values: dict[str, Any], folder: Path) -> None:
    """``config.json``, whole or not at all."""
    with atomic_write(folder / CONFIG) as unfinished:
        unfinished.write_text(json.dumps(values, indent=2) + "\n")


def take_frozen(tensors: dict[str, Tensor], target: Target, folder: Path) -> None:
    """Remove the copies of the target's embedding and head, if they are there, and refuse others than copies."""
    for name, own in zip(frozen_names("dspark"), (target.embedding, target.head), strict=True):
        if name not in tensors:
            continue
        stored = tensors.pop(name)
        coarser = min(stored.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
        if stored.shape != own.shape or not torch.equal(stored.to(coarser), own.detach().cpu().to(coarser)):
            raise CheckpointError(
                f"{folder}: {name} is not a copy of that of {target.name}; a drafter here uses the target's own"
            )


def check_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse missing, unexpected and mis-shaped tensors by name."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name].shape != wanted[name].shape
    ]
    refuse([f"missing {n}" for n in missing] + [f"unexpected {n}" for n in unexpected] + shapes, folder)


def refuse(problems: list[str], folder: Path) -> None:
    """Raise if there are problems; the first five in words."""
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{folder}: {shown}")


def _check_target(config: DrafterConfig, target: Target, folder: Path) -> None:
    for what, ours, its in (
        ("width", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of layers", config.num_target_layers, target.num_layers),
    ):
        if ours != its:
            raise CheckpointError(f"{folder}: made for a target whose {what} is {ours}; that of {target.name} is {its}")
