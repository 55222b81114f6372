"""What each family of conversations produces."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """One single-turn conversation, not yet numbered or assigned to a split.

    difficulty: steps of a math problem; 1 for the other families.
    answer: what decides whether a response is right, if anything does: the number
        of a math problem, assertions that a function must pass.
    """

    prompt: str
    response: str
    difficulty: int = 1
    answer: str | None = None
