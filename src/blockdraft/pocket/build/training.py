"""This module trains pocket: a Qwen3 model whose depth grows in stages, under Muon and AdamW, resumable bit for bit.

Nothing but the settings and the step decides what a step does: its batch is a function of both, there is no dropout,
and the model grows at given steps. Resuming therefore needs the weights, the optimizers' moments and the step.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.errors import BlockdraftError
from blockdraft.muon import Muon
from blockdraft.pocket.build.text import END, PAD, PackedBatch, training_batch


@dataclass(frozen=True)
class Shape:
    """Says how wide the model is; how deep, the stages of training say."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 48


def new_model(shape: Shape, num_layers: int, tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Return a model with random weights, which depend on the seed alone."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def grow(model: Qwen3ForCausalLM, num_layers: int) -> Qwen3ForCausalLM:
    """Return a deeper copy: layer l of the new model is layer ``l mod L`` of the old one, which has L.

    Stacking whole copies of a trained network is the operator that *Stacking Your Transformers* (Du et al., 2024)
    found to train fastest. The function changes, and recovers within a few dozen steps.
    """
    old_depth = model.config.num_hidden_layers
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    deeper = Qwen3ForCausalLM(config)
    old = model.state_dict()
    new = {name: old[source_name(name, old_depth)] for name in deeper.state_dict()}
    deeper.load_state_dict(new)
    return deeper


def source_name(name: str, old_depth: int) -> str:
    """Return the name of the parameter of a model of ``old_depth`` layers that a deeper model's parameter copies."""
    prefix, dot, rest = name.partition(".layers.")
    if not dot:
        return name
    layer, _, tail = rest.partition(".")
    return f"{prefix}.layers.{int(layer) % old_depth}.{tail}"


def weighted_loss(model: Qwen3ForCausalLM, batch: PackedBatch) -> Tensor:
    """Return the mean cross-entropy over the batch's tokens, by their weights: ``sum w_t ce_t / sum w_t``."""
    hidden = model.model(
        input_ids=batch.tokens, attention_mask=batch.mask(), position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    weights = batch.weights[:, 1:].flatten()
    counted = weights > 0
    logits = F.linear(hidden[:, :-1].flatten(0, 1)[counted], cast(Tensor, model.lm_head.weight))  # [N, V]
    losses = F.cross_entropy(logits.float(), batch.tokens[:, 1:].flatten()[counted], reduction="none")
    weights = weights[counted]
    return (losses * weights).sum() / weights.sum()


class SettingsError(BlockdraftError):
    """The build was asked for something that cannot be done, or its folder holds a checkpoint of other settings."""


@dataclass(frozen=True)
class Stage:
    """Says how deep the model is for how many optimizer steps."""

    num_layers: int
    num_steps: int


@dataclass(frozen=True)
class Settings:
    """Holds everything that decides what is built.

    stages: depths in the order of training; each is a multiple of the one before.
    num_rows, row_length: size of a batch in rows and tokens.
    muon_rate: peak learning rate of the layers' matrices, under Muon.
    adamw_rate: peak learning rate of the embedding and the norms, under AdamW.
    precision: of the products in a step, ``float32`` or ``bfloat16``; weights, moments and sums are float32 always.
    warmup_steps: steps over which the learning rates rise at the beginning and again after each growth.
    decay_share: the last share of all steps, over which the learning rates fall linearly to zero. A deep model needs
        lower rates than a shallow one, so the fall begins before the last growth.
    """

    stages: tuple[Stage, ...] = (Stage(4, 5000), Stage(8, 1200), Stage(16, 1800))
    num_rows: int = 12
    row_length: int = 256
    muon_rate: float = 4e-3
    adamw_rate: float = 2e-3
    precision: str = "bfloat16"
    warmup_steps: int = 50
    decay_share: float = 0.5
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 42
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        """Refuse stages that do not grow by whole copies."""
        depths = [stage.num_layers for stage in self.stages]
        if not depths or any(deep % shallow for shallow, deep in pairwise(depths)):
            raise SettingsError(f"each stage's depth must be a multiple of the one before, got {depths}")

    @property
    def num_steps(self) -> int:
        """Return the number of steps of all stages."""
        return sum(stage.num_steps for stage in self.stages)

    def stage_of(self, step: int) -> tuple[Stage, int]:
        """Return the stage that a step (counted from 0) belongs to, and how many of its steps come before it."""
        for stage in self.stages:
            if step < stage.num_steps:
                return stage, step
            step -= stage.num_steps
        return self.stages[-1], self.stages[-1].num_steps + step

    def rate_share(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a share of the peak rate.

        It rises linearly at the start of each stage, is constant, and falls linearly to zero over the last steps.
        """
        warmup = (self.stage_of(step)[1] + 1) / self.warmup_steps
        decay = (self.num_steps - step) / max(1, self.decay_share * self.num_steps)
        return min(1.0, warmup, decay)


class PocketTrainer:
    """Trains a model in a folder with ``checkpoint.pt``, ``metrics.jsonl`` and ``settings.json``."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, folder: Path, *, compiled: bool = False) -> None:
        """Begin, or resume from the folder's checkpoint; ``compiled`` layers are faster and need a C++ compiler."""
        self.settings, self.tokenizer, self.folder, self.compiled = settings, tokenizer, folder, compiled
        self.step = 0
        self.model = new_model(settings.shape, settings.stages[0].num_layers, tokenizer, settings.seed)
        self.optimizers = self._new_optimizers()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "checkpoint.pt").exists():
            self._load()
        self._compile()
        (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")

    @property
    def done(self) -> bool:
        """Tell whether every step is taken."""
        return self.step >= self.settings.num_steps

    def run(self, *, minutes: float = math.inf, checkpoint_every: int = 50, report_every: int = 20) -> None:
        """Train until done or until the minutes are over; either way a checkpoint is left behind."""
        progress = BuildProgress(self, minutes)
        while not self.done and not progress.time_is_up():
            metrics = self.take_step()
            progress.count(metrics, report=self.step % report_every == 0 or self.done)
            if self.step % checkpoint_every == 0:
                self.save()
        self.save()

    def take_step(self) -> dict[str, Any]:
        """Take one optimizer step, and grow the model before it if its stage begins."""
        settings = self.settings
        depth = settings.stage_of(self.step)[0].num_layers
        if depth != self.model.config.num_hidden_layers:
            self._grow(depth)
        self.model.train()
        batch = training_batch(self.tokenizer, settings.num_rows, settings.row_length, settings.seed, self.step)
        share = settings.rate_share(self.step)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16"):
            loss = weighted_loss(self.model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        for optimizer, peak in zip(self.optimizers, (settings.muon_rate, settings.adamw_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        num_tokens = int((batch.segments > 0).sum())
        return {
            "step": self.step, "num_layers": depth, "loss": loss.item(), "norm": norm.item(), "rate_share": share,
            "num_tokens": num_tokens,
        }  # fmt: skip

    def save(self) -> None:
        """Write the checkpoint beside its place, then move it there in one go."""
        state = {
            "step": self.step,
            "settings": _plain(self.settings),
            "tokenizer": self.tokenizer.to_str(),
            "model": self.model.state_dict(),
            "moments": self._moments(),
        }
        unfinished = self.folder / "checkpoint.pt.new"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / "checkpoint.pt")

    def _new_optimizers(self) -> tuple[Muon, AdamW]:
        named = dict(self.model.named_parameters())
        matrices = [tensor for name, tensor in named.items() if is_layer_matrix(name, tensor)]
        others = [tensor for name, tensor in named.items() if not is_layer_matrix(name, tensor)]
        muon = Muon(matrices, lr=self.settings.muon_rate, weight_decay=self.settings.weight_decay)
        return muon, AdamW(others, lr=self.settings.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizers' state by the names of the parameters."""
        named = self.model.named_parameters()
        states = {name: self._optimizer_of(name, tensor).state.get(tensor, {}) for name, tensor in named}
        return {name: dict(state) for name, state in states.items() if state}

    def _set_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the optimizers' state, each parameter with tensors of its own."""
        for name, tensor in self.model.named_parameters():
            if name in moments:
                state = {key: value.clone() for key, value in moments[name].items()}
                self._optimizer_of(name, tensor).state[tensor] = state

    def _optimizer_of(self, name: str, tensor: Tensor) -> Optimizer:
        return self.optimizers[0] if is_layer_matrix(name, tensor) else self.optimizers[1]

    def _grow(self, num_layers: int) -> None:
        """Stack copies of the layers, and of what the optimizers remember of them."""
        old_depth, moments = self.model.config.num_hidden_layers, self._moments()
        self.model = grow(self.model, num_layers)
        self.optimizers = self._new_optimizers()
        names = [name for name, _ in self.model.named_parameters()]
        known = {name: source_name(name, old_depth) for name in names}
        self._set_moments({name: moments[source] for name, source in known.items() if source in moments})
        self._compile()

    def _compile(self) -> None:
        if self.compiled:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    def _load(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        wanted = _plain(self.settings)
        changed = [key for key, value in wanted.items() if state["settings"].get(key) != value]
        if state["tokenizer"] != self.tokenizer.to_str():
            changed.append("tokenizer")
        if changed:
            raise SettingsError(
                f"{self.folder} holds a checkpoint made with other settings ({', '.join(changed)}); "
                "resume with the same ones, or choose another folder"
            )
        self.step = state["step"]
        depth = self.settings.stage_of(max(0, self.step - 1))[0].num_layers
        if depth != self.model.config.num_hidden_layers:
            self.model = grow(self.model, depth)
            self.optimizers = self._new_optimizers()
        self.model.load_state_dict(state["model"])
        self._set_moments(state["moments"])
        self._forget_later_metrics()

    def _forget_later_metrics(self) -> None:
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines[: self.step] if line.endswith("\n")))


def is_layer_matrix(name: str, tensor: Tensor) -> bool:
    """Tell whether a parameter is a matrix of a layer, which Muon updates; the tied embedding is not."""
    return tensor.dim() == 2 and ".layers." in name


def _plain(settings: Settings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return plain


class BuildProgress:
    """Writes a line of ``metrics.jsonl`` for every step, and one on standard error now and then."""

    def __init__(self, trainer: PocketTrainer, minutes: float) -> None:
        self.trainer = trainer
        self.started = time.monotonic()
        self.deadline = self.started + 60 * minutes
        self.num_layers = 0
        """Layers of all steps so far, which the time is about proportional to."""

    def time_is_up(self) -> bool:
        """Tell whether the minutes are over."""
        return time.monotonic() >= self.deadline

    def count(self, metrics: dict[str, Any], *, report: bool) -> None:
        """Note one step, and report it if asked."""
        seconds = time.monotonic() - self.started
        with (self.trainer.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics | {"seconds": round(seconds, 2)}) + "\n")
        self.num_layers += metrics["num_layers"]
        if report:
            settings = self.trainer.settings
            left = sum(settings.stage_of(step)[0].num_layers for step in range(metrics["step"], settings.num_steps))
            minutes = seconds / self.num_layers * left / 60
            line = f"step {metrics['step']}/{settings.num_steps}  {metrics['num_layers']} layers"
            print(f"{line}  loss {metrics['loss']:.3f}  {minutes:.0f} min left", file=sys.stderr, flush=True)
