"""Where metrics go: ``metrics.jsonl`` always; TensorBoard, Weights & Biases or trackio if asked."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from blockdraft.recipes import Recipe, RecipeError

TRACKERS = ("wandb", "trackio")


def check_trackers(recipe: Recipe) -> None:
    """Raise if the recipe asks for a tracker that is not installed; on every process, before any of them waits."""
    for name in ("tensorboard", *TRACKERS):
        if getattr(recipe.logging, name) and importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"logging.{name} needs a package that is not installed: pip install {name}, or set logging.{name}=false"
            )


class MetricsLog:
    """Writes the metrics of one run; used by the process that writes."""

    def __init__(self, file: Path, recipe: Recipe) -> None:
        self._file = file.open("a")
        self._writers: list[Any] = []
        if recipe.logging.tensorboard:
            self._writers.append(_TensorBoard(file.parent / "tensorboard"))
        for name in TRACKERS:
            if getattr(recipe.logging, name):
                self._writers.append(_Tracker(name, file.parent, recipe))

    def write(self, values: dict[str, Any]) -> None:
        """Write one line; ``step`` is among the values."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        for writer in self._writers:
            writer.write(numbers, texts, values["step"])

    def close(self) -> None:
        """Close the file and all trackers."""
        self._file.close()
        for writer in self._writers:
            writer.close()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, numbers: dict[str, float], texts: dict[str, str], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        for name, text in texts.items():
            self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """wandb and trackio share their interface; they are sent numbers only."""

    def __init__(self, name: str, run: Path, recipe: Recipe) -> None:
        self._module = __import__(name)
        self._module.init(project="blockdraft", name=run.name, config=recipe.model_dump(mode="json"))

    def write(self, numbers: dict[str, float], _texts: dict[str, str], step: int) -> None:
        self._module.log(numbers, step=step)

    def close(self) -> None:
        self._module.finish()
