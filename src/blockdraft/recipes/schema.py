"""Describe a training run in one strict schema, whose defaults are the paper's."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from blockdraft.data.batches import AnchorChoice
from blockdraft.drafters import SHIPPED
from blockdraft.drafters.config import DrafterKind, MarkovKind
from blockdraft.errors import BlockdraftError
from blockdraft.losses import Objective, objective

Beta = Annotated[float, Field(ge=0, lt=1)]
KNOWN_INITIAL = ("scratch", "target", "required")


class RecipeError(BlockdraftError):
    """A recipe cannot be used, and the message says why."""


class Section(BaseModel):
    """Stands for a part of a recipe: frozen, and strict about keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetSection(Section):
    """Names the frozen model that the drafter drafts for."""

    name: str = Field("Qwen/Qwen3-4B", description="pocket, smollm2, a Hugging Face id or a folder")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="of the target's weights; null is float32 on a CPU and bfloat16 elsewhere"
    )
    mask_token_id: int | None = Field(None, ge=0, description="the mask token; null takes the one known of the family")
    shape: dict[str, Any] | None = Field(
        None, description="configuration fields that `blockdraft estimate` needs before the model is downloaded"
    )


class DrafterSection(Section):
    """Describes the model that is trained. Its width and heads are the target's."""

    kind: DrafterKind = Field("dflash", description="dflash or dspark")
    num_layers: int = Field(5, ge=1, description="decoder layers")
    num_proposals: int = Field(15, ge=1, description="B, the tokens proposed per block; the anchor is not counted")
    num_features: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="target layers whose outputs the drafter reads; null is five, or what the target has",
    )
    vocab_size: int | float | None = Field(
        None,
        gt=0,
        description="propose only the most frequent tokens of the texts: how many, or the share (below 1) to cover",
    )
    markov_head: MarkovKind = Field("vanilla", description="DSpark only: vanilla, gated or rnn")
    markov_rank: int = Field(256, ge=1, description="DSpark only: rank of the Markov head")
    initial: str = Field(
        "scratch",
        description="scratch, target (its own last layers), or a drafter to train on: shipped, a folder, RUN@last, "
        "a Hub id; required in recipes that leave it to the user to name one",
    )

    @field_validator("vocab_size")
    @classmethod
    def _tokens_or_share(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise ValueError("must be a whole number of tokens, or a share below 1")
        return value

    @field_validator("initial")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in (*KNOWN_INITIAL, *SHIPPED) and "/" not in value:
            raise ValueError("must be scratch, target, a shipped drafter or a drafter's folder (./name if it is here)")
        return value

    def config_options(self) -> dict[str, Any]:
        """Return the options that `DrafterConfig.for_target` takes."""
        values: dict[str, Any] = {"num_layers": self.num_layers, "num_proposals": self.num_proposals}
        if self.num_features is not None:
            values["num_features"] = self.num_features
        if self.kind == "dspark":
            values |= {"markov_head": self.markov_head, "markov_rank": self.markov_rank}
        return values


class ObjectiveSection(Section):
    """Says what is minimised."""

    name: str = Field("bv", description="ce, kl, rkl, tv, lk, bv, or another registered objective")
    options: dict[str, Any] = Field(
        {}, description="options of the objective; those not given are the paper's for the kind of drafter"
    )


class AnnealingSection(Section):
    """Moves beta of objectives in log form from ``initial`` to ``final``, then keeps it there."""

    ratio: float = Field(0.5, ge=0, le=1, description="share of the training steps over which beta moves")
    initial: float = Field(0.0, ge=0, le=1, description="beta at the first step")
    final: float = Field(1.0, ge=0, le=1, description="beta from the end of the ramp on")


class DataSection(Section):
    """Names the texts of the target, as `blockdraft data regenerate` writes them."""

    path: Path | None = Field(None, description="the data folder")
    num_heldout: int = Field(
        256, ge=0, description="texts kept for measuring and never trained on; whole prompts, if these have several"
    )
    features: Literal["online", "cached"] = Field(
        "online", description="run the target at every step, or read its features from a cache on disk"
    )
    cache: Path | None = Field(None, description="folder of the feature cache; it is built if it is not there")
    cache_gib: float = Field(20.0, gt=0, description="largest cache that may be built")


class BatchSection(Section):
    """Says what one optimizer step takes: the texts of the global batch, and anchors drawn from all of them."""

    num_texts: int = Field(32, ge=1, description="texts per step, over all processes; a text is one assistant turn")
    num_anchors: int = Field(16_384, ge=1, description="blocks per step at most, over all processes")
    max_anchors_per_text: int = Field(512, ge=1, description="blocks of one text per step at most")
    gradient_accumulation_steps: int = Field(1, ge=1, description="backward passes that share one step")
    anchors: AnchorChoice = Field(
        "uniform",
        description="where blocks start: uniform positions, rounds (where decoding's rounds would start), or mixed",
    )
    run_length: int = Field(
        1, ge=1, description="draw anchors in runs of this number of consecutive ones, which the objective rounds needs"
    )
    full_blocks: bool = Field(False, description="leave out anchors with fewer than num_proposals tokens after them")


class OptimizerSection(Section):
    """Sets the optimizer, with a linear warm-up over a share of the steps, then a cosine to zero."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw (the paper's), or muon for matrices with AdamW for the rest"
    )
    learning_rate: float = Field(6e-4, gt=0, description="the largest learning rate")
    warmup_ratio: float = Field(0.04, ge=0, le=1, description="share of the steps with a rising learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay rates of AdamW's two moments")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    num_train_epochs: int = Field(6, ge=1, description="passes over the training texts")
    max_steps: int | None = Field(
        None, ge=1, description="number of steps, whatever num_train_epochs says; null trains whole epochs"
    )

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of a run; ``max_steps`` overrides the epochs, as it does in transformers."""
        return self.max_steps or self.num_train_epochs * steps_per_epoch


class RuntimeSection(Section):
    """Says where and how the run computes; a resumed run may change it."""

    device: str | None = Field(None, description="cpu, cuda, cuda:1; null is an accelerator if there is one")
    precision: Literal["float32", "bfloat16"] | None = Field(
        None, description="of the drafter's arithmetic (its weights are float32); null is bfloat16 off the CPU"
    )
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="replicate the drafter over processes, or shard it")
    shard_target: bool = Field(False, description="shard the target's layers over the processes")
    compile: bool | None = Field(
        None, description="compile the drafter's layers with torch.compile; null is on a GPU, if a small layer passes"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    threads: int | None = Field(None, ge=1, description="CPU threads; null leaves PyTorch's choice")
    peak_tflops: float | None = Field(
        None, gt=0, allow_inf_nan=False,
        description="peak rate of a device, for its utilization and for estimates; null knows common GPUs by name",
    )  # fmt: skip
    fused: bool = Field(True, description="fuse head and objective, so that no [tokens, vocabulary] tensor exists")


class LoggingSection(Section):
    """Says what is measured, logged and kept while the run goes on; a resumed run may change it."""

    logging_steps: int = Field(10, ge=1, description="steps between two lines of metrics.jsonl")
    save_steps: int = Field(500, ge=1, description="steps between two checkpoints")
    eval_steps: int | None = Field(None, ge=1, description="steps between two held-out measurements; null: each epoch")
    heldout_blocks: int = Field(2048, ge=1, description="blocks of held-out texts that are measured")
    decode_prompts: int = Field(0, ge=0, description="held-out prompts that are decoded at every measurement")
    keep_epoch_checkpoints: bool = Field(False, description="keep the checkpoint of every epoch")
    tensorboard: bool = Field(False, description="also log to TensorBoard; needs blockdraft[tensorboard]")
    wandb: bool = Field(False, description="also log to Weights & Biases")
    trackio: bool = Field(False, description="also log to trackio")

    def epochs_kept(self, num_steps: int, steps_per_epoch: int) -> frozenset[int]:
        """Return the steps at the end of every epoch and of the run, if the recipe keeps their checkpoints."""
        if not self.keep_epoch_checkpoints:
            return frozenset()
        return frozenset({*range(steps_per_epoch, num_steps, steps_per_epoch), num_steps})


class Recipe(Section):
    """Describes a training run."""

    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    objective: ObjectiveSection = ObjectiveSection()
    annealing: AnnealingSection | None = AnnealingSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    runtime: RuntimeSection = RuntimeSection()
    logging: LoggingSection = LoggingSection()
    seed: int = Field(42, ge=0, lt=2**63, description="of the weights, the split, the order and the anchors")

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        try:
            made = self.make_objective()
        except TypeError as error:
            raise ValueError(f"objective.options: {error}") from error
        if "beta" in self.objective.options and self.annealing is not None and is_annealed(made):
            raise ValueError(
                "objective.options.beta would be overwritten by the schedule in annealing; set annealing.initial and "
                "annealing.final, or annealing=null for a constant beta"
            )
        if self.batch.run_length > 1 and self.batch.anchors != "uniform":
            raise ValueError("batch.run_length places runs of anchors uniformly; set batch.anchors=uniform")
        if self.batch.full_blocks and getattr(made, "control_variate", False):
            raise ValueError(
                "batch.full_blocks chooses anchors by tokens that come later, which biases a control variate; "
                "leave out one of the two"
            )
        if self.data.features == "cached" and self.data.cache is None:
            raise ValueError("data.features is cached; say where with data.cache")
        if self.logging.decode_prompts > self.data.num_heldout:
            raise ValueError(
                f"logging.decode_prompts is {self.logging.decode_prompts}, of {self.data.num_heldout} held-out texts; "
                "hold out more with data.num_heldout"
            )
        return self

    def make_objective(self) -> Objective:
        """Build the objective, with the paper's settings for the drafter where the recipe gives none."""
        options = {name: _number(value) for name, value in self.objective.options.items()}
        return objective(self.objective.name, drafter=self.drafter.kind, **options)

    def resolved(self) -> "Recipe":
        """Return the same recipe with nothing left to defaults elsewhere: every option of the objective is stated.

        The schedule is null where the objective has no beta to anneal, and beta is absent where the schedule sets it.
        """
        made = self.make_objective()
        scheduled = self.annealing is not None and is_annealed(made)
        options = {k: v for k, v in dataclasses.asdict(made).items() if not (scheduled and k == "beta")}
        section = self.objective.model_copy(update={"options": options})
        return self.model_copy(update={"objective": section, "annealing": self.annealing if scheduled else None})


def is_annealed(made: Objective) -> bool:
    """Return whether an objective has a beta that a schedule may set: those in log form."""
    return hasattr(made, "beta") and getattr(made, "form", "log") == "log"


def _number(value: Any) -> Any:
    """Read what YAML took for text for want of a dot, such as ``1e-6``, as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
