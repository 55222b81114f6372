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

KEPT = ("runtime.precision", "runtime.device")
"""Fields of these sections that may not change: they decide the precision of the drafter's arithmetic."""

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
    differ = [name for name in COMPARED if found[name] != wanted[name]]
    return differ + (["runtime.precision"] if run.runtime.precision != cell.runtime.precision else [])


def refuse_another_study(recipe: StudyRecipe, folder: Path) -> None:
    """Raise if a folder holds a study that this one does not go on with."""
    file = folder / STUDY_FILE
    if not os.path.lexists(file):
        return
    try:
        before = StudyRecipe.model_validate(read_yaml_file(file))
    except ValidationError as error:
        raise StudyError(f"{file} does not describe a study; choose another --out") from error
    changed = changes(before, recipe)
    if changed:
        raise StudyError(
            f"{folder} holds another study: {', '.join(changed)} differ. You may add seeds and objectives, and change "
            f"the baseline, the hardware and {' and '.join(FREE)} (but not {' and '.join(KEPT)}, which change what is "
            "learnt), but nothing else. Choose another --out"
        )


def changes(before: StudyRecipe, now: StudyRecipe) -> list[str]:
    """Return the names of the fields in which a study does not go on with one begun before.

    It may add seeds and objectives, and change what is free; the baseline and the hardware are free as well.
    """
    before, now = _deciding(before), _deciding(now)
    kept = {
        "seeds": set(before.seeds) <= set(now.seeds),
        "objectives": before.objectives.items() <= now.objectives.items(),
        "baseline": True,
        "hardware": True,
    }
    same = {name: getattr(before, name) == getattr(now, name) for name in StudyRecipe.model_fields}
    return [name for name, is_same in (same | kept).items() if not is_same]


def _deciding(study: StudyRecipe) -> StudyRecipe:
    """Return a study without the assignments of fields that are free to change."""

    def without(found: StudyRecipe | StudyTarget | StudyObjective) -> dict[str, list[str]]:
        return {"set": [each for each in found.set if not is_free(each.partition("=")[0].strip())]}

    def is_free(field: str) -> bool:
        has_kept = any(f"{name}.".startswith(f"{field}.") for name in KEPT)
        return not has_kept and any(field == name or field.startswith(f"{name}.") for name in FREE)

    return study.model_copy(
        update=without(study)
        | {
            "targets": {name: each.model_copy(update=without(each)) for name, each in study.targets.items()},
            "objectives": {name: each.model_copy(update=without(each)) for name, each in study.objectives.items()},
        }
    )
