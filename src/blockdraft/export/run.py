"""What a run's folder tells of a drafter: recipe, data, measured lengths."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.data.store import MANIFEST
from blockdraft.files import complete_lines


@dataclass(frozen=True)
class RunFacts:
    """Of the run that made a checkpoint; None is what the folder does not tell.

    about: ``run.json``: recipe, target, versions.
    step: optimizer steps of this checkpoint.
    measured: the held-out lengths of this very step.
    data: the manifest of the data folder, if it is still there.
    """

    about: dict[str, Any] | None = None
    step: int | None = None
    measured: dict[str, float] | None = None
    data: dict[str, Any] | None = None

    @property
    def target(self) -> str | None:
        """The name under which the target was loaded."""
        return None if self.about is None else str(self.about["target"]["name"])


def run_facts(checkpoint: str | Path) -> RunFacts:
    """Of a checkpoint ``run/steps/00000500``, or a link to it; empty for a folder outside of a run."""
    folder = Path(checkpoint).resolve()
    run = folder.parent.parent
    about = _json(run / "run.json")
    if about is None or folder.parent.name != "steps" or not folder.name.isdigit():
        return RunFacts()
    step = int(folder.name)
    path = about["recipe"]["data"]["path"]
    data = None if path is None else _json(Path(path) / MANIFEST)
    return RunFacts(about, step, _measured(run / "metrics.jsonl", step), data)


def _measured(file: Path, step: int) -> dict[str, float] | None:
    if not file.is_file():
        return None
    for metrics in map(json.loads, complete_lines(file)):
        if metrics.get("step") == step and "heldout_length_block" in metrics:
            return {name: value for name, value in metrics.items() if name.startswith("heldout_")}
    return None


def _json(file: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
