"""Show frozen language models the way a drafter needs them."""

from blockdraft.errors import BUILT_IN
from blockdraft.targets.attention import Span
from blockdraft.targets.cache import BatchedKVCache, KVCache
from blockdraft.targets.loading import (
    TargetShape,
    as_target,
    fingerprint,
    load_target,
    target_shape,
    template_fingerprint,
    weights_fingerprint,
)
from blockdraft.targets.target import (
    DTYPES,
    Message,
    Normalizer,
    Sampling,
    Target,
    TargetOutput,
    UnsupportedTargetError,
    choose_layers,
)

__all__ = [
    "BUILT_IN",
    "DTYPES",
    "BatchedKVCache",
    "KVCache",
    "Message",
    "Normalizer",
    "Sampling",
    "Span",
    "Target",
    "TargetOutput",
    "TargetShape",
    "UnsupportedTargetError",
    "as_target",
    "choose_layers",
    "fingerprint",
    "load_target",
    "target_shape",
    "template_fingerprint",
    "weights_fingerprint",
]
