"""Tell what the training of a study took, as its runs logged it: seconds a step, and peak memory."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from blockdraft.reports.table import MISSING, CellValue, Column, Table, TableRow
from blockdraft.runs import Run
from blockdraft.study.plan import StudyRecipe

Row = tuple[str, str, str]
"""Names a target, a drafter and an objective of a study."""


@dataclass(frozen=True)
class Taken:
    """Holds what training took over all seeds: seconds of a step, and GiB of memory if that is known."""

    seconds: float
    memory: float | None


def cost_table(study: StudyRecipe, out: Path, labels: Mapping[Row, str], over: str | None) -> Table | None:
    """Build the table of what training took, by target, drafter and objective; None if the runs do not tell.

    Args:
        study: the study, or the part of it that is evaluated.
        out: its folder.
        labels: how tables call the objectives.
        over: how they call the baseline, beside which the seconds are shown; None if there is none.
    """
    found, baseline = _taken(study, out), study.compared_with
    if not found:
        return None
    rows = []
    for (target, drafter, objective), label in labels.items():
        taken, theirs = found.get((target, drafter, objective)), found.get((target, drafter, baseline or ""))
        values = [MISSING if taken is None else CellValue(f"{taken.seconds:.3g}", taken.seconds)]
        if baseline is not None:
            ratio = None if taken is None or theirs is None else taken.seconds / theirs.seconds
            values.append(MISSING if ratio is None else CellValue(f"{ratio:.2f}", ratio))
        memory = None if taken is None else taken.memory
        values.append(MISSING if memory is None else CellValue(f"{memory:.2f}", memory))
        rows.append(TableRow((target, drafter, label), tuple(values)))
    columns = [Column(("Seconds a step",), "seconds")]
    columns += [] if baseline is None else [Column((f"Relative to {over}",), "relative")]
    columns += [Column(("Peak GiB",), "peak_gib")]
    caption = (
        "As the runs logged it, over all seeds: the median of the seconds that a step had taken on average since the "
        "run began or was resumed, with its measurements and checkpoints; and the largest peak memory of a process, "
        "that of its GPU, or the host's where it computed on a CPU. Cells may have run side by side, which slows them "
        "down."
    )
    title = f"{study.name}: what training took"
    return Table("study-cost", title, caption, ("Target", "Drafter", "Objective"), tuple(columns), tuple(rows))


def _taken(study: StudyRecipe, out: Path) -> dict[Row, Taken]:
    """Return what was logged of each objective; runs may be gone, and those of earlier versions logged less."""
    logged = defaultdict[Row, list[dict[str, Any]]](list)
    for cell in study.cells:
        folder = out / "runs" / cell.name
        if Run.is_run(folder):
            logged[cell.target, cell.drafter, cell.objective] += Run.open(folder).metrics()
    found = {}
    for row, lines in logged.items():
        seconds = [1 / line["steps_per_second"] for line in lines if line.get("steps_per_second")]
        memory = [line["peak_memory_gib"] for line in lines if line.get("peak_memory_gib")]
        if seconds:
            found[row] = Taken(median(seconds), max(memory, default=None))
    return found
