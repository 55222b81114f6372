"""Share among all families randomness that any Python reproduces, sentences with alternatives, tables of words."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Exchange:
    """Holds a single-turn conversation that is not yet numbered or assigned to a split.

    kind: what it is within its family, such as ``definition``.
    difficulty: steps of a math problem; 1 for everything else.
    answer: what decides whether a response is right, if anything does: the number of a math problem, assertions that
        a function must pass, words that an answer must contain.
    """

    prompt: str
    response: str
    kind: str
    difficulty: int = 1
    answer: str | None = None


class Dice:
    """Makes choices from a seeded stream.

    Everything is drawn from ``random.Random.random``, the one method whose sequence Python promises not to change
    between versions.
    """

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(str(seed)).random

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random() < probability

    def between(self, low: int, high: int) -> int:
        """Draw a whole number from ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """Draw one of the options."""
        return options[int(self._random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Draw ``count`` different options, in random order."""
        rest = list(options)
        return [rest.pop(int(self._random() * len(rest))) for _ in range(count)]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Draw ``count`` different options, in the order given."""
        chosen = set(self.sample(range(len(options)), count))
        return [option for index, option in enumerate(options) if index in chosen]

    def say(self, template: str, **words: object) -> str:
        """Expand a template: ``[a|b|]`` becomes one of its alternatives, ``{name}`` one of the words.

        Brackets nest; an empty alternative makes the rest optional. Words are filled in last, so that they may hold
        brackets themselves.
        """
        while _CHOICE.search(template):
            template = _CHOICE.sub(lambda match: self.pick(match.group(1).split("|")), template)
        return template.format(**words)

    def casually(self, text: str) -> str:
        """Write a message as people do: mostly as it is, at times without capitals or the sign at its end."""
        if self.chance(0.7):
            return text
        if self.chance(0.5):
            text = text.lower()
        return text.rstrip("?.!") if self.chance(0.6) else text


def with_article(noun: str) -> str:
    """Put the indefinite article in front: ``a kettle``, ``an umbrella``, ``a university``."""
    vowel = noun[0] in "aeiou" and not noun.startswith(("uni", "use", "one"))
    return f"{'an' if vowel else 'a'} {noun}"


def capitalized(text: str) -> str:
    """Return the text with its first letter, and no other, in upper case."""
    return text[:1].upper() + text[1:]


def joined(items: Sequence[str]) -> str:
    """Join items as a sentence lists them: ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def read_table(name: str) -> dict[str, list[list[str]]]:
    """Read a file of this folder: sections that begin with ``[name]``, rows of cells between bars, ``#`` comments."""
    sections: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append([cell.strip() for cell in line.split("|")])
    return sections


def read_talks(name: str) -> dict[str, list[tuple[str, str]]]:
    """Read a file of this folder: sections as in `read_table`, templates on lines ``Q: ...`` and ``A: ...``."""
    sections: dict[str, list[tuple[str, str]]] = {}
    talks: list[tuple[str, str]] = []
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        mark, _, template = line.partition(": ")
        if line.startswith("["):
            talks = sections.setdefault(line.strip("[]"), [])
        elif mark == "Q":
            talks.append((template, ""))
        elif mark == "A":
            talks[-1] = (talks[-1][0], template)
    return sections


TOPICS = read_table("topics.txt")
"""What the families talk about, by section."""


def words(section: str) -> list[str]:
    """Return all cells of a section of ``topics.txt``."""
    return [cell for row in TOPICS[section] for cell in row]
