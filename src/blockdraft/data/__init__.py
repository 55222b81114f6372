"""Training data from the target itself: prompts, regenerated responses, batches of blocks."""

from blockdraft.data.batches import Batch, BatchSampler, TextAnchors, collate, partition
from blockdraft.data.dialogue import Completion, Conversation, GenerationSettings
from blockdraft.data.engine import Engine, EngineError
from blockdraft.data.features import CachedFeatures, Features, OnlineFeatures, build_cache
from blockdraft.data.files import read_prompts, write_prompts
from blockdraft.data.local import LocalEngine
from blockdraft.data.paths import TextDataset, open_dataset
from blockdraft.data.prompts import Prompt, PromptError
from blockdraft.data.regenerate import regenerate
from blockdraft.data.sampling_check import SamplingCheck, check_sampling
from blockdraft.data.server import ServerEngine
from blockdraft.data.store import DataError

__all__ = [
    "Batch",
    "BatchSampler",
    "CachedFeatures",
    "Completion",
    "Conversation",
    "DataError",
    "Engine",
    "EngineError",
    "Features",
    "GenerationSettings",
    "LocalEngine",
    "OnlineFeatures",
    "Prompt",
    "PromptError",
    "SamplingCheck",
    "ServerEngine",
    "TextAnchors",
    "TextDataset",
    "build_cache",
    "check_sampling",
    "collate",
    "open_dataset",
    "partition",
    "read_prompts",
    "regenerate",
    "write_prompts",
]
