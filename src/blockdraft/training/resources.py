"""What a run will take, counted before it is launched.

Weights, optimizer and files are counted exactly; activations and logits by the
formulas in `ResourceEstimate`'s fields, which name what they leave out.
"""

from dataclasses import dataclass

import torch

from blockdraft.data.features import cache_bytes
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.losses.fused import CHUNK_BYTES
from blockdraft.recipes import Recipe
from blockdraft.targets import target_shape

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ResourceEstimate:
    """Counts, and bytes.

    num_steps, num_tokens: of the whole run; tokens that the target reads, all epochs.
    target_parameters, drafter_parameters: numbers of weights.
    data_bytes: of the rows, uncompressed; the files are about half of it.
    cache_bytes: of a feature cache, should one be made.
    target_bytes, drafter_bytes, optimizer_bytes: per device; weights (and a copy in the computing precision),
        and gradients with AdamW's two moments.
    activation_bytes: per device and micro-batch: hidden states and features of the target, and what the
        drafter's layers keep for their backward pass.
    fused_bytes, unfused_bytes: per device: buffers of the fused objective; the six vocabulary-sized float32
        tensors of plain autograd (two of logits, two of log-probabilities, two of gradients).
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
    target_bytes: int
    drafter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    fused_bytes: int
    unfused_bytes: int
    training_flops: float

    @property
    def device_bytes(self) -> int:
        """Memory of one device with the fused objective, allocator's waste and the attention's scratch not counted."""
        parts = (self.target_bytes, self.drafter_bytes, self.optimizer_bytes, self.activation_bytes, self.fused_bytes)
        return sum(parts)

    def hours(self, tflops: float, efficiency: float) -> float:
        """Return the hours of training on devices of a peak rate, of which a share is reached."""
        return self.training_flops / (self.num_devices * tflops * 1e12 * efficiency) / 3600


def estimate(recipe: Recipe, *, num_devices: int, num_texts: int, tokens_per_text: float) -> ResourceEstimate:
    """Estimate what a recipe takes on so many devices with so much data."""
    shape = target_shape(recipe.target.name, recipe.target.shape)
    config = DrafterConfig.for_target(recipe.drafter.kind, shape, **recipe.drafter.config_options())
    with torch.device("meta"):
        drafter_parameters = sum(parameter.numel() for parameter in build_drafter(config).parameters())
    target_parameters = shape.num_parameters
    precision = BYTES[recipe.runtime.precision or ("float32" if _on_cpu(recipe) else "bfloat16")]
    target_precision = BYTES[recipe.target.dtype or ("float32" if _on_cpu(recipe) else "bfloat16")]
    drafter_shards = num_devices if recipe.runtime.parallel == "fsdp" else 1
    target_shards = num_devices if recipe.runtime.shard_target else 1
    all_tokens = round(num_texts * tokens_per_text)
    num_steps = recipe.optimizer.num_train_epochs * -(-num_texts // recipe.batch.num_texts)
    if recipe.optimizer.max_steps is not None:
        num_steps = min(num_steps, recipe.optimizer.max_steps)
    share = num_devices * recipe.batch.gradient_accumulation_steps
    micro_tokens = -(-recipe.batch.num_texts // share) * tokens_per_text
    micro_blocks = -(-recipe.batch.num_anchors // share)
    positions = micro_blocks * config.num_proposals
    width, num_features = config.hidden_size, len(config.target_layers)
    kept_per_slot = 1 if recipe.runtime.gradient_checkpointing else _kept_widths(config)
    features = micro_tokens * (1 + num_features) * width * target_precision
    slots = micro_blocks * config.num_slots * config.num_layers * kept_per_slot * width * precision
    chunk = min(CHUNK_BYTES, positions * shape.vocab_size * 4)
    return ResourceEstimate(
        num_devices=num_devices,
        num_steps=num_steps,
        num_tokens=round(num_steps * min(recipe.batch.num_texts, num_texts) * tokens_per_text),
        target_parameters=target_parameters,
        drafter_parameters=drafter_parameters,
        data_bytes=4 * all_tokens,
        cache_bytes=cache_bytes(all_tokens, width, num_features, target_precision),
        target_bytes=target_parameters * target_precision // target_shards,
        drafter_bytes=drafter_parameters * (4 if precision == 4 else 4 + precision) // drafter_shards,
        optimizer_bytes=drafter_parameters * 12 // drafter_shards,
        activation_bytes=round(features + slots),
        fused_bytes=4 * chunk + 2 * positions * width * 4,
        unfused_bytes=6 * positions * shape.vocab_size * 4,
        training_flops=num_steps
        * step_flops(recipe, config, target_parameters, min(recipe.batch.num_texts, num_texts) * tokens_per_text),
    )


def step_flops(recipe: Recipe, config: DrafterConfig, target_parameters: int, tokens_per_step: float) -> float:
    """Count the multiply-adds of one step, twice; attention scores and the objective's sweeps are left out."""
    width, kv_width = config.hidden_size, config.num_kv_heads * config.head_dim
    embedding = config.vocab_size * width
    target = 0 if recipe.data.features == "cached" else 2 * (target_parameters - embedding) * tokens_per_step
    q_width = config.num_heads * config.head_dim
    per_slot = config.num_layers * (2 * q_width * width + 2 * kv_width * width + 3 * config.intermediate_size * width)
    per_token = len(config.target_layers) * width * width + config.num_layers * 2 * kv_width * width
    blocks = recipe.batch.num_anchors
    drafter = 6 * (per_slot * blocks * config.num_slots + per_token * tokens_per_step)
    head = 2 * 2 * config.num_draft_tokens * width * blocks * config.num_proposals  # draft logits and their gradient
    shared = 2 * config.num_draft_tokens * width * min(tokens_per_step, blocks * config.num_proposals)  # target logits
    return float(target + drafter + head + shared)


def _kept_widths(config: DrafterConfig) -> float:
    """Values that one slot keeps in one layer, in units of the width: norms and residuals, projections, the MLP."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return (4 * config.hidden_size + 4 * heads + 4 * kv_heads + 4 * config.intermediate_size) / config.hidden_size


def _on_cpu(recipe: Recipe) -> bool:
    embedded = recipe.target.name in ("pocket", "smollm2")
    return recipe.runtime.device == "cpu" or (recipe.runtime.device is None and embedded)
