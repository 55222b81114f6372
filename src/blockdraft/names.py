"""The names of embedded targets, and which of them a misspelt one means, known before anything slow is imported."""

import difflib
from pathlib import Path

EMBEDDED = ("pocket", "smollm2")
"""The targets that come with the package, or in a package of their own."""


def misspelt_target(name: str) -> str | None:
    """Return the embedded target that a name seems to mean; None if it is right, far from any, or somebody's folder."""
    near = difflib.get_close_matches(name.lower(), EMBEDDED, n=1)
    if not near or name in EMBEDDED or name.startswith((".", "~")) or Path(name).exists():
        return None
    return near[0]
