"""Training data from the target itself: prompts first."""

from blockdraft.data.files import read_prompts, write_prompts
from blockdraft.data.prompts import Prompt, PromptError

__all__ = ["Prompt", "PromptError", "read_prompts", "write_prompts"]
