"""Say what engines do with an exported drafter, and write its model card.

What engines do was read from the released packages: vLLM 0.32.0, SGLang 0.5.23, transformers 5.22. The defaults of
both servers throw away what block verification gains, so every command here states its settings. The card holds what
the run's folder tells of the drafter, and how to serve it. Nothing is guessed.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from blockdraft.data import DataError, Manifest, read_manifest
from blockdraft.drafters import DrafterConfig, SlotLayout, build_drafter
from blockdraft.drafters.formats import Format, Surroundings, frozen_names
from blockdraft.evaluation.candidates import ShippedDrafter, shipped_record
from blockdraft.export.measured import UNKNOWN, Evaluated, evaluation_in_words, heldout_in_words, record_in_words
from blockdraft.runs import Run, RunInfo
from blockdraft.targets import Target, fingerprint

BLOCK: dict[str, str | int] = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
"""vLLM's two settings for block verification of sampled drafts."""

STATE_SAMPLING = (
    "Servers apply the target's generation_config.json to requests that do not state every sampling field: send "
    "temperature, top_p and top_k."
)


def embedded_note(target: str) -> str | None:
    """Say how engines come to an embedded target, which no hub knows by its name; None for any other target."""
    if target not in EMBEDDED_LICENCES:
        return None
    return (
        f"{target} is embedded in blockdraft. Before you serve it, write it as a folder that engines can load, where "
        f"you start the engine: blockdraft export-target {target} --out {target}"
    )


@dataclass(frozen=True)
class EngineNote:
    """Says what one engine does with an exported drafter at temperatures above 0.

    engine: its name, and the version whose sources were read.
    served: whether it can read and run the folder.
    drafts: ``sampled`` from the drafter's distribution, or ``greedy``, its argmax; None if it is not served.
    verification: ``block`` or ``token``, under the command; None if it is not served.
    command: how to serve it, on the command line or in Python; None if it is not served.
    notes: what to watch for; the reason, if it is not served.
    language: of the command, ``sh`` or ``python``.
    """

    engine: str
    served: bool
    drafts: str | None
    verification: str | None
    command: str | None
    notes: tuple[str, ...]
    language: str = "sh"

    @classmethod
    def unserved(cls, engine: str, reason: str) -> "EngineNote":
        """Say that an engine cannot serve this folder, and why."""
        return cls(engine, False, None, None, None, (reason,))

    @property
    def summary(self) -> str:
        """Give one line: the engine and what it does."""
        if not self.served:
            return f"{self.engine} does not serve this folder: {self.notes[0]}"
        return f"{self.engine}: {self.drafts} drafts, {self.verification} verification"


def engine_notes(config: DrafterConfig, flavour: Format, target: str, drafter: str) -> list[EngineNote]:
    """Return what each engine does with a drafter.

    Args:
        config: of the drafter.
        flavour: the format it was exported in.
        target, drafter: names or paths to put into the commands.
    """
    return [
        _vllm(config, target, drafter),
        _sglang(config, flavour, target, drafter),
        _transformers(config, target, drafter),
    ]


def vllm_config(config: DrafterConfig, drafter: str, *, block: bool = False) -> dict[str, str | int]:
    """Return vLLM's ``--speculative-config``; its default verifies tokens one by one and drafts greedily."""
    plain: dict[str, str | int] = {
        "method": config.kind,
        "model": drafter,
        "num_speculative_tokens": config.num_proposals,
    }
    return plain | BLOCK if block else plain


def vllm_command(config: DrafterConfig, target: str, drafter: str) -> str:
    """Return vLLM's command for block verification with sampled drafts."""
    settings = json.dumps(vllm_config(config, drafter, block=True))
    return f"vllm serve {shlex.quote(target)} --speculative-config \\\n    {shlex.quote(settings)}"


def sglang_command(config: DrafterConfig, target: str, drafter: str) -> str:
    """Return SGLang's command; it counts the anchor's slot in DFlash's draft tokens, but not in DSpark's block size."""
    settings = (
        f"--speculative-num-draft-tokens {config.num_slots}"
        if config.kind == "dflash"
        else f"--speculative-dspark-block-size {config.num_proposals} --speculative-use-block-verification"
    )
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
        f"    --speculative-algorithm {config.kind.upper()} --speculative-draft-model-path {shlex.quote(drafter)} \\\n"
        f"    {settings}"
    )


def _vllm(config: DrafterConfig, target: str, drafter: str) -> EngineNote:
    engine = "vLLM 0.32"
    if config.markov_head in ("gated", "rnn"):
        return EngineNote.unserved(engine, f"it has the vanilla Markov head only; this one is {config.markov_head}")
    refused = "refuses DSpark" if config.kind == "dspark" else 'accepts "block", ignores it, and drafts greedily'
    defaults = (
        "Keep both settings of the command: by default vLLM drafts greedily and verifies token by token, and with "
        "greedy drafts block verification gains nothing."
    )
    runner = f"Both need the V2 model runner, the default where Triton runs; the V1 runner of CPU builds {refused}."
    return EngineNote(engine, True, "sampled", "block", vllm_command(config, target, drafter), (defaults, runner))


def _sglang(config: DrafterConfig, flavour: Format, target: str, drafter: str) -> EngineNote:
    engine = "SGLang 0.5.23"
    if flavour == "speculators":
        reason = "it does not read this format; `blockdraft export --format flat` writes the one it reads"
        return EngineNote.unserved(engine, reason)
    command = sglang_command(config, target, drafter)
    if config.kind == "dflash":
        note = (
            "SGLang takes the argmax of a DFlash drafter at every temperature, so --speculative-use-block-verification "
            "has no effect and what training for block verification gained is lost. vLLM samples the same drafter."
        )
        return EngineNote(engine, True, "greedy", "token", command, (note,))
    note = (
        "Keep --speculative-use-block-verification: by default SGLang verifies token by token. It needs CUDA or ROCm."
    )
    return EngineNote(engine, True, "sampled", "block", command, (note,))


def _transformers(config: DrafterConfig, target: str, drafter: str) -> EngineNote:
    engine = "transformers 5.22"
    if config.kind == "dspark":
        return EngineNote.unserved(engine, "its generate() has no Markov head; blockdraft's own generate() has")
    if config.slot_layout is not SlotLayout.FILL_IN:
        return EngineNote.unserved(engine, "its generate() discards slot 0, which predicts a token here")
    command = (
        "import blockdraft as bd\n"
        f"target = bd.load_target({target!r})\n"
        f"assistant = bd.as_assistant(bd.load_drafter({drafter!r}, target))\n"
        "target.model.generate(\n"
        '    **inputs, assistant_model=assistant, speculation_type="dflash", do_sample=True, top_k=0\n'
        ")"
    )
    notes = ("It verifies token by token; blockdraft's own generate() verifies blocks.",)
    return EngineNote(engine, True, "sampled", "token", command, notes, language="python")


CARD = "README.md"
NAMES = {"dflash": "DFlash", "dspark": "DSpark"}
EMBEDDED_LICENCES = {"pocket": "apache-2.0", "smollm2": "apache-2.0"}
"""Of the embedded targets: this package's own, and what the metadata of SmolLM2's file says."""


@dataclass(frozen=True)
class RunFacts:
    """Holds what is known of a checkpoint, mostly from its run's folder; None is what is not known.

    info: ``run.json``: recipe, target, versions.
    step: optimizer steps of this checkpoint.
    measured: the held-out lengths of this very step.
    data: the manifest of the data folder, if it is still there.
    record: of a drafter that comes with the package.
    evaluation: what an evaluation found of this drafter.
    """

    info: RunInfo | None = None
    step: int | None = None
    measured: dict[str, float] | None = None
    data: Manifest | None = None
    record: ShippedDrafter | None = None
    evaluation: Evaluated | None = None

    @property
    def target(self) -> str | None:
        """Give the name under which the target was loaded."""
        if self.info is not None:
            return self.info.target.name
        return None if self.record is None else self.record.target


def run_facts(checkpoint: str | Path) -> RunFacts:
    """Read the facts of a checkpoint ``run/steps/00000500`` or a link to it, or of a drafter of the package.

    Nothing is known of a folder elsewhere.
    """
    found = Run.of_checkpoint(checkpoint)
    if found is None:
        return RunFacts(record=shipped_record(checkpoint))
    run, step = found
    path = run.recipe.data.path
    try:
        data = None if path is None else read_manifest(path)
    except DataError:
        data = None
    return RunFacts(run.info, step, run.heldout_metrics(step), data)


def write_card(
    folder: Path, config: DrafterConfig, target: Target, flavour: Format, around: Surroundings, facts: RunFacts
) -> None:
    """Write ``README.md``, with the metadata that the Hugging Face Hub reads at its top."""
    base = public_name(around.verifier)
    opening = (
        f"A drafter for speculative decoding: it proposes up to {config.num_proposals} tokens at a time, the target "
        "verifies them, and the text keeps the target's own distribution. Written by `blockdraft export`."
    )
    sections = [
        f"# {NAMES[config.kind]} drafter for {base}",
        opening,
        markdown_table(_drafter_rows(config, around)),
        "## Serving",
        _serving(config, flavour, base),
        "## Target",
        markdown_table(
            [
                ("name", public_name(target.name)),
                ("fingerprint of its weights", fingerprint(target)),
                ("licence", licence_of(target)),
            ]
        ),
        "## Training",
        _training(facts),
        "## Measured",
        _measured(facts, config),
        "## Licence",
        _licence(config, target),
    ]
    save_card(folder, sections, base_model=base, tags=["speculative-decoding", config.kind, flavour])


def save_card(folder: Path, sections: list[str], **metadata: Any) -> None:
    """Save sections of Markdown as a card, with its metadata at the top."""
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(pipeline_tag="text-generation", **metadata)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n").save(folder / CARD)


def licence_of(target: Target) -> str | None:
    """Return the licence that the target's own card states, or that is known of an embedded one; else None."""
    from huggingface_hub import metadata_load

    if target.name in EMBEDDED_LICENCES:
        return EMBEDDED_LICENCES[target.name]
    card = Path(target.name) / CARD
    try:
        values = metadata_load(card) if card.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # a card that cannot be read states nothing
    licence = (values or {}).get("license")
    return licence if isinstance(licence, str) else None


def public_name(name: str) -> str:
    """Return a name as it is, and of a path on this machine its last part."""
    return Path(name).name if Path(name).is_absolute() else name


def _drafter_rows(config: DrafterConfig, around: Surroundings) -> list[tuple[str, Any]]:
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in build_drafter(config).parameters())
    copies = frozen_names(config)
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
    if facts.record is not None:
        record, made_with = facts.record, facts.record.provenance.model_dump()
        rows: list[tuple[str, Any]] = [
            ("objective", record.label),
            ("steps", f"{record.step} of {record.num_steps}"),
            ("made with", ", ".join(f"{name} {version}" for name, version in made_with.items() if version)),
        ]
        return f"{markdown_table(rows)}\n\n```sh\n" + "\n".join(record.commands) + "\n```"
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
    return f"{markdown_table(rows)}\n\nThe recipe, with only the last part of every path:\n\n```yaml\n{text}```"


def _without_paths(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what a stranger may read: names of folders instead of where they lie."""
    places = {("data", "path"), ("data", "cache"), ("drafter", "initial"), ("target", "name")}
    return {
        section: {
            key: public_name(value) if (section, key) in places and value else value for key, value in values.items()
        }
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
        f"sampled from {public_name(facts.data.about.target)} at temperature {sampling.temperature}, "
        f"top-k {sampling.top_k}, top-p {sampling.top_p}"
    )


def _measured(facts: RunFacts, config: DrafterConfig) -> str:
    known = [
        None if facts.evaluation is None else evaluation_in_words(facts.evaluation),
        None if facts.record is None else record_in_words(facts.record),
        None if facts.measured is None else heldout_in_words(facts.measured, config.num_proposals),
    ]
    return "\n\n".join(filter(None, known)) or f"Accepted lengths: {UNKNOWN}."


def _licence(config: DrafterConfig, target: Target) -> str:
    text = f"The target's licence: {licence_of(target) or UNKNOWN}. "
    text += f"The drafter's own: {UNKNOWN}; its publisher states it here."
    if frozen_names(config):
        text += (
            " The folder carries copies of the target's embedding and head, which remain under the target's licence."
        )
    return text


def _serving(config: DrafterConfig, flavour: Format, verifier: str) -> str:
    parts = []
    for note in engine_notes(config, flavour, verifier, "PATH_OF_THIS_FOLDER"):
        if note.command is None:
            parts.append(f"{note.summary}.")
            continue
        parts.append(f"{note.summary}.\n\n```{note.language}\n{note.command}\n```\n\n{' '.join(note.notes)}")
    return "\n\n".join(filter(None, [embedded_note(verifier), *parts, STATE_SAMPLING]))


def markdown_table(rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {UNKNOWN if value is None else value} |" for name, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines])
