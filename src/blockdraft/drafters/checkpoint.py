"""Drafters on disk: ``config.json`` and ``model.safetensors``, every name and shape checked."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.atomic import replacing
from blockdraft.drafters.config import DrafterConfig
from blockdraft.drafters.drafter import Drafter, build_drafter
from blockdraft.targets import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class CheckpointError(ValueError):
    """A folder that is not a drafter for this target, with the reason."""


def save_drafter(drafter: Drafter, folder: str | Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights, the drafter's own unless given; each file appears whole or not at all."""
    folder = Path(folder)
    tensors = drafter.state_dict() if tensors is None else tensors
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with replacing(folder / WEIGHTS) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    with replacing(folder / CONFIG) as unfinished:
        unfinished.write_text(json.dumps(drafter.config.to_dict(), indent=2) + "\n")


def load_drafter(folder: str | Path, target: Target) -> Drafter:
    """Load a drafter for ``target``, on its device, in evaluation mode."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}; a drafter's folder holds {CONFIG} and {WEIGHTS}")
    try:
        config = DrafterConfig.from_dict(json.loads((folder / CONFIG).read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    _check_target(config, target, folder)
    drafter = build_drafter(config)
    tensors = load_file(folder / WEIGHTS)
    _check_tensors(drafter, {name: tuple(t.shape) for name, t in tensors.items()}, folder)
    drafter.load_state_dict(tensors)
    return drafter.to(target.device).eval()


def _check_target(config: DrafterConfig, target: Target, folder: Path) -> None:
    for what, ours, its in (
        ("width", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of layers", config.num_target_layers, target.num_layers),
    ):
        if ours != its:
            raise CheckpointError(f"{folder}: made for a target whose {what} is {ours}; that of {target.name} is {its}")


def _check_tensors(drafter: Drafter, found: dict[str, tuple[int, ...]], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [
        f"{n} is {found[n]}, not {wanted[n]}" for n in sorted(wanted.keys() & found.keys()) if found[n] != wanted[n]
    ]
    if missing or unexpected or shapes:
        problems = [f"missing {n}" for n in missing] + [f"unexpected {n}" for n in unexpected] + shapes
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{folder}: {shown}")
