"""A target as an ordinary Hugging Face folder, so that any engine can load it."""

import copy
from pathlib import Path

import torch

from blockdraft.drafters import CheckpointError
from blockdraft.export.card import CARD, licence_of
from blockdraft.export.folder import new_folder
from blockdraft.targets import Target, UnsupportedTargetError

FILES = frozenset(
    {
        CARD, "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
        "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
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
    with new_folder(folder, FILES, force=force) as unfinished:
        target.model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        licence = licence_of(target)
        title = f"# {target.name}\n\nWritten by `blockdraft export-target`, weights in {_name(target.dtype)}. "
        text = f"{title}Licence: {licence or 'not recorded'}.\n"
        (unfinished / CARD).write_text((f"---\nlicense: {licence}\n---\n" if licence else "") + text)
    return folder


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
