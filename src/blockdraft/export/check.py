"""Is this folder what an engine will read as the drafter it came from?"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters import Anchors, CheckpointError, Drafter, DrafterConfig, build_drafter, load_drafter
from blockdraft.drafters.checkpoint import check_tensors, load_config, load_json, load_tensors, refuse
from blockdraft.drafters.foreign import surroundings
from blockdraft.drafters.formats import Format, FormatError, Surroundings, format_of, frozen_names, write_config
from blockdraft.export.drafter import exported_tensors
from blockdraft.targets import DTYPES, Target

PROBE_LENGTH = 24


@dataclass
class Checked:
    """What was found right, a line each; what was wrong was raised."""

    folder: Path
    flavour: Format
    lines: list[str] = field(default_factory=list)


def check_export(folder: str | Path, *, target: Target | None = None, checkpoint: str | Path | None = None) -> Checked:
    """Check an export; raise `CheckpointError` with the reason at the first kind of fault.

    Args:
        folder: in either engine format.
        target: if given, the target must fit and the frozen copies be copies of its tensors.
        checkpoint: if given, with the target, configuration, tensors and logits must be those of this checkpoint.
    """
    folder = Path(folder)
    values = load_json(folder)
    kind = format_of(values)
    if kind is None:
        raise CheckpointError(f"{folder}: a checkpoint of ours, not an export; blockdraft export makes one of it")
    checked = Checked(folder, kind)
    config = load_config(folder, None if target is None else target.num_layers)
    around = _check_config(folder, values, config)
    checked.lines.append(f"configuration: {config.kind}, {config.num_proposals} proposals, {config.slot_layout} slots")
    tensors = load_tensors(folder)
    _check_tensors(folder, config, tensors, around.dtype)
    checked.lines.append(f"tensors: {len(tensors)}, names and shapes as they must be, all {around.dtype}, all finite")
    if target is None:
        checked.lines.append("target: not given, so neither it nor logits were compared")
        return checked
    reloaded = load_drafter(folder, target)
    frozen = frozen_names(config.kind)
    checked.lines.append(f"target: {target.name} fits" + (f"; {' and '.join(frozen)} are its own" if frozen else ""))
    if checkpoint is None:
        checked.lines.append("checkpoint: not given, so logits were not compared")
        return checked
    _check_checkpoint(folder, reloaded, load_drafter(checkpoint, target), target, tensors)
    checked.lines.append(
        f"checkpoint: the tensors of {checkpoint}, and its logits on {PROBE_LENGTH} tokens, bit for bit"
    )
    return checked


def _check_config(folder: Path, values: dict[str, Any], config: DrafterConfig) -> Surroundings:
    """Every key as we would write it for this drafter; keys of others are left alone."""
    kind = format_of(values)
    assert kind is not None
    try:
        around = surroundings(values)
        if around.dtype not in DTYPES:
            raise FormatError(f"dtype is {around.dtype!r}; known: {', '.join(DTYPES)}")
        expected = write_config(kind, config, around)
    except FormatError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if kind == "speculators":  # names that neither the package nor vLLM goes by
        for name in ("architectures", "speculators_version"):
            del expected[name]
    refuse(_differences(expected, values), folder)
    return around


def _differences(expected: dict[str, Any], found: dict[str, Any], path: str = "") -> list[str]:
    problems = []
    for key, value in expected.items():
        name = f"{path}{key}"
        if key not in found:
            problems.append(f"{name} is missing; it must be {value!r}")
        elif isinstance(value, dict) and isinstance(found[key], dict):
            problems += _differences(value, found[key], f"{name}.")
        elif found[key] != value:
            problems.append(f"{name} is {found[key]!r}; it must be {value!r}")
    return problems


def _check_tensors(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], dtype: str) -> None:
    with torch.device("meta"):
        wanted = dict(build_drafter(config).state_dict())
        for name in frozen_names(config.kind):
            wanted[name] = torch.empty(config.vocab_size, config.hidden_size)
    check_tensors(wanted, tensors, folder)
    refuse(
        [
            f"{name} is {t.dtype}, the configuration says {dtype}"
            for name, t in tensors.items()
            if t.dtype != DTYPES[dtype]
        ],
        folder,
    )
    refuse([f"{name} holds NaN or infinity" for name, t in tensors.items() if not t.isfinite().all()], folder)


def _check_checkpoint(
    folder: Path, reloaded: Drafter, original: Drafter, target: Target, tensors: dict[str, Tensor]
) -> None:
    ours, theirs = (each.config.to_dict() for each in (original, reloaded))
    refuse(
        [f"{key} is {theirs[key]!r}; the checkpoint's is {ours[key]!r}" for key in ours if ours[key] != theirs[key]],
        folder,
    )
    dtype = tensors["fc.weight"].dtype
    expected = exported_tensors(original, target, dtype)
    refuse(
        [f"{name} is not the checkpoint's" for name, t in expected.items() if not torch.equal(t, tensors[name])], folder
    )
    original = original.to(dtype).to(reloaded.fc.weight.dtype)
    if not torch.equal(probe_logits(reloaded, target), probe_logits(original, target)):
        raise CheckpointError(f"{folder}: the reloaded drafter's logits are not the checkpoint's")


@torch.no_grad()
def probe_logits(drafter: Drafter, target: Target) -> Tensor:
    """``[A, B, V]`` logits of blocks all over a fixed random text, the Markov head's share included."""
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (1, PROBE_LENGTH + config.num_proposals), generator=generator)
    tokens = tokens.to(target.device)
    features = target.forward(tokens, layers=config.target_layers).features
    assert features is not None
    position = torch.arange(1, PROBE_LENGTH, 3, device=target.device)
    path = tokens[0, position[:, None] + torch.arange(config.num_proposals, device=target.device)]
    hidden = drafter(
        features.to(drafter.fc.weight.dtype), path[:, 0], Anchors.of(torch.zeros_like(position), position), target
    )
    return drafter.logits(hidden, path, target).float()
