"""The same training step by the package `speculators`: a worker that `training.py` asks for steps, one at a time.

Run by an interpreter that has it (`make bench` sets one up). The file that `training_step.py --given` wrote holds the
texts end to end, the target's features and last hidden states, the anchors, and all weights. A step is what its trainer
does: the model's forward pass with its loss and metrics, backward, clipping, AdamW; float32, no autocast. Anchors are
those of the file instead of drawn anew, so that both packages do the same work and must find the same loss.
"""

import argparse
import json
import time
from typing import Any

import torch
from safetensors import safe_open
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config

from measuring import Peak, serve


def build(config: dict[str, Any], tensors: dict[str, Tensor], attention: str) -> DFlashDraftModel:
    """Its model in our shape, with our weights."""
    layers = Qwen3Config(
        vocab_size=config["vocab_size"], hidden_size=config["hidden_size"], head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"], num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_heads"], num_key_value_heads=config["num_kv_heads"],
        rms_norm_eps=config["rms_norm_eps"], tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
    )  # fmt: skip
    layers._attn_implementation = attention
    num_slots = config["num_proposals"] + 1
    proposals = GreedyTokenProposalConfig(speculative_tokens=config["num_proposals"])
    whole = DFlashSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=config["vocab_size"], block_size=num_slots,
        aux_hidden_state_layer_ids=[layer + 1 for layer in config["target_layers"]],
        mask_token_id=config["mask_token_id"], sample_from_anchor=False, sliding_window_non_causal=True,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash", proposal_methods=[proposals], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )  # fmt: skip
    model = DFlashDraftModel(whole).float()
    weights = {name.removeprefix("drafter."): t for name, t in tensors.items() if name.startswith("drafter.")}
    weights |= {
        "embed_tokens.weight": tensors["embedding"], "verifier_norm.weight": tensors["norm"],
        "lm_head.weight": tensors["head"], "verifier_lm_head.weight": tensors["head"],
    }  # fmt: skip
    model.load_state_dict(weights)
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loss", default="kl_div")
    parser.add_argument("--attention", default="eager")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with safe_open(options.file, "pt") as file:
        about = {name: json.loads(text) for name, text in file.metadata().items()}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = build(about["config"], tensors, options.attention)
    anchors = tensors["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    batch = {
        "hidden_states": tensors["features"], "input_ids": tensors["tokens"], "loss_mask": tensors["mask"],
        "verifier_last_hidden_states": tensors["hidden"], "document_ids": tensors["documents"],
        "position_ids": tensors["positions"],
    }  # fmt: skip
    batch = {name: tensor.unsqueeze(0) for name, tensor in batch.items()}
    loss_config = resolve_loss_config(options.loss, "eager")
    recipe = about["optimizer"]
    optimizer = torch.optim.AdamW(
        model.named_parameters(), lr=recipe["learning_rate"], betas=recipe["betas"], weight_decay=recipe["weight_decay"]
    )
    peak = Peak()

    def take() -> dict[str, Any]:
        start = time.perf_counter()
        _tokens, loss, metrics = model(**batch, loss_config=loss_config, gamma=float("inf"), max_anchors=len(anchors))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["max_grad_norm"])
        optimizer.step()
        values = {name: value.item() for name, value in metrics.items()}
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds, "num_blocks": len(anchors), "loss": values["loss_sum"],
            "extra_bytes": peak.extra_bytes(),
        }  # fmt: skip

    serve(take)


if __name__ == "__main__":
    main()
