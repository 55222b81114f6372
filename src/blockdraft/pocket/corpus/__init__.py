"""The corpus makes unlimited, seeded conversations of three families, split into train and held-out prompts.

A prompt belongs to the split that a hash of its text says, so that no prompt is ever in both, whatever the seed. The
same prompt may come with many responses. Nothing here needs more than the standard library.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from blockdraft.errors import BlockdraftError
from blockdraft.pocket.corpus import chat, functions, stories
from blockdraft.pocket.corpus.dice import Dice

Family = Literal["math", "code", "chat"]
Split = Literal["train", "heldout"]

FAMILIES: tuple[Family, ...] = get_args(Family)
SPLITS: tuple[Split, ...] = get_args(Split)

MIXTURE: tuple[Family, ...] = ("math", "math", "math", "code", "code", "code", "chat", "chat", "chat", "chat")
"""How often each family comes where all are mixed, by repetition."""

TWO_TURNS = 0.1
"""Share of conversations that have two turns."""

_GENERATORS = {"math": stories.problem, "code": functions.problem, "chat": chat.problem}
_HELDOUT_SHARE = 10
"""One prompt in this number is held out."""


class CorpusError(BlockdraftError):
    """A family or split was asked for that the corpus does not have."""


@dataclass(frozen=True)
class Example:
    """Holds a single-turn conversation.

    id: ``family/split/seed/index``.
    kind: what it is within its family, such as ``definition`` or ``sharing``.
    difficulty: steps of a math problem; 1 for everything else.
    answer: what decides whether a response is right, if anything does: the number of a math problem, assertions that
        a function must pass, the words that an answer of `chat` must contain.
    """

    id: str
    family: Family
    prompt: str
    response: str
    kind: str
    difficulty: int
    answer: str | None


@dataclass(frozen=True)
class CorpusPrompt:
    """Holds the user's messages of one conversation, of one or two turns; ``family`` is that of the first."""

    id: str
    family: Family
    turns: tuple[str, ...]


def split_of(prompt: str) -> Split:
    """Return the split that a prompt belongs to, by its text alone."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % _HELDOUT_SHARE == 0 else "train"


def examples(family: Family, split: Split, seed: int | str) -> Iterator[Example]:
    """Yield conversations of one family and split without end; the same ones for the same seed."""
    if family not in FAMILIES:
        raise CorpusError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise CorpusError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    dice = Dice(f"{family}/{split}/{seed}")
    index = 0
    while True:
        draft = _GENERATORS[family](dice)
        if split_of(draft.prompt) == split:
            name = f"{family}/{split}/{seed}/{index}"
            yield Example(name, family, draft.prompt, draft.response, draft.kind, draft.difficulty, draft.answer)
            index += 1


def prompts(seed: int | str, family: Family | None = None) -> Iterator[CorpusPrompt]:
    """Yield training prompts without end, of one family or of all in pocket's own mixture.

    They are the same for the same seed, and none of the held-out prompts is among them. Texts may repeat.
    """
    if family is not None and family not in FAMILIES:
        raise CorpusError(f"unknown family {family!r} of pocket's corpus; known: {', '.join(FAMILIES)}")
    mixture = [each for each in MIXTURE if family in (None, each)]
    dice = Dice(f"prompts/{seed}")
    streams = {each: examples(each, "train", seed) for each in mixture}
    while True:
        drawn = [next(streams[dice.pick(mixture)]) for _ in range(2 if dice.chance(TWO_TURNS) else 1)]
        name = "+".join(example.id for example in drawn)
        yield CorpusPrompt(name, drawn[0].family, tuple(example.prompt for example in drawn))


def heldout(family: Family, num_prompts: int = 100, kind: str | None = None) -> list[Example]:
    """Return the fixed evaluation list of a family: the first ``num_prompts`` different held-out prompts.

    A shorter list is the beginning of a longer one; ``kind`` keeps only those of one kind. The responses are one
    good answer each, not the only one.
    """
    chosen: dict[str, Example] = {}
    for example in examples(family, "heldout", "evaluation"):
        if len(chosen) >= num_prompts:
            break
        if kind in (None, example.kind):
            chosen.setdefault(example.prompt, example)
    return list(chosen.values())
