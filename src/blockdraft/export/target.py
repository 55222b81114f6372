"""A target as an ordinary Hugging Face folder, so that any engine can load it, also one built on transformers 4."""

import copy
import json
from pathlib import Path
from typing import Any

from blockdraft.drafters import CheckpointError
from blockdraft.export.card import CARD, licence_of, public_name, save_card
from blockdraft.export.drafter import replacing
from blockdraft.files import naming_write_errors, refuse_full_disk, write_json
from blockdraft.targets import Target, UnsupportedTargetError

FILES = frozenset(
    {
        CARD, "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model*.safetensors",
        "model.safetensors.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
        "vocab.json",
    }
)  # fmt: skip


def export_target(target: Target, folder: str | Path, *, force: bool = False) -> Path:
    """Write configuration, weights, tokenizer and chat template.

    The mask token of the drafters is written into the tokenizer, so that the folder, loaded as a target, has the
    same one. It is a row of the embedding that is there already; nothing is added to the vocabulary.
    """
    folder = Path(folder)
    if target.tokenizer is None:
        raise UnsupportedTargetError(f"{target.name} has no tokenizer; engines need one")
    tokenizer = copy.deepcopy(target.tokenizer)
    mask = target.mask_token_id
    if tokenizer.mask_token_id != mask:
        name = tokenizer.convert_ids_to_tokens(mask)
        if name is not None:  # Qwen3's is a row beyond the tokenizer; the family is known
            tokenizer.mask_token = name
    if tokenizer.mask_token_id not in (None, mask):
        raise CheckpointError(f"{target.name}: the tokenizer would not keep {mask} as its mask token")
    weights = target.model.parameters()
    refuse_full_disk(folder, sum(each.numel() * each.element_size() for each in weights), "the weights")
    with replacing(folder, FILES, force=force) as unfinished:
        with naming_write_errors(folder):
            target.model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        _rewrite(unfinished / "config.json", readable_config)
        _rewrite(unfinished / "tokenizer_config.json", readable_tokenizer)
        licence, dtype = licence_of(target), str(target.dtype).removeprefix("torch.")
        text = f"Written by `blockdraft export-target`, weights in {dtype}. Licence: {licence or 'not recorded'}."
        save_card(unfinished, [f"# {public_name(target.name)}", text], license=licence)
    return folder


def readable_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with what transformers 4 looks for under other names.

    It reads ``rope_theta`` at the top and falls back to 10,000 without a word; ``rope_scaling`` instead of
    ``rope_parameters``; and, up to 4.55, ``torch_dtype`` instead of ``dtype``. transformers 5 reads both.
    """
    rope = dict(values.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None)
    older: dict[str, Any] = {}
    if theta is not None:
        older["rope_theta"] = theta
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = rope
    if "dtype" in values:
        older["torch_dtype"] = values["dtype"]
    return older | values


def readable_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's configuration that transformers 4 can load as well.

    It does not know the class ``TokenizersBackend``, which is `PreTrainedTokenizerFast` under another name, and takes
    a list of further special tokens as ``additional_special_tokens``. Where the tokenizer was loaded from is left out.
    """
    values = {key: value for key, value in values.items() if key not in ("backend", "is_local", "local_files_only")}
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    return values


def _rewrite(file: Path, change: Any) -> None:
    write_json(change(json.loads(file.read_text(encoding="utf-8"))), file)
