"""Studies: the paper's experiment at any size, by one command, over seeds, with tables."""

from blockdraft.study.plan import Cell, StudyError, StudyRecipe, load_study, shipped_studies
from blockdraft.study.run import Study

__all__ = ["Cell", "Study", "StudyError", "StudyRecipe", "load_study", "shipped_studies"]
