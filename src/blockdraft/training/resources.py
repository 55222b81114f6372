"""Count what a run will take before it is launched, and try everything that it needs once: a dry run.

Weights, optimizer and files are counted exactly. Activations, the backward
pass's working set and the objective's buffers are sums over the tensors that
the layers keep; tests hold them to within a tenth of what is counted, operator
by operator, on a fake GPU. The allocator's waste and the CUDA context (1 to 2
GiB) are not in them.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockdraft.data.features import cache_bytes
from blockdraft.distributed import Distributed
from blockdraft.drafters import DrafterConfig, build_drafter, load_drafter
from blockdraft.losses.fused import ACCELERATOR_CHUNK_BYTES, CHUNK_BYTES
from blockdraft.recipes import Recipe, RecipeError
from blockdraft.targets import BUILT_IN, Target, target_shape
from blockdraft.training.measuring import step_flops
from blockdraft.training.trainer import CHECKPOINT_BYTES, Trainer

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ResourceEstimate:
    """Holds what a run will take: numbers of steps, tokens and weights, bytes, and operations.

    num_steps, num_tokens: of the whole run; tokens that the target reads, all epochs.
    target_parameters, drafter_parameters: numbers of weights.
    data_bytes: of the rows, uncompressed; the files are about half of it.
    cache_bytes: of a feature cache, should one be made.
    num_checkpoints, checkpoint_bytes: checkpoints that stay when the run has ended, and the bytes of each: the best
        one, and the last or, if they are kept, that of every epoch.
    target_bytes, drafter_bytes, optimizer_bytes: per device; weights (and a copy in the computing precision),
        and gradients with AdamW's two moments.
    gradient_bytes: the gradients alone. Several processes keep them all the time, in buckets that they exchange; one
        process makes them while the backward pass gives activations up, so they do not add to the peak.
    activation_bytes: per device and micro-batch: hidden states and features of the target, and what the
        drafter's layers keep for their backward pass.
    backward_bytes: per device: what the backward pass of one layer makes beside, and gradients of hidden states.
    fused_bytes, unfused_bytes: per device: buffers of the fused objective; the six vocabulary-sized float32
        tensors of plain autograd (two of logits, two of log-probabilities, two of gradients).
    accumulation: backward passes that share a step.
    training_flops: floating-point operations of the whole run: the target's passes, the drafter's forward and backward
        passes, and the products with the head, two to a multiply-add.
    """

    num_devices: int
    num_steps: int
    num_tokens: int
    target_parameters: int
    drafter_parameters: int
    data_bytes: int
    cache_bytes: int
    num_checkpoints: int
    checkpoint_bytes: int
    target_bytes: int
    drafter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    backward_bytes: int
    fused_bytes: int
    unfused_bytes: int
    accumulation: int
    training_flops: float

    @property
    def device_bytes(self) -> int:
        """Give the peak memory of a device with the fused objective, without the allocator's waste and the context."""
        held = self.target_bytes + self.drafter_bytes + self.optimizer_bytes - self.gradient_bytes
        passing = self.activation_bytes + max(self.backward_bytes, self.fused_bytes)
        if self.num_devices > 1:
            return held + self.gradient_bytes + passing
        return held + max(self.gradient_bytes, passing)

    def hours(self, tflops: float, efficiency: float) -> float:
        """Return the hours of training on devices of a peak rate, of which a share is reached."""
        return self.training_flops / (self.num_devices * tflops * 1e12 * efficiency) / 3600


def estimate(recipe: Recipe, *, num_devices: int, num_texts: int, tokens_per_text: float) -> ResourceEstimate:
    """Estimate what a recipe takes with this number of devices and this amount of data."""
    shape = target_shape(recipe.target.name, recipe.target.shape)
    config = DrafterConfig.for_target(recipe.drafter.kind, shape, **recipe.drafter.config_options())
    target_parameters, drafter_parameters = _counted(recipe.target.name, str(recipe.target.shape), recipe, config)
    on_cpu = _on_cpu(recipe)
    precision = BYTES[recipe.runtime.precision or ("float32" if on_cpu else "bfloat16")]
    target_precision = BYTES[recipe.target.dtype or ("float32" if on_cpu else "bfloat16")]
    drafter_shards = num_devices if recipe.runtime.parallel == "fsdp" else 1
    target_shards = num_devices if recipe.runtime.shard_target else 1
    all_tokens = round(num_texts * tokens_per_text)
    steps_per_epoch = -(-num_texts // recipe.batch.num_texts)
    num_steps = recipe.optimizer.num_steps(steps_per_epoch)
    share = num_devices * recipe.batch.gradient_accumulation_steps
    micro_tokens = -(-recipe.batch.num_texts // share) * tokens_per_text
    micro_blocks = -(-recipe.batch.num_anchors // share)
    layers = _LayerBytes.of(config, micro_blocks, micro_tokens, precision)
    width, num_features = config.hidden_size, len(config.target_layers)
    positions = micro_blocks * config.num_proposals
    features = micro_tokens * (2 + num_features) * width * target_precision
    kept, working = config.num_layers * layers.kept, layers.working
    if recipe.runtime.gradient_checkpointing:  # the layers' inputs, and one layer anew
        kept, working = config.num_layers * layers.inputs, layers.kept + layers.working
    row = config.num_draft_tokens * (4 if on_cpu else target_precision)
    chunk = min(CHUNK_BYTES if on_cpu else ACCELERATOR_CHUNK_BYTES, positions * row)
    target_rows = min(1.0, micro_tokens / max(1, positions))
    states = positions * width * (4 + precision)  # gradients of hidden states, as summed and as handed on
    return ResourceEstimate(
        num_devices=num_devices,
        num_steps=num_steps,
        num_tokens=round(num_steps * min(recipe.batch.num_texts, num_texts) * tokens_per_text),
        target_parameters=target_parameters,
        drafter_parameters=drafter_parameters,
        data_bytes=4 * all_tokens,
        cache_bytes=cache_bytes(all_tokens, width, num_features, target_precision),
        num_checkpoints=1 + max(1, len(recipe.logging.epochs_kept(num_steps, steps_per_epoch))),
        checkpoint_bytes=CHECKPOINT_BYTES * drafter_parameters,
        target_bytes=target_parameters * target_precision // target_shards,
        drafter_bytes=drafter_parameters * (4 if precision == 4 else 4 + precision) // drafter_shards,
        optimizer_bytes=drafter_parameters * 12 // drafter_shards,
        gradient_bytes=drafter_parameters * 4 // drafter_shards,
        activation_bytes=round(features + kept),
        backward_bytes=round(working + states),
        fused_bytes=round(chunk * (1 + target_rows) * (2 if on_cpu else 1) + states),
        unfused_bytes=6 * positions * shape.vocab_size * 4,
        accumulation=recipe.batch.gradient_accumulation_steps,
        training_flops=num_steps
        * step_flops(recipe, config, target_parameters, min(recipe.batch.num_texts, num_texts) * tokens_per_text),
    )


_counts: dict[tuple[str, str, DrafterConfig], tuple[int, int]] = {}


def _counted(name: str, fields: str, recipe: Recipe, config: DrafterConfig) -> tuple[int, int]:
    """Return how many weights target and drafter have, from models without storage; building those takes seconds."""
    key = (name, fields, config)
    if key not in _counts:
        with torch.device("meta"):
            drafter = sum(parameter.numel() for parameter in build_drafter(config).parameters())
        _counts[key] = target_shape(recipe.target.name, recipe.target.shape).num_parameters, drafter
    return _counts[key]


@dataclass(frozen=True)
class _LayerBytes:
    """Holds the bytes that one layer of the drafter keeps for its backward pass, and those that the pass makes.

    A slot keeps the input and output of both norms and both residual sums (4 H), queries before their norm and
    after rotation and what they attended to (3 Q), keys before their norm (K), and of the MLP gate, its SiLU, up and
    their product (4 I). Keys and values are laid out once more beside those of the context (2 K). The backward pass
    of an MLP makes the gradients of three of its tensors before it gives the first up.
    """

    inputs: float
    kept: float
    working: float

    @classmethod
    def of(cls, config: DrafterConfig, num_blocks: int, num_tokens: float, itemsize: int) -> "_LayerBytes":
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        width, inner = config.hidden_size, config.intermediate_size
        num_slots = num_blocks * config.num_slots
        slots = num_slots * (4 * width + 3 * queries + 3 * keys + 4 * inner)
        softmax = num_slots * config.num_heads * 4
        return cls(
            inputs=num_slots * width * itemsize,
            kept=(slots + num_tokens * 3 * keys) * itemsize + softmax,
            working=num_slots * (3 * inner + 2 * width) * itemsize,
        )


HEADROOM = 2 * GIB
"""Left for the CUDA context and what the allocator wastes."""


def fit(recipe: Recipe, memory: int, *, num_devices: int, num_texts: int, tokens_per_text: float) -> Recipe:
    """Return the recipe with as much gradient accumulation as it takes to fit into a device's memory.

    Accumulation decides the rounding and nothing else. Raises `RecipeError` if no amount of it is enough, and says
    what would be.
    """

    def peak(some: Recipe) -> int:
        found = estimate(some, num_devices=num_devices, num_texts=num_texts, tokens_per_text=tokens_per_text)
        return found.device_bytes + HEADROOM

    steps = recipe.batch.gradient_accumulation_steps
    most = max(steps, -(-recipe.batch.num_texts // num_devices))  # a text is not divided
    needed = 0
    while steps <= most:
        fitting = recipe.model_copy(
            update={"batch": recipe.batch.model_copy(update={"gradient_accumulation_steps": steps})}
        )
        needed = peak(fitting)
        if needed <= memory:
            return fitting
        steps = steps + 1 if steps < 4 else min(2 * steps, most) if steps < most else most + 1
    runtime = fitting.runtime
    options: dict[str, dict[str, Any]] = {
        "runtime.gradient_checkpointing=true": {"gradient_checkpointing": True},
        "runtime.parallel=fsdp": {"parallel": "fsdp"},
        "runtime.shard_target=true": {"shard_target": True},
    }
    chosen: list[str] = []
    for name, change in options.items():
        if num_devices == 1 and "gradient_checkpointing" not in name:
            continue
        runtime = runtime.model_copy(update=change)
        chosen.append(name)
        if peak(fitting.model_copy(update={"runtime": runtime})) <= memory:
            raise RecipeError(
                f"this run needs {needed / GIB:.1f} GiB a device and there are {memory / GIB:.1f}, even with "
                f"batch.gradient_accumulation_steps={fitting.batch.gradient_accumulation_steps}; set {' '.join(chosen)}"
            )
    raise RecipeError(
        f"this run needs {needed / GIB:.1f} GiB a device and there are {memory / GIB:.1f}; train with more "
        "or larger devices, a smaller target or a smaller drafter"
    )


def _on_cpu(recipe: Recipe) -> bool:
    is_built_in = recipe.target.name in BUILT_IN
    return recipe.runtime.device == "cpu" or (recipe.runtime.device is None and is_built_in)


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's own memory; None where it shares the host's."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def dry_run(recipe: Recipe, target: Target, distributed: Distributed) -> Iterator[str]:
    """Check recipe, data and target, take two steps, write and read a checkpoint; yields a line for each."""
    yield f"recipe: {recipe.objective.name} on {recipe.drafter.kind}, valid"
    yield f"target: {target.name}, {target.num_layers} layers, vocabulary {target.vocab_size:,}"
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "logging": recipe.logging.model_copy(update={"tensorboard": False}),
            "data": recipe.data.model_copy(update={"features": "online"}),  # a cache may take hours
        }
        trainer = Trainer(recipe.model_copy(update=changes), target, Path(folder), distributed)
        dataset = trainer.sampler.dataset
        num_texts, num_tokens = len(dataset), len(dataset.tokens)
        yield f"data: {num_texts:,} texts to train on, {num_tokens:,} tokens, every checksum right"
        if trainer.coverage is not None:
            yield str(trainer.coverage)
        yield f"plan: {trainer.num_steps:,} steps, {trainer.sampler.steps_per_epoch:,} an epoch"
        found = estimate(
            recipe, num_devices=distributed.world_size, num_texts=num_texts, tokens_per_text=num_tokens / num_texts
        )
        yield f"memory: about {found.device_bytes / GIB:.2f} GiB a device"
        for batches in trainer.loader.steps(0, min(2, trainer.num_steps)):
            metrics = trainer.take_step(batches)
            yield f"step {metrics['step']}: loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.4f}"
        trainer.save(trainer.evaluate().get("heldout_length_block"))
        if distributed.is_main:
            again = load_drafter(trainer.run.checkpoint("last"), target, dtype=torch.float32)
            if not distributed.is_distributed:  # otherwise this process may hold a shard of the weights
                ours = trainer.drafter.state_dict()
                if not all(torch.equal(ours[name], tensor) for name, tensor in again.state_dict().items()):
                    raise RuntimeError("the checkpoint does not hold the weights that were saved")
        yield "checkpoint: written and read"
