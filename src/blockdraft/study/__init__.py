"""Studies: the paper's experiment at any size, by one command, over seeds, with tables."""

from blockdraft.study.plan import Cell, StudyError, StudyHardware, StudyRecipe, load_study, shipped_studies
from blockdraft.study.run import Study

__all__ = ["Cell", "Study", "StudyError", "StudyHardware", "StudyRecipe", "load_study", "shipped_studies"]
