"""Measure a run while it trains, and write the metrics where trackers find them.

Measured are expected accepted lengths, real decoding, and how fast it goes. Metrics go to ``metrics.jsonl`` always,
and to TensorBoard, Weights & Biases or trackio if asked.
"""

import importlib.util
import json
import resource
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from blockdraft.data import BatchSampler, Features, OnlineFeatures, TextDataset, collate, partition
from blockdraft.decoding import generate, room
from blockdraft.distributed import Distributed
from blockdraft.drafters import Drafter, DrafterConfig
from blockdraft.losses import BlockStatistics, objective
from blockdraft.recipes import Recipe, RecipeError
from blockdraft.targets import Target
from blockdraft.training.initialization import Coverage, coverage
from blockdraft.training.step import PrefetchingLoader, TrainingStep, check_batch
from blockdraft.verification import RULES

TEXTS_PER_BATCH = 16
DECODED_TOKENS = 128


class Rates:
    """Measures how fast a run goes, from now on.

    Args:
        distributed: its device has the peak rate and the memory.
        loader: knows how long the trainer waited for it.
        flops: floating-point operations of a step, all processes together.
        peak_tflops: of a device, if it was given; else it is looked up by the device's name.
    """

    def __init__(
        self, distributed: Distributed, loader: PrefetchingLoader, flops: float, peak_tflops: float | None = None
    ) -> None:
        self.device, self.loader = distributed.device, loader
        peak = peak_rate(self.device) if peak_tflops is None else peak_tflops * 1e12
        self.share_of_peak = None if peak is None else flops / (peak * distributed.world_size)
        self.started, self.waited = time.perf_counter(), loader.seconds_waited

    def measure(self, num_steps: int, num_blocks: float) -> dict[str, float]:
        """Return the rates over some steps, with the number of blocks in the last of them."""
        seconds = time.perf_counter() - self.started
        rates = {
            "steps_per_second": num_steps / seconds,
            "blocks_per_second": num_blocks * num_steps / seconds,
            "waiting_for_data": (self.loader.seconds_waited - self.waited) / seconds,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
        }
        if self.share_of_peak is not None:
            rates["flop_utilization"] = self.share_of_peak * num_steps / seconds
        return rates


def step_flops(recipe: Recipe, config: DrafterConfig, target_parameters: int, tokens_per_step: float) -> float:
    """Count the multiply-adds of one step, twice; attention scores and the objective's sweeps are left out.

    Gradient checkpointing computes the forward pass of the drafter's layers a second time.
    """
    width, kv_width = config.hidden_size, config.num_kv_heads * config.head_dim
    embedding = config.vocab_size * width
    target = 0 if recipe.data.features == "cached" else 2 * (target_parameters - embedding) * tokens_per_step
    q_width = config.num_heads * config.head_dim
    per_slot = config.num_layers * (2 * q_width * width + 2 * kv_width * width + 3 * config.intermediate_size * width)
    context = config.num_layers * 2 * kv_width * width
    blocks = recipe.batch.num_anchors
    layers = per_slot * blocks * config.num_slots + context * tokens_per_step
    features = len(config.target_layers) * width * width * tokens_per_step
    drafter = (8 if recipe.runtime.gradient_checkpointing else 6) * layers + 6 * features
    head = 2 * 2 * config.num_draft_tokens * width * blocks * config.num_proposals  # draft logits and their gradient
    shared = 2 * config.num_draft_tokens * width * min(tokens_per_step, blocks * config.num_proposals)  # target logits
    return float(target + drafter + head + shared)


PEAK_TFLOPS = {
    "A10": 125.0, "A40": 149.7, "A100": 312.0, "A800": 312.0, "L4": 121.0, "L40": 181.0, "L40S": 362.0,
    "RTX 4090": 165.2, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "H200": 989.0, "GH200": 989.0,
    "B200": 2250.0, "GB200": 2500.0,
}  # fmt: skip
"""Dense bfloat16 products, in TFLOP/s, by what a device's name contains; the longest match counts."""


def peak_rate(device: torch.device) -> float | None:
    """Return the floating-point operations per second that a device could do at most; None if it is not known."""
    if device.type != "cuda":
        return None
    return named_peak_rate(torch.cuda.get_device_properties(device).name)


def named_peak_rate(name: str) -> float | None:
    """Return the peak rate of a device of this name, in operations per second."""
    words = f" {name.replace('-', ' ')} "
    known = [each for each in PEAK_TFLOPS if f" {each} " in words]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held on a device so far, or in the host's memory for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class HeldOutBlocks:
    """Measures how long the accepted prefixes are, on the same whole blocks of held-out texts every time."""

    def __init__(
        self,
        dataset: TextDataset,
        num_blocks: int,
        num_proposals: int,
        seed: int,
        features: Features,
        temperature: float = 1.0,
    ) -> None:
        self.dataset, self.features, self.num_proposals = dataset, features, num_proposals
        self.objective = objective("ce", temperature=temperature)  # any will do: only the statistics are read
        sampler = BatchSampler(
            dataset,
            num_texts=len(dataset),
            num_anchors=num_blocks,
            num_proposals=num_proposals,
            seed=seed,
            full_blocks=True,
            max_anchors_per_text=num_blocks,
        )
        self.chosen = [each for each in sampler.step(0, 0) if len(each.anchors)]

    @torch.no_grad()
    def measure(self, step: TrainingStep, distributed: Distributed, *, lockstep: bool = False) -> BlockStatistics:
        """Return statistics over all blocks, shared out over the processes.

        In ``lockstep`` every process runs every batch, as weights that are gathered in each pass ask for.
        """
        parts = partition(self.chosen, -(-len(self.chosen) // TEXTS_PER_BATCH), self.dataset)
        total: BlockStatistics | None = None
        step.drafter.eval()
        for number, part in enumerate(parts):
            mine = number % distributed.world_size == distributed.rank
            if mine or lockstep:
                batch = collate(part, self.dataset, self.num_proposals)
                check_batch(batch, step.target.vocab_size)
                batch = batch.to(distributed.device)
                stats = step(batch, self.features(batch), self.objective)[2]
                if mine and stats is not None:
                    total = stats if total is None else total + stats
        step.drafter.train()
        empty = torch.zeros(self.num_proposals, device=distributed.device)
        sums = {}
        for field in fields(BlockStatistics):
            nothing = empty[0] if field.name == "num_blocks" else empty
            sums[field.name] = distributed.all_reduce(nothing if total is None else getattr(total, field.name))
        return BlockStatistics(**sums)


def summary(stats: BlockStatistics) -> dict[str, float | list[float]]:
    """Return plain numbers for a log."""
    values: dict[str, float | list[float]] = {f"length_{rule}": float(stats.expected_length(rule)) for rule in RULES}
    values |= {f"retention_{rule}": [round(float(x), 5) for x in stats.retention(rule)] for rule in RULES}
    values["token_accuracy"] = float(stats.token_accuracy)
    values["argmax_agreement"] = float(stats.argmax_agreement)
    values["num_blocks"] = float(stats.num_blocks)
    return values


class DecodedPrompts:
    """Decodes the first few held-out prompts under block verification.

    Its random streams are its own and the same every time: two measurements differ by the drafter alone, and
    training's random state is not touched.
    """

    def __init__(self, dataset: TextDataset, num_prompts: int, target: Target, temperature: float, seed: int) -> None:
        rows = dataset.first_responses[:num_prompts].tolist()
        self.prompts = [dataset[row][: dataset.prompt_lengths[row]].tolist() for row in rows]
        self.target, self.temperature, self.seed = target, temperature, seed

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """Return the tokens retained per verification call, pooled over the prompts, and the first text."""
        drafter.eval()
        found = []
        for number, prompt in enumerate(self.prompts):
            fits = room(self.target, drafter, len(prompt))
            budget = DECODED_TOKENS if fits is None else min(DECODED_TOKENS, fits)
            if budget < 1:
                continue  # the prompt fills the context: nothing can be drafted behind it
            out = generate(
                self.target, drafter, prompt, temperature=self.temperature, max_new_tokens=budget,
                seed=self.seed + number, cuda_graphs=False,  # training needs the memory, and new weights new graphs
            )  # fmt: skip
            found.append(out)
        drafter.train()
        if not found:
            return {}
        rounds = [each for out in found for each in out.rounds]
        length = sum(len(each.tokens) for each in rounds) / max(1, len(rounds))
        return {"decoded_length_block": length, "decoded_text": found[0].text}


class HeldOut:
    """Measures a drafter on held-out texts: expected accepted lengths and, if asked for, what decoding retains.

    coverage: what a reduced draft vocabulary leaves of these texts; None if the drafter has all tokens.
    decoded: the prompts that are decoded, in the process that does it; None if there are none.
    """

    def __init__(
        self,
        blocks: HeldOutBlocks,
        decoded: DecodedPrompts | None,
        coverage: Coverage | None,
        drafter: Drafter,
        distributed: Distributed,
        lockstep: bool,
    ) -> None:
        self.blocks, self.decoded, self.coverage = blocks, decoded, coverage
        self._drafter, self._distributed, self._lockstep = drafter, distributed, lockstep

    @classmethod
    def of(
        cls,
        texts: TextDataset,
        recipe: Recipe,
        drafter: Drafter,
        temperature: float,
        target: Target,
        distributed: Distributed,
    ) -> "HeldOut | None":
        """Prepare what a recipe asks to measure, at the objective's temperature; None where no text is held out."""
        runtime, logging, config = recipe.runtime, recipe.logging, drafter.config
        lockstep = distributed.is_distributed and (runtime.parallel == "fsdp" or runtime.shard_target)
        if lockstep and logging.decode_prompts:
            raise RecipeError(
                "logging.decode_prompts needs whole models in one process, and these are sharded; set it to 0, "
                "or train with runtime.parallel=ddp and runtime.shard_target=false"
            )
        if not len(texts):
            return None
        covered, decoded, ids = None, None, drafter.draft_ids
        if ids is not None:
            covered = coverage(texts, ids.cpu().numpy(), target.vocab_size, config.num_proposals)
        features = OnlineFeatures(target, config.target_layers, None if ids is None else temperature)
        blocks = HeldOutBlocks(texts, logging.heldout_blocks, config.num_proposals, recipe.seed, features, temperature)
        if logging.decode_prompts and distributed.is_main:
            decoded = DecodedPrompts(texts, logging.decode_prompts, target, temperature, recipe.seed)
        return cls(blocks, decoded, covered, drafter, distributed, lockstep)

    def measure(self, step: TrainingStep) -> dict[str, Any]:
        """Return what was measured, by the names of ``metrics.jsonl``."""
        stats = self.blocks.measure(step, self._distributed, lockstep=self._lockstep)
        measured: dict[str, Any] = {f"heldout_{name}": value for name, value in summary(stats).items()}
        return measured if self.decoded is None else measured | self.decoded.measure(self._drafter)


TRACKERS = ("wandb", "trackio")


def check_trackers(recipe: Recipe) -> None:
    """Raise if the recipe asks for a tracker that is not installed; on every process, before any of them waits."""
    for name in ("tensorboard", *TRACKERS):
        if getattr(recipe.logging, name) and importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"logging.{name} needs a package that is not installed: pip install {name}, or set logging.{name}=false"
            )


class MetricsLog:
    """Writes the metrics of one run; used by the process that writes."""

    def __init__(self, file: Path, recipe: Recipe) -> None:
        self._file = file.open("a")
        self._writers: list[Any] = []
        if recipe.logging.tensorboard:
            self._writers.append(_TensorBoard(file.parent / "tensorboard"))
        for name in TRACKERS:
            if getattr(recipe.logging, name):
                self._writers.append(_Tracker(name, file.parent, recipe))

    def write(self, values: dict[str, Any]) -> None:
        """Write one line; ``step`` is among the values."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        for writer in self._writers:
            writer.write(numbers, texts, values["step"])

    def close(self) -> None:
        """Close the file and all trackers."""
        self._file.close()
        for writer in self._writers:
            writer.close()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, numbers: dict[str, float], texts: dict[str, str], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        for name, text in texts.items():
            self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Sends numbers to wandb or trackio, which share their interface."""

    def __init__(self, name: str, run: Path, recipe: Recipe) -> None:
        self._module = __import__(name)
        self._module.init(project="blockdraft", name=run.name, config=recipe.model_dump(mode="json"))

    def write(self, numbers: dict[str, float], _texts: dict[str, str], step: int) -> None:
        self._module.log(numbers, step=step)

    def close(self) -> None:
        self._module.finish()
