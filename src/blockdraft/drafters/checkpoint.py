"""Find drafters on disk and on the Hub, and read and write their ``config.json`` and ``model.safetensors``.

Nothing is taken on trust: every name, shape and value of a tensor is checked, and so is the target it was made for.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft import files
from blockdraft.drafters.config import DrafterConfig, recorded_fingerprint
from blockdraft.drafters.drafter import Drafter, build_drafter
from blockdraft.drafters.formats import D2T, EMBEDDING, HEAD, T2D, format_of, read_config
from blockdraft.errors import BlockdraftError
from blockdraft.targets import Target
from blockdraft.targets.loading import refuse_unreachable_hub

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HOLDS = f"a drafter's folder holds {CONFIG} and {WEIGHTS}"
CHECKPOINTS = {"best": "best", "last": "checkpoint"}
"""Name the links in a run's folder that RUN@best (on held-out texts) and RUN@last mean; the best goes first."""
RUN = "run.json"
"""This file says of a folder that it is a run's."""

SHIPPED_FOLDER = Path(__file__).parent / "shipped"
SHIPPED: dict[str, Path] = {file.parent.name: file.parent for file in sorted(SHIPPED_FOLDER.glob(f"*/{CONFIG}"))}
"""Folders of drafters that come with the package, by the names that `load_drafter` takes."""

DRAFT_IDS = "draft_ids"
"""Names the tokens of a reduced draft vocabulary, the one tensor that is no weight."""


class CheckpointError(BlockdraftError):
    """A folder is not a drafter for this target, and the message says why."""


def save_drafter(drafter: Drafter, folder: str | Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights, the drafter's own unless given; each file appears whole or not at all."""
    folder = Path(folder)
    write_tensors(drafter.state_dict() if tensors is None else tensors, folder)
    write_config_json(drafter.config.to_dict(), folder)


def load_drafter(
    name_or_path: str | Path, target: Target, *, dtype: torch.dtype | None = None, same_target: bool = True
) -> Drafter:
    """Load a drafter for ``target``, on its device and in evaluation mode.

    Args:
        name_or_path: a drafter's folder, in our format or in one of z-lab, DeepSpec or the package speculators; a run's
            folder, of which the best checkpoint is taken, or the last one as ``RUN@last``; the name of a drafter that
            comes with the package, such as ``"pocket-dflash-bv"`` (a folder of that name here is
            ``"./pocket-dflash-bv"``); or the id of a repository on the Hugging Face Hub, which is downloaded once.
        target: the model to draft for. Shapes must fit, and so must its fingerprint, if the drafter records one.
        dtype: of the weights; the target's unless given. Training asks for float32.
        same_target: refuse a drafter of another target of the same shapes. Pass False to start from one, for example
            when the target was fine-tuned; decoding with it is lossless, but keeps fewer tokens.
    """
    folder = find_drafter(name_or_path)
    config = load_config(folder, target.num_layers)
    _check_target(config, target, folder, same_target)
    tensors = load_tensors(folder)
    if format_of(load_json(folder)) is not None:
        take_draft_ids(tensors, config, folder)
        take_frozen(tensors, target, folder, compare=same_target)
    with torch.device("meta"):  # no storage before it is known that the tensors fit
        drafter = build_drafter(config)
    check_tensors(drafter.state_dict(), tensors, folder)
    check_values(tensors, folder)
    check_draft_ids(tensors, config, folder)
    drafter.load_state_dict(_converted(tensors, dtype or target.dtype, folder), assign=True)
    return drafter.to(target.device).eval()


def find_drafter(name_or_path: str | Path) -> Path:
    """Return the folder of a drafter, given in any of the ways that `load_drafter` takes."""
    name = str(name_or_path)
    if name in SHIPPED:
        return SHIPPED[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _best(folder)
    run, _, which = name.rpartition("@")
    if which in CHECKPOINTS and (Path(run).expanduser() / RUN).exists():
        return _checkpoint(Path(run).expanduser(), which)
    if folder.exists():
        raise CheckpointError(f"{name} is a file; {HOLDS}")
    if is_on_hub(name):
        return _best(_download(name))
    there = [str(path) for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(name, [*SHIPPED, *there], n=1, cutoff=0.8)
    if near:
        raise CheckpointError(f"{name}: no such folder; did you mean {near[0]}?")
    if "/" not in name and SHIPPED:
        raise CheckpointError(f"{name}: no such folder, and no shipped drafter: {', '.join(sorted(SHIPPED))}")
    raise CheckpointError(f"{name}: no such folder; {HOLDS}")


def is_on_hub(name: str) -> bool:
    """Return whether the name of a drafter is that of a repository on the Hugging Face Hub, and of no folder here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(Path(name).parts[0]).exists()


def _best(folder: Path) -> Path:
    """Return the best checkpoint of a run's folder, and any other folder as it is."""
    if (folder / CONFIG).exists():
        return folder
    found = _first_checkpoint(folder, CHECKPOINTS)
    if found is not None and not (folder / RUN).exists():
        raise CheckpointError(
            f"{folder} has checkpoints but no {RUN}, so nobody knows of what; put it back, or name one of them: {found}"
        )
    return found or folder


def _checkpoint(run: Path, which: str) -> Path:
    """Return the best or the last checkpoint of a run; before anything is measured, the last is the best."""
    found = _first_checkpoint(run, CHECKPOINTS if which == "best" else [which])
    if found is None:
        raise CheckpointError(f"{run} has no checkpoint yet; the command that began the run goes on with it")
    return found


def _first_checkpoint(run: Path, wanted: Iterable[str]) -> Path | None:
    """Return the first of these checkpoints that a run's folder has."""
    links = (run / CHECKPOINTS[which] for which in wanted)
    return next((link for link in links if (link / CONFIG).exists()), None)


def _download(repository: str) -> Path:
    """Return the local copy of a repository on the Hub."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # a second that a local folder does not need

    try:
        if not isinstance(try_to_load_from_cache(repository, CONFIG), str):
            refuse_unreachable_hub(repository, CheckpointError)
        return Path(snapshot_download(repository, allow_patterns=[CONFIG, INDEX, "*.safetensors"]))
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{repository}: no such folder here, and it cannot be had from the Hub: {reason}"
        ) from error


def load_config(folder: Path, num_target_layers: int | None = None) -> DrafterConfig:
    """Read the configuration of a drafter's folder, in any format."""
    values = load_json(folder)
    try:
        return DrafterConfig.from_dict(values) if format_of(values) is None else read_config(values, num_target_layers)
    except BlockdraftError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error


def load_json(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` as it stands."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; {HOLDS}")
    values = files.read_json(file, CheckpointError)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no keys; it must be a JSON object")
    return values


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, of one file or of several with an index."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return tensors


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of a drafter's weights on disk, that of ``fc.weight``; only headers are read."""
    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt") as stored:
                if "fc.weight" in stored.keys():  # noqa: SIM118  (not a mapping)
                    return stored.get_slice("fc.weight")[:0].dtype  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    raise CheckpointError(f"{folder}: missing fc.weight")


def _weight_files(folder: Path) -> list[Path]:
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        index = files.read_json(folder / INDEX, CheckpointError)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict) or not named or not all(isinstance(each, str) for each in named.values()):
            raise CheckpointError(f"{folder / INDEX} is damaged: its weight_map must name the file of every tensor")
        names = sorted(set(named.values()))
    for name in names:
        if Path(str(name)).name != name:
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}; {HOLDS}")
    return [folder / name for name in names]


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``model.safetensors``, whole or not at all."""
    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with files.atomic_write(folder / WEIGHTS) as unfinished, files.naming_write_errors(folder / WEIGHTS):
        save_file(whole, unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)  # safetensors leaves it to the owner alone, and servers run as somebody else


def write_config_json(values: dict[str, Any], folder: Path) -> None:
    """Write ``config.json``, whole or not at all."""
    files.write_json(values, folder / CONFIG)


def take_draft_ids(tensors: dict[str, Tensor], config: DrafterConfig, folder: Path) -> None:
    """Replace the engines' offsets and mask of a reduced draft vocabulary by our ids."""
    offsets, known = tensors.pop(D2T, None), tensors.pop(T2D, None)
    if config.draft_vocab_size is None or offsets is None:
        return  # a whole vocabulary needs neither; a missing one is named later
    if offsets.shape != (config.draft_vocab_size,) or offsets.is_floating_point():
        refuse([f"{D2T} must be {config.draft_vocab_size} offsets, got {offsets.dtype} {list(offsets.shape)}"], folder)
    ids = torch.arange(len(offsets)) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        refuse([f"{D2T} leads outside of the vocabulary of {config.vocab_size}"], folder)
    if known is not None and known.bool().nonzero().flatten().tolist() != sorted(ids.tolist()):
        refuse([f"{T2D} marks other tokens than {D2T} leads to"], folder)
    tensors[DRAFT_IDS] = ids


def take_frozen(tensors: dict[str, Tensor], target: Target, folder: Path, *, compare: bool = True) -> None:
    """Remove the copies of the target's embedding and head, if they are there; ``compare`` refuses any that are not."""
    ids = tensors.get(DRAFT_IDS)
    head = target.head if ids is None else target.head[ids.to(target.device)]
    for name, own in ((EMBEDDING, target.embedding), (HEAD, head)):
        stored = tensors.pop(name, None)
        if stored is None or not compare:
            continue
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


def check_values(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse tensors that hold something else than finite numbers, by name."""
    numbers = {name: tensor for name, tensor in tensors.items() if name != DRAFT_IDS}
    refuse([f"{n} is {t.dtype}, not floating-point" for n, t in numbers.items() if not t.is_floating_point()], folder)
    refuse([f"{n} holds NaN or infinity" for n, t in numbers.items() if not t.isfinite().all()], folder)


def check_draft_ids(tensors: Mapping[str, Tensor], config: DrafterConfig, folder: Path) -> None:
    """Refuse draft ids that are not different tokens of the target, in ascending order."""
    ids = tensors.get(DRAFT_IDS)
    if ids is None:
        return
    good = ids.dtype == torch.int64 and bool((ids.diff() > 0).all())
    if not good or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        refuse([f"{DRAFT_IDS} must be different token ids below {config.vocab_size}, ascending, int64"], folder)


def _converted(tensors: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    """Return copies in this dtype, independent of the file they were read from."""
    copies = {
        name: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in tensors.items()
    }
    if dtype is torch.float16:  # the only one that may overflow
        refuse([f"{n} holds values beyond float16" for n, t in copies.items() if not t.isfinite().all()], folder)
    return copies


def refuse(problems: list[str], folder: Path) -> None:
    """Raise if there are problems; the first five in words."""
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{folder}: {shown}")


def _check_target(config: DrafterConfig, target: Target, folder: Path, same_target: bool) -> None:
    for what, ours, its in (
        ("width", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of layers", config.num_target_layers, target.num_layers),
    ):
        if ours != its:
            raise CheckpointError(f"{folder}: made for a target whose {what} is {ours}; that of {target.name} is {its}")
    if config.target_fingerprint is None or not same_target:
        return
    found = recorded_fingerprint(target)
    if found not in (None, config.target_fingerprint):
        raise CheckpointError(
            f"{folder}: made for the target with fingerprint {config.target_fingerprint}; {target.name} has the same "
            f"shapes but other weights, fingerprint {found}. Give the target it was made for, or train it further for "
            "this one with drafter.initial"
        )
