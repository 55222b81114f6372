"""Say what may change while a study is under way, and refuse the rest: runs and folders of another study."""

import os
from pathlib import Path

from pydantic import ValidationError

from blockdraft.recipes import Recipe
from blockdraft.recipes.loading import read_yaml_file
from blockdraft.study.plan import StudyError, StudyObjective, StudyRecipe, StudyTarget

STUDY_FILE = "study.yaml"

COMPARED = ("drafter", "objective", "annealing", "batch", "optimizer", "seed")
"""Parts of a recipe that a finished run must share with its cell; what depends on data and target is left out."""

FREE = ("runtime", "batch.gradient_accumulation_steps")
"""Sections and fields that say how a run computes, and not what: they may change while a study goes on."""

OF_THE_FOLDER = ("num_layers", "num_proposals", "num_features", "markov_head", "markov_rank")
"""Fields that a drafter which is trained further has of its own, unless the recipe states them."""


def differences(run: Recipe, cell: Recipe) -> list[str]:
    """Return the names of the parts in which the recipe that a run recorded differs from that of its cell."""
    part = cell.drafter
    open_fields = set[str]()
    if part.initial not in ("scratch", "target"):
        open_fields = {n for n in OF_THE_FOLDER if n not in part.model_fields_set or getattr(part, n) is None}
    left_out = {"batch": {"gradient_accumulation_steps"}, "drafter": open_fields}
    both = run.resolved(), cell.resolved()  # a run of an earlier version states no option that is newer
    found, wanted = (each.model_dump(include=set(COMPARED), exclude=left_out) for each in both)
    return [name for name in COMPARED if found[name] != wanted[name]]


def refuse_another_study(recipe: StudyRecipe, folder: Path) -> None:
    """Raise if a folder holds a study that this one does not go on with."""
    file = folder / STUDY_FILE
    if not os.path.lexists(file):
        return
    try:
        before = StudyRecipe.model_validate(read_yaml_file(file))
    except ValidationError as error:
        raise StudyError(f"{file} does not describe a study; choose another --out") from error
    if not is_continued(before, recipe):
        raise StudyError(
            f"{folder} holds another study; you may add seeds and objectives, and change the baseline, the hardware "
            f"and {' and '.join(FREE)}, but nothing else. Choose another --out"
        )


def is_continued(before: StudyRecipe, now: StudyRecipe) -> bool:
    """Return whether a study goes on with one begun before: it may add seeds and objectives, and change what is free.

    The baseline and the hardware are free as well.
    """
    before, now = _deciding(before), _deciding(now)
    kept = set(before.seeds) <= set(now.seeds) and before.objectives.items() <= now.objectives.items()
    may_differ = {name: getattr(now, name) for name in ("seeds", "objectives", "baseline", "hardware")}
    return kept and before.model_copy(update=may_differ) == now


def _deciding(study: StudyRecipe) -> StudyRecipe:
    """Return a study without the assignments of fields that are free to change."""

    def without(found: StudyRecipe | StudyTarget | StudyObjective) -> dict[str, list[str]]:
        return {"set": [each for each in found.set if not is_free(each.partition("=")[0].strip())]}

    def is_free(field: str) -> bool:
        return any(field == name or field.startswith(f"{name}.") for name in FREE)

    return study.model_copy(
        update=without(study)
        | {
            "targets": {name: each.model_copy(update=without(each)) for name, each in study.targets.items()},
            "objectives": {name: each.model_copy(update=without(each)) for name, each in study.objectives.items()},
        }
    )
