"""Write a drafter's model card: what its run's folder tells of it, how it drafts, and how to serve it.

Of how it drafts, lengths and acceptance by position, there are three sources: an evaluation that has this drafter in
it, what is recorded of a drafter that comes with the package, and the held-out measurement of the run that trained it.
Nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from blockdraft.data import DataError, Manifest, read_manifest
from blockdraft.drafters import Drafter, DrafterConfig, build_drafter
from blockdraft.drafters.formats import Format, Surroundings, frozen_names
from blockdraft.evaluation import read_profile, read_results
from blockdraft.evaluation.candidates import Candidate, MeasuredLengths, Measurement, ShippedDrafter, shipped_record
from blockdraft.evaluation.results import AcceptanceRates, EvaluationError, Profile, ProfileEntry, Results
from blockdraft.export.engines import STATE_SAMPLING, built_in_note, engine_notes
from blockdraft.runs import Run, RunInfo
from blockdraft.targets import Target, fingerprint
from blockdraft.verification import RULES

CARD = "README.md"
UNKNOWN = "not recorded"
NAMES = {"dflash": "DFlash", "dspark": "DSpark"}
BUILT_IN_LICENCES = {"pocket": "apache-2.0", "smollm2": "apache-2.0"}
"""The licences of the built-in targets: pocket has this package's own, SmolLM2 the one in its file's metadata."""


@dataclass(frozen=True)
class Evaluated:
    """Holds what an evaluation found of one drafter: its results, and the entries of its acceptance profile."""

    results: Results
    profile: Profile
    entries: list[ProfileEntry]


def evaluated(folder: str | Path, drafter: Drafter) -> Evaluated:
    """Read what an evaluation found of a drafter, which it must have under the same weights and configuration."""
    results, profile = read_results(folder), read_profile(folder)
    own = Candidate("", Path(), drafter).fingerprint
    name = next((each.name for each in results.drafters if each.fingerprint == own), None)
    if name is None:
        there = ", ".join(f"{each.name} ({each.fingerprint})" for each in results.drafters)
        raise EvaluationError(f"{folder} has no drafter with these weights, whose fingerprint is {own}; it has {there}")
    if not any(each.decoded_prompts for each in results.tasks):
        raise EvaluationError(
            f"{folder} has predicted lengths only, and a card shows what was measured: evaluate with --num-decoded 1 "
            "or more"
        )
    return Evaluated(results, profile, [each for each in profile.entries if each.drafter == name])


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
    """Return the licence that the target's own card states, or that is known of a built-in one; else None."""
    from huggingface_hub import metadata_load

    if target.name in BUILT_IN_LICENCES:
        return BUILT_IN_LICENCES[target.name]
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
    return "\n\n".join(filter(None, [built_in_note(verifier), *parts, STATE_SAMPLING]))


def evaluation_in_words(found: Evaluated) -> str:
    """Return lengths by rule, and acceptance by position, of an evaluation."""
    settings = found.results.settings
    tasks = prompts_in_words({each.title: each.decoded_prompts for each in found.results.tasks})
    rows = [
        "| rule | draft temperature | tokens per call, macro | tokens per call, micro | calls |",
        "|" + " -- |" * 5,
    ]
    for each in found.entries:
        lengths = " | ".join(f"{rates.acceptance_length:.2f}" for rates in (each.macro, each.micro))
        rows.append(f"| {each.rule} | {_draft_temperature(each)} | {lengths} | {each.num_rounds:,} |")
    averaging = found.profile.averaging
    opening = (
        f"By decoding {tasks}, at the target's temperature {found.profile.temperature:g}, up to "
        f"{settings['max_new_tokens']} tokens an answer. Tokens per verification call count correction and bonus "
        f"tokens, and nothing after an end token. Macro is the {averaging['macro']}; micro is {averaging['micro']}."
    )
    positions = (
        "Acceptance by position i, micro. Marginal is the share of calls that accept at least i drafted tokens; "
        "conditional is the same among the calls that accept i - 1."
    )
    return "\n\n".join([opening, "\n".join(rows), positions, "\n".join(_positions(found.entries))])


def _positions(entries: list[ProfileEntry]) -> list[str]:
    num = max((each.num_proposals for each in entries), default=0)
    rows = ["| rule | draft temperature | |" + "".join(f" {i} |" for i in range(1, num + 1)), "|" + " -- |" * (num + 3)]
    for each in entries:
        rates: AcceptanceRates = each.micro
        marginal = [f" {value:.2f} |" for value in rates.marginal]
        conditional = [f" {'-' if value is None else f'{value:.2f}'} |" for value in rates.conditional]
        start = f"| {each.rule} | {_draft_temperature(each)} |"
        rows += [f"{start} marginal |{''.join(marginal)}", f"{start} conditional |{''.join(conditional)}"]
    return rows


def _draft_temperature(entry: ProfileEntry | MeasuredLengths) -> str:
    return "argmax" if entry.draft_temperature == 0 else f"{entry.draft_temperature:g} ({entry.choice})"


def heldout_in_words(measured: Mapping[str, float], num_proposals: int) -> str:
    """Return what a run measured on held-out texts."""
    rows: list[tuple[str, Any]] = [
        (f"{rule} verification", f"{measured[f'heldout_length_{rule}']:.3f}") for rule in RULES
    ]
    rows.append(("token accuracy", f"{measured['heldout_token_accuracy']:.3f}"))
    return (
        f"Expected accepted tokens of a block of {num_proposals}, correction and bonus token not counted, over "
        f"{measured['heldout_num_blocks']:,.0f} blocks of held-out texts of the same data, without decoding:\n\n"
        + markdown_table(rows)
    )


def record_in_words(record: ShippedDrafter) -> str:
    """Return what is recorded of a drafter that comes with the package."""
    found: Measurement | None = record.measured
    if found is None:
        return f"Tokens per verification call: {UNKNOWN}."
    whose = "the weights of the run, before they were rounded" if found.weights == "run" else "these weights"
    measured = any(each.acceptance_length for each in found.lengths)
    heads = ["rule", "draft temperature", "predicted tokens per call", *(["measured", "speed-up"] if measured else [])]
    rows = [f"| {' | '.join(heads)} |", "|" + " -- |" * len(heads)]
    too_few = ""
    for each in found.lengths:
        numbers = list(filter(None, (each.predicted_length, each.acceptance_length, each.speedup)))
        if any(number.bounds is None for number in numbers):
            too_few = "; numbers without are of too few prompts for one"
        values = [each.rule, _draft_temperature(each), *(number.shown() for number in numbers)]
        rows.append(f"| {' | '.join(values)} |")
    said = (
        f"With {whose}, at the target's temperature {found.temperature:g}, up to {found.max_new_tokens} tokens an "
        f"answer. Predicted lengths are means over {prompts_in_words(found.tasks)}; "
        f"{_decoded_in_words(found) if measured else 'nothing was decoded'}. Brackets are 95% intervals over "
        f"prompts{too_few}."
    )
    if measured:
        said += f" Speed-ups are those of the machine that measured them{_timing_in_words(found)}."
    return said + "\n\n" + "\n".join(rows)


def prompts_in_words(counts: Mapping[str, int]) -> str:
    """Return the numbers of prompts of tasks: as one phrase if all are the same."""
    numbers = set(counts.values())
    if len(counts) > 1 and len(numbers) == 1:
        return f"{_prompts(numbers.pop())} of each of {len(counts)} tasks ({', '.join(counts)})"
    return ", ".join(f"{_prompts(num)} of {name}" for name, num in counts.items())


def _prompts(num: int) -> str:
    return "1 prompt" if num == 1 else f"{num} prompts"


def _decoded_in_words(found: Measurement) -> str:
    """Say what measured lengths and speed-ups are means over."""
    which = "measured lengths and speed-ups over"
    if found.num_decoded is None:
        return f"{which} those that were decoded, whose number is not recorded"
    if found.num_decoded == found.tasks:
        return f"{which} the same, which were all decoded"
    numbers = set(found.num_decoded.values())
    if len(numbers) == 1:
        return f"{which} {numbers.pop()}{' of each' if len(found.num_decoded) > 1 else ''} that were decoded"
    return f"{which} those that were decoded: {prompts_in_words(found.num_decoded)}"


def _timing_in_words(found: Measurement) -> str:
    """Say how many processes and threads decoded, if that is recorded."""
    if found.num_processes is None or found.num_threads is None:
        return ""
    threads = "1 thread" if found.num_threads == 1 else f"{found.num_threads} threads"
    return f", by {found.num_processes} processes of {threads} each" if found.num_processes > 1 else f", by {threads}"


def markdown_table(rows: list[tuple[str, Any]]) -> str:
    """Write names and values as a table without a heading; None is not recorded."""
    lines = [f"| {name} | {UNKNOWN if value is None else value} |" for name, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines])
