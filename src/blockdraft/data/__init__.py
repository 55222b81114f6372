"""Training data from the target itself: prompts, regenerated responses, batches of blocks."""

from blockdraft.data.batches import Batch, Chosen, Plan, collate, share_out
from blockdraft.data.dialogue import Dialogue, Row, Settings
from blockdraft.data.engine import Engine, EngineError
from blockdraft.data.features import CachedFeatures, Features, OnlineFeatures, build_cache
from blockdraft.data.files import read_prompts, write_prompts
from blockdraft.data.law import LawCheck, check_law
from blockdraft.data.local import LocalEngine
from blockdraft.data.paths import Paths, open_paths
from blockdraft.data.prompts import Prompt, PromptError
from blockdraft.data.regenerate import regenerate
from blockdraft.data.server import ServerEngine
from blockdraft.data.store import DataError

__all__ = [
    "Batch",
    "CachedFeatures",
    "Chosen",
    "DataError",
    "Dialogue",
    "Engine",
    "EngineError",
    "Features",
    "LawCheck",
    "LocalEngine",
    "OnlineFeatures",
    "Paths",
    "Plan",
    "Prompt",
    "PromptError",
    "Row",
    "ServerEngine",
    "Settings",
    "build_cache",
    "check_law",
    "collate",
    "open_paths",
    "read_prompts",
    "regenerate",
    "share_out",
    "write_prompts",
]
