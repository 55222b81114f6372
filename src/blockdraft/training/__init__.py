"""Training drafters: recipes, estimates, and the run itself."""

from blockdraft.training.estimate import Estimate, estimate
from blockdraft.training.recipe import Recipe, RecipeError
from blockdraft.training.shipped import load_recipe, shipped_names

__all__ = ["Estimate", "Recipe", "RecipeError", "estimate", "load_recipe", "shipped_names"]
