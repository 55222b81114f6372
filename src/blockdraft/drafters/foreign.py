"""Configurations of other people's drafters, in either format of `formats`, as ours.

What our drafters compute is taken, the rest refused by name; what a format leaves
to be guessed is found from what else it says, or refused.
"""

from typing import Any

from blockdraft.drafters.config import DrafterConfig, DrafterKind, SlotLayout
from blockdraft.drafters.formats import (
    ARCHITECTURES,
    HEAD_KEYS,
    LAYER_KEYS,
    FormatError,
    Surroundings,
    Values,
    format_of,
)
from blockdraft.targets import choose_layers


def read_config(values: Values, num_target_layers: int | None = None) -> DrafterConfig:
    """A drafter's configuration from either format.

    Args:
        values: of ``config.json``.
        num_target_layers: of the target, for configurations that do not state it.
    """
    where = format_of(values)
    try:
        config = _from_speculators(values, num_target_layers) if where == "speculators" else _from_flat(values)
    except (TypeError, AttributeError) as error:
        raise FormatError(f"a key has a value of the wrong type: {error}") from error
    _refuse_inconsistent(config)
    return config


def surroundings(values: Values) -> Surroundings:
    """What a configuration states besides the drafter; a flat one does not name its target."""
    layers = values.get("transformer_layer_config", values)
    verifier = values.get("speculators_config", {}).get("verifier", {})
    return Surroundings(
        max_positions=_need(layers, "max_position_embeddings"),
        dtype=_need(values, "dtype"),
        verifier=verifier.get("name_or_path") or "",
        verifier_architectures=tuple(verifier.get("architectures") or ()),
    )


def _from_flat(values: Values) -> DrafterConfig:
    names = _need(values, "architectures")
    kinds = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    if not kinds:
        raise FormatError(f"architectures is {names}; known: {', '.join(ARCHITECTURES)}")
    nested = values.get("dflash_config") or {}
    layers = _read_layers(values | {"causal": values.get("is_causal") or nested.get("causal")} | _attention(nested))
    features = nested if kinds[0] == "dflash" else values
    num_target_layers = _need(values, "num_target_layers")
    ids = features.get("target_layer_ids")
    if ids is None and kinds[0] == "dflash":
        ids = choose_layers("the target", num_target_layers, layers["num_layers"])  # as z-lab's own code does
    if ids is None:
        raise FormatError("target_layer_ids is missing" + (", at the top level" if "dflash_config" in values else ""))
    anchor = bool(nested.get("sample_from_anchor", values.get("sample_from_anchor", kinds[0] == "dspark")))
    return _config(
        values, layers, kinds[0], anchor, mask_token_id=features.get("mask_token_id"), target_layers=ids,
        num_target_layers=num_target_layers,
    )  # fmt: skip


def _from_speculators(values: Values, num_target_layers: int | None) -> DrafterConfig:
    kind = values["speculators_model_type"]
    if kind not in ("dflash", "dspark"):
        raise FormatError(f"speculators_model_type is {kind!r}; known: dflash, dspark")
    layers = _read_layers(_need(values, "transformer_layer_config"))
    for name, own in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(name) not in (None, layers[own]):
            raise FormatError(f"{name} is {values[name]} and {own} {layers[own]}: a drafter here has the target's")
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
    return _config(
        values, layers, kind, anchor, mask_token_id=values.get("mask_token_id"), target_layers=ids,
        num_target_layers=num_target_layers,
    )  # fmt: skip


def _config(values: Values, layers: Values, kind: DrafterKind, anchor: bool, **features: Any) -> DrafterConfig:
    if features["mask_token_id"] is None:
        raise FormatError("mask_token_id is missing")
    heads: Values = {}
    if kind == "dspark":
        rank, head, confidence = (_need(values, "markov_rank"), values.get(HEAD_KEYS[1]), values.get(HEAD_KEYS[2]))
        if rank == 0 and not confidence:
            kind = "dflash"  # DeepSpec's DFlash: its DSpark without heads
        else:
            if head is None:
                raise FormatError("markov_head_type is missing")
            if confidence and not values.get("confidence_head_with_markov"):
                raise FormatError("a confidence head that does not read the Markov embedding is not supported")
            heads = {"markov_rank": rank, "markov_head": head, "confidence_head": bool(confidence)}
    layout = SlotLayout.NEXT_TOKEN if anchor else SlotLayout.FILL_IN
    num_proposals = _need(values, "block_size") - (not anchor)
    try:
        return DrafterConfig(
            kind=kind, slot_layout=layout, num_proposals=num_proposals, **layers, **features, **heads
        )  # fmt: skip
    except ValueError as error:
        raise FormatError(str(error)) from error


def _read_layers(values: Values) -> Values:
    """Our names for what a Qwen3 configuration says, if our layers compute it."""
    wrong = [
        f"{key} is {values[key]!r}"
        for key, usual in (
            ("model_type", ("qwen3",)),
            ("hidden_act", ("silu",)),
            ("attention_bias", (False,)),
            ("use_sliding_window", (False,)),
            ("is_neox_style", (True,)),
            ("logit_scale", (1.0,)),
            ("causal", (False,)),
            ("quantization_config", ()),
            ("use_swa", (False,)),
            ("attention_sink_bias", (False,)),
            ("attention_value_scale", (1.0,)),
        )
        if values.get(key) is not None and values[key] not in usual
    ]
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        wrong.append(f"layer_types has {', '.join(kinds)}")
    if wrong:
        raise FormatError(f"not what our layers compute: {'; '.join(wrong)}")
    layers: Values = {
        ours: values.get(theirs) if ours == "head_dim" else _need(values, theirs) for ours, theirs in LAYER_KEYS.items()
    }
    if layers["head_dim"] is None:
        layers["head_dim"] = layers["hidden_size"] // layers["num_heads"]
    listed = values.get("layer_types")
    if listed is not None and len(listed) != layers["num_layers"]:
        raise FormatError(f"layer_types names {len(listed)} layers, num_hidden_layers {layers['num_layers']}")
    return layers | {"rope_theta": _rope_theta(values)}


def _attention(nested: Values) -> Values:
    return {key: nested.get(key) for key in ("use_swa", "attention_sink_bias", "attention_value_scale")}


def _rope_theta(values: Values) -> float:
    """From the new key, the old one, or both if they agree."""
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


def _refuse_inconsistent(config: DrafterConfig) -> None:
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise FormatError(f"mask token {config.mask_token_id} has no row in an embedding of {config.vocab_size}")
    last = config.num_target_layers - 2
    if not config.target_layers or not all(0 <= layer <= last for layer in config.target_layers):
        raise FormatError(
            f"features of layers {list(config.target_layers)}: a target of {config.num_target_layers} layers has those "
            f"of 0 to {last} (speculators count from 1)"
        )


def _need(values: Values, key: str) -> Any:
    if values.get(key) is None:
        raise FormatError(f"{key} is missing")
    return values[key]
