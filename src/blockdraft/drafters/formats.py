"""Drafter configurations as serving engines read them.

One set of tensors, two flavours of ``config.json``:

flat          z-lab's for DFlash and DeepSpec's for DSpark; SGLang and vLLM read it
speculators   of the package of that name; vLLM reads it

Everything is stated that a reader might otherwise guess; what no engine can serve
is refused. `foreign` reads both.
"""

from dataclasses import dataclass
from typing import Any, Literal

from blockdraft.drafters.config import DrafterConfig, DrafterKind, SlotLayout
from blockdraft.errors import BlockdraftError

Format = Literal["flat", "speculators"]
FORMATS: tuple[Format, ...] = ("flat", "speculators")
Values = dict[str, Any]

SPECULATORS_VERSION = "0.9.0"
ARCHITECTURES: dict[str, DrafterKind] = {
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
LAYER_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Our names, and those of a Qwen3 configuration."""
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


class FormatError(BlockdraftError):
    """A configuration that cannot be written or read, with the reason."""


@dataclass(frozen=True)
class Surroundings:
    """What a configuration states besides the drafter.

    max_positions: the longest text, the target's.
    dtype: of the tensors, by name.
    verifier: the target, by the name or path under which an engine finds it.
    verifier_architectures: its classes.
    """

    max_positions: int
    dtype: str
    verifier: str
    verifier_architectures: tuple[str, ...]


def format_of(values: Values) -> Format | None:
    """Whose configuration this is; None is ours."""
    if "speculators_model_type" in values:
        return "speculators"
    return "flat" if "architectures" in values else None


def frozen_names(kind: DrafterKind) -> tuple[str, ...]:
    """Copies of the target's tensors that a drafter's folder carries in either format."""
    return ("embed_tokens.weight", "lm_head.weight") if kind == "dspark" else ()


def write_config(flavour: Format, config: DrafterConfig, around: Surroundings) -> Values:
    """``config.json`` in one of the two formats."""
    _refuse_unservable(flavour, config)
    return _flat(config, around) if flavour == "flat" else _speculators(config, around)


def _refuse_unservable(flavour: Format, config: DrafterConfig) -> None:
    next_token = config.slot_layout is SlotLayout.NEXT_TOKEN
    if config.kind == "dflash" and next_token:
        raise FormatError("vLLM refuses DFlash drafters whose slot 0 predicts, and SGLang would read slot 0 as nothing")
    if config.kind == "dspark" and not next_token and flavour == "flat":
        raise FormatError(
            "slot 0 of a flat DSpark drafter predicts the next token, and SGLang knows no other layout; "
            "a fill-in DSpark drafter can be exported as speculators"
        )
    if config.markov_head in ("gated", "rnn") and flavour == "speculators":
        raise FormatError(
            f"vLLM, which reads speculators, has the vanilla Markov head only; this one is {config.markov_head}. "
            "SGLang serves it as flat"
        )


def _flat(config: DrafterConfig, around: Surroundings) -> Values:
    """z-lab's keys for DFlash, DeepSpec's for DSpark."""
    anchor = config.slot_layout is SlotLayout.NEXT_TOKEN
    values: Values = {"architectures": ["DFlashDraftModel" if config.kind == "dflash" else "Qwen3DSparkModel"]}
    values |= _layers(config, around.max_positions) | {"dtype": around.dtype}
    values |= {
        "block_size": config.num_slots,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": anchor,
    }
    features = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layers)}
    return values | ({"dflash_config": features} if config.kind == "dflash" else features | _heads(config))


def _speculators(config: DrafterConfig, around: Surroundings) -> Values:
    anchor = config.slot_layout is SlotLayout.NEXT_TOKEN
    values = {
        "speculators_model_type": config.kind,
        "speculators_version": SPECULATORS_VERSION,
        "architectures": ["DFlashDraftModel" if config.kind == "dflash" else "DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layers],
        "block_size": config.num_slots,
        "draft_vocab_size": config.vocab_size,
        "dtype": around.dtype,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": anchor,
        "sliding_window_non_causal": True,  # vLLM makes every layer causal without it
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_proposals,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": around.verifier, "architectures": list(around.verifier_architectures)},
        },
        "transformer_layer_config": _layers(config, around.max_positions) | {"dtype": around.dtype},
    }
    return values | (_heads(config) if config.kind == "dspark" else {})


def _layers(config: DrafterConfig, max_positions: int) -> Values:
    """A Qwen3 configuration of the layers, with ``rope_theta`` also where older readers look."""
    return {"model_type": "qwen3"} | {theirs: getattr(config, ours) for ours, theirs in LAYER_KEYS.items()} | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": max_positions,
        "max_window_layers": config.num_layers,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }  # fmt: skip


def _heads(config: DrafterConfig) -> Values:
    heads = (config.markov_rank, config.markov_head, config.confidence_head, config.confidence_head)
    return dict(zip(HEAD_KEYS, heads, strict=True))
