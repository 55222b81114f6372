"""Estimate what is left of a study: training and files by formula, sampling and decoding by an assumed rate."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.evaluation.protocol import GRID, Protocol
from blockdraft.evaluation.tasks import count_prompts
from blockdraft.files import refuse_full_disk
from blockdraft.runs import Run
from blockdraft.study.plan import StudyCell
from blockdraft.training import ResourceEstimate, estimate

if TYPE_CHECKING:
    from blockdraft.study.run import Study


@dataclass(frozen=True)
class CellCost:
    """Holds what one cell takes: steps, those taken so far, memory of each device, disk, and the hours that are left.

    checkpoint_bytes, unwritten_bytes: of the checkpoints that stay when the cell is trained, and of those that are yet
        to be written.
    hours: from now to the end of training, with all devices of the cell at work together.
    """

    cell: StudyCell
    num_steps: int
    num_done: int
    device_bytes: int
    checkpoint_bytes: int
    unwritten_bytes: int
    hours: float


@dataclass(frozen=True)
class Answers:
    """Holds how many answers are left to sample or decode, and the hours that they take."""

    num: int
    hours: float


def cell_costs(study: "Study") -> list[CellCost]:
    """Estimate the training that is left of every cell, and its checkpoints."""
    assumed, found = study.recipe.hardware, []
    for cell in study.recipe.cells:
        cost = _estimate(study, cell)
        num_done, known_steps = study.steps_done(cell)
        num_steps = known_steps or cost.num_steps
        hours = cost.hours(assumed.tflops, assumed.efficiency) * (1 - num_done / num_steps)
        unwritten = 0
        if not study.is_trained(cell):
            folder = study.run_folder(cell)
            written = len(Run.open(folder).checkpoints()) if Run.is_run(folder) else 0
            unwritten = max(0, cost.num_checkpoints - written) * cost.checkpoint_bytes
        kept = cost.num_checkpoints * cost.checkpoint_bytes
        found.append(CellCost(cell, num_steps, num_done, cost.device_bytes, kept, unwritten, hours))
    return found


def _estimate(study: "Study", cell: StudyCell) -> ResourceEstimate:
    """Estimate a cell for the number of texts in its data folder.

    Until that is complete, every prompt counts as one text for each of its responses, though a conversation of several
    turns will have more.
    """
    target, assumed, manifest = study.recipe.targets[cell.target], study.recipe.hardware, study.manifest(cell.target)
    num_texts, length = target.num_prompts * target.num_responses, assumed.tokens_per_text
    if manifest is not None and manifest.complete:
        num_texts, length = manifest.totals.texts_and_length
    return estimate(cell.recipe, num_devices=assumed.devices, num_texts=num_texts, tokens_per_text=length)


def features_to_write(study: "Study", *, of_known_texts: bool = False) -> dict[Path, int]:
    """Estimate the bytes that are left to write of every feature cache that cells which are left will read.

    of_known_texts: leave out caches of texts that are not complete, whose number of tokens is assumed.
    """
    found: dict[Path, int] = {}
    for cell in study.recipe.cells:
        if cell.recipe.data.features == "cached" and not study.is_trained(cell):
            manifest, folder = study.manifest(cell.target), study.cache_folder(cell)
            if folder not in found and (not of_known_texts or (manifest is not None and manifest.complete)):
                there = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
                found[folder] = max(0, _estimate(study, cell).cache_bytes - there)
    return found


def refuse_too_large(study: "Study") -> None:
    """Raise if the checkpoints and feature caches that a study has yet to write have no room on their disks."""
    sizes = {study.out: sum(cost.unwritten_bytes for cost in cell_costs(study))}
    for folder, num_bytes in features_to_write(study, of_known_texts=True).items():
        place = study.out if folder.is_relative_to(study.out) else folder
        sizes[place] = sizes.get(place, 0) + num_bytes
    for folder, num_bytes in sizes.items():
        refuse_full_disk(folder, num_bytes, "the study's checkpoints and features")


def responses_to_sample(study: "Study") -> Answers:
    """Estimate the sampling of training texts that are not there, by one device.

    A response is taken to be as long as a text, or as the study allows: more than it will be.
    """
    assumed, num, tokens = study.recipe.hardware, 0, 0.0
    for name in {study.data_folder(each): each for each in reversed(study.recipe.targets)}.values():
        target, manifest = study.recipe.targets[name], study.manifest(name)
        if target.data is not None:
            continue
        left = target.num_prompts * target.num_responses
        if manifest is not None:
            left = round(manifest.identity.num_conversations * (1 - len(manifest.shards) / manifest.num_shards))
        num += left
        tokens += left * min(assumed.tokens_per_text, target.max_new_tokens)
    return Answers(num, tokens / assumed.sampling_rate / 3600)


def answers_to_decode(study: "Study") -> Answers:
    """Estimate the evaluations that are left: one answer to a prompt, of full length, and none faster for its drafter.

    The texts of the target, on which lengths are predicted, count as well; scoring drafters on them does not. Where
    drafters are added to results that are there, only theirs are decoded.
    """
    asked, assumed = study.recipe.evaluation, study.recipe.hardware
    pairs = study.evaluations_left()
    counts = count_prompts(asked.tasks, asked.num_prompts) if pairs else []
    grid = tuple(asked.draft_temperatures or GRID)
    protocol = Protocol(rules=tuple(asked.rules), draft_temperatures=grid, one_hot=asked.argmax_drafts)
    best: dict[str, float] = dict.fromkeys(protocol.sampled_rules, -1.0)  # not the paper's: the most setups
    if len(protocol.grid) == 1:
        best = dict.fromkeys(protocol.sampled_rules, protocol.temperature)
    num, seconds = 0, 0.0
    for target, seed in pairs:
        evaluated = study.evaluated_drafters(target, seed)
        setups = sum(len(protocol.setups(name, best)) for name in study.drafters_of(target, seed) - evaluated)
        texts = 0
        if not evaluated:
            setups += len({protocol.baseline(rule) for rule in protocol.rules})
            texts = len(protocol.text_kinds) * sum(counts)
        per_task = max(counts, default=0) if asked.num_decoded is None else asked.num_decoded
        decoded = setups * sum(min(per_task, count) for count in counts)
        num += texts + decoded
        seconds += asked.max_new_tokens * (texts / assumed.sampling_rate + decoded / assumed.decoding_rate)
    return Answers(num, seconds / assumed.devices / 3600)
