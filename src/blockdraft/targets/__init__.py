"""Frozen target models: features, hidden states, head, embedding, templates, the law that is sampled from them."""

from blockdraft.targets.attention import Span
from blockdraft.targets.cache import KVCache
from blockdraft.targets.fingerprint import fingerprint
from blockdraft.targets.loading import load_target
from blockdraft.targets.sampling import Sampling
from blockdraft.targets.shape import TargetShape, target_shape
from blockdraft.targets.slots import Slots
from blockdraft.targets.target import DTYPES, Message, Target, TargetOutput, UnsupportedTargetError

__all__ = [
    "DTYPES",
    "KVCache",
    "Message",
    "Sampling",
    "Slots",
    "Span",
    "Target",
    "TargetOutput",
    "TargetShape",
    "UnsupportedTargetError",
    "fingerprint",
    "load_target",
    "target_shape",
]
