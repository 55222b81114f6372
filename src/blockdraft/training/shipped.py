"""Shipped recipes: one small file per target, drafter and objective, composed as ``target-drafter-objective``."""

import difflib
import itertools
from pathlib import Path
from typing import Any

import yaml

from blockdraft.training.recipe import Recipe, RecipeError, merge, override, parse

FOLDER = Path(__file__).parent / "recipes"
PARTS = ("targets", "drafters", "objectives")


def shipped_names() -> list[str]:
    """All combinations."""
    return ["-".join(parts) for parts in itertools.product(*(_stems(part) for part in PARTS))]


def load_recipe(name_or_path: str | Path, assignments: list[str] | None = None) -> Recipe:
    """A shipped recipe by name, or a YAML file, with ``key.path=value`` laid over it."""
    name = str(name_or_path)
    values = _shipped_values(name) if name in shipped_names() else _file_values(Path(name_or_path))
    return parse(override(values, assignments or []), name)


def _shipped_values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for parts in itertools.product(*(_stems(part) for part in PARTS)):
        if "-".join(parts) == name:
            for part, stem in zip(PARTS, parts, strict=True):
                values = merge(values, _read(FOLDER / part / f"{stem}.yaml"))
    return values


def _file_values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(str(path), shipped_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`blockdraft recipes ls` lists the shipped ones"
        raise RecipeError(f"{path}: neither a file nor a shipped recipe; {hint}")
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a YAML file: {str(error).splitlines()[0]}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, not a {type(values).__name__}")
    return values


def _stems(part: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / part).glob("*.yaml"))
