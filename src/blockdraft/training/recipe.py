"""What a training run is, in one strict schema; its defaults are the paper's."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from blockdraft.errors import BlockdraftError
from blockdraft.losses import Objective, objective

Beta = Annotated[float, Field(ge=0, lt=1)]
Kind = Literal["dflash", "dspark"]


class RecipeError(BlockdraftError):
    """A recipe that cannot be used, with the reason."""


class Part(BaseModel):
    """A section: frozen, and no key that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetPart(Part):
    """The frozen model. ``shape`` are the fields of its configuration that an estimate needs before it is there."""

    name: str = "Qwen/Qwen3-4B"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    mask_token_id: int | None = None
    shape: dict[str, Any] | None = None


class DrafterPart(Part):
    """The model that is trained. Its width and heads are the target's.

    initial: ``scratch``, ``target`` (the target's own last layers), or the folder of a drafter to train further.
    """

    kind: Kind = "dflash"
    num_layers: int = Field(5, ge=1)
    num_proposals: int = Field(15, ge=1)
    num_features: int | None = Field(None, ge=1)
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = Field(256, ge=1)
    initial: str = "scratch"

    @field_validator("initial")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("scratch", "target") and "/" not in value:
            raise ValueError("must be scratch, target or a drafter's folder (./name if it is here)")
        return value

    def changes(self) -> dict[str, Any]:
        """As `DrafterConfig.for_target` takes them."""
        values: dict[str, Any] = {"num_layers": self.num_layers, "num_proposals": self.num_proposals}
        if self.num_features is not None:
            values["num_features"] = self.num_features
        if self.kind == "dspark":
            values |= {"markov_head": self.markov_head, "markov_rank": self.markov_rank}
        return values


class ObjectivePart(Part):
    """What is minimised. Options are those of the objective; the paper's eta and floors come with the drafter."""

    name: str = "bv"
    options: dict[str, Any] = {}


class AnnealingPart(Part):
    """beta of log BV: from ``initial`` to ``final`` over the first ``share`` of training."""

    share: float = Field(0.5, ge=0, le=1)
    initial: float = Field(0.0, ge=0, le=1)
    final: float = Field(1.0, ge=0, le=1)


class DataPart(Part):
    """TextDataset of the target. ``heldout`` texts are kept for measuring."""

    path: Path | None = None
    heldout: int = Field(256, ge=0)
    features: Literal["online", "cached"] = "online"
    cache: Path | None = None
    cache_gib: float = Field(20.0, gt=0)


class BatchPart(Part):
    """One optimizer step: the texts of the global batch, and anchors drawn from all of them."""

    num_texts: int = Field(32, ge=1)
    num_anchors: int = Field(16_384, ge=1)
    accumulation: int = Field(1, ge=1)
    full_blocks: bool = False


class OptimizerPart(Part):
    """AdamW, linear warm-up over a share of the steps, then a cosine to zero."""

    rate: float = Field(6e-4, gt=0)
    warmup: float = Field(0.04, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    clip: float = Field(1.0, gt=0)
    epochs: int = Field(6, ge=1)
    max_steps: int | None = Field(None, ge=1)


class RuntimePart(Part):
    """Where and how it runs. ``precision`` is that of the drafter's arithmetic; its weights are float32."""

    device: str | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    shard_target: bool = False
    compile: bool = False
    checkpoint_activations: bool = False
    threads: int | None = Field(None, ge=1)
    fused: bool = True


class RecordPart(Part):
    """What is measured and kept while it runs; counts are optimizer steps."""

    log_every: int = Field(10, ge=1)
    save_every: int = Field(500, ge=1)
    evaluate_every: int | None = Field(None, ge=1)
    heldout_blocks: int = Field(2048, ge=1)
    decode_prompts: int = Field(0, ge=0)
    keep_epochs: bool = False
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False


class Recipe(Part):
    """A training run."""

    target: TargetPart = TargetPart()
    drafter: DrafterPart = DrafterPart()
    objective: ObjectivePart = ObjectivePart()
    annealing: AnnealingPart = AnnealingPart()
    data: DataPart = DataPart()
    batch: BatchPart = BatchPart()
    optimizer: OptimizerPart = OptimizerPart()
    runtime: RuntimePart = RuntimePart()
    record: RecordPart = RecordPart()
    seed: int = Field(42, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        try:
            self.make_objective()
        except TypeError as error:
            raise ValueError(f"objective.options: {error}") from error
        if self.data.features == "cached" and self.data.cache is None:
            raise ValueError("data.features is cached; say where with data.cache")
        if self.record.decode_prompts > self.data.heldout:
            raise ValueError(
                f"record.decode_prompts is {self.record.decode_prompts}, of {self.data.heldout} held-out texts; "
                "hold out more with data.heldout"
            )
        return self

    def make_objective(self) -> Objective:
        """The objective, with the paper's settings for the drafter where the recipe has none."""
        options = {name: _number(value) for name, value in self.objective.options.items()}
        return objective(self.objective.name, drafter=self.drafter.kind, **options)

    def to_yaml(self) -> str:
        """Every field, as a file that `load_recipe` reads."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


def _number(value: Any) -> Any:
    """YAML reads ``1e-6`` as text, for want of a dot."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def parse(values: dict[str, Any], where: str) -> Recipe:
    """A recipe from nested values; a mistake names the field, and the nearest one for an unknown name."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_explain(each) for each in error.errors())) from error


def override(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Nested values with ``key.path=value`` applied; values are read as YAML."""
    result = merge({}, values)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise RecipeError(f"{assignment!r} is not of the form key.path=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"{assignment!r}: the value is not YAML") from error
        nested: Any = value
        for key in reversed(path.split(".")):
            nested = {key: nested}
        result = merge(result, nested)
    return result


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on top, section by section."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _explain(error: Any) -> str:
    """One mistake in words."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path) or "the recipe"
    if error["type"] == "extra_forbidden":
        known = list(_section(path[:-1]).model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"unknown field {name!r}" + (f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})")
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {message[:1].lower()}{message[1:]}, got {error['input']!r}" if path else message


def _section(path: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Recipe
    for key in path:
        annotation = section.model_fields[key].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))
    return section
