"""Load recipes by name or file, with overrides, and show them as YAML that explains every field."""

import difflib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from blockdraft.files import read_bytes
from blockdraft.recipes.schema import Recipe, RecipeError

SHIPPED_RECIPES = Path(__file__).parent
PARTS = ("targets", "drafters", "objectives")


def shipped_names() -> list[str]:
    """Return the names of all shipped recipes: target, drafter and objective, joined by hyphens."""
    return ["-".join(parts) for parts in itertools.product(*(_stems(part) for part in PARTS))]


def load_recipe(name_or_path: str | Path, assignments: list[str] | None = None) -> Recipe:
    """Load a shipped recipe by name, or a YAML file, with ``key.path=value`` laid over it."""
    name = str(name_or_path)
    values = _shipped_values(name) if name in shipped_names() else _file_values(Path(name_or_path))
    return parse(override(values, assignments or []), name)


def parse(values: dict[str, Any], where: str) -> Recipe:
    """Make a recipe of nested values; a mistake names the field, and the nearest one for an unknown name."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(explain_field(each, Recipe) for each in error.errors())) from error


def override(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Return nested values with ``key.path=value`` applied; values are read as YAML."""
    result = merge({}, values)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise RecipeError(f"{assignment!r} is not of the form key.path=value")
        nested: Any = _read_yaml(text, f"{assignment!r}: the value")
        for key in reversed(path.split(".")):
            nested = {key: nested}
        result = merge(result, nested)
    return result


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` laid on top, section by section."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def to_yaml(recipe: Recipe, *, explain: bool = False) -> str:
    """Write every field as YAML that `load_recipe` reads; with ``explain``, each one with what it means."""
    values = recipe.model_dump(mode="json")
    if not explain:
        return str(yaml.safe_dump(values, sort_keys=False))
    lines: list[str] = []
    for name, section, about in sections():
        value = values[name]
        lines.append(f"# {about}")
        if section is None or value is None:
            lines.append(f"{name}: {_scalar(value)}")
        else:
            lines.append(f"{name}:")
            entries = [f"  {key}: {_scalar(value[key])}" for key in section.model_fields]
            width = min(44, max(map(len, entries)))
            abouts = [field.description or "" for field in section.model_fields.values()]
            lines += [f"{entry:<{width}}  # {text}" for entry, text in zip(entries, abouts, strict=True)]
        lines.append("")
    return "\n".join(lines)


def sections() -> Iterator[tuple[str, type[BaseModel] | None, str]]:
    """Yield every top-level field of a recipe: its name, its section's class if it has one, and what it is."""
    for name, field in Recipe.model_fields.items():
        section = _section_class(field.annotation)
        about = field.description if section is None else (section.__doc__ or "").splitlines()[0]
        yield name, section, about or ""


def reference_page() -> str:
    """Return the reference of recipe fields as Markdown, made from the schema."""
    opening = "Made from the schema by `make reference`. The defaults are the paper's; any field is "
    parts = ["# Recipe fields", opening + "overridden on the command line as `section.field=value`."]
    for name, section, about in sections():
        parts.append(f"## {name}\n\n{about}")
        if section is None:
            parts[-1] += f". Default: `{_scalar(Recipe.model_fields[name].default)}`."
            continue
        rows = [
            f"| `{key}` | `{_scalar(_plain(field.default))}` | {field.description} |"
            for key, field in section.model_fields.items()
        ]
        parts.append("\n".join(["| field | default | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return text.removesuffix("...").strip()


def _shipped_values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for parts in itertools.product(*(_stems(part) for part in PARTS)):
        if "-".join(parts) == name:
            for part, stem in zip(PARTS, parts, strict=True):
                values = merge(values, read_yaml_file(SHIPPED_RECIPES / part / f"{stem}.yaml"))
    return values


def _file_values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(str(path), shipped_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`blockdraft recipes ls` lists the shipped ones"
        raise RecipeError(f"{path}: neither a file nor a shipped recipe; {hint}")
    return read_yaml_file(path)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; a `RecipeError` names the file and what is wrong with it."""
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a text file: {error}") from error
    values = _read_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, not a {type(values).__name__}")
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that appears twice in one mapping, of which YAML would silently keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} appears twice", node.start_mark)
        return dict(super().construct_mapping(node, deep))


def _read_yaml(text: str, where: str) -> Any:
    try:
        if re.search(r"\\(u|U0000)[dD][89a-fA-F]", text):
            raise ValueError("an escape stands for half of a character, a lone surrogate")
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise RecipeError(f"{where} is not YAML that can be used: {reason}") from error


def _stems(part: str) -> list[str]:
    return sorted(path.stem for path in (SHIPPED_RECIPES / part).glob("*.yaml"))


def explain_field(error: Any, root: type[BaseModel]) -> str:
    """Say in words what pydantic found wrong with a file that describes a ``root``."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path) or "the recipe"
    if error["type"] == "extra_forbidden":
        known = list(_section(path[:-1], root).model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"unknown field {name!r}" + (f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})")
    if error["type"] == "missing":
        return f"{name} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    got = "" if isinstance(error["input"], dict) else f", got {error['input']!r}"
    return f"{name}: {message[:1].lower()}{message[1:]}{got}" if path else message


def _section(path: list[str], root: type[BaseModel]) -> type[BaseModel]:
    """Return the section at a path; in a mapping of sections, the key that follows its name is the user's own."""
    section, keys = root, iter(path)
    for key in keys:
        annotation = section.model_fields[key].annotation
        found = _section_class(annotation)
        assert found is not None
        section = found
        if get_origin(annotation) is dict:
            next(keys)
    return section


def _section_class(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)
