"""Which drafter is which: names and labels, from its folder and the run it came from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.evaluation.conversation import AUTOREGRESSIVE
from blockdraft.evaluation.results import EvaluationError
from blockdraft.targets import Target


@dataclass(frozen=True)
class Candidate:
    """A drafter to be evaluated.

    run: what its training wrote about itself, if it lies in a run's folder. folder: the run's.
    step: the checkpoint's.
    """

    name: str
    path: Path
    drafter: Drafter
    run: dict[str, Any] | None
    folder: Path | None
    step: int | None

    @property
    def objective(self) -> str | None:
        """As in the recipe."""
        return None if self.run is None else str(self.run["recipe"]["objective"]["name"])

    @property
    def label(self) -> str:
        """For tables: the objective in capitals, BV told apart by form and annealing; the name if nothing is known."""
        if self.run is None or self.objective is None:
            return self.name
        if self.objective != "bv":
            return self.objective.upper()
        recipe = self.run["recipe"]
        form = recipe["objective"]["options"].get("form", "log")
        if form != "log":
            return f"BV {form}"
        annealing = recipe["annealing"]
        annealed = annealing["share"] > 0 and annealing["initial"] != annealing["final"]
        return "BV" if annealed else "BV w/o annealing"


def load_candidates(drafters: list[str], target: Target) -> list[Candidate]:
    """From ``PATH`` or ``NAME=PATH``; a path is a drafter's folder, or a run's, whose best checkpoint is taken."""
    found: list[Candidate] = []
    for given in drafters:
        name, equals, path = ("", "", given) if Path(given).exists() else given.partition("=")
        candidate = _load(Path(path if equals else given), name if equals else None, target)
        if candidate.name == AUTOREGRESSIVE:
            raise EvaluationError(
                f"{AUTOREGRESSIVE!r} is what decoding without a drafter is called; choose another name"
            )
        if any(other.name == candidate.name for other in found):
            raise EvaluationError(f"two drafters are called {candidate.name!r}; name one: --drafter NAME=PATH")
        found.append(candidate)
    return found


def _load(path: Path, name: str | None, target: Target) -> Candidate:
    if (path / "run.json").exists():
        path = path / ("best" if (path / "best").exists() else "checkpoint")
    drafter = load_drafter(path, target).to(target.device, target.dtype).eval()
    resolved = path.resolve()
    run_folder = resolved.parent.parent  # run/steps/00000500
    if not (run_folder / "run.json").exists() or resolved.parent.name != "steps":
        return Candidate(name or path.name, path, drafter, None, None, None)
    run = json.loads((run_folder / "run.json").read_text())
    return Candidate(name or run_folder.name, path, drafter, run, run_folder, int(resolved.name))
