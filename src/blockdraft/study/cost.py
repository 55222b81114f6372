"""Estimate what a study will take before it runs: training by formula, sampling and decoding by an assumed rate."""

import os
from dataclasses import dataclass

from blockdraft.data import read_manifest
from blockdraft.data.manifest import MANIFEST
from blockdraft.evaluation.protocol import Protocol
from blockdraft.evaluation.tasks import count_prompts
from blockdraft.study.plan import StudyCell
from blockdraft.study.run import Study
from blockdraft.training import estimate


@dataclass(frozen=True)
class CellCost:
    """Holds what one cell takes: its steps, those taken so far, the memory of each device, and hours on all of them."""

    cell: StudyCell
    num_steps: int
    num_done: int
    device_bytes: int
    hours: float


@dataclass(frozen=True)
class Answers:
    """Holds how many answers are left to sample or decode, and the hours that they take."""

    num: int
    hours: float


def cell_costs(study: Study) -> list[CellCost]:
    """Estimate the training of every cell.

    The number of texts is that of the data folder. Until there is one, every prompt counts as one text for each of its
    responses, though a conversation of several turns will have more.
    """
    assumed, found = study.recipe.hardware, []
    for cell in study.recipe.cells:
        target = study.recipe.targets[cell.target]
        num_texts, length = target.num_prompts * target.num_responses, assumed.tokens_per_text
        if _has_data(study, cell.target):
            num_texts, length = read_manifest(study.data_folder(cell.target)).totals.texts_and_length
        cost = estimate(cell.recipe, num_devices=assumed.devices, num_texts=num_texts, tokens_per_text=length)
        hours = cost.hours(assumed.tflops, assumed.efficiency)
        found.append(CellCost(cell, cost.num_steps, study.steps_done(cell)[0], cost.device_bytes, hours))
    return found


def responses_to_sample(study: Study) -> Answers:
    """Estimate the sampling of training texts that are not there, by one device.

    A response is taken to be as long as a text, or as the study allows: more than it will be.
    """
    assumed, num, tokens = study.recipe.hardware, 0, 0.0
    for name in {study.data_folder(each): each for each in reversed(study.recipe.targets)}.values():
        target = study.recipe.targets[name]
        if not _has_data(study, name):
            num += target.num_prompts * target.num_responses
            length = min(assumed.tokens_per_text, target.max_new_tokens)
            tokens += target.num_prompts * target.num_responses * length
    return Answers(num, tokens / assumed.sampling_rate / 3600)


def answers_to_decode(study: Study) -> Answers:
    """Estimate the evaluations that are left: one answer to a prompt, of full length, and none faster for its drafter.

    The texts of the target, on which lengths are predicted, count as well; scoring drafters on them does not.
    """
    asked, assumed = study.recipe.evaluation, study.recipe.hardware
    counts = count_prompts(asked.tasks, asked.num_prompts)
    protocol = Protocol(rules=tuple(asked.rules))
    num, seconds = 0, 0.0
    for seed in study.recipe.seeds:
        for target in study.recipe.targets:
            if study.is_evaluated(target, seed):
                continue
            drafters = [c.drafter_name for c in study.recipe.cells if (c.target, c.seed) == (target, seed)]
            best: dict[str, float] = dict.fromkeys(protocol.sampled_rules, -1.0)  # not the paper's: the most setups
            setups = len({protocol.baseline(rule) for rule in protocol.rules})
            setups += sum(len(protocol.setups(name, best)) for name in drafters)
            texts = len(protocol.text_kinds) * sum(counts)
            decoded = setups * sum(min(asked.num_decoded or count, count) for count in counts)
            num += texts + decoded
            seconds += asked.max_new_tokens * (texts / assumed.sampling_rate + decoded / assumed.decoding_rate)
    return Answers(num, seconds / assumed.devices / 3600)


def _has_data(study: Study, target: str) -> bool:
    return os.path.lexists(study.data_folder(target) / MANIFEST)
