"""blockdraft: drafters for speculative decoding, trained for block verification."""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_PARTS = ("losses", "overlap", "verification")


def __getattr__(name: str) -> ModuleType:
    """Parts of the package, imported when first asked for."""
    if name in _PARTS:
        return importlib.import_module(f"blockdraft.{name}")
    raise AttributeError(f"module 'blockdraft' has no attribute {name!r}")
