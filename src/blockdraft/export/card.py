"""The model card of an export: what is known of the drafter, and how to serve it. Nothing is guessed."""

import re
from pathlib import Path
from typing import Any

import yaml

from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.drafters.formats import Format, Surroundings, frozen_names
from blockdraft.export.commands import sglang_command, unserved, vllm_command
from blockdraft.export.run import RunFacts
from blockdraft.targets import Target, fingerprint
from blockdraft.verification import RULES

CARD = "README.md"
UNKNOWN = "not recorded"
NAMES = {"dflash": "DFlash", "dspark": "DSpark"}
EMBEDDED_LICENCES = {"pocket": "apache-2.0", "smollm2": "apache-2.0"}
"""Of the embedded targets: this package's own, and what the metadata of SmolLM2's file says."""


def write_card(
    folder: Path, config: DrafterConfig, target: Target, flavour: Format, around: Surroundings, facts: RunFacts
) -> None:
    """Write ``README.md``."""
    name, verifier = NAMES[config.kind], around.verifier
    front = {"base_model": verifier, "tags": ["speculative-decoding", config.kind, flavour]}
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name} drafter for {verifier}",
        _opening(config),
        _table(_drafter_rows(config, around)),
        "## Target",
        _table([("name", _public(target.name)), ("fingerprint", fingerprint(target)), ("licence", licence_of(target))]),
        "## Training",
        _training(facts),
        "## Measured",
        _measured(facts, config),
        "## Licence",
        _licence(config, target),
        "## Serving",
        _serving(config, flavour, verifier),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _opening(config: DrafterConfig) -> str:
    return (
        f"A drafter for speculative decoding: it proposes {config.num_proposals} tokens a block, the target verifies "
        "them, and the text follows the target's law. Written by `blockdraft export`."
    )


def licence_of(target: Target) -> str | None:
    """As the target's own card states it, or as known of an embedded one; None if neither does."""
    card = Path(target.name) / CARD
    if target.name in EMBEDDED_LICENCES:
        return EMBEDDED_LICENCES[target.name]
    if not card.is_file():
        return None
    return front_matter(card).get("license")


def front_matter(card: Path) -> dict[str, Any]:
    """The YAML at the top of a card; empty without."""
    found = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _drafter_rows(config: DrafterConfig, around: Surroundings) -> list[tuple[str, Any]]:
    num_parameters = sum(parameter.numel() for parameter in build_drafter(config).parameters())
    copies = frozen_names(config.kind)
    rows: list[tuple[str, Any]] = [
        (
            "parameters",
            f"{num_parameters:,}" + (f", and copies of the target's {' and '.join(copies)}" if copies else ""),
        ),
        ("layers", config.num_layers),
        ("proposals per block", config.num_proposals),
        ("slot layout", f"{config.slot_layout} ({config.num_slots} slots)"),
        ("features", f"outputs of the target's layers {', '.join(map(str, config.target_layers))}, counted from 0"),
        ("mask token", config.mask_token_id),
        ("weights", around.dtype),
    ]
    if config.markov_head:
        rows.insert(2, ("Markov head", f"{config.markov_head}, rank {config.markov_rank}"))
    return rows


def _training(facts: RunFacts) -> str:
    if facts.info is None:
        return f"Objective, data and recipe: {UNKNOWN}."
    recipe, made_with = facts.info.recipe, facts.info.provenance.model_dump()
    revision = made_with.pop("git")
    rows = [
        ("objective", recipe.objective.name),
        ("objective's options", recipe.objective.options),
        ("steps", f"{facts.step} of {facts.info.num_steps}"),
        ("data", _data(facts)),
        ("made with", ", ".join(f"{name} {version}" for name, version in made_with.items())),
        ("revision", revision),
    ]
    text = yaml.safe_dump(_without_paths(recipe.model_dump(mode="json")), sort_keys=False)
    return f"{_table(rows)}\n\nThe recipe (of paths, the last part only):\n\n```yaml\n{text}```"


def _public(name: str) -> str:
    """A name, or the last part of a path."""
    return Path(name).name if Path(name).is_absolute() else name


def _without_paths(recipe: dict[str, Any]) -> dict[str, Any]:
    """What a stranger may read: names of folders instead of where they lie."""
    places = {("data", "path"), ("data", "cache"), ("drafter", "initial"), ("target", "name")}
    return {
        section: {key: _public(value) if (section, key) in places and value else value for key, value in values.items()}
        if isinstance(values, dict)
        else values
        for section, values in recipe.items()
    }


def _data(facts: RunFacts) -> str | None:
    if facts.data is None:
        return None
    sampling, counts = facts.data.identity.sampling, facts.data.totals
    return (
        f"{counts.rows:,} texts with {counts.response_tokens:,} response tokens, "
        f"sampled from {_public(facts.data.about.target)} at temperature {sampling.temperature}, "
        f"top-k {sampling.top_k}, top-p {sampling.top_p}"
    )


def _measured(facts: RunFacts, config: DrafterConfig) -> str:
    if facts.measured is None:
        return f"Accepted lengths: {UNKNOWN}."
    rows = [(f"{rule} verification", f"{facts.measured[f'heldout_length_{rule}']:.3f}") for rule in RULES]
    rows.append(("token accuracy", f"{facts.measured['heldout_token_accuracy']:.3f}"))
    return (
        f"Expected accepted tokens of a block of {config.num_proposals}, correction and bonus token not counted, over "
        f"{facts.measured['heldout_num_blocks']:,.0f} blocks of held-out texts of the same data, without decoding:\n\n"
        + _table(rows)
    )


def _licence(config: DrafterConfig, target: Target) -> str:
    text = f"The target's licence: {licence_of(target) or UNKNOWN}. "
    text += f"The drafter's own: {UNKNOWN}; its publisher states it here."
    if frozen_names(config.kind):
        text += (
            " The folder carries copies of the target's embedding and head, which remain under the target's licence."
        )
    return text


def _serving(config: DrafterConfig, flavour: Format, verifier: str) -> str:
    cannot = unserved(config, flavour)
    parts = []
    for engine, command in (("vLLM", vllm_command), ("SGLang", sglang_command)):
        if engine in cannot:
            parts.append(f"{engine} does not serve this folder: {cannot[engine]}.")
        else:
            parts.append(f"{engine}:\n\n```sh\n{command(config, verifier, 'PATH_OF_THIS_FOLDER')}\n```")
    parts.append(
        "Block verification gains over token verification only if drafts are sampled (`probabilistic`); vLLM's default "
        "is greedy drafts; SGLang verifies token by token. Servers apply the target's `generation_config.json` to "
        "requests that do not state every sampling field: send temperature, top_p and top_k."
    )
    return "\n\n".join(parts)


def _table(rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {UNKNOWN if value is None else value} |" for name, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines])
