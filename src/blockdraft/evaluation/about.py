"""Which drafter is which: names and labels, from its folder and the run it came from."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.evaluation.conversation import AUTOREGRESSIVE
from blockdraft.evaluation.results import EvaluationError
from blockdraft.recipes import is_annealed
from blockdraft.runs import Run
from blockdraft.targets import Target


@dataclass(frozen=True)
class Candidate:
    """A drafter to be evaluated.

    run: the training run that it lies in, if it does. step: the checkpoint's.
    """

    name: str
    path: Path
    drafter: Drafter
    run: Run | None = None
    step: int | None = None

    @property
    def objective(self) -> str | None:
        """The objective's name, as in the recipe."""
        return None if self.run is None else self.run.recipe.objective.name

    @property
    def label(self) -> str:
        """For tables: the objective in capitals, BV told apart by form and annealing; the name if nothing is known."""
        if self.run is None or self.objective is None:
            return self.name
        if self.objective != "bv":
            return self.objective.upper()
        recipe = self.run.recipe
        made = recipe.make_objective()
        if not is_annealed(made):
            return f"BV {getattr(made, 'form', '')}".strip()
        annealing = recipe.annealing
        annealed = annealing is not None and annealing.ratio > 0 and annealing.initial != annealing.final
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
    if Run.is_run(path):
        path = Run.open(path).checkpoint("best")
    drafter = load_drafter(path, target).to(target.device, target.dtype).eval()
    found = Run.of_checkpoint(path)
    if found is None:
        return Candidate(name or path.name, path, drafter)
    run, step = found
    return Candidate(name or run.folder.name, path, drafter, run, step)
