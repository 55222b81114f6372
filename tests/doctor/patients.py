"""Folders for the doctor, written out by hand in everybody's formats, around drafters that know some texts by heart."""

import functools
import json

import numpy as np
import torch
from safetensors.torch import save_file

from blockdraft.data import OnlineFeatures, TextAnchors, collate, open_dataset
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.losses import fused_linear_objective, objective
from blockdraft.training.initialization import initialise

from tiny import tiny_target

NUM_PROPOSALS = 4
LAYERS = [1, 3]


@functools.cache
def target():
    return tiny_target(dtype=torch.float32)


@functools.cache
def trained(data, kind, num_steps=140, **changes):
    """Train a drafter of one layer on every block of a data folder's texts, written out as a loop of its own."""
    model, texts = target(), open_dataset(data)
    shape = {"num_layers": 1, "num_proposals": NUM_PROPOSALS, "target_layers": tuple(LAYERS)}
    if kind == "dspark":
        shape["markov_rank"] = 6
    torch.manual_seed(0)
    drafter = build_drafter(DrafterConfig.for_target(kind, model, **(shape | changes)))
    initialise(drafter, std=0.2)
    chosen = [
        TextAnchors(i, np.arange(int(texts.prompt_lengths[i]), int(texts.lengths[i]) - 1)) for i in range(len(texts))
    ]
    batch = collate(chosen, texts, NUM_PROPOSALS)
    output = OnlineFeatures(model, LAYERS)(batch)
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=1e-2)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / num_steps)
        hidden = drafter(output.features, batch.anchor_tokens, batch.anchors, model)
        value = fused_linear_objective(
            objective("ce", eta=100.0), hidden, batch.at_blocks(output.hidden), model.head, model.head, batch.labels,
            batch.valid, markov=drafter.markov(hidden, batch.previous),
        )  # fmt: skip
        optimizer.zero_grad()
        value.loss.backward()
        optimizer.step()
    return drafter.eval()


# Folders as other projects write them: the keys of their formats, and no code of ours


def qwen3(config):
    return {
        "model_type": "qwen3", "attention_bias": False, "head_dim": config.head_dim, "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "num_attention_heads": 4,
        "num_hidden_layers": config.num_layers, "num_key_value_heads": 2, "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": 40, "max_position_embeddings": 512, "layer_types": ["full_attention"] * config.num_layers,
        "rope_theta": config.rope_theta, "rope_scaling": None, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip


def zlab(config):
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layers)}
    return qwen3(config) | {
        "architectures": ["DFlashDraftModel"], "block_size": config.num_proposals + 1, "num_target_layers": 6,
        "dflash_config": nested,
    }  # fmt: skip


def deepspec(config):
    return qwen3(config) | {
        "architectures": ["Qwen3DSparkModel"], "block_size": config.num_proposals, "num_target_layers": 6,
        "target_layer_ids": list(config.target_layers), "mask_token_id": config.mask_token_id, "num_anchors": 512,
        "markov_rank": config.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False,
        "confidence_head_with_markov": False, "sample_from_anchor": True,
    }  # fmt: skip


def speculators(config):
    anchor = config.kind == "dspark"
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_proposals, "verifier_accept_k": 1}
    values = {
        "speculators_model_type": config.kind, "speculators_version": "0.9.0", "architectures": ["DraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layers], "dtype": "float32",
        "block_size": config.num_proposals + (not anchor), "draft_vocab_size": config.num_draft_tokens,
        "mask_token_id": config.mask_token_id, "sample_from_anchor": anchor, "sliding_window_non_causal": True,
        "tie_word_embeddings": False, "transformer_layer_config": qwen3(config),
        "speculators_config": {"algorithm": config.kind, "proposal_methods": [method], "verifier": {}},
    }  # fmt: skip
    heads = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return values | (heads if anchor else {})


def ours(config):
    return config.to_dict()


def patient(folder, drafter, write, change=None):
    """Write a folder of a drafter, changed by ``change(values, tensors)``."""
    values = json.loads(json.dumps(write(drafter.config.replace(target_fingerprint=None))))
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    if write is not ours:
        ids = tensors.pop("draft_ids", None)
        if drafter.config.kind == "dspark":
            tensors |= {"embed_tokens.weight": target().embedding.clone(), "lm_head.weight": target().head.clone()}
        if ids is not None:
            known = torch.zeros(40, dtype=torch.bool)
            known[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known, "lm_head.weight": target().head[ids].clone()}
    if change is not None:
        change(values, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def put(path, value):
    """Return a change that sets a value of ``config.json``, or deletes it if the value is None."""

    def change(values, _tensors):
        *parents, last = path.split(".")
        for key in parents:
            values = values[int(key)] if isinstance(values, list) else values[key]
        if value is None:
            del values[last]
        else:
            values[last] = value

    return change
