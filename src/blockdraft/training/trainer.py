"""The training run: steps, held-out measurements, checkpoints, resuming."""

import contextlib
import json
import platform
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import blockdraft
from blockdraft.data import BatchSampler, CachedFeatures, Features, Manifest, OnlineFeatures, build_cache, open_dataset
from blockdraft.data.features import refuse_large_cache
from blockdraft.distributed import Distributed, shard
from blockdraft.errors import BlockdraftError
from blockdraft.files import atomic_write, exclusive
from blockdraft.losses import Annealing
from blockdraft.targets import Sampling, Target, fingerprint
from blockdraft.training.allocator import keep_freed_memory
from blockdraft.training.checkpoints import Checkpoints, truncate_metrics
from blockdraft.training.decoded import Decoded
from blockdraft.training.feed import PrefetchingLoader
from blockdraft.training.heldout import HeldOut, summary
from blockdraft.training.initial import new_drafter
from blockdraft.training.logs import Logs, check_trackers
from blockdraft.training.recipe import Recipe, RecipeError
from blockdraft.training.schedule import Schedule
from blockdraft.training.step import Step

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class TrainingError(BlockdraftError):
    """A run that cannot go on, with what is known and what to try."""


class StoppedError(Exception):
    """The run was asked to stop, and saved itself."""


@dataclass(frozen=True)
class Progress:
    """After one optimizer step."""

    step: int
    num_steps: int
    metrics: dict[str, Any]


class Trainer:
    """A run in its folder.

    Everything that decides the weights is in the recipe, the data and the target; how many processes or
    accumulated batches share a step decides only the rounding.
    """

    def __init__(self, recipe: Recipe, target: Target, run: str | Path, processes: Distributed | None = None) -> None:
        """Set up a new run, or go on with one that was interrupted."""
        keep_freed_memory()
        if recipe.runtime.threads is not None:
            torch.set_num_threads(recipe.runtime.threads)
        self.recipe, self.target, self.run_folder = recipe, target, Path(run)
        self.processes = processes or Distributed(recipe.runtime.device)
        self.lockstep = self.processes.is_distributed and (
            recipe.runtime.parallel == "fsdp" or recipe.runtime.shard_target
        )
        if self.lockstep and recipe.record.decode_prompts:
            raise RecipeError(
                "record.decode_prompts needs whole models in one process, and these are sharded; set it to 0, "
                "or train with runtime.parallel=ddp and runtime.shard_target=false"
            )
        if recipe.data.path is None:
            raise RecipeError("the recipe has no data; set data.path to a folder that data regenerate wrote")
        self.paths = open_dataset(recipe.data.path, target)
        self._fingerprint = fingerprint(target)  # before its layers may be sharded
        _refuse_other_law(recipe, self.paths.manifest)
        training, heldout = self.paths.split(recipe.data.heldout, recipe.seed)
        drafter = new_drafter(recipe, target).to(self.processes.device)
        drafter.checkpoint_activations = recipe.runtime.checkpoint_activations
        self.drafter, self.config = drafter, drafter.config
        batch = recipe.batch
        self.plan = BatchSampler(
            training, num_texts=batch.num_texts, num_anchors=batch.num_anchors,
            num_proposals=self.config.num_proposals, seed=recipe.seed, full_blocks=batch.full_blocks,
        )  # fmt: skip
        all_steps = recipe.optimizer.epochs * self.plan.steps_per_epoch
        self.num_steps = min(all_steps, recipe.optimizer.max_steps or all_steps)
        self.feed = PrefetchingLoader(
            self.plan, training, rank=self.processes.rank, num_processes=self.processes.world_size,
            accumulation=batch.accumulation,
        )  # fmt: skip
        self.features = self._features(training)
        self.heldout: HeldOut | None = None
        self.decoded: Decoded | None = None
        if len(heldout):
            online = OnlineFeatures(target, self.config.target_layers)
            blocks = recipe.record.heldout_blocks
            temperature = recipe.make_objective().temperature
            self.heldout = HeldOut(heldout, blocks, self.config.num_proposals, recipe.seed, online, temperature)
            if recipe.record.decode_prompts and self.processes.is_main:
                self.decoded = Decoded(heldout, recipe.record.decode_prompts, target, temperature, recipe.seed)
        self.objective = recipe.make_objective()
        self.annealing = Annealing(self.num_steps, **recipe.annealing.model_dump())
        self.schedule = Schedule(recipe.optimizer.rate, recipe.optimizer.warmup, self.num_steps)
        self.step_module = Step(drafter, target, self._precision(), fused=recipe.runtime.fused)
        layers = list(drafter.layers)
        if recipe.runtime.compile:
            for layer in layers:
                layer.compile()
        if recipe.runtime.shard_target and self.processes.is_distributed:
            for layer in target.model.model.layers:
                shard(layer, [])
        self.module = self.processes.wrap(self.step_module, recipe.runtime.parallel, layers)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=recipe.optimizer.rate, betas=recipe.optimizer.betas,
            weight_decay=recipe.optimizer.weight_decay,
        )  # fmt: skip
        epochs = range(1, recipe.optimizer.epochs + 1) if recipe.record.keep_epochs else ()
        self.checkpoints = Checkpoints(
            self.run_folder, keep=frozenset(min(epoch * self.plan.steps_per_epoch, self.num_steps) for epoch in epochs)
        )
        self.step, self.best_step, self.best_length = 0, 0, -1.0
        self._asked_to_stop: int | None = None
        self._begin()

    # The run

    def run(self, on_step: Callable[[Progress], None] | None = None) -> dict[str, Any]:
        """Train to the end; the last held-out measurement. SIGTERM and SIGINT save first."""
        check_trackers(self.recipe)
        with contextlib.ExitStack() as stack:
            logs = None
            if self.processes.is_main:
                stack.enter_context(exclusive(self.run_folder))
                truncate_metrics(self.run_folder / "metrics.jsonl", self.step or -1)
                logs = Logs(self.run_folder, self.recipe)
                stack.callback(logs.close)
            for each in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, each, signal.signal(each, self._ask_to_stop))
            return self._run(logs, on_step or (lambda _progress: None))

    def _run(self, logs: Logs | None, on_step: Callable[[Progress], None]) -> dict[str, Any]:
        record = self.recipe.record
        measured = self.evaluate()
        if self.step == 0:
            self._log(logs, {"step": 0} | measured)
        self.drafter.train()
        started, first, waited = time.perf_counter(), self.step, self.feed.seconds_waited
        for batches in self.feed.steps(self.step, self.num_steps):
            metrics = self.take_step(batches)
            seconds = time.perf_counter() - started
            metrics["steps_per_second"] = (self.step - first) / seconds
            metrics["waiting_for_data"] = (self.feed.seconds_waited - waited) / seconds
            epoch_end = self.step % self.plan.steps_per_epoch == 0
            last = self.step == self.num_steps
            length: float | None = None
            if epoch_end or last or (record.evaluate_every and self.step % record.evaluate_every == 0):
                measured = self.evaluate()
                metrics |= measured
                length = measured.get("heldout_length_block")
            if self.step % record.log_every == 0 or last or "heldout_length_block" in metrics:
                self._log(logs, metrics)
            stop = self._stopping()
            if epoch_end or last or stop or self.step % record.save_every == 0:
                self.save(length)
            on_step(Progress(self.step, self.num_steps, metrics))
            if stop and not last:
                raise StoppedError(f"stopped at step {self.step} of {self.num_steps}, saved; the same command goes on")
        return measured

    def take_step(self, batches: list[Any]) -> dict[str, Any]:
        """One optimizer step over this process's share of the global batch."""
        processes = self.processes
        objective = self.annealing.apply(self.objective)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(6, dtype=torch.float64, device=processes.device)
        for number, (batch, texts) in enumerate(batches):
            batch = batch.to(processes.device)
            output = self.features(batch, texts)
            with processes.accumulating(self.module, last=number == len(batches) - 1):
                numerator, denominator, stats = self.module(batch, output, objective)
                numerator.backward()
            lengths = [getattr(stats, rule).sum() for rule in ("greedy", "token", "block")]
            sums += torch.stack([numerator.detach(), denominator, stats.num_blocks, *lengths]).double()
        totals = processes.all_reduce(sums)
        num_blocks = max(1.0, float(totals[2]))
        loss = float(objective.reduce(totals[0], totals[1]))
        scale = objective.gradient_scale(totals[0], totals[1]) * processes.world_size  # gradients were averaged
        for parameter in self.drafter.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        clipped = clip_grad_norm_(self.drafter.parameters(), self.recipe.optimizer.clip)
        norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
        self._refuse_non_finite(loss, norm)
        rate = self.schedule.rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        self.annealing.advance()
        greedy, token, block = (float(x) / num_blocks for x in totals[3:])
        return {
            "step": self.step, "epoch": self.step / self.plan.steps_per_epoch, "loss": loss, "rate": rate, "norm": norm,
            "beta": self.annealing.beta_at(self.step - 1), "num_blocks": num_blocks,
            "length_greedy": greedy, "length_token": token, "length_block": block,
        }  # fmt: skip

    def evaluate(self) -> dict[str, Any]:
        """Expected accepted lengths on held-out paths; in the first process, what decoding retains, if asked for."""
        if self.heldout is None:
            return {}
        stats = self.heldout.measure(self.step_module, self.processes, lockstep=self.lockstep)
        measured: dict[str, Any] = {f"heldout_{name}": value for name, value in summary(stats).items()}
        return measured if self.decoded is None else measured | self.decoded.measure(self.drafter)

    def save(self, length: float | None = None) -> None:
        """Write a checkpoint; the best one is kept as well.

        Args:
            length: what these very weights were measured to have accepted under block verification on held-out
                texts, if they were. Without held-out texts the last checkpoint is the best.
        """
        tensors = get_model_state_dict(self.drafter, options=WHOLE)
        optimizer = get_optimizer_state_dict(self.drafter, self.optimizer, options=WHOLE)
        if self.heldout is None or (length is not None and length > self.best_length):
            self.best_step, self.best_length = self.step, length or 0.0
        if self.processes.is_main:
            state = {
                "optimizer": optimizer, "random": torch.get_rng_state(),
                "best_step": self.best_step, "best_length": self.best_length,
            }  # fmt: skip
            self.checkpoints.save(self.step, self.drafter, tensors, state, best_step=self.best_step)
        self.processes.barrier()

    # Setting up

    def _begin(self) -> None:
        """Load the last checkpoint, or write down what this run is."""
        about = self._about()
        file = self.run_folder / "run.json"
        if file.exists():
            _refuse_other_run(file, about)
        state = self.checkpoints.load()
        if state is not None:
            tensors: dict[str, Any] = dict(load_file(state["folder"] / "model.safetensors"))
            set_model_state_dict(self.drafter, tensors, options=StateDictOptions(full_state_dict=True))
            set_optimizer_state_dict(
                self.drafter, self.optimizer, state["optimizer"], options=StateDictOptions(full_state_dict=True)
            )
            torch.set_rng_state(state["random"])
            self.step = state["step"]
            self.best_step, self.best_length = state["best_step"], state["best_length"]
            self.annealing.load_state_dict({"step": self.step})
        if self.processes.is_main and not file.exists():
            with atomic_write(self.run_folder / "recipe.yaml") as unfinished:
                unfinished.write_text(self.recipe.to_yaml())
            with atomic_write(file) as unfinished:
                unfinished.write_text(json.dumps(about, indent=2) + "\n")
        self.processes.barrier()

    def _about(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "target": {"name": self.target.name, "fingerprint": self._fingerprint},
            "data": self.paths.identity,
            "num_steps": self.num_steps,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "drafter": self.config.to_dict(),
            "versions": {
                "blockdraft": blockdraft.__version__, "torch": torch.__version__,
                "transformers": transformers.__version__, "python": platform.python_version(),
            },
            "git": _git_revision(),
        }  # fmt: skip

    def _features(self, training: Any) -> Features:
        layers = self.config.target_layers
        data = self.recipe.data
        if data.features == "online":
            return OnlineFeatures(self.target, layers)
        assert data.cache is not None
        max_bytes = int(data.cache_gib * 2**30)
        refuse_large_cache(self.target, training, layers, max_bytes)
        if self.processes.is_main:
            build_cache(data.cache, self.target, training, layers, max_bytes=max_bytes)
        self.processes.barrier()
        return CachedFeatures(data.cache, self.target, training, layers)

    def _precision(self) -> torch.dtype:
        default = "float32" if self.processes.device.type == "cpu" else "bfloat16"
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.recipe.runtime.precision or default]

    # Stopping

    def _ask_to_stop(self, number: int, _frame: Any) -> None:
        self._asked_to_stop = number

    def _stopping(self) -> bool:
        asked = torch.tensor(float(self._asked_to_stop is not None))
        return float(self.processes.all_reduce(asked)) > 0

    def _refuse_non_finite(self, loss: float, norm: float) -> None:
        bad = [name for name, value in (("loss", loss), ("gradient", norm)) if not abs(value) < float("inf")]
        if bad:
            last = self.checkpoints.load()
            kept = (
                f"step {last['step']} is in {self.run_folder / 'checkpoint'}" if last else "there is no checkpoint yet"
            )
            raise TrainingError(
                f"the {' and the '.join(bad)} of step {self.step + 1} is not finite; the last good checkpoint: {kept}. "
                "Try a smaller optimizer.rate, a longer optimizer.warmup, or runtime.precision=float32"
            )

    def _log(self, logs: Logs | None, metrics: dict[str, Any]) -> None:
        if logs is not None:
            logs.write(metrics)


def _refuse_other_law(recipe: Recipe, manifest: Manifest | None) -> None:
    """Raise if the texts were not sampled from the distribution whose ratios are trained: BV's identity needs that."""
    temperature = recipe.make_objective().temperature
    if manifest is not None and manifest.identity.sampling != Sampling(temperature):
        sampled = asdict(manifest.identity.sampling)
        raise RecipeError(
            f"{recipe.data.path} was sampled with {sampled}, the objective assumes temperature {temperature:g} "
            "over the whole vocabulary; regenerate the data so"
        )


def _refuse_other_run(file: Path, about: dict[str, Any]) -> None:
    """A run goes on only with what it began with; how it runs may change."""
    there = json.loads(file.read_text())
    free = {"runtime", "record"}
    ours, theirs = ({k: v for k, v in each["recipe"].items() if k not in free} for each in (about, there))
    for recipe in (ours, theirs):
        recipe["batch"] = {k: v for k, v in recipe["batch"].items() if k != "accumulation"}
    wrong = [f"recipe.{key}" for key in ours if ours[key] != theirs.get(key)]
    wrong += [key for key in ("target", "data") if about[key] != there[key]]
    if wrong:
        raise RecipeError(
            f"{file.parent} holds a run of something else: {', '.join(wrong)} differ. Choose another --out"
        )


def _git_revision() -> str | None:
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
