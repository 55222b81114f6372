"""Recipes say what a training run is, and are checked before anything is launched."""

from blockdraft.recipes.loading import load_recipe, merge, override, parse, reference_page, shipped_names, to_yaml
from blockdraft.recipes.schema import Recipe, RecipeError, is_annealed

__all__ = [
    "Recipe",
    "RecipeError",
    "is_annealed",
    "load_recipe",
    "merge",
    "override",
    "parse",
    "reference_page",
    "shipped_names",
    "to_yaml",
]
