"""The training loop: AdamW with warm-up and cosine decay, checkpoints that resume bit for bit.

Nothing but the settings and the step decides what a step does: its batch is a
function of both, and there is no dropout. Resuming therefore needs the weights,
the optimizer's moments and the step.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.pocket.packing import Batch, training_batch
from blockdraft.pocket.tokenizer import END, PAD


@dataclass(frozen=True)
class Settings:
    """Shape of the model and of its training."""

    num_steps: int = 3000
    num_rows: int = 8
    row_length: int = 384
    peak_rate: float = 2e-3
    warmup_steps: int = 200
    final_share: float = 0.02
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 42
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 48

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0: linear warm-up, then a cosine down to a small share."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.peak_rate * (self.final_share + (1 - self.final_share) * cosine)


class SettingsError(ValueError):
    """A run's folder holds a checkpoint of other settings."""


def new_model(settings: Settings, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A Qwen3 language model with tied embeddings and random weights."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    torch.manual_seed(settings.seed)
    return Qwen3ForCausalLM(config)


def weighted_loss(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy over the batch's tokens, by their weights."""
    logits = model(
        input_ids=batch.tokens, attention_mask=batch.mask(), position_ids=batch.positions, use_cache=False
    ).logits
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


class Trainer:
    """A model on its way, in a run's folder with ``checkpoint.pt``, ``metrics.jsonl`` and ``settings.json``."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, folder: Path) -> None:
        self.settings, self.tokenizer, self.folder = settings, tokenizer, folder
        self.model = new_model(settings, tokenizer)
        decayed = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.peak_rate, betas=(0.9, 0.95), fused=True)
        self.step = 0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "checkpoint.pt").exists():
            self._load()
        (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")

    @property
    def done(self) -> bool:
        """True when every step is taken."""
        return self.step >= self.settings.num_steps

    def run(self, *, minutes: float = math.inf, checkpoint_every: int = 100, report_every: int = 20) -> None:
        """Train until done or until the minutes are over; either way a checkpoint is left behind."""
        progress = Progress(self, minutes)
        self.model.train()
        while not self.done and not progress.time_is_up():
            metrics = self.take_step()
            progress.count(metrics, report=self.step % report_every == 0 or self.done)
            if self.step % checkpoint_every == 0:
                self.save()
        self.save()

    def take_step(self) -> dict[str, Any]:
        """One optimizer step."""
        settings = self.settings
        batch = training_batch(self.tokenizer, settings.num_rows, settings.row_length, settings.seed, self.step)
        rate = settings.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = weighted_loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self.optimizer.step()
        self.step += 1
        num_tokens = int((batch.segments > 0).sum())
        return {"step": self.step, "loss": loss.item(), "norm": norm.item(), "rate": rate, "num_tokens": num_tokens}

    def save(self) -> None:
        """Write the checkpoint beside its place, then move it there in one go."""
        state = {
            "step": self.step,
            "settings": asdict(self.settings),
            "tokenizer": self.tokenizer.to_str(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        unfinished = self.folder / "checkpoint.pt.new"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / "checkpoint.pt")

    def _load(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        changed = [key for key, value in asdict(self.settings).items() if state["settings"].get(key) != value]
        if state["tokenizer"] != self.tokenizer.to_str():
            changed.append("tokenizer")
        if changed:
            raise SettingsError(
                f"{self.folder} holds a checkpoint made with other settings ({', '.join(changed)}); "
                "go on with the same ones, or choose another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]
        self._forget_later_metrics()

    def _forget_later_metrics(self) -> None:
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines[: self.step] if line.endswith("\n")))


class Progress:
    """Writes ``metrics.jsonl`` and a line on standard error."""

    def __init__(self, trainer: Trainer, minutes: float) -> None:
        self.trainer = trainer
        self.started = time.monotonic()
        self.deadline = self.started + 60 * minutes
        self.num_tokens = 0
        self.first_step = trainer.step

    def time_is_up(self) -> bool:
        return time.monotonic() >= self.deadline

    def count(self, metrics: dict[str, Any], *, report: bool) -> None:
        """Note one step, and report it if asked."""
        seconds = time.monotonic() - self.started
        self.num_tokens += metrics["num_tokens"]
        with (self.trainer.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics | {"seconds": round(seconds, 2)}) + "\n")
        if report:
            num_steps = self.trainer.settings.num_steps
            left = seconds / (metrics["step"] - self.first_step) * (num_steps - metrics["step"])
            line = f"step {metrics['step']}/{num_steps}  loss {metrics['loss']:.3f}"
            line += f"  {self.num_tokens / seconds:,.0f} tokens/s  {left / 60:.1f} min left"
            print(line, file=sys.stderr, flush=True)
