"""The network: a Qwen3 language model with tied embeddings, and how a shallow one grows into a deep one."""

import copy
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.pocket.build.packing import Batch
from blockdraft.pocket.build.tokenizer import END, PAD


@dataclass(frozen=True)
class Shape:
    """Width of the model; the depth is a matter of the training's stages."""

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


def weighted_loss(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
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
