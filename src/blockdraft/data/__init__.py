"""Make training data from the target itself: prompts, regenerated responses, batches of blocks."""

from blockdraft.data.batches import Batch, BatchSampler, TextAnchors, collate, partition
from blockdraft.data.conversation import (
    Completion,
    Conversation,
    Engine,
    EngineError,
    GenerationSettings,
    LocalEngine,
    Request,
)
from blockdraft.data.features import CachedFeatures, Features, OnlineFeatures, build_cache
from blockdraft.data.manifest import DataError, Manifest, read_manifest
from blockdraft.data.prompts import Prompt, PromptError, read_prompts, write_prompts
from blockdraft.data.regenerate import regenerate
from blockdraft.data.sampling_check import SamplingCheck, check_sampling
from blockdraft.data.server import ServerEngine
from blockdraft.data.store import TextDataset, open_dataset, read_completions

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
    "Manifest",
    "OnlineFeatures",
    "Prompt",
    "PromptError",
    "Request",
    "SamplingCheck",
    "ServerEngine",
    "TextAnchors",
    "TextDataset",
    "build_cache",
    "check_sampling",
    "collate",
    "open_dataset",
    "partition",
    "read_completions",
    "read_manifest",
    "read_prompts",
    "regenerate",
    "write_prompts",
]
