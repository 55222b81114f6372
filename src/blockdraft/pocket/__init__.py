"""pocket is a small Qwen3-architecture language model made by this project, with the corpus it speaks.

What other packages need of it is here: the folder of the shipped model, endless training prompts, and the held-out
prompts for evaluation. None of it needs PyTorch. ``python -m blockdraft.pocket.build`` makes the model from nothing
but a seed; ``README.md`` in this folder says what its text is like and how good it is.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdraft.pocket.corpus import FAMILIES, CorpusError, CorpusPrompt, Example, Family, heldout, prompts

__all__ = ["FAMILIES", "MODEL_FOLDER", "CorpusError", "CorpusPrompt", "Example", "Family", "heldout", "prompts"]

MODEL_FOLDER = Path(__file__).parent / "model"
"""The shipped model: an ordinary Hugging Face folder with weights, tokenizer, configuration and ``quality.json``."""


def __getattr__(name: str) -> Any:
    """Import the corpus when one of its names is first used."""
    if name in __all__:
        from blockdraft.pocket import corpus

        return getattr(corpus, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
