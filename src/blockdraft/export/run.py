"""What a run's folder tells of a drafter: recipe, data, measured lengths."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.data import DataError, Manifest, read_manifest
from blockdraft.runs import Run, RunInfo


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run that made a checkpoint; None is what the folder does not tell.

    info: ``run.json``: recipe, target, versions.
    step: optimizer steps of this checkpoint.
    measured: the held-out lengths of this very step.
    data: the manifest of the data folder, if it is still there.
    """

    info: RunInfo | None = None
    step: int | None = None
    measured: dict[str, float] | None = None
    data: Manifest | None = None

    @property
    def target(self) -> str | None:
        """The name under which the target was loaded."""
        return None if self.info is None else self.info.target.name


def run_facts(checkpoint: str | Path) -> RunFacts:
    """Return what is known of a checkpoint ``run/steps/00000500``, or a link to it; nothing outside of a run."""
    found = Run.of_checkpoint(checkpoint)
    if found is None:
        return RunFacts()
    run, step = found
    path = run.recipe.data.path
    try:
        data = None if path is None else read_manifest(path)
    except DataError:
        data = None
    return RunFacts(run.info, step, run.heldout_metrics(step), data)
