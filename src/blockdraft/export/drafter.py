"""A drafter as a folder for an engine: tensors, ``config.json``, card."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.drafters import CheckpointError, Drafter
from blockdraft.drafters.checkpoint import CONFIG, WEIGHTS, write_json, write_tensors
from blockdraft.drafters.formats import Format, FormatError, Surroundings, frozen_names, write_config
from blockdraft.export.card import CARD, write_card
from blockdraft.export.folder import new_folder
from blockdraft.export.run import RunFacts
from blockdraft.targets import DTYPES, Target

FILES = frozenset({CONFIG, WEIGHTS, CARD})


@dataclass(frozen=True)
class Exported:
    """What was written.

    num_tensors, num_bytes: of the weights, the frozen copies among them.
    """

    folder: Path
    flavour: Format
    dtype: str
    num_tensors: int
    num_bytes: int


def export_drafter(
    drafter: Drafter,
    target: Target,
    folder: str | Path,
    flavour: Format,
    *,
    dtype: torch.dtype | None = None,
    verifier: str | None = None,
    facts: RunFacts | None = None,
    force: bool = False,
) -> Exported:
    """Write a drafter in an engine's format.

    Args:
        drafter, target: the drafter and whom it drafts for.
        folder: a new or empty folder.
        flavour: ``flat`` or ``speculators``.
        dtype: of the tensors; the drafter's own, which loses nothing, unless given.
        verifier: the name or path under which the engine finds the target; its name here if not given.
        facts: of the run that made the drafter, for the card.
        force: replace an export that is there.
    """
    folder = Path(folder)
    dtype = dtype or drafter.fc.weight.dtype
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise CheckpointError(f"weights of {dtype} cannot be served; choose one of {', '.join(DTYPES)}")
    around = Surroundings(
        max_positions=target.config.max_position_embeddings,
        dtype=names[dtype],
        verifier=verifier or target.name,
        verifier_architectures=(type(target.model).__name__,),
    )
    try:
        values = write_config(flavour, drafter.config, around)
    except FormatError as error:
        raise CheckpointError(f"this drafter cannot be exported as {flavour}: {error}") from error
    tensors = exported_tensors(drafter, target, dtype)
    with new_folder(folder, FILES, force=force) as unfinished:
        write_tensors(tensors, unfinished)
        write_json(values, unfinished)
        write_card(unfinished, drafter.config, target, flavour, around, facts or RunFacts())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return Exported(folder, flavour, around.dtype, len(tensors), num_bytes)


def exported_tensors(drafter: Drafter, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """The drafter's tensors, and for DSpark copies of the target's embedding and head."""
    own = dict(drafter.state_dict())
    frozen = zip(frozen_names("dspark"), (target.embedding, target.head), strict=True)
    own |= {name: tensor for name, tensor in frozen if name in frozen_names(drafter.config.kind)}
    # a tied head is the embedding itself: safetensors refuses tensors that share memory
    return {name: tensor.detach().cpu().to(dtype, copy=True) for name, tensor in own.items()}
