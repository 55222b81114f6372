"""Training batches: whole conversations packed into rows, each a function of the seed and the step alone."""

from dataclasses import dataclass
from itertools import chain, pairwise, repeat

import torch
from tokenizers import Tokenizer
from torch import Tensor

from blockdraft.pocket.build.tokenizer import END, render
from blockdraft.pocket.corpus import FAMILIES, MIXTURE, TWO_TURNS, examples
from blockdraft.pocket.corpus.dice import Dice

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are pocket, a small language model.",
    "You are a friendly assistant that answers questions.",
    "Answer the user's question.",
    "Be brief.",
    "Help the user.",
)
SYSTEM_SHARE = 0.1
"""Share of conversations that begin with a system message."""

PROMPT_WEIGHT = 0.1
"""Weight of a prompt's tokens in the loss.

The model is there to speak responses, and prompts are as random as the corpus can make them;
a little weight lets them teach the words early at no cost.
"""


@dataclass(frozen=True)
class Batch:
    """A batch is R rows of T tokens.

    tokens: ``[R, T]``.
    positions: ``[R, T]`` counted from each conversation's start.
    segments: ``[R, T]`` number of the conversation in its row, 0 for padding.
    weights: ``[R, T]`` of each token as something to predict; 0 for the first of a conversation and for padding.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    weights: Tensor

    def mask(self) -> Tensor:
        """Return ``[R, 1, T, T]``, True where a token (third axis) may look: backwards, within its conversation."""
        same = self.segments[:, None, :, None] == self.segments[:, None, None, :]
        return same.tril()


@dataclass(frozen=True)
class Conversation:
    """A conversation is its tokens, and the weight of each in the loss."""

    tokens: list[int]
    weights: list[float]


def encode_conversation(tokenizer: Tokenizer, turns: list[tuple[str, str]], system: str | None = None) -> Conversation:
    """Encode prompts and responses in the chat template."""
    tokens: list[int] = []
    weights: list[float] = []
    before = [{"role": "system", "content": system}] if system else []
    for prompt, response in turns:
        context = render([*before, {"role": "user", "content": prompt}], add_generation_prompt=True)
        for text, weight in ((context, PROMPT_WEIGHT), (response + END, 1.0), ("\n", PROMPT_WEIGHT)):
            ids = tokenizer.encode(text).ids
            tokens += ids
            weights += repeat(weight, len(ids))
        before = []
    return Conversation(tokens, [0.0, *weights[1:]])


def conversations(tokenizer: Tokenizer, num_tokens: int, seed: str) -> list[Conversation]:
    """Draw conversations of at least so many tokens in all; some have two turns, some a system message."""
    dice = Dice(f"packing/{seed}")
    sources = {family: examples(family, "train", seed) for family in FAMILIES}
    found = []
    while num_tokens > 0:
        drawn = [next(sources[dice.pick(MIXTURE)]) for _ in range(2 if dice.chance(TWO_TURNS) else 1)]
        system = dice.pick(SYSTEM_MESSAGES) if dice.chance(SYSTEM_SHARE) else None
        found.append(encode_conversation(tokenizer, [(each.prompt, each.response) for each in drawn], system))
        num_tokens -= len(found[-1].tokens)
    return found


def pack(found: list[Conversation], num_rows: int, row_length: int, pad_id: int) -> Batch:
    """Pack the longest first, each into the fullest row that has room; what fits nowhere is left out."""
    rows: list[list[Conversation]] = [[] for _ in range(num_rows)]
    room = [row_length] * num_rows
    for conversation in sorted(found, key=lambda each: -len(each.tokens)):
        length = len(conversation.tokens)
        fitting = [index for index in range(num_rows) if room[index] >= length]
        if fitting:
            best = min(fitting, key=lambda index: room[index])
            rows[best].append(conversation)
            room[best] -= length
    batch = Batch(
        torch.full((num_rows, row_length), pad_id),
        torch.zeros(num_rows, row_length, dtype=torch.long),
        torch.zeros(num_rows, row_length, dtype=torch.long),
        torch.zeros(num_rows, row_length),
    )
    for index, row in enumerate(rows):
        ends = [0]
        for each in row:
            ends.append(ends[-1] + len(each.tokens))
        batch.tokens[index, : ends[-1]] = torch.tensor(list(chain(*(each.tokens for each in row))), dtype=torch.long)
        batch.weights[index, : ends[-1]] = torch.tensor(list(chain(*(each.weights for each in row))))
        for segment, (start, end) in enumerate(pairwise(ends), start=1):
            batch.segments[index, start:end] = segment
            batch.positions[index, start:end] = torch.arange(end - start)
    return batch


def training_batch(tokenizer: Tokenizer, num_rows: int, row_length: int, seed: int, step: int) -> Batch:
    """Make the batch of one step."""
    # a fifth more than fits, so that the rows fill up
    found = conversations(tokenizer, int(1.2 * num_rows * row_length), f"{seed}/{step}")
    return pack(found, num_rows, row_length, pad_id=0)
