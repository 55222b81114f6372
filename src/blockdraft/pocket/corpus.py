"""The corpus: unlimited, seeded conversations of three families, split into train and held-out prompts.

A prompt belongs to the split that a hash of its text says, so that no prompt is
ever in both, whatever the seed. The same prompt may come with many responses.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from blockdraft.pocket import chat, functions, stories
from blockdraft.pocket.dice import Dice

Family = Literal["math", "code", "chat"]
Split = Literal["train", "heldout"]

FAMILIES: tuple[Family, ...] = get_args(Family)
SPLITS: tuple[Split, ...] = get_args(Split)

_GENERATORS = {"math": stories.problem, "code": functions.problem, "chat": chat.problem}
_HELDOUT_SHARE = 10
"""One prompt in so many is held out."""


@dataclass(frozen=True)
class Example:
    """A single-turn conversation.

    id: ``family/split/seed/index``.
    difficulty: steps of a math problem; 1 for the other families.
    answer: what decides whether a response is right: the number of a math problem,
        assertions that a function must pass; None for chat.
    """

    id: str
    family: Family
    prompt: str
    response: str
    difficulty: int
    answer: str | None


def split_of(prompt: str) -> Split:
    """Where a prompt belongs, by its text alone."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % _HELDOUT_SHARE == 0 else "train"


def examples(family: Family, split: Split, seed: int | str) -> Iterator[Example]:
    """Endless conversations of one family and split; the same ones for the same seed."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    dice = Dice(f"{family}/{split}/{seed}")
    index = 0
    while True:
        draft = _GENERATORS[family](dice)
        if split_of(draft.prompt) == split:
            name = f"{family}/{split}/{seed}/{index}"
            yield Example(name, family, draft.prompt, draft.response, draft.difficulty, draft.answer)
            index += 1


def prompts(family: Family, split: Split, seed: int | str) -> Iterator[str]:
    """The prompts of `examples`."""
    return (example.prompt for example in examples(family, split, seed))


def heldout(family: Family, num_prompts: int = 100) -> list[Example]:
    """The fixed evaluation list of a family: the first so many different held-out prompts.

    A shorter list is the beginning of a longer one. The responses are one good
    answer each, not the only one.
    """
    chosen: dict[str, Example] = {}
    for example in examples(family, "heldout", "evaluation"):
        if len(chosen) >= num_prompts:
            break
        chosen.setdefault(example.prompt, example)
    return list(chosen.values())
