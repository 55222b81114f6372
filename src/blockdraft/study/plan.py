"""Describe a study: its targets, drafters, objectives and seeds, which make its cells, and what it will cost."""

import difflib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from blockdraft.errors import BlockdraftError
from blockdraft.evaluation.candidates import MAX_NAME
from blockdraft.recipes import Recipe, load_recipe, shipped_names
from blockdraft.recipes.loading import explain_field, override, read_yaml_file
from blockdraft.recipes.schema import Section

SHIPPED_STUDIES = Path(__file__).parent / "shipped"
PLACEHOLDER = Path("features")
"""The feature cache in a cell's recipe, where the study chooses it."""


class StudyError(BlockdraftError):
    """A study cannot be planned or run, and the message says why."""


class StudyTarget(Section):
    """Names a target of a study, and the texts its drafters are trained on."""

    recipe: str = Field(description="the shipped target whose recipes are used: pocket, smollm2, qwen3-4b, qwen3-8b")
    data: Path | None = Field(None, description="a data folder that is there; null makes one from the prompts")
    prompts: str = Field("pocket", description="where prompts come from, as `data prompts --from` takes it")
    num_prompts: int = Field(1400, ge=1, description="prompts to answer")
    num_responses: int = Field(1, ge=1, description="how many times each prompt is answered")
    max_new_tokens: int = Field(256, ge=1, description="longest response")
    max_length: int = Field(768, ge=2, description="longest prompt and response together")
    set: list[str] = Field([], description="recipe fields for all cells of this target, as key.path=value")


class StudyObjective(Section):
    """Names an objective of a study: a shipped one, with changes that make it a variant."""

    recipe: str = Field(description="the shipped objective: ce, kl, rkl, tv, lk, bv, ...")
    set: list[str] = Field([], description="recipe fields of this variant, as key.path=value")


class StudyEvaluation(Section):
    """Says how every drafter is evaluated."""

    tasks: list[str] = Field(["pocket"], min_length=1, description="as `evaluate --tasks` takes them")
    prompts: Path | None = Field(None, description="a folder with NAME.jsonl for the benchmarks; null is the Hub")
    num_prompts: int | None = Field(None, ge=1, description="prompts of each task; null is as many as the paper's")
    num_decoded: int | None = Field(
        None, ge=0, description="of these, prompts that are also decoded; null is all. Predicted lengths use all"
    )
    max_new_tokens: int = Field(256, ge=2, description="longest answer")
    rules: list[Literal["greedy", "token", "block"]] = Field(
        ["greedy", "token", "block"], min_length=1, description="verification rules"
    )
    draft_temperatures: list[Annotated[float, Field(gt=0)]] | None = Field(
        None, min_length=1, description="grid for the best draft temperature; null is 0.1 to 1.2, [1] only the paper's"
    )
    argmax_drafts: bool = Field(
        True, description="whether argmax drafts are measured as well, as serving engines draft by default"
    )
    checkpoint: Literal["last", "best"] = Field("last", description="the paper evaluates the last checkpoint")
    num_traces: int = Field(2, ge=0, description="prompts of each task for the report's block explorer")
    dynamics_texts: int = Field(0, ge=0, description="training texts for the figure of training dynamics")

    @field_validator("tasks", "rules")
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        twice = [each for each in value if value.count(each) > 1]
        if twice:
            raise ValueError(f"{twice[0]} appears twice")
        return value


class StudyHardware(Section):
    """Says how many devices train a cell, and what the plan assumes of them; no result depends on it."""

    devices: int = Field(1, ge=1, description="devices that train a cell together, and evaluate; a process for each")
    tflops: float = Field(989.0, gt=0, description="peak rate of a device in TFLOP/s")
    efficiency: float = Field(0.2, gt=0, le=1, description="share of the peak rate that is reached")
    tokens_per_text: float = Field(1000.0, ge=1, description="mean length of a text, until there is a data folder")
    sampling_rate: float = Field(
        2500.0, gt=0, description="tokens per second that a device samples in large batches: an assumption"
    )
    decoding_rate: float = Field(
        50.0, gt=0, description="tokens per second of a device that decodes a single text: an assumption"
    )


class StudyRecipe(Section):
    """Describes a study: every combination of its targets, drafters, objectives and seeds is a cell."""

    name: str = Field(description="of the study")
    targets: dict[str, StudyTarget] = Field(description="targets by name")
    drafters: list[Literal["dflash", "dspark"]] = Field(["dflash", "dspark"], min_length=1)
    objectives: dict[str, StudyObjective] = Field(description="objectives by name")
    baseline: str | None = Field(
        None, description="the objective that the others are compared with; null is the first one trained with CE"
    )
    seeds: list[int] = Field([42], min_length=1, description="each seed is a cell of its own")
    set: list[str] = Field([], description="recipe fields for all cells, as key.path=value")
    evaluation: StudyEvaluation = StudyEvaluation()
    hardware: StudyHardware = StudyHardware()

    @field_validator("targets", "objectives")
    @classmethod
    def _safe_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        dotted = [name for name in value if "." in name]
        if dotted:
            raise ValueError(
                f"{dotted[0]!r} has a dot in it, where KEY.PATH=VALUE on the command line would end the name; use '-'"
            )
        wrong = [name for name in value if not all(c.isalnum() or c in "-_" for c in name) or not name[:1].isalnum()]
        if wrong or not value:
            raise ValueError(
                f"names are letters, digits, '-' and '_', the first a letter or a digit, got {wrong or 'none'}"
            )
        long = [name for name in value if len(f"dspark-{name}".encode()) > MAX_NAME]
        if long:
            most = MAX_NAME - len("dspark-")
            raise ValueError(f"names have at most {most} bytes, since drafters are called by them, got {long[0]!r}")
        return value

    @model_validator(mode="after")
    def _known_baseline(self) -> Self:
        if self.baseline is not None and self.baseline not in self.objectives:
            raise ValueError(
                f"the baseline {self.baseline!r} is not one of the objectives: {', '.join(self.objectives)}"
            )
        return self

    @property
    def compared_with(self) -> str | None:
        """Give the name of the objective that the others are compared with, if there is one."""
        return self.baseline or next((name for name, each in self.objectives.items() if each.recipe == "ce"), None)

    def to_yaml(self) -> str:
        """Write every field as YAML that `load_study` reads."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))

    @property
    def cells(self) -> "list[StudyCell]":
        """Give all cells, seed by seed, so that an interrupted study has whole seeds."""
        return [
            StudyCell(self, target, drafter, objective, seed)
            for seed in self.seeds
            for target in self.targets
            for drafter in self.drafters
            for objective in self.objectives
        ]


@dataclass(frozen=True)
class StudyCell:
    """Describes one training run of a study."""

    study: StudyRecipe
    target: str
    drafter: Literal["dflash", "dspark"]
    objective: str
    seed: int

    @property
    def name(self) -> str:
        """Give a name that no other cell has, which is also the run's folder."""
        return f"{self.target}-{self.drafter}-{self.objective}-seed{self.seed}"

    @property
    def drafter_name(self) -> str:
        """Give the name of the drafter in the evaluation of its target and seed."""
        return f"{self.drafter}-{self.objective}"

    @property
    def recipe_name(self) -> str:
        """Give the shipped recipe that the cell starts from."""
        target, objective = self.study.targets[self.target], self.study.objectives[self.objective]
        return f"{target.recipe}-{self.drafter}-{objective.recipe}"

    def assignments(self, data: Path, cache: Path) -> list[str]:
        """Return the fields that the cell sets, in the order in which they override each other."""
        target, objective = self.study.targets[self.target], self.study.objectives[self.objective]
        return [
            f"data.path={data}", f"data.cache={cache}", f"seed={self.seed}", "logging.tensorboard=false",
            *self.study.set, *target.set, *objective.set,
        ]  # fmt: skip

    @cached_property
    def recipe(self) -> Recipe:
        """Give the cell's recipe; its data folder is left open."""
        return load_recipe(self.recipe_name, self.assignments(Path("data"), PLACEHOLDER))


def shipped_studies() -> list[str]:
    """Return the names of the shipped studies."""
    return sorted(path.stem for path in SHIPPED_STUDIES.glob("*.yaml"))


def load_study(name_or_path: str | Path, assignments: list[str] | None = None) -> StudyRecipe:
    """Load a shipped study by name, or a YAML file, with ``key.path=value`` laid over it; every cell is checked.

    ``null`` removes a target or an objective.
    """
    name = str(name_or_path)
    path = SHIPPED_STUDIES / f"{name}.yaml" if name in shipped_studies() else Path(name_or_path)
    if not path.is_file():
        near = difflib.get_close_matches(name, shipped_studies(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"shipped: {', '.join(shipped_studies())}"
        raise StudyError(f"{name}: neither a file nor a shipped study; {hint}")
    try:
        values = read_yaml_file(path)
        study = StudyRecipe.model_validate(_without_removed(override(values, assignments or []), values))
    except ValidationError as error:
        raise StudyError(f"{name}: {explain_field(error.errors()[0], StudyRecipe)}") from error
    names = [cell.name for cell in study.cells]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise StudyError(f"{name}: two cells are called {twice}; no drafter, seed or combination of names may repeat")
    for cell in study.cells:
        if cell.recipe_name not in shipped_names():
            raise StudyError(f"{name}: {cell.name} needs a recipe {cell.recipe_name!r}, which is not shipped")
        if cell.recipe.drafter.initial == "required":  # a mistake in any cell is said before anything runs
            raise StudyError(
                f"{name}: {cell.name} trains a drafter further; name it with drafter.initial=FOLDER in the `set` of "
                "the study, the target or the objective"
            )
    return study


def _without_removed(values: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a study without the targets and objectives of its file that assignments set to null."""
    kept = dict(values)
    for part in ("targets", "objectives"):
        now, before = values.get(part), file.get(part)
        if isinstance(now, dict) and isinstance(before, dict):
            unknown = [str(name) for name, value in now.items() if value is None and name not in before]
            if unknown:
                near = difflib.get_close_matches(unknown[0], map(str, before), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(map(str, before))}"
                raise StudyError(f"{part}.{unknown[0]}=null: the study has no {unknown[0]!r} to remove; {hint}")
            kept[part] = {name: value for name, value in now.items() if value is not None or before[name] is None}
    return kept
