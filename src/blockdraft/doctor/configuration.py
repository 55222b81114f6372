"""Compare what ``config.json`` says with what the target is and what engines make of it.

Each check yields findings and mends the folder's copy of the configuration, so that one mistake does not hide the next
one, and so that a drafter whose configuration is wrong can still be measured.
"""

from collections.abc import Iterator
from typing import Any

from blockdraft.doctor.folder import LAYERS, Finding, Folder, as_number, as_section, is_int, listed
from blockdraft.drafters.checkpoint import CONFIG
from blockdraft.drafters.config import recorded_fingerprint
from blockdraft.drafters.formats import ARCHITECTURES, FINGERPRINT, NUM_ANCHORS, USUAL
from blockdraft.targets import Target, UnsupportedTargetError, choose_layers

CREATORS = {"dflash": "DFlash, as z-lab writes it", "dspark": "DSpark, as DeepSpec writes it"}


def check_configuration(folder: Folder, target: Target) -> Iterator[Finding]:
    """Run all checks of ``config.json``; those that cannot go on leave `Folder.hopeless`."""
    yield from _format(folder)
    if folder.hopeless is None:
        for check in (_shapes, _slots, _mask, _feature_layers, _causality, _rope, _layers, _heads, _made_for):
            yield from check(folder, target)


def _format(folder: Folder) -> Iterator[Finding]:
    if folder.kind is None:
        key = {"flat": "architectures", "speculators": "speculators_model_type"}.get(folder.format, "kind")
        known = ", ".join(ARCHITECTURES) if folder.format == "flat" else "dflash, dspark"
        folder.hopeless = f"{key} names no drafter that is known here"
        yield Finding(
            "format",
            "wrong",
            f"{key} is {folder.given.get(key)!r}",
            f"known are {known}; is this the folder of a drafter?",
        )
        return
    found = CREATORS[folder.kind] if folder.format == "flat" else f"{folder.kind}, in the format of {folder.format}"
    yield Finding("format", "ok", f"{folder.format}: {found}" if folder.format == "flat" else found)


def _shapes(folder: Folder, target: Target) -> Iterator[Finding]:
    """Check width, vocabulary and depth; only the width decides what can be computed."""
    rows = (
        ("width", "width", target.hidden_size, True),
        ("vocabulary", "vocabulary", target.vocab_size, True),
        ("depth", "number of layers", target.num_layers, folder.format != "speculators"),
    )
    good = True
    for field, what, wanted, needed in rows:
        value = folder.get(field)
        if value == wanted or (value is None and not needed):
            continue
        good = False
        there = f"{folder.key(field)} is missing" if value is None else f"{folder.key(field)} is {value!r}"
        yield Finding(
            "target's shape",
            "wrong",
            f"{there}; the {what} of {target.name} is {wanted}",
            f"give the target it was made for, or set {folder.key(field)} to {wanted} in {CONFIG}"
            if field != "width"
            else "give the target it was made for: a drafter has its target's width",
        )
        if field == "width":
            folder.hopeless = "the drafter's width is not the target's"
        folder.put(field, wanted)
    if good:
        shape = f"width {target.hidden_size}, vocabulary {target.vocab_size:,}, {target.num_layers} layers"
        yield Finding("target's shape", "ok", shape)


def _slots(folder: Folder, _target: Target) -> Iterator[Finding]:
    """Check block size, number of tokens and the flag that says what slot 0 does."""
    if folder.format == "blockdraft":
        yield Finding("slot convention", "ok", f"slot_layout is {folder.get('slots')}")
        return
    size, flag = folder.get("block_size"), folder.get("slots")
    nested = folder.get("dflash_config.sample_from_anchor")
    flag = nested if flag is None else flag
    if not is_int(size) or size < 1:
        folder.hopeless = "block_size is not a number of slots"
        yield Finding("slot convention", "wrong", f"block_size is {size!r}", f"set the number of slots in {CONFIG}")
        return
    if folder.format == "speculators":
        yield from _speculative_tokens(folder, size, flag)
        return
    usual = folder.kind == "dspark"
    if flag is None:
        level = "warning" if usual else "ok"
        advice = "write sample_from_anchor: true, since other formats take its absence for false" if usual else ""
        what = "predicts, as in flat DSpark" if usual else "predicts nothing, as in DFlash"
        yield Finding("slot convention", level, f"sample_from_anchor is absent: slot 0 {what}", advice)  # type: ignore[arg-type]
    elif bool(flag) != usual:
        yield Finding(
            "slot convention",
            "wrong",
            f"sample_from_anchor is {str(bool(flag)).lower()}, and engines take slot 0 of a flat {folder.kind} drafter "
            f"for one that predicts {'the next token' if usual else 'nothing'}",
            "no engine reads the flag of a flat folder; see the measured readings for what the weights say",
        )
    else:
        yield Finding("slot convention", "ok", f"sample_from_anchor is {str(bool(flag)).lower()}, {size} slots")


def _speculative_tokens(folder: Folder, size: int, flag: Any) -> Iterator[Finding]:
    methods = folder.get("speculators_config.proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    tokens = method.get("speculative_tokens")
    path = "speculators_config.proposal_methods[0].speculative_tokens"
    if flag is None:
        anchor = tokens == size if tokens in (size, size - 1) else folder.kind == "dspark"
        yield Finding(
            "slot convention",
            "wrong",
            "sample_from_anchor is absent, which means true to the package speculators and false to vLLM",
            f"write it: {str(anchor).lower()} agrees with {tokens} speculative tokens and a block_size of {size}",
        )
    else:
        anchor = bool(flag)
    wanted = size - (not anchor)
    if folder.kind == "dflash" and anchor:
        advice = "write sample_from_anchor: false if slot 0 predicts nothing; see the measured readings"
        yield Finding("slot convention", "wrong", "sample_from_anchor is true, which vLLM refuses for DFlash", advice)
    if tokens != wanted:
        yield Finding(
            "slot convention",
            "wrong",
            f"{path} is {tokens!r} with a block_size of {size} and sample_from_anchor {str(anchor).lower()}",
            f"set it to {wanted}, or the flag to {str(not anchor).lower()} if that is what the weights say",
        )
        folder.put("speculators_config.proposal_methods", [method | {"speculative_tokens": wanted}])
    elif flag is not None and not (folder.kind == "dflash" and anchor):
        yield Finding("slot convention", "ok", f"sample_from_anchor is {str(anchor).lower()}, {size} slots")
    folder.put("slots", anchor)


def _mask(folder: Folder, target: Target) -> Iterator[Finding]:
    if folder.format == "flat" and folder.kind == "dspark":
        yield from _nested(folder)
    mask, key = folder.get("mask"), folder.key("mask")
    try:
        usual: int | None = target.mask_token_id
    except UnsupportedTargetError:
        usual = None
    pad = None if target.tokenizer is None else target.tokenizer.pad_token_id
    good = usual if usual is not None else target.vocab_size - 1
    advice = f"set {key} in {CONFIG} to the token it was trained with" + (
        f"; that of {target.name} is {usual}" if usual is not None else ""
    )
    if not is_int(mask) or not 0 <= mask < target.embedding.shape[0]:
        missing = f"{key} is missing" if mask is None else f"{key} is {mask!r}, which has no row in the embedding"
        yield Finding("mask token", "wrong", missing, advice)
        folder.put("mask", good)
    elif mask in target.eos_ids or mask == pad:
        what = "an end token" if mask in target.eos_ids else "the padding token"
        yield Finding("mask token", "warning", f"{key} is {mask}, {what} of {target.name}", advice)
    elif usual not in (None, mask):
        found = f"{key} is {mask}; drafters of {target.name} usually have {usual}"
        yield Finding("mask token", "warning", found, "see the measured readings")
    else:
        yield Finding("mask token", "ok", f"{key} is {mask}")


def _nested(folder: Folder) -> Iterator[Finding]:
    """Find DSpark's keys where DFlash has them: there they are read by nobody."""
    for field in ("mask", "layers"):
        nested = folder.get(f"dflash_config.{folder.key(field)}")
        if folder.get(field) is None and nested is not None:
            yield Finding(
                "mask token" if field == "mask" else "layer ids",
                "wrong",
                f"{folder.key(field)} stands in dflash_config, where no reader of a DSpark drafter looks",
                f"move it to the top level of {CONFIG}",
            )
            folder.put(field, nested)


def _feature_layers(folder: Folder, target: Target) -> Iterator[Finding]:
    ids, key, num = folder.get("layers"), folder.key("layers"), folder.num_features
    first, last = folder.first_layer, folder.first_layer + target.num_layers - 2
    default = _default_layers(target, num)
    counted = f"counted from {first}"
    if ids is None and folder.format == "flat" and folder.kind == "dflash" and default:
        found = f"{key} is absent: z-lab's own choice, {list(default)}, is taken"
        yield Finding("layer ids", "warning", found, f"write {key}: {list(default)} in {CONFIG}")
        folder.put("layers", list(default))
        return
    advice = f"set {key} in {CONFIG} to the layers it was trained with, {counted}"
    if not isinstance(ids, list) or not ids or not all(is_int(each) for each in ids):
        problem = f"{key} is missing" if ids is None else f"{key} is {ids!r}, not a list of layers"
    elif num is not None and len(ids) != num:
        problem = f"{key} names {len(ids)} layers, and fc.weight reads {num}"
    elif all(first <= each <= last for each in ids):
        same = default is not None and [each - first for each in ids] == list(default)
        yield Finding("layer ids", "ok", f"{key} is {ids}, {counted}" + (", as DFlash chooses them" if same else ""))
        return
    else:
        step = 1 if min(ids) < first else -1
        moved = [each + step for each in ids]
        outside = [each for each in ids if not first <= each <= last]
        problem = (
            f"{key} has {listed(outside)}; {target.name} has features of layers {first} to {last}, {counted} "
            "(the last layer has none)"
        )
        if all(first <= each <= last for each in moved):
            yield Finding("layer ids", "wrong", problem, f"they seem to be counted from {first - step}: try {moved}")
            folder.put("layers", moved)
            return
    yield Finding("layer ids", "wrong", problem, advice)
    if default is None:
        folder.hopeless = "the layers that the drafter reads are not known"
    else:
        folder.put("layers", [layer + first for layer in default])


def _default_layers(target: Target, num: int | None) -> tuple[int, ...] | None:
    try:
        return None if num is None else choose_layers(target.name, target.num_layers, num)
    except UnsupportedTargetError:
        return None


def _causality(folder: Folder, _target: Target) -> Iterator[Finding]:
    """Find what would make the slots of a block see earlier slots only, or only the last part of a text."""
    found = []
    if folder.format == "speculators":
        flag = folder.get("sliding_window_non_causal")
        if flag is not True:
            state = "absent, and false by default" if flag is None else "false"
            yield Finding(
                "causality",
                "wrong",
                f"sliding_window_non_causal is {state}: vLLM makes every layer of the drafter causal",
                f"set sliding_window_non_causal to true in {CONFIG}",
            )
            folder.put("sliding_window_non_causal", True)
            found.append("flag")
    for path in ("is_causal", "dflash_config.causal", f"{LAYERS}is_causal"):
        if folder.get(path) is True:
            yield Finding(
                "causality",
                "warning",
                f"{path} is true: slots see earlier slots only",
                f"DFlash and DSpark blocks are not causal; set it to false in {CONFIG} unless the causal reading fits",
            )
            folder.put(path, False)
            found.append(path)
    for path in ("use_sliding_window", "use_swa", "dflash_config.use_swa", "layer_types"):
        section = f"{LAYERS}{path}" if folder.format == "speculators" else path
        value = folder.get(section)
        windowed = value is True or (isinstance(value, list) and set(map(str, value)) - {"full_attention"})
        if windowed:
            yield Finding(
                "causality",
                "wrong",
                f"{section} asks for attention within a window",
                "blockdraft's layers see the whole text, and the lengths below are measured so; on texts longer than "
                "the window they do not hold",
            )
            folder.put(section, ["full_attention"] * len(value) if isinstance(value, list) else False)
            found.append(section)
    if not found:
        yield Finding("causality", "ok", "every slot sees its whole block and all of the text")


def _rope(folder: Folder, target: Target) -> Iterator[Finding]:
    own = target_theta(target)
    if folder.format == "blockdraft":
        stated_theta, theta = folder.get("theta"), as_number(folder.get("theta"))
        if theta is None or theta <= 0:
            found = f"rope_theta is {stated_theta!r:.60}, not a number above 0"
            yield Finding("rotary positions", "wrong", found, f"write it in {CONFIG}; that of {target.name} is {own:g}")
            folder.put("theta", own)
            return
    else:
        layers, problem = folder.layers, None
        rope, scaling = (as_section(layers.get(name)) for name in ("rope_parameters", "rope_scaling"))
        kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        stated = [number for number in (as_number(each.get("rope_theta")) for each in (rope, layers)) if number]
        if kind != "default":
            yield Finding(
                "rotary positions",
                "wrong",
                f"rope_type is {kind!r}",
                "blockdraft's drafters rotate without scaling, and the lengths below are measured so",
            )
        if not stated:
            problem = "rope_theta is missing or no number; readers of transformers 4 then take 10,000"
        elif len(set(stated)) > 1:
            problem = f"rope_theta is {stated[1]:g} at the top and {stated[0]:g} in rope_parameters"
        if problem:
            yield Finding(
                "rotary positions",
                "wrong",
                problem,
                f"write one value in both places of {CONFIG}; that of {target.name} is {own:g}",
            )
        theta = stated[0] if stated and not problem else own
        layers["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
        layers["rope_theta"] = theta
        layers.pop("rope_scaling", None)
        if problem or kind != "default":
            return
    if theta == own:
        yield Finding("rotary positions", "ok", f"rope_theta is {theta:g}, the target's")
    else:
        found = f"rope_theta is {theta:g}; that of {target.name} is {own:g}"
        yield Finding("rotary positions", "warning", found, "a drafter may have its own; see the measured readings")


def target_theta(target: Target) -> float:
    """Return the target's base of rotary positions."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta") or getattr(target.config, "rope_theta", None) or 10_000.0)


def _layers(folder: Folder, _target: Target) -> Iterator[Finding]:
    """Find options of the layers that our layers do not compute."""
    if folder.format == "blockdraft":
        return
    nested = folder.values.get("dflash_config")
    sections = [folder.layers] + ([nested] if isinstance(nested, dict) else [])
    for section in sections:
        for key, usual in USUAL.items():
            value = section.get(key)
            if value is None or value in usual or key in ("causal", "use_swa", "use_sliding_window"):
                continue
            yield Finding(
                "layers",
                "wrong",
                f"{key} is {value!r}",
                f"drafters here have {usual[0]!r}; the lengths below are measured so" if usual else "not supported",
            )
            if usual:
                section[key] = usual[0]
            else:
                folder.hopeless = f"{key} is set, and such weights cannot be read"


def _heads(folder: Folder, _target: Target) -> Iterator[Finding]:
    """Check DSpark's heads. A confidence head does not draft, so one that cannot be read here is left out."""
    if folder.kind != "dspark" or folder.format == "blockdraft":
        return
    rank, kind = folder.get("markov_rank"), folder.get("markov_head_type")
    if not is_int(rank) or rank < 0:
        folder.hopeless = "the rank of the Markov head is not known"
        yield Finding("heads", "wrong", f"markov_rank is {rank!r}", f"write the rank in {CONFIG}")
        return
    if rank and kind not in ("vanilla", "gated", "rnn"):
        yield Finding("heads", "wrong", f"markov_head_type is {kind!r}", "write vanilla, gated or rnn")
        folder.put("markov_head_type", "vanilla")
    elif rank and kind != "vanilla" and folder.format == "speculators":
        yield Finding("heads", "wrong", f"markov_head_type is {kind}", "vLLM has the vanilla head only; SGLang has all")
    else:
        yield Finding("heads", "ok", f"a {kind} Markov head of rank {rank}" if rank else "no Markov head")
    if folder.get("enable_confidence_head") and not (rank and folder.get("confidence_head_with_markov")):
        yield Finding(
            "heads",
            "warning",
            "its confidence head reads the hidden state alone",
            "blockdraft's reads the Markov embedding as well, so it cannot load this one; drafting does not need it",
        )
        folder.put("enable_confidence_head", False)
        for name in [name for name in folder.tensors if name.startswith("confidence_head.")]:
            del folder.tensors[name]
    if folder.format == "flat" and not is_int(folder.get("num_anchors")):
        found = "num_anchors is absent: DeepSpec's own class refuses the folder"
        yield Finding("heads", "warning", found, f"write num_anchors: {NUM_ANCHORS} in {CONFIG}; nothing reads it")


def _made_for(folder: Folder, target: Target) -> Iterator[Finding]:
    """Check the target that the folder was made for, as far as it says so, and whether its head is tied."""
    stated, own = folder.get(FINGERPRINT), recorded_fingerprint(target)
    if stated is None:
        yield Finding("target's weights", "ok", "the folder does not record which target it was made for")
    elif own in (None, stated):
        yield Finding("target's weights", "ok", f"made for the target with fingerprint {stated}")
    else:
        yield Finding(
            "target's weights",
            "wrong",
            f"made for the target with fingerprint {stated}; that of {target.name} is {own}",
            "give the target it was made for, or train it further for this one with drafter.initial",
        )
    tied = folder.layers.get("tie_word_embeddings")
    if tied and folder.format != "blockdraft" and target.head is not target.embedding:
        yield Finding(
            "head and embedding",
            "wrong",
            f"tie_word_embeddings is true, and the head of {target.name} is not its embedding: an engine that ties "
            "them drafts with the embedding in place of the head",
            f"set tie_word_embeddings to false in {CONFIG}",
        )
