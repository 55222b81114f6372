"""Check what a study will read before anything runs: a mistake in its last stage would be found days later."""

import importlib.util

from blockdraft.data import read_manifest
from blockdraft.evaluation.tasks import BENCHMARKS, load_tasks
from blockdraft.study.plan import StudyError, StudyEvaluation, StudyRecipe


def check_data(recipe: StudyRecipe) -> None:
    """Refuse data folders that are not there, damaged or unfinished."""
    for target in recipe.targets.values():
        if target.data is not None and not read_manifest(target.data).complete:
            raise StudyError(f"{target.data} is not complete; let `blockdraft data regenerate` finish it first")


def check_dynamics(recipe: StudyRecipe) -> None:
    """Refuse to ask for training dynamics of runs that will not keep the checkpoints they are measured on."""
    cell = next((each for each in recipe.cells if not each.recipe.logging.keep_epoch_checkpoints), None)
    if recipe.evaluation.dynamics_texts and cell is not None:
        raise StudyError(
            f"evaluation.dynamics_texts is {recipe.evaluation.dynamics_texts}, but {cell.name} keeps no checkpoints of "
            "its epochs; set logging.keep_epoch_checkpoints=true, or evaluation.dynamics_texts=0"
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
