"""Frozen target models: features, hidden states, head, embedding, templates."""

from blockdraft.targets.cache import KVCache
from blockdraft.targets.loading import load_target
from blockdraft.targets.target import Message, Target, TargetOutput, UnsupportedTargetError

__all__ = ["KVCache", "Message", "Target", "TargetOutput", "UnsupportedTargetError", "load_target"]
