"""Run the training: steps, held-out measurements, checkpoints, resuming."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
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

from blockdraft.data import Batch, BatchSampler, TextDataset, open_dataset
from blockdraft.distributed import Distributed, shard_frozen
from blockdraft.errors import BlockdraftError
from blockdraft.files import Provenance, exclusive, refuse_full_disk
from blockdraft.losses import Annealing, Objective
from blockdraft.recipes import Recipe, RecipeError, is_annealed
from blockdraft.runs import Run, RunError, RunInfo, RunTarget
from blockdraft.targets import Sampling, Target, fingerprint
from blockdraft.training.initialization import new_drafter, with_shape
from blockdraft.training.measuring import HeldOut, MetricsLog, Rates, check_trackers, step_flops
from blockdraft.training.step import (
    PrefetchingLoader,
    check_batch,
    learning_rate_at,
    make_features,
    make_optimizers,
    make_step,
    scale_gradients,
)
from blockdraft.verification import RULES

SUMS = ("numerator", "denominator", "num_blocks", *RULES, "stop")
"""What a step adds up over its batches and processes; the last says how many were asked to stop."""

CHECKPOINT_BYTES = 12
"""A checkpoint takes so much on disk for each weight: the weight and two moments, in float32."""

STOP_STEPS = 16
"""A step is read at least so often, so that processes which were asked to stop do so soon."""

FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class TrainingError(BlockdraftError):
    """A run cannot continue; the message says what is known and what to try."""


class StoppedError(Exception):
    """The run was asked to stop, and saved itself."""


@dataclass(frozen=True)
class Progress:
    """Says where a run is after one optimizer step; the metrics are those of the last step that was measured."""

    step: int
    num_steps: int
    metrics: dict[str, Any]


class Trainer:
    """Trains a drafter in a run's folder, or resumes a run that was interrupted.

    Everything that decides the weights is in the recipe, the data and the target; how many processes or
    accumulated batches share a step decides only the rounding.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        folder: str | Path,
        distributed: Distributed | None = None,
        on_features: Callable[[int, int], None] | None = None,
    ) -> None:
        """Check everything, build what is missing of a feature cache, and load the last checkpoint if there is one.

        on_features: called while a cache is built, with the tokens that are done and all there are.
        """
        if recipe.runtime.threads is not None:
            torch.set_num_threads(recipe.runtime.threads)
        if recipe.data.path is None:
            raise RecipeError("the recipe has no data; set data.path to a folder that `data regenerate` wrote")
        self.recipe, self.target = recipe.resolved(), target
        self.distributed = distributed or Distributed(recipe.runtime.device)
        self.objective = recipe.make_objective()
        dataset = open_dataset(recipe.data.path, target)
        target_fingerprint = fingerprint(target)  # before its layers may be sharded
        _refuse_other_sampling(recipe, self.objective, dataset)
        training, heldout = dataset.split(recipe.data.num_heldout, recipe.seed)
        self.num_heldout = len(heldout)
        self.drafter = new_drafter(recipe, target, training).to(self.distributed.device)
        self.recipe = with_shape(self.recipe, self.drafter.config)
        self.drafter.checkpoint_activations = recipe.runtime.gradient_checkpointing
        self.config = self.drafter.config
        self.sampler = BatchSampler(
            training, num_texts=recipe.batch.num_texts, num_anchors=recipe.batch.num_anchors,
            num_proposals=self.config.num_proposals, seed=recipe.seed, full_blocks=recipe.batch.full_blocks,
            max_anchors_per_text=recipe.batch.max_anchors_per_text,
            anchors=recipe.batch.anchors, run_length=recipe.batch.run_length,
        )  # fmt: skip
        self.num_steps = recipe.optimizer.num_steps(self.sampler.steps_per_epoch)
        self.annealing: Annealing | None = None
        if recipe.annealing is not None and is_annealed(self.objective):
            schedule = recipe.annealing
            self.annealing = Annealing(self.num_steps, schedule.ratio, schedule.initial, schedule.final)
        self.loader = PrefetchingLoader(
            self.sampler, rank=self.distributed.rank, world_size=self.distributed.world_size,
            accumulation=recipe.batch.gradient_accumulation_steps, prepare=self._prepare,
        )  # fmt: skip
        info = RunInfo(
            recipe=self.recipe, target=RunTarget(name=target.name, fingerprint=target_fingerprint),
            data=dataset.identity, num_steps=self.num_steps, steps_per_epoch=self.sampler.steps_per_epoch,
            drafter=self.config.to_dict(), provenance=Provenance.here(),
        )  # fmt: skip
        _refuse_another_run(Path(folder), info)  # before hours are spent on features
        temperature = self.objective.temperature
        self.features = make_features(
            self.recipe, target, training, self.config.target_layers,
            None if self.drafter.draft_ids is None else temperature, on_features,
        )  # fmt: skip
        self.heldout = HeldOut.of(heldout, self.recipe, self.drafter, temperature, target, self.distributed)
        self.coverage = None if self.heldout is None else self.heldout.coverage
        self.decoded = None if self.heldout is None else self.heldout.decoded
        self._prepare_modules()
        tokens_per_step = recipe.batch.num_texts * len(training.tokens) / max(1, len(training))
        self.flops = step_flops(recipe, self.config, sum(p.numel() for p in target.model.parameters()), tokens_per_step)
        """Floating-point operations of one step, all processes together."""
        self.step, self.best_step, self.best_length = 0, 0, -1.0
        self._asked_to_stop = self._stop_is_asked_for = False
        self.run = self._open_run(Path(folder), info)
        self._bad_steps = torch.zeros(2, dtype=torch.long, device=self.distributed.device)
        """The first steps whose loss and gradient norm were not finite, 0 for none; on the device, until it is read."""

    # Training

    def train(self, on_step: Callable[[Progress], None] | None = None) -> dict[str, Any]:
        """Train to the end and return the last held-out measurement; SIGTERM, SIGHUP and SIGINT save first."""
        check_trackers(self.recipe)
        with contextlib.ExitStack() as stack:
            log: MetricsLog | None = None
            if self.distributed.is_main:
                stack.enter_context(exclusive(self.run.folder))
                self._refuse_full_disk()
                self.run.truncate_metrics(self.step or -1)
                log = MetricsLog(self.run.metrics_file, self.recipe)
                stack.callback(log.close)
            for each in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM)):
                if signal.getsignal(each) is not signal.SIG_IGN:  # under nohup a hang-up means nothing
                    stack.callback(signal.signal, each, signal.signal(each, self._ask_to_stop))
            return self._train(log, on_step or (lambda _progress: None))

    def _train(self, log: MetricsLog | None, on_step: Callable[[Progress], None]) -> dict[str, Any]:
        logging, per_epoch = self.recipe.logging, self.sampler.steps_per_epoch
        measured = self.evaluate()
        if self.step == 0 and log is not None:
            log.write({"step": 0} | measured)
        self.drafter.train()
        rates = Rates(self.distributed, self.loader, self.flops, self.recipe.runtime.peak_tflops)
        first = self.step
        metrics: dict[str, Any] = {}
        for batches in self._steps():
            number = self.step + 1
            epoch_end, last = number % per_epoch == 0, number == self.num_steps
            measures = epoch_end or last or (logging.eval_steps and number % logging.eval_steps == 0)
            saves, logs = epoch_end or last or number % logging.save_steps == 0, number % logging.logging_steps == 0
            is_read = bool(logs or saves or measures or number == first + 1 or number % STOP_STEPS == 0)
            found = self.take_step(batches, read=is_read)
            if is_read:
                metrics = found | rates.measure(self.step - first, found["num_blocks"])
            if epoch_end:
                self._exchange_walk()
                self.sampler.finish_epoch()
            length: float | None = None
            if measures:
                measured = self.evaluate()
                metrics |= measured
                length = measured.get("heldout_length_block")
            if log is not None and (logs or last or length is not None):
                log.write(metrics)
            stop = self._stopping()
            if saves or stop:
                self.save(length)
            on_step(Progress(self.step, self.num_steps, metrics))
            if stop and not last:
                raise StoppedError(
                    f"stopped at step {self.step} of {self.num_steps} and saved; the same command resumes"
                )
        return measured

    def _steps(self) -> Iterator[list[Batch]]:
        """Yield the batches of the steps that are left.

        Where anchors walk, an epoch starts where the last one's rounds ended: nothing is prefetched beyond its end.
        """
        per_epoch, walking = self.sampler.steps_per_epoch, self.sampler.anchors != "uniform"
        while self.step < self.num_steps:
            end = (self.step // per_epoch + 1) * per_epoch if walking else self.num_steps
            yield from self.loader.steps(self.step, min(end, self.num_steps))

    def _exchange_walk(self) -> None:
        """Let every process know where the anchors of all texts walked to."""
        if self.sampler.anchors != "uniform":
            for found in self.distributed.all_gather(self.sampler.next_walk):
                self.sampler.next_walk |= found

    def take_step(self, batches: list[Batch], *, read: bool = True) -> dict[str, Any]:
        """Take one optimizer step over this process's share of the global batch, and return what it measured.

        Only if it is to be ``read``, statistics are taken, and the host waits for the device, once. Otherwise nothing
        is returned, and a loss that is not finite is reported by the next step that is read.
        """
        distributed, options = self.distributed, self.recipe.optimizer
        objective, beta = self.objective, None
        if self.annealing is not None:
            beta = self.annealing.beta_at(self.step)
            objective = dataclasses.replace(objective, beta=beta)  # type: ignore[call-arg]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=distributed.device)
        for number, batch in enumerate(batches):
            batch = batch.to(distributed.device)
            output = self.features(batch)
            with distributed.accumulating(self.module, last=number == len(batches) - 1):
                walks = batch.uniforms is not None
                numerator, denominator, stats, survival = self.module(batch, output, objective, stats=read or walks)
                numerator.backward()
            if walks:
                self.sampler.move_on(batch, survival)
            parts = [numerator.detach(), denominator]
            if stats is not None:
                parts += [stats.num_blocks, *(getattr(stats, rule).sum() for rule in RULES)]
            sums[: len(parts)] += torch.stack(parts).double()
        if self._asked_to_stop:
            sums[-1] = 1
        totals = distributed.all_reduce(sums)
        loss = objective.reduce(totals[0], totals[1])
        scale = objective.gradient_scale(totals[0], totals[1]) * distributed.world_size  # gradients were averaged
        scale_gradients(self.drafter.parameters(), scale)
        norm = clip_grad_norm_(self.drafter.parameters(), options.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        ends = torch.stack([loss, norm.double()])
        is_new = (self._bad_steps == 0) & ~ends.isfinite()
        self._bad_steps = torch.where(is_new, self.step + 1, self._bad_steps)
        is_known = read or distributed.device.type == "cpu"
        if is_known:
            seen = torch.cat([totals, ends, self._bad_steps.double()]).tolist()
            self._refuse_non_finite(*seen[-2:])
            self._stop_is_asked_for = seen[len(SUMS) - 1] > 0
        rate = learning_rate_at(self.step, self.num_steps, options)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.step += 1
        if not read:
            return {}
        num_blocks = max(1.0, seen[2])
        metrics = {
            "step": self.step, "epoch": self.step / self.sampler.steps_per_epoch, "loss": seen[len(SUMS)],
            "learning_rate": rate, "grad_norm": seen[len(SUMS) + 1], "num_blocks": num_blocks,
        }  # fmt: skip
        metrics |= {f"length_{rule}": x / num_blocks for rule, x in zip(RULES, seen[3:], strict=False)}
        return metrics if beta is None else metrics | {"beta": beta}

    def evaluate(self) -> dict[str, Any]:
        """Measure expected accepted lengths on held-out texts and, if asked for, what decoding retains."""
        return {} if self.heldout is None else self.heldout.measure(self.step_module)

    def save(self, length: float | None = None) -> None:
        """Write a checkpoint; the best one is kept as well.

        Args:
            length: what these very weights were measured to have accepted under block verification on held-out
                texts, if they were. Without held-out texts the last checkpoint is the best.
        """
        tensors: dict[str, Any] = dict(get_model_state_dict(self.drafter, options=FULL_STATE))
        optimizer = get_optimizer_state_dict(self.drafter, self.optimizers, options=FULL_STATE)
        if self.heldout is None or (length is not None and length > self.best_length):
            self.best_step, self.best_length = self.step, length or 0.0
        self._exchange_walk()
        if self.distributed.is_main:
            state = {
                "optimizer": optimizer, "random": torch.get_rng_state(), "sampler": self.sampler.state_dict(),
                "best_step": self.best_step, "best_length": self.best_length,
            }  # fmt: skip
            self.run.save_checkpoint(
                self.step, self.drafter, tensors, state, best_step=self.best_step, keep=self._kept_steps()
            )
        self.distributed.barrier()

    # Setting up

    def _prepare(self, batch: Batch) -> Batch:
        """Check a batch, read what is on disk of it, and pin it where a device will fetch it; called ahead of time."""
        check_batch(batch, self.target.vocab_size)
        batch = self.features.load(batch)
        return batch.pinned() if self.distributed.device.type == "cuda" else batch

    def _prepare_modules(self) -> None:
        runtime, layers = self.recipe.runtime, list(self.drafter.layers)
        self.step_module = make_step(self.drafter, self.target, runtime, self.distributed.device)
        if runtime.shard_target and self.distributed.is_distributed:
            shard_frozen(self.target.model.model, list(self.target.model.model.layers))
        self.module = self.distributed.wrap(self.step_module, runtime.parallel, layers, self.step_module.precision)
        self.optimizers = make_optimizers(self.drafter, self.recipe.optimizer, self.distributed)

    def _open_run(self, folder: Path, info: RunInfo) -> Run:
        """Load the last checkpoint of a run that is there, or write down what this one is."""
        if Run.is_run(folder):
            run = Run.open(folder)
            self._resume(run)
        else:
            run = Run.create(folder, info) if self.distributed.is_main else Run(folder, info)
        self.distributed.barrier()
        return run

    def _resume(self, run: Run) -> None:
        found = run.load_state()
        if found is None:
            return
        folder, state = found
        whole = StateDictOptions(full_state_dict=True)
        tensors: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
        set_model_state_dict(self.drafter, tensors, options=whole)
        set_optimizer_state_dict(self.drafter, self.optimizers, state["optimizer"], options=whole)
        torch.set_rng_state(state["random"])
        self.sampler.load_state_dict(state["sampler"])
        self.step, self.best_step, self.best_length = state["step"], state["best_step"], state["best_length"]

    def _kept_steps(self) -> frozenset[int]:
        return self.recipe.logging.epochs_kept(self.num_steps, self.sampler.steps_per_epoch)

    def _refuse_full_disk(self) -> None:
        """Raise if the checkpoints that will stand side by side have no room."""
        each = CHECKPOINT_BYTES * sum(parameter.numel() for parameter in self.drafter.parameters())
        there = len(self.run.checkpoints())
        at_once = 3 + len(self._kept_steps())  # the last, the best, the one that is being written, and those to keep
        refuse_full_disk(self.run.folder, each * max(1, at_once - there), "the checkpoints")

    # Stopping

    def _ask_to_stop(self, _number: int, _frame: Any) -> None:
        self._asked_to_stop = True

    def _stopping(self) -> bool:
        """Return whether to stop, in all processes at the same step: their flags travel with the step's sums."""
        if not self.distributed.is_distributed:
            return self._asked_to_stop
        return self._stop_is_asked_for

    def _refuse_non_finite(self, *bad_steps: float) -> None:
        """Raise if the loss or the gradient has not been finite; these are the first such steps, 0 for none."""
        if not any(bad_steps):
            return
        number = int(min(step for step in bad_steps if step))
        bad = [name for name, step in zip(("loss", "gradient"), bad_steps, strict=True) if step == number]
        saved = self.run.checkpoints()
        kept = f"step {max(saved)} is in {self.run.folder / 'checkpoint'}" if saved else "there is none yet"
        raise TrainingError(
            f"the {' and the '.join(bad)} of step {number} is not finite; the last good checkpoint: {kept}. "
            "Try a smaller optimizer.learning_rate, a larger optimizer.warmup_ratio, or runtime.precision=float32"
        )


def _refuse_other_sampling(recipe: Recipe, objective: Objective, dataset: TextDataset) -> None:
    """Raise unless the texts were drawn from the distribution whose ratios are trained: BV's identity needs it."""
    manifest = dataset.manifest
    if manifest is not None and manifest.identity.sampling != Sampling(objective.temperature):
        raise RecipeError(
            f"{recipe.data.path} was sampled with {asdict(manifest.identity.sampling)}, but the objective assumes "
            f"temperature {objective.temperature:g} over the whole vocabulary; regenerate the data that way"
        )


def _refuse_another_run(folder: Path, info: RunInfo) -> None:
    """Raise if a folder holds a run that this one does not go on with."""
    if Run.is_run(folder):
        wrong = info.differences(Run.open(folder).info)
        if wrong:
            raise RecipeError(
                f"{folder} holds a run of something else: {', '.join(wrong)} differ. Choose another --out"
            )
    elif os.path.lexists(folder / "steps"):
        raise RunError(f"{folder} has checkpoints but no run.json to say what they belong to; choose another --out")
