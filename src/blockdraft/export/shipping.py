"""Put a run's checkpoint into the package as a shipped drafter: rounded to bfloat16, described, with a model card."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from blockdraft.data import DataError, read_manifest
from blockdraft.drafters import CheckpointError, DrafterConfig, build_drafter
from blockdraft.drafters.checkpoint import (
    SHIPPED_FOLDER,
    check_tensors,
    check_values,
    load_config,
    load_tensors,
    write_config_json,
    write_tensors,
)
from blockdraft.evaluation import Candidate, EvaluationError, Results
from blockdraft.evaluation.candidates import (
    RECORD,
    MeasuredLengths,
    Measurement,
    ShippedDrafter,
    TrainingTexts,
    label_of,
)
from blockdraft.export.card import (
    BUILT_IN_LICENCES,
    NAMES,
    UNKNOWN,
    markdown_table,
    public_name,
    record_in_words,
    save_card,
)
from blockdraft.export.folders import DRAFTER_FILES, replacing
from blockdraft.files import Provenance
from blockdraft.recipes import Recipe, load_recipe, shipped_names
from blockdraft.recipes.schema import KNOWN_INITIAL
from blockdraft.runs import Run

MACHINE = ("runtime", "logging")
"""Sections of a recipe that say where and how a run computed; of them only the precision decides the weights."""


def ship(
    run: str | Path,
    name: str,
    *,
    results: Results | None = None,
    commands: Sequence[str] = (),
    checkpoint: Literal["best", "last"] = "best",
    num_proposals: int | None = None,
    out: str | Path = SHIPPED_FOLDER,
    force: bool = False,
) -> Path:
    """Write a checkpoint of a run as the shipped drafter ``out/name``, and return the folder.

    Args:
        run: the run's folder.
        name: of the shipped drafter.
        results: of an evaluation that has this very drafter in it, by its fingerprint; the run's checkpoint and the
            shipped folder count as the same.
        commands: what made the data, in the order it was run; the training command is derived from the recipe.
        checkpoint: which one of the run.
        num_proposals: how many tokens the shipped drafter proposes, at most those it was trained with; None is all.
        out: the folder that holds the shipped drafters.
        force: replace a shipped drafter of this name.
    """
    opened = Run.open(run)
    source = opened.checkpoint(checkpoint)
    found = Run.of_checkpoint(source)
    assert found is not None
    config = load_config(source)
    if config.target_fingerprint is None:
        raise CheckpointError(f"{source} does not record its target's fingerprint, so it cannot be shipped")
    if num_proposals is not None:
        if not 1 <= num_proposals <= config.num_proposals:
            raise CheckpointError(
                f"{source} was trained to propose {config.num_proposals} tokens, not {num_proposals}; choose a number "
                "from 1 to that"
            )
        config = config.replace(num_proposals=num_proposals)
    tensors = rounded(load_tensors(source))
    with torch.device("meta"):
        empty = build_drafter(config)
    check_tensors(empty.state_dict(), tensors, source)
    check_values(tensors, source)
    drafter = empty.to_empty(device="cpu")
    drafter.load_state_dict(tensors, assign=True)
    fingerprint = Candidate(name, source, drafter).fingerprint
    recipe = public_recipe(opened.recipe.resolved())
    record = ShippedDrafter(
        name=name, target=public_name(opened.info.target.name), target_fingerprint=config.target_fingerprint,
        label=label_of(opened.recipe), recipe=recipe, commands=[*commands, training_command(recipe, name)],
        step=found[1], num_steps=opened.info.num_steps, data=_texts(opened), provenance=opened.info.provenance,
        num_parameters=sum(each.numel() for each in drafter.parameters()), fingerprint=fingerprint,
        num_bytes=sum(each.numel() * each.element_size() for each in tensors.values()),
        measured=None if results is None else measurement(results, fingerprint),
    )  # fmt: skip
    with replacing(Path(out) / name, DRAFTER_FILES | {RECORD}, force=force) as unfinished:
        write_tensors(tensors, unfinished)
        write_config_json(config.to_dict(), unfinished)
        record.write(unfinished)
        write_shipped_card(unfinished, record, config)
    return Path(out) / name


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in bfloat16; what is no weight, such as the ids of a reduced vocabulary, stays as it is."""
    return {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in tensors.items()}


def public_recipe(recipe: Recipe) -> Recipe:
    """Return a recipe that says nothing of the machine it ran on but the precision, which decides the figures.

    Paths below the working folder stay; of all others only the last part does.
    """
    values = recipe.model_dump(mode="json")
    for key in ("path", "cache"):
        values["data"][key] = values["data"][key] and public_path(values["data"][key])
    initial = values["drafter"]["initial"]
    if "/" in initial:
        values["drafter"]["initial"] = f"./{public_path(initial)}"
    values["target"]["name"] = public_name(values["target"]["name"])
    for section in MACHINE:
        values[section] = Recipe().model_dump(mode="json")[section]
    values["runtime"]["precision"] = recipe.runtime.precision
    return Recipe.model_validate(values)


def public_path(path: str) -> str:
    """Return a path below the working folder as it is, and only the last part of any other."""
    given = Path(path)
    return given.name if given.is_absolute() or ".." in given.parts else str(given)


def training_command(recipe: Recipe, name: str) -> str:
    """Return the command that trains by this recipe, as changes of the shipped recipe that is nearest to it."""
    target = Path(recipe.target.name).name.lower()
    nearest = f"{target}-{recipe.drafter.kind}-{recipe.objective.name}"
    if nearest not in shipped_names():
        return f"blockdraft train recipe.yaml --out runs/{name}"
    ours, theirs = (_flat(each.resolved().model_dump(mode="json")) for each in (recipe, load_recipe(nearest)))
    changes = [
        f"{key}={json.dumps(value) if isinstance(value, list | dict) else yaml_scalar(value)}"
        for key, value in ours.items()
        if (key not in theirs or theirs[key] != value) and (key == "runtime.precision" or not key.startswith(MACHINE))
    ]
    return shlex.join(["blockdraft", "train", nearest, *changes, "--out", f"runs/{name}"])


def yaml_scalar(value: Any) -> str:
    """Write a value as `blockdraft train` reads it behind ``key=``."""
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("\n").removesuffix("...").strip()


def measurement(results: Results, fingerprint: str) -> Measurement:
    """Take what an evaluation found of the drafter with this fingerprint."""
    about = next((each for each in results.drafters if each.fingerprint == fingerprint), None)
    if about is None:
        there = ", ".join(f"{each.name} ({each.fingerprint})" for each in results.drafters)
        raise EvaluationError(f"the evaluation has no drafter with the fingerprint {fingerprint}; it has {there}")
    settings = results.settings
    timed: set[tuple[int | None, int | None]] = {(each.num_processes, each.threads) for each in about.speed_settings}
    if not about.speed_settings:  # an evaluation by an earlier version knows how answers were last decoded
        timed = {(results.provenance.get("num_processes"), results.provenance.get("threads"))}
    num_processes, num_threads = timed.pop() if len(timed) == 1 else (None, None)
    made = {name: results.provenance.get(name) for name in Provenance.model_fields}
    return Measurement(
        weights="shipped" if about.checkpoint is None else "run",
        tasks={each.name: each.num_prompts for each in results.tasks}, temperature=settings["temperature"],
        max_new_tokens=settings["max_new_tokens"], seed=settings["seed"],
        lengths=[
            MeasuredLengths(
                rule=each.rule, choice=each.choice, draft_temperature=each.draft_temperature,
                predicted_length=each.predicted_length, acceptance_length=each.acceptance_length, speedup=each.speedup,
            )
            for each in results.averages
            if each.drafter == about.name
        ],
        lengths_by_proposals=about.lengths_by_proposals, provenance=Provenance.model_validate(made),
        num_decoded={each.name: each.decoded_prompts for each in results.tasks},
        num_processes=num_processes, num_threads=num_threads,
    )  # fmt: skip


def write_shipped_card(folder: Path, record: ShippedDrafter, config: DrafterConfig) -> None:
    """Write the model card of a shipped drafter, from what is recorded of it."""
    licence = BUILT_IN_LICENCES.get(record.target)
    example = f'blockdraft generate --target {record.target} --drafter {record.name} --compare "What is a river?"'
    opening = (
        f"A {NAMES[config.kind]} drafter for {record.target}, trained with {record.label}. It proposes up to "
        f"{config.num_proposals} tokens at a time, the target verifies them, and the text keeps the target's own "
        "distribution. It comes with blockdraft:"
    )
    sections = [
        f"# {record.name}",
        opening,
        f"```bash\n{example}\n```",
        markdown_table(
            [
                ("target", f"{record.target}, fingerprint {record.target_fingerprint}"),
                ("parameters", f"{record.num_parameters:,} in bfloat16, {record.num_bytes / 1e6:.1f} MB"),
                ("layers", config.num_layers),
                ("proposals per block", _proposals_in_words(config, record.recipe)),
                ("features", f"outputs of the target's layers {', '.join(map(str, config.target_layers))} (from 0)"),
                ("objective", record.label),
                *_start_in_words(record.recipe),
                ("steps", f"{record.step:,} of {record.num_steps:,}"),
                ("texts", _texts_in_words(record.data)),
                ("made with", _versions(record.provenance)),
            ]
        ),
        "## Measured",
        record_in_words(record),
        "## How it was made",
        "```bash\n" + "\n".join(record.commands) + "\n```",
        "The resolved recipe:",
        f"```yaml\n{yaml.safe_dump(_deciding(record.recipe), sort_keys=False)}```",
        "## Licence",
        f"That of blockdraft, apache-2.0. The target's: {licence or UNKNOWN}.",
    ]
    save_card(
        folder, sections, base_model=record.target, tags=["speculative-decoding", config.kind], license="apache-2.0"
    )


def _proposals_in_words(config: DrafterConfig, recipe: Recipe) -> str:
    trained = recipe.drafter.num_proposals
    return f"{config.num_proposals}" + ("" if config.num_proposals == trained else f", trained with {trained}")


def _start_in_words(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the row of a card that names the drafter whose weights training started from, if it did."""
    initial = recipe.drafter.initial
    return [] if initial in KNOWN_INITIAL else [("starts from", f"the drafter {initial.removeprefix('./')}")]


def _texts(run: Run) -> TrainingTexts:
    """Say what a run was trained on; of a data folder that is gone, only its identity is known."""
    path = run.recipe.data.path
    try:
        manifest = None if path is None else read_manifest(path)
    except DataError:
        manifest = None
    if manifest is None:
        return TrainingTexts(identity=run.info.data)
    return TrainingTexts(
        identity=run.info.data, num_texts=manifest.totals.rows, temperature=manifest.identity.temperature,
        num_response_tokens=manifest.totals.response_tokens,
    )  # fmt: skip


def _texts_in_words(texts: TrainingTexts) -> str:
    if texts.num_texts is None:
        return f"identity {texts.identity}"
    return (
        f"{texts.num_texts:,} answers of the target with {texts.num_response_tokens:,} tokens, sampled at temperature "
        f"{texts.temperature:g}; identity {texts.identity}"
    )


def _versions(provenance: Provenance) -> str:
    return ", ".join(f"{name} {version}" for name, version in provenance.model_dump().items() if version)


def _deciding(recipe: Recipe) -> dict[str, Any]:
    """Return the sections of a recipe that decide the weights, and the precision if one was asked for."""
    values = recipe.model_dump(mode="json", exclude=set(MACHINE))
    return values if recipe.runtime.precision is None else values | {"runtime": {"precision": recipe.runtime.precision}}


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested values by their paths, ``section.key``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return flat
