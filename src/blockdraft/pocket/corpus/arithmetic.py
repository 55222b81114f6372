"""Tell and solve problems of family ``math``: one to three steps, worked out, last line ``Answer: 42``.

Every number on the way is between 2 and 99. The stories are in `blockdraft.pocket.corpus.stories`.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from blockdraft.pocket.corpus.dice import Dice, Exchange, capitalized

LARGEST = 99

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
NUMBER_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
"""The numbers from 2 on that a problem may write as words."""


def parse_answer(text: str) -> int | None:
    """Return the number on the last line ``Answer: 42``, or None if there is no such line."""
    match = re.search(r"^Answer: (-?\d+)\s*\Z", text, flags=re.MULTILINE)
    return int(match.group(1)) if match else None


class Event(NamedTuple):
    """Holds templates for one operation: how the prompt tells it, how the solution explains it."""

    fact: str
    reason: str


@dataclass
class Story:
    """Collects a problem: facts for the prompt, and a chain of operations on one running value."""

    dice: Dice
    value: int
    opening: str
    words: dict[str, object]
    facts: list[str] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)

    def say(self, template: str, **words: object) -> str:
        """Expand a template with the story's own words."""
        return self.dice.say(template, **self.words, **words)

    def apply(self, symbol: str, number: int, event: Event, *, reverse: bool = False) -> None:
        """Tell an event and apply it to the running value: ``value - number``, or ``number - value`` in reverse."""
        if event.fact:
            self.facts.append(capitalized(self.say(event.fact, number=number)))
        reason = capitalized(self.say(event.reason, number=number))
        left, right = (number, self.value) if reverse else (self.value, number)
        self.steps.append((reason, working(self.dice, left, symbol, right)))
        self.value = OPERATIONS[symbol](left, right)

    def more_or_less(self, gain: Event, loss: Event) -> None:
        """Apply one addition or subtraction that keeps the value in range."""
        can_gain, can_lose = self.value <= LARGEST - 2, self.value >= 4
        if can_gain and (self.dice.chance(0.5) or not can_lose):
            self.apply("+", self.dice.between(2, LARGEST - self.value), gain)
        else:
            self.apply("-", self.dice.between(2, self.value - 2), loss)

    def finish(self, question: str, closing: str, kind: str) -> Exchange:
        """Return the story as a conversation."""
        return Exchange(self._prompt(question), self._solution(closing), kind, len(self.steps), str(self.value))

    def _prompt(self, question: str) -> str:
        """Join the facts and the question, at times with a request around them or small numbers as words."""
        request = self.say("[||||||| Show your work.| Explain your answer.| Solve it step by step.]")
        lead = self.say(
            "[||||||||||||||||||||Can you help me with this? |Solve this problem: |Here is a problem: |I need help: ]"
        )
        text = lead + " ".join([*self.facts, self.say(question)]) + request
        if self.dice.chance(0.06):
            text = re.sub(r"\b([2-9]|1[0-2])\b", lambda match: NUMBER_WORDS[int(match.group()) - 2], text)
        if self.dice.chance(0.5):
            return self.dice.casually(text)
        return text

    def _solution(self, closing: str) -> str:
        """Write prose or numbered steps, and the answer's line."""
        intro = self.say(
            "[Let us work it out.|We solve this step by step.|We go through the story in order.|"
            "Let us look at the numbers.|First we write down what we know.|]"
        )
        begin, end = self.say(self.opening), self.say(closing, value=self.value)
        start = f"{intro} {begin}".strip()
        if self.dice.chance(0.5):
            steps = [f"Step {i}) {reason}: {sums}." for i, (reason, sums) in enumerate(self.steps, start=1)]
            return "\n".join([start, *steps, end, f"Answer: {self.value}"])
        prose = [f"{reason}: {sums}." for reason, sums in self.steps]
        return " ".join([start, *prose, end]) + f"\nAnswer: {self.value}"


def working(dice: Dice, left: int, symbol: str, right: int) -> str:
    """Write ``47 + 38 = 85``, mostly by way of the tens: ``47 + 38 = 47 + 30 + 8 = 77 + 8 = 85``."""
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
    """Draw two factors, the second below 10; mostly out of the multiplication table."""
    if dice.chance(0.2):
        left = dice.between(11, 33)
        return left, dice.between(2, LARGEST // left)
    right = dice.between(2, 9)
    return dice.between(2, min(12, LARGEST // right)), right


def terms(dice: Dice, symbol: str) -> tuple[int, int]:
    """Draw two numbers whose operation stays between 2 and 99."""
    if symbol == "+":
        left = dice.between(2, LARGEST - 2)
        return left, dice.between(2, LARGEST - left)
    if symbol == "-":
        left = dice.between(4, LARGEST)
        return left, dice.between(2, left - 2)
    left, right = product(dice)
    if symbol == "*":
        return (left, right) if dice.chance(0.5) or left > 12 else (right, left)
    return left * right, right


SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def bare_sum(dice: Dice, num_steps: int) -> Exchange:
    """Ask for a sum without a story: one operation, or two of plus and minus from left to right."""
    symbol = dice.pick("+-*/" if num_steps == 1 else "+-")
    left, right = terms(dice, symbol)
    value = OPERATIONS[symbol](left, right)
    asked = [str(left), symbol, str(right)]
    sums = [working(dice, left, symbol, right)]
    if num_steps > 1:
        second = "+" if value <= LARGEST - 2 and (dice.chance(0.5) or value < 4) else "-"
        number = dice.between(2, LARGEST - value) if second == "+" else dice.between(2, value - 2)
        sums.append(working(dice, value, second, number))
        asked += [second, str(number)]
        value = OPERATIONS[second](value, number)
    if dice.chance(0.2):
        asked = [SIGNS.get(part, part) for part in asked]
    written = " ".join(asked)
    if dice.chance(0.1):
        written = written.replace(" + ", "+").replace(" - ", "-").replace(" * ", "*").replace(" / ", "/")
    question = dice.say(
        "[What is {sum}?|What is {sum}?|What's {sum}?|How much is {sum}?|Calculate {sum}.|Compute {sum}."
        "|What do you get for {sum}?|Can you calculate {sum}?|Please compute {sum}.|{sum} = ?|{sum}"
        "|What is the result of {sum}?]",
        sum=written,
    )
    intro = dice.say(
        "[Let us work it out. |We calculate: |We go from left to right. |]"
        if num_steps > 1
        else "[|We calculate: |Let us work it out. ]"
    )
    steps = ". Then ".join(sums)
    closing = dice.say("[| So the result is {value}.| The result is {value}.]", value=value)
    response = f"{intro}{steps}.{closing}\nAnswer: {value}"
    return Exchange(dice.casually(question), response, "sum", len(sums), str(value))
