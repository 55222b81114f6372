"""This package runs the paper's experiment at any size, by one command, over seeds, with tables."""

from blockdraft.study.plan import StudyCell, StudyError, StudyHardware, StudyRecipe, load_study, shipped_studies
from blockdraft.study.processes import jobs_at_once
from blockdraft.study.run import Study

__all__ = [
    "Study", "StudyCell", "StudyError", "StudyHardware", "StudyRecipe", "jobs_at_once", "load_study", "shipped_studies",
]  # fmt: skip
