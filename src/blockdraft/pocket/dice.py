"""Randomness that any Python reproduces, and sentences with alternatives."""

import random
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


class Dice:
    """A seeded stream of choices.

    Everything is drawn from ``random.Random.random``, the one method whose
    sequence Python promises not to change between versions.
    """

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(str(seed)).random

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def between(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self._random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different options, in random order."""
        rest = list(options)
        return [rest.pop(int(self._random() * len(rest))) for _ in range(count)]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different options, in the order given."""
        chosen = set(self.sample(range(len(options)), count))
        return [option for index, option in enumerate(options) if index in chosen]

    def say(self, template: str, **words: object) -> str:
        """Expand a template: ``[a|b|]`` becomes one of its alternatives, ``{name}`` one of the words.

        Brackets nest; an empty alternative makes the rest optional. Words are
        filled in last, so that they may hold brackets themselves.
        """
        while _CHOICE.search(template):
            template = _CHOICE.sub(lambda match: self.pick(match.group(1).split("|")), template)
        return template.format(**words)


def with_article(noun: str) -> str:
    """``a kettle``, ``an umbrella``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalized(text: str) -> str:
    """The text with its first letter, and no other, in upper case."""
    return text[:1].upper() + text[1:]


def listed(words: str) -> list[str]:
    """The words of a text."""
    return words.split()
