"""Check what a study will read before anything runs: a mistake in its last stage would be found days later."""

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from blockdraft.data import read_manifest
from blockdraft.data.manifest import MANIFEST
from blockdraft.drafters.checkpoint import find_drafter, is_on_hub, load_config
from blockdraft.errors import BlockdraftError
from blockdraft.evaluation.tasks import BENCHMARKS, load_tasks
from blockdraft.study.plan import StudyCell, StudyError, StudyEvaluation, StudyRecipe
from blockdraft.targets import Sampling, target_shape
from blockdraft.training.initialization import refuse_other_shape


def check_data(recipe: StudyRecipe, *, running: bool) -> None:
    """Refuse texts that cells could not be trained on: of another target, or sampled from another distribution.

    running: also refuse data folders that are not there or not finished; a plan may be for elsewhere.
    """
    for name, target in recipe.targets.items():
        cells = [cell for cell in recipe.cells if cell.target == name]
        if target.data is None:
            _refuse_other_sampling(cells, "the texts that a study makes", Sampling())
        elif running or os.path.lexists(target.data / MANIFEST):
            manifest = read_manifest(target.data)
            if running and not manifest.complete:
                raise StudyError(f"{target.data} is not complete; let `blockdraft data regenerate` finish it first")
            _refuse_other_target(cells, target.data, manifest.about.target)
            _refuse_other_sampling(cells, str(target.data), manifest.identity.sampling)


def _refuse_other_target(cells: Iterable[StudyCell], folder: Path, sampled_from: str) -> None:
    """Raise if texts were sampled from a model of another name; its weights are compared when a cell starts."""
    for cell in cells:
        if _model_name(cell.recipe.target.name) != _model_name(sampled_from):
            raise StudyError(
                f"{folder} was sampled from {sampled_from}, and {cell.name} trains for {cell.recipe.target.name}. Set "
                f"targets.{cell.target}.data to texts of that target; if the two are one model in different folders, "
                "give them the same name"
            )


def _refuse_other_sampling(cells: Iterable[StudyCell], texts: str, sampling: Sampling) -> None:
    """Raise unless texts are drawn from the distribution whose ratios are trained, as a run itself will."""
    for cell in cells:
        temperature = cell.recipe.make_objective().temperature
        if sampling != Sampling(temperature):
            found = ", ".join(f"{option} {value:g}" for option, value in asdict(sampling).items())
            raise StudyError(
                f"{texts}: sampled with {found}, and the objective of {cell.name} assumes temperature "
                f"{temperature:g} over the whole vocabulary. Set targets.{cell.target}.data to texts that were sampled "
                "so, or change the objective"
            )


def _model_name(name: str) -> str:
    """Return what a model is called wherever it lies: a Hub id without its owner, or a folder without its parents."""
    return Path(name).absolute().name.lower()


def check_initial(cells: Iterable[StudyCell], *, download: bool) -> None:
    """Refuse drafters to train further that are not there, or have another shape than their cells state.

    download: also load those that come from the Hub, which keeps a copy for the training.
    """
    for cell in cells:
        drafter, target = cell.recipe.drafter, cell.recipe.target
        if drafter.initial in ("scratch", "target") or (is_on_hub(drafter.initial) and not download):
            continue
        try:
            num_layers = target_shape(target.name, target.shape).num_layers
            refuse_other_shape(drafter, load_config(find_drafter(drafter.initial), num_layers))
        except BlockdraftError as error:
            raise StudyError(f"{cell.name} trains a drafter further: {error}") from error


def check_dynamics(recipe: StudyRecipe) -> None:
    """Refuse to ask for training dynamics of runs that will not keep the checkpoints they are measured on."""
    cell = next((each for each in recipe.cells if not each.recipe.logging.keep_epoch_checkpoints), None)
    if recipe.evaluation.dynamics_texts and cell is not None:
        raise StudyError(
            f"evaluation.dynamics_texts is {recipe.evaluation.dynamics_texts}, but {cell.name} keeps no checkpoints of "
            "its epochs; set logging.keep_epoch_checkpoints=true, or evaluation.dynamics_texts=0"
        )


def check_best(recipe: StudyRecipe) -> None:
    """Refuse to evaluate the best checkpoints of runs that hold no texts out to find them."""
    cell = next((each for each in recipe.cells if not each.recipe.data.num_heldout), None)
    if recipe.evaluation.checkpoint == "best" and cell is not None:
        raise StudyError(
            f"evaluation.checkpoint is best, by held-out length, but {cell.name} holds no texts out; set "
            "data.num_heldout, or evaluation.checkpoint=last"
        )


def check_tasks(asked: StudyEvaluation, *, download: bool) -> None:
    """Refuse tasks that are unknown, and prompts that cannot be read.

    download: also load benchmarks that come from the Hub, which keeps a copy for the evaluations.
    """
    on_hub = [] if download else tasks_on_hub(asked)
    if "benchmarks" in on_hub and len(on_hub) > 1:
        raise StudyError(f"evaluation.tasks: benchmarks stands for all seven, so {on_hub} names some of them twice")
    here = [name for name in asked.tasks if name not in on_hub]
    if here:
        load_tasks(here, folder=asked.prompts, num_prompts=asked.num_prompts)


def tasks_on_hub(asked: StudyEvaluation) -> list[str]:
    """Return the tasks whose prompts come from the Hugging Face Hub."""
    return [name for name in asked.tasks if asked.prompts is None and name in ("benchmarks", *BENCHMARKS)]


def lacks_datasets(asked: StudyEvaluation) -> bool:
    """Return whether prompts come from the Hub and the package that reads them is not installed."""
    return bool(tasks_on_hub(asked)) and importlib.util.find_spec("datasets") is None
