"""A target before its weights are there: what its configuration alone tells."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from blockdraft.targets.loading import POCKET
from blockdraft.targets.target import UnsupportedTargetError, choose_layers

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip


class TargetShape:
    """Sizes of a target, for drafter configurations and estimates."""

    def __init__(self, name: str, config: PreTrainedConfig) -> None:
        self.name, self.config = name, config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.mask_token_id = 0  # no row of the embedding is looked at

    def feature_layers(self, num_features: int) -> tuple[int, ...]:
        """As of the target itself."""
        return choose_layers(self.name, self.num_layers, num_features)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a shared head counted once."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())


def target_shape(name: str, fields: dict[str, Any] | None = None) -> TargetShape:
    """From configuration fields if given, else from the configuration of a target by name."""
    if fields is None and name == "smollm2":
        fields = SMOLLM2
    if fields is not None:
        fields = dict(fields)
        try:
            return TargetShape(name, AutoConfig.for_model(fields.pop("model_type"), **fields))
        except (KeyError, ValueError) as error:
            raise UnsupportedTargetError(f"{name}: target.shape lacks or mistakes {error}") from error
    try:
        config = AutoConfig.from_pretrained(POCKET if name == "pocket" else name)
    except (OSError, ValueError) as error:
        raise UnsupportedTargetError(
            f"{name}: its configuration cannot be read: {str(error).splitlines()[0]}"
        ) from error
    return TargetShape(name, config)
