"""Define the one base class of everything a user can get wrong, and help to say in one line what it was.

This module is imported before anything slow is, so that a mistake in the command line is answered at once.
"""

import difflib
from pathlib import Path

BUILT_IN = ("pocket", "smollm2")
"""The targets that come with the package, or in a package of their own."""


class BlockdraftError(ValueError):
    """The user made a mistake that can be mended; the message says what is wrong, why, and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of another package says, and its kind where the words say little."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    plain = isinstance(error, OSError | ValueError | ImportError) and " " in text
    return text if plain else f"{type(error).__name__}: {text}".removesuffix(": ")


def misspelt_target(name: str) -> str | None:
    """Return the built-in target that a name seems to mean; None if it is right, far from any, or somebody's folder."""
    near = difflib.get_close_matches(name.lower(), BUILT_IN, n=1)
    if not near or name in BUILT_IN or name.startswith((".", "~")) or Path(name).exists():
        return None
    return near[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that there is no more memory, on the CPU or on an accelerator."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError | OSError) and "allocate memory" in str(error))
    )
