"""Training drafters: recipes, estimates, and the run itself."""

from blockdraft.training.estimate import ResourceEstimate, estimate
from blockdraft.training.recipe import Recipe, RecipeError
from blockdraft.training.shipped import load_recipe, shipped_names
from blockdraft.training.trainer import Trainer

__all__ = ["Recipe", "RecipeError", "ResourceEstimate", "Trainer", "estimate", "load_recipe", "shipped_names"]
