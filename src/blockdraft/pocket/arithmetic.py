"""Family ``math``: word problems of one to three steps, worked out, with a last line ``Answer: 42``.

Every number on the way is between 2 and 99. The stories are in `blockdraft.pocket.stories`.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from blockdraft.pocket.dice import Dice, capitalized

LARGEST = 99

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


def parse_answer(text: str) -> int | None:
    """The number on the last line ``Answer: 42``, or None if there is no such line."""
    match = re.search(r"^Answer: (-?\d+)\s*\Z", text, flags=re.MULTILINE)
    return int(match.group(1)) if match else None


class Event(NamedTuple):
    """Templates for one operation: how the prompt tells it, how the solution explains it."""

    fact: str
    reason: str


@dataclass
class Story:
    """A problem in the making: facts for the prompt, and a chain of operations on one running value."""

    dice: Dice
    value: int
    opening: str
    words: dict[str, object]
    facts: list[str] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)

    def say(self, template: str, **words: object) -> str:
        """Expand a template with the story's own words."""
        return self.dice.say(template, **self.words, **words)

    def apply(self, symbol: str, number: int, event: Event) -> None:
        """Tell an event and apply it to the running value."""
        if event.fact:
            self.facts.append(capitalized(self.say(event.fact, number=number)))
        reason = capitalized(self.say(event.reason, number=number))
        self.steps.append((reason, working(self.dice, self.value, symbol, number)))
        self.value = OPERATIONS[symbol](self.value, number)

    def more_or_less(self, gain: Event, loss: Event) -> None:
        """One addition or subtraction that keeps the value in range."""
        can_gain, can_lose = self.value <= LARGEST - 2, self.value >= 4
        if can_gain and (self.dice.chance(0.5) or not can_lose):
            self.apply("+", self.dice.between(2, LARGEST - self.value), gain)
        else:
            self.apply("-", self.dice.between(2, self.value - 2), loss)

    def prompt(self, question: str) -> str:
        """The facts, the question, and sometimes a request to explain."""
        request = self.say("[| Show your work.| Explain your answer.| Solve it step by step.]")
        return " ".join([*self.facts, self.say(question)]) + request

    def solution(self, closing: str) -> str:
        """Prose or a numbered list, and the answer's line."""
        intro = self.say(
            "[Let us work it out.|We solve this step by step.|We go through the story in order.|"
            "Let us look at the numbers.|First we write down what we know.]"
        )
        begin, end = self.say(self.opening), self.say(closing, value=self.value)
        if self.dice.chance(0.5):
            steps = [f"Step {i}) {reason}: {sums}." for i, (reason, sums) in enumerate(self.steps, start=1)]
            return "\n".join([f"{intro} {begin}", *steps, end, f"Answer: {self.value}"])
        prose = [f"{reason}: {sums}." for reason, sums in self.steps]
        return " ".join([intro, begin, *prose, end]) + f"\nAnswer: {self.value}"


def working(dice: Dice, left: int, symbol: str, right: int) -> str:
    """``47 + 38 = 85``, mostly by way of the tens: ``47 + 38 = 47 + 30 + 8 = 77 + 8 = 85``."""
    result = OPERATIONS[symbol](left, right)
    tens, ones = right - right % 10, right % 10
    ways = [f"{left} {symbol} {right}"]
    if symbol in "+-" and tens and ones and left >= 10 and dice.chance(0.75):
        middle = OPERATIONS[symbol](left, tens)
        ways += [f"{left} {symbol} {tens} {symbol} {ones}", f"{middle} {symbol} {ones}"]
    if symbol == "*" and left > 12 and left % 10:
        tens, ones = left - left % 10, left % 10
        ways += [f"{tens} * {right} + {ones} * {right}", f"{tens * right} + {ones * right}"]
    return " = ".join([*ways, str(result)])


def product(dice: Dice) -> tuple[int, int]:
    """Two factors, the second below 10; mostly out of the multiplication table."""
    if dice.chance(0.2):
        left = dice.between(11, 33)
        return left, dice.between(2, LARGEST // left)
    right = dice.between(2, 9)
    return dice.between(2, min(12, LARGEST // right)), right
