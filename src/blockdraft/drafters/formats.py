"""Write the two configurations that serving engines read from ours, and read them into ours.

One set of tensors, two flavours of ``config.json``:

flat          z-lab's for DFlash and DeepSpec's for DSpark; SGLang and vLLM read it
speculators   of the package of that name; vLLM reads it

Writing states everything that a reader might otherwise guess, and refuses what no engine can serve. Reading takes
what our drafters compute, refuses the rest by name, and finds what a format leaves open from what else it says.
"""

from dataclasses import dataclass
from typing import Any, Literal

from blockdraft.drafters.config import DrafterConfig, DrafterKind, SlotLayout
from blockdraft.errors import BlockdraftError
from blockdraft.targets import choose_layers

Format = Literal["flat", "speculators"]
FORMATS: tuple[Format, ...] = ("flat", "speculators")
Values = dict[str, Any]

SPECULATORS_VERSION = "0.9.0"
NUM_ANCHORS = 512
"""Blocks per text in DeepSpec's training; its class wants the number in every config and drafting does not use it."""
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
USUAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "is_neox_style": (True,),
    "logit_scale": (1.0,),
    "causal": (False,),
    "quantization_config": (),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
}
"""What our layers compute, by the keys under which configurations may say otherwise; absent and null are fine."""
FINGERPRINT = "target_fingerprint"
"""Our own key in both formats; engines leave keys alone that they do not know."""


class FormatError(BlockdraftError):
    """A configuration cannot be written or read, and the message says why."""


@dataclass(frozen=True)
class Surroundings:
    """Hold what a configuration states besides the drafter.

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
    """Tell whose configuration this is; None is ours."""
    if "speculators_model_type" in values:
        return "speculators"
    return "flat" if "architectures" in values else None


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
D2T, T2D = "d2t", "t2d"
"""A reduced draft vocabulary: int64 ``[Vd]`` offsets from draft index to token id; bool ``[V]``, tokens it has."""


def frozen_names(config: DrafterConfig) -> tuple[str, ...]:
    """Return the names of the target's tensors of which a drafter's folder carries copies, in either format.

    DSpark's carries both; a reduced draft vocabulary makes the head a part of the folder, its own rows alone.
    """
    if config.kind == "dspark":
        return EMBEDDING, HEAD
    return () if config.draft_vocab_size is None else (HEAD,)


# Writing


def write_config(flavour: Format, config: DrafterConfig, around: Surroundings) -> Values:
    """Return ``config.json`` in one of the two formats."""
    _refuse_unservable(flavour, config)
    values = _flat(config, around) if flavour == "flat" else _speculators(config, around)
    return values if config.target_fingerprint is None else values | {FINGERPRINT: config.target_fingerprint}


def _refuse_unservable(flavour: Format, config: DrafterConfig) -> None:
    next_token = config.slot_layout is SlotLayout.NEXT_TOKEN
    if config.kind == "dflash" and next_token:
        raise FormatError("vLLM refuses DFlash drafters whose slot 0 predicts, and SGLang would read slot 0 as nothing")
    if config.kind == "dspark" and not next_token and flavour == "flat":
        raise FormatError(
            "slot 0 of a flat DSpark drafter predicts the next token, and SGLang knows no other layout; "
            "a fill-in DSpark drafter can be exported as speculators"
        )
    if config.draft_vocab_size is not None and flavour == "flat":
        raise FormatError(
            "SGLang, which reads flat folders, has no reduced draft vocabulary for DFlash and DSpark; export it as "
            "speculators, for vLLM, or train with drafter.vocab_size=null"
        )
    if config.markov_head in ("gated", "rnn") and flavour == "speculators":
        raise FormatError(
            f"vLLM, which reads speculators, has the vanilla Markov head only; this one is {config.markov_head}. "
            "SGLang serves it as flat"
        )


def _flat(config: DrafterConfig, around: Surroundings) -> Values:
    """Return z-lab's keys for DFlash, DeepSpec's for DSpark."""
    values: Values = {"architectures": ["DFlashDraftModel" if config.kind == "dflash" else "Qwen3DSparkModel"]}
    values |= _write_layers(config, around.max_positions) | {"dtype": around.dtype}
    values |= {
        "block_size": config.num_slots,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.slot_layout is SlotLayout.NEXT_TOKEN,
    }
    features = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layers)}
    if config.kind == "dflash":
        return values | {"dflash_config": features}
    return values | features | _write_heads(config) | {"num_anchors": NUM_ANCHORS}


def _speculators(config: DrafterConfig, around: Surroundings) -> Values:
    """Return the keys of the package speculators."""
    values = {
        "speculators_model_type": config.kind,
        "speculators_version": SPECULATORS_VERSION,
        "architectures": ["DFlashDraftModel" if config.kind == "dflash" else "DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layers],
        "block_size": config.num_slots,
        "draft_vocab_size": config.num_draft_tokens,
        "dtype": around.dtype,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.slot_layout is SlotLayout.NEXT_TOKEN,
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
        "transformer_layer_config": _write_layers(config, around.max_positions) | {"dtype": around.dtype},
    }
    return values | (_write_heads(config) if config.kind == "dspark" else {})


def _write_layers(config: DrafterConfig, max_positions: int) -> Values:
    """Return a Qwen3 configuration of the layers, with ``rope_theta`` also where older readers look."""
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


def _write_heads(config: DrafterConfig) -> Values:
    """Return DSpark's keys; its confidence head always reads the Markov embedding here."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head,
    }


# Reading


def read_config(values: Values, num_target_layers: int | None = None) -> DrafterConfig:
    """Return a drafter's configuration from either format.

    Args:
        values: of ``config.json``.
        num_target_layers: of the target, for configurations that do not state it.
    """
    try:
        if format_of(values) == "speculators":
            found = _from_speculators(values, num_target_layers)
        else:
            found = _from_flat(values)
        return DrafterConfig.from_dict(found | {FINGERPRINT: values.get(FINGERPRINT)})
    except BlockdraftError as error:
        raise FormatError(str(error)) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise FormatError(f"a key has a value of the wrong type: {error}") from error


def surroundings(values: Values) -> Surroundings:
    """Return what a configuration states besides the drafter; a flat one does not name its target."""
    layers = values.get("transformer_layer_config", values)
    verifier = values.get("speculators_config", {}).get("verifier", {})
    return Surroundings(
        max_positions=_need(layers, "max_position_embeddings"),
        dtype=_need(values, "dtype"),
        verifier=verifier.get("name_or_path") or "",
        verifier_architectures=tuple(verifier.get("architectures") or ()),
    )


def _from_flat(values: Values) -> Values:
    names = _need(values, "architectures")
    kinds = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    if not kinds:
        raise FormatError(f"architectures is {names}; known: {', '.join(ARCHITECTURES)}")
    nested = values.get("dflash_config") or {}
    layers = _read_layers(
        values
        | {"causal": values.get("is_causal") or nested.get("causal")}
        | {key: nested.get(key) for key in ("use_swa", "attention_sink_bias", "attention_value_scale")}
    )
    features = nested if kinds[0] == "dflash" else values
    num_target_layers = _need(values, "num_target_layers")
    ids = features.get("target_layer_ids")
    if ids is None and kinds[0] == "dflash" and 0 < layers["num_layers"] < num_target_layers < 1000:
        ids = choose_layers("the target", num_target_layers, layers["num_layers"])  # as z-lab's own code does
    if ids is None:
        raise FormatError("target_layer_ids is missing" + (", at the top level" if "dflash_config" in values else ""))
    anchor = bool(nested.get("sample_from_anchor", values.get("sample_from_anchor", kinds[0] == "dspark")))
    return layers | _read_block(values, kinds[0], anchor, features.get("mask_token_id"), ids, num_target_layers)


def _from_speculators(values: Values, num_target_layers: int | None) -> Values:
    kind = values["speculators_model_type"]
    if kind not in ("dflash", "dspark"):
        raise FormatError(f"speculators_model_type is {kind!r}; known: dflash, dspark")
    layers = _read_layers(_need(values, "transformer_layer_config"))
    if values.get("target_hidden_size") not in (None, layers["hidden_size"]):
        raise FormatError(
            f"target_hidden_size is {values['target_hidden_size']} and hidden_size {layers['hidden_size']}: a drafter "
            "here has the target's width"
        )
    reduced = values.get("draft_vocab_size")
    if reduced not in (None, layers["vocab_size"]):
        layers["draft_vocab_size"] = reduced
    num_target_layers = values.get("num_target_layers", num_target_layers)
    if num_target_layers is None:
        raise FormatError("the configuration does not tell the target's number of layers; give the target")
    methods = _need(_need(values, "speculators_config"), "proposal_methods")
    tokens = _need(methods[0] if methods else {}, "speculative_tokens")
    block_size = _need(values, "block_size")
    if tokens not in (block_size, block_size - 1):
        raise FormatError(f"speculative_tokens is {tokens} and block_size {block_size}: neither layout has that")
    # absent, the flag means True to the package and False to vLLM; the number of tokens tells which it is
    anchor = values.get("sample_from_anchor", tokens == block_size)
    if tokens != block_size - (not anchor):
        raise FormatError(
            f"speculative_tokens is {tokens}, block_size {block_size} and sample_from_anchor {str(anchor).lower()}; "
            "the tokens must equal the block size if the anchor's slot predicts, else be one fewer"
        )
    ids = [layer - 1 for layer in _need(values, "aux_hidden_state_layer_ids")]
    if any(layer < 0 for layer in ids):
        raise FormatError("aux_hidden_state_layer_ids has a 0, but speculators count layers from 1")
    return layers | _read_block(values, kind, anchor, values.get("mask_token_id"), ids, num_target_layers)


def _read_block(values: Values, kind: DrafterKind, anchor: bool, mask: Any, ids: Any, num_target_layers: Any) -> Values:
    """Return what both formats say of a block in the same words: its size, features and heads."""
    if mask is None:
        raise FormatError("mask_token_id is missing")
    heads = _read_heads(values) if kind == "dspark" else {}
    return heads | {
        "kind": "dspark" if heads else "dflash",  # DeepSpec's DFlash is its DSpark without heads
        "slot_layout": SlotLayout.NEXT_TOKEN if anchor else SlotLayout.FILL_IN,
        "num_proposals": _need(values, "block_size") - (not anchor),
        "mask_token_id": mask,
        "target_layers": ids,
        "num_target_layers": num_target_layers,
    }


def _read_heads(values: Values) -> Values:
    """Return the fields of DSpark's heads; nothing if it has none."""
    rank, confidence = _need(values, "markov_rank"), bool(values.get("enable_confidence_head"))
    if rank == 0 and confidence:
        raise FormatError(
            "markov_rank is 0 and enable_confidence_head true: a confidence head here reads the Markov embedding as "
            "well, which a drafter of rank 0 does not have"
        )
    if rank == 0:
        return {}
    if confidence and not values.get("confidence_head_with_markov"):
        raise FormatError(
            "enable_confidence_head is true without confidence_head_with_markov: a confidence head here reads the "
            "Markov embedding as well"
        )
    return {
        "markov_rank": rank,
        "markov_head": _need(values, "markov_head_type"),
        "confidence_head": confidence,
    }


def _read_layers(values: Values) -> Values:
    """Return our names for what a Qwen3 configuration says, if our layers compute it."""
    wrong = [
        f"{key} is {values[key]!r}"
        for key, usual in USUAL.items()
        if values.get(key) is not None and values[key] not in usual
    ]
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        wrong.append(f"layer_types has {', '.join(kinds)}")
    if wrong:
        raise FormatError(f"not what our layers compute: {'; '.join(wrong)}")
    layers: Values = {ours: _need(values, theirs) for ours, theirs in LAYER_KEYS.items() if ours != "head_dim"}
    layers["head_dim"] = values.get("head_dim") or layers["hidden_size"] // layers["num_heads"]
    listed = values.get("layer_types")
    if listed is not None and len(listed) != layers["num_layers"]:
        raise FormatError(f"layer_types names {len(listed)} layers, num_hidden_layers {layers['num_layers']}")
    return layers | {"rope_theta": _rope_theta(values)}


def _rope_theta(values: Values) -> float:
    """Return it from the new key, the old one, or both if they agree."""
    rope, scaling = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise FormatError(f"rotary positions of type {kind!r} are not supported")
    found = {float(each["rope_theta"]) for each in (rope, values) if each.get("rope_theta") is not None}
    if len(found) != 1:
        raise FormatError(
            f"rope_theta is {' and '.join(map(str, sorted(found)))}" if found else "rope_theta is missing"
        )
    return found.pop()


def _need(values: Values, key: str) -> Any:
    if values.get(key) is None:
        raise FormatError(f"{key} is missing")
    return values[key]
