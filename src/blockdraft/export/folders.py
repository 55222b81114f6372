"""Write drafters and targets as folders that engines read.

A drafter's folder has tensors, ``config.json`` and a card, and can be checked for the known traps. A target's is an
ordinary Hugging Face folder, which also engines built on transformers 4 can load.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters import (
    Anchors,
    CheckpointError,
    Drafter,
    DrafterConfig,
    build_drafter,
    find_drafter,
    load_drafter,
)
from blockdraft.drafters.checkpoint import (
    CONFIG,
    DRAFT_IDS,
    WEIGHTS,
    check_tensors,
    check_values,
    load_config,
    load_json,
    load_tensors,
    refuse,
    write_config_json,
    write_tensors,
)
from blockdraft.drafters.formats import (
    D2T,
    EMBEDDING,
    HEAD,
    T2D,
    Format,
    FormatError,
    Surroundings,
    format_of,
    frozen_names,
    surroundings,
    write_config,
)
from blockdraft.export.card import CARD, RunFacts, licence_of, public_name, save_card, write_card
from blockdraft.files import atomic_folder, naming_write_errors, refuse_full_disk, write_json
from blockdraft.targets import DTYPES, Target, UnsupportedTargetError

DRAFTER_FILES = frozenset({CONFIG, WEIGHTS, CARD})
PROBE_LENGTH = 24


@contextmanager
def replacing(folder: Path, like: frozenset[str], *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder that takes the place of ``folder`` once it is filled.

    Args:
        folder: where it goes. One that holds anything is refused, unless it may be replaced.
        like: patterns of the files of such a folder; one that holds anything else is never replaced.
        force: replace a folder that holds only such files.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose a new folder with --out")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there and not force:
        raise CheckpointError(f"{folder} is not empty; choose another folder, or replace an export there with --force")
    strange = sorted(name for name in there if not any(fnmatch(name, pattern) for pattern in like))
    if strange:
        raise CheckpointError(f"{folder} holds more than an export ({', '.join(strange[:3])}); choose another folder")
    with atomic_folder(folder) as unfinished:
        yield unfinished


# Writing


@dataclass(frozen=True)
class Exported:
    """Says what was written.

    num_tensors, num_bytes: of the weights, the frozen copies among them.
    verifier: the name or path under which the configuration says that the engine finds the target.
    """

    folder: Path
    flavour: Format
    dtype: str
    num_tensors: int
    num_bytes: int
    verifier: str


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
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    refuse_full_disk(folder, num_bytes, "the weights")
    with replacing(folder, DRAFTER_FILES, force=force) as unfinished:
        write_tensors(tensors, unfinished)
        write_config_json(values, unfinished)
        write_card(unfinished, drafter.config, target, flavour, around, facts or RunFacts())
    return Exported(folder, flavour, around.dtype, len(tensors), num_bytes, around.verifier)


def exported_tensors(drafter: Drafter, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the drafter's tensors, and for DSpark copies of the target's embedding and head."""
    own = dict(drafter.state_dict())
    ids = own.pop(DRAFT_IDS, None)
    frozen = {EMBEDDING: target.embedding, HEAD: drafter.head(target)}
    own |= {name: frozen[name] for name in frozen_names(drafter.config)}
    # a tied head is the embedding itself: safetensors refuses tensors that share memory
    tensors = {name: tensor.detach().cpu().to(dtype, copy=True) for name, tensor in own.items()}
    if ids is not None:
        ids = ids.cpu()
        known = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {D2T: ids - torch.arange(len(ids)), T2D: known}
    return tensors


def original_format(folder: Path, facts: RunFacts) -> Format | None:
    """Return the format that a drafter came in: its folder's, or that of the drafter which its run trained further.

    None where neither has one, or where the drafter that a run began with is no longer there.
    """
    own = format_of(load_json(folder))
    initial = None if facts.info is None else facts.info.recipe.drafter.initial
    if own is not None or initial in (None, "scratch", "target"):
        return own
    try:
        return format_of(load_json(find_drafter(str(initial))))
    except CheckpointError:
        return None


# Checking


@dataclass
class Checked:
    """Says what was found right, a line each; what was wrong was raised."""

    folder: Path
    flavour: Format
    lines: list[str] = field(default_factory=list)


def check_export(folder: str | Path, *, target: Target | None = None, checkpoint: str | Path | None = None) -> Checked:
    """Check that engines will read a folder as the drafter it came from; raise `CheckpointError` with what is wrong.

    Args:
        folder: in either engine format.
        target: if given, the target must fit and the frozen copies be copies of its tensors.
        checkpoint: if given, with the target, configuration, tensors and logits must be those of this checkpoint.
    """
    folder = Path(folder)
    values = load_json(folder)
    flavour = format_of(values)
    if flavour is None:
        raise CheckpointError(f"{folder}: a checkpoint of ours, not an export; blockdraft export makes one of it")
    checked = Checked(folder, flavour)
    config = load_config(folder, None if target is None else target.num_layers)
    around = _check_config(folder, values, flavour, config)
    checked.lines.append(f"configuration: {config.kind}, {config.num_proposals} proposals, {config.slot_layout} slots")
    tensors = load_tensors(folder)
    _check_weights(folder, config, tensors, around.dtype)
    checked.lines.append(f"tensors: {len(tensors)}, names and shapes as they must be, all {around.dtype}, all finite")
    if target is None:
        checked.lines.append("target: not given, so neither it nor logits were compared")
        return checked
    reloaded = load_drafter(folder, target)
    frozen = frozen_names(config)
    checked.lines.append(f"target: {target.name} fits" + (f"; {' and '.join(frozen)} are its own" if frozen else ""))
    if checkpoint is None:
        checked.lines.append("checkpoint: not given, so logits were not compared")
        return checked
    original = load_drafter(checkpoint, target, dtype=DTYPES[around.dtype])
    _check_checkpoint(folder, reloaded, original, target, tensors)
    checked.lines.append(
        f"checkpoint: the tensors of {checkpoint}, and its logits on {PROBE_LENGTH} tokens, bit for bit"
    )
    return checked


def _check_config(folder: Path, values: dict[str, Any], flavour: Format, config: DrafterConfig) -> Surroundings:
    """Compare every key with what we would write for this drafter; keys of others are left alone."""
    try:
        around = surroundings(values)
        if around.dtype not in DTYPES:
            raise FormatError(f"dtype is {around.dtype!r}; known: {', '.join(DTYPES)}")
        expected = write_config(flavour, config, around)
    except FormatError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    # names that neither the package nor vLLM goes by, and a number that only must be there
    free = ("architectures", "speculators_version") if flavour == "speculators" else ("num_anchors",)
    for name in free:
        if name in expected and name in values:
            del expected[name]
    refuse(_differences(expected, values), folder / CONFIG)
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


def _check_weights(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], dtype: str) -> None:
    with torch.device("meta"):
        wanted = dict(build_drafter(config).state_dict())
        for name in frozen_names(config):
            rows = config.vocab_size if name == EMBEDDING else config.num_draft_tokens
            wanted[name] = torch.empty(rows, config.hidden_size)
        if wanted.pop(DRAFT_IDS, None) is not None:
            wanted |= {D2T: torch.empty(config.num_draft_tokens), T2D: torch.empty(config.vocab_size)}
    check_tensors(wanted, tensors, folder)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in (D2T, T2D)}
    others = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype != DTYPES[dtype]}
    refuse([f"{name} is {found}, but {CONFIG} says {dtype}" for name, found in others.items()], folder)
    check_values(tensors, folder)


def _check_checkpoint(
    folder: Path, reloaded: Drafter, original: Drafter, target: Target, tensors: dict[str, Tensor]
) -> None:
    """Compare with the checkpoint that was exported, loaded in the dtype of the export."""
    ours, theirs = (each.config.to_dict() for each in (original, reloaded))
    if theirs["target_fingerprint"] is None:
        del ours["target_fingerprint"]  # exports of older versions record none
    refuse(
        [f"{key} is {theirs[key]!r}; the checkpoint's is {ours[key]!r}" for key in ours if ours[key] != theirs[key]],
        folder,
    )
    expected = exported_tensors(original, target, original.fc.weight.dtype)
    refuse(
        [f"{name} is not the checkpoint's" for name, t in expected.items() if not torch.equal(t, tensors[name])], folder
    )
    if not torch.equal(probe_logits(reloaded, target), probe_logits(original.to(target.dtype), target)):
        raise CheckpointError(f"{folder}: the reloaded drafter's logits are not the checkpoint's")


@torch.no_grad()
def probe_logits(drafter: Drafter, target: Target) -> Tensor:
    """Return logits ``[A, B, V]`` of blocks all over a fixed random text, the Markov head's share included."""
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


TARGET_FILES = frozenset(
    {
        CARD, "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model*.safetensors",
        "model.safetensors.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
        "vocab.json",
    }
)  # fmt: skip


def export_target(target: Target, folder: str | Path, *, force: bool = False) -> Path:
    """Write configuration, weights, tokenizer and chat template.

    The mask token of the drafters is written into the tokenizer, so that the folder, loaded as a target, has the
    same one. It is a row of the embedding that is there already; nothing is added to the vocabulary.
    """
    folder = Path(folder)
    if target.tokenizer is None:
        raise UnsupportedTargetError(f"{target.name} has no tokenizer; engines need one")
    tokenizer = copy.deepcopy(target.tokenizer)
    mask = target.mask_token_id
    if tokenizer.mask_token_id != mask:
        name = tokenizer.convert_ids_to_tokens(mask)
        if name is not None:  # Qwen3's is a row beyond the tokenizer; the family is known
            tokenizer.mask_token = name
    if tokenizer.mask_token_id not in (None, mask):
        raise CheckpointError(f"{target.name}: the tokenizer would not keep {mask} as its mask token")
    weights = target.model.parameters()
    refuse_full_disk(folder, sum(each.numel() * each.element_size() for each in weights), "the weights")
    with replacing(folder, TARGET_FILES, force=force) as unfinished:
        with naming_write_errors(folder):
            target.model.save_pretrained(unfinished)
            try:
                tokenizer.save_pretrained(unfinished)
            except UnicodeEncodeError as error:
                raise CheckpointError(f"{target.name}: its tokenizer's files hold text that is not Unicode") from error
        _rewrite(unfinished / "config.json", readable_config)
        _rewrite(unfinished / "tokenizer_config.json", readable_tokenizer)
        licence, dtype = licence_of(target), str(target.dtype).removeprefix("torch.")
        text = f"Written by `blockdraft export-target`, weights in {dtype}. Licence: {licence or 'not recorded'}."
        save_card(unfinished, [f"# {public_name(target.name)}", text], license=licence)
    return folder


def readable_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with what transformers 4 looks for under other names.

    It reads ``rope_theta`` at the top and falls back to 10,000 without a word; ``rope_scaling`` instead of
    ``rope_parameters``; and, up to 4.55, ``torch_dtype`` instead of ``dtype``. transformers 5 reads both.
    """
    rope = dict(values.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None)
    older: dict[str, Any] = {}
    if theta is not None:
        older["rope_theta"] = theta
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = rope
    if "dtype" in values:
        older["torch_dtype"] = values["dtype"]
    return older | values


def readable_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's configuration that transformers 4 can load as well.

    It does not know the class ``TokenizersBackend``, which is `PreTrainedTokenizerFast` under another name, and takes
    a list of further special tokens as ``additional_special_tokens``. Where the tokenizer was loaded from is left out.
    """
    values = {key: value for key, value in values.items() if key not in ("backend", "is_local", "local_files_only")}
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    return values


def _rewrite(file: Path, change: Any) -> None:
    write_json(change(json.loads(file.read_text(encoding="utf-8"))), file)
