"""blockdraft trains drafters for speculative decoding, and decodes with them without changing the target's output.

    import blockdraft as bd

    target = bd.load_target("pocket")
    print(bd.generate(target, None, "What is a river?", rule="greedy").text)

Names here are imported when they are first used, so that ``import blockdraft`` alone loads no PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "BlockdraftError",
    "__version__",
    "as_assistant",
    "data",
    "decoding",
    "doctor",
    "drafters",
    "evaluation",
    "export",
    "fused_linear_objective",
    "generate",
    "law",
    "load_drafter",
    "load_target",
    "losses",
    "objective",
    "overlap",
    "pocket",
    "recipes",
    "reports",
    "study",
    "targets",
    "training",
    "verification",
    "verify",
]

_HOMES = {
    "BlockdraftError": "errors",
    "as_assistant": "export",
    "fused_linear_objective": "losses",
    "generate": "decoding",
    "law": "verification",
    "load_drafter": "drafters",
    "load_target": "targets",
    "objective": "losses",
    "verify": "verification",
}
"""The part of the package that each function and class comes from; the other names are parts themselves."""

if TYPE_CHECKING:
    from blockdraft import (
        data,
        decoding,
        doctor,
        drafters,
        evaluation,
        export,
        losses,
        overlap,
        pocket,
        recipes,
        reports,
        study,
        targets,
        training,
        verification,
    )
    from blockdraft.decoding import generate
    from blockdraft.drafters import load_drafter
    from blockdraft.errors import BlockdraftError
    from blockdraft.export import as_assistant
    from blockdraft.losses import fused_linear_objective
    from blockdraft.losses.objective import objective
    from blockdraft.targets import load_target
    from blockdraft.verification import law, verify
else:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used, and keep it."""
        if name not in __all__:
            raise AttributeError(f"module 'blockdraft' has no attribute {name!r}")
        home = importlib.import_module(f"blockdraft.{_HOMES.get(name, name)}")
        globals()[name] = found = getattr(home, name) if name in _HOMES else home
        return found

    def __dir__() -> list[str]:
        """List the public names, whether or not they have been imported yet."""
        return sorted(__all__)
