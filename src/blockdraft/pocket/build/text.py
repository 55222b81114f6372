"""This module turns text into what the model reads: a tokenizer that is learnt from the corpus, and packed batches.

The tokenizer is a byte-level BPE and is saved as an ordinary Hugging Face folder. Every byte has an entry, so that any
text survives the round trip; digits are never merged. A batch is whole conversations packed into rows, and depends on
the seed and the step alone.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from blockdraft.pocket.corpus import FAMILIES, MIXTURE, TWO_TURNS, examples
from blockdraft.pocket.corpus.dice import Dice

VOCAB_SIZE = 2048
PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, START, END, MASK)
"""Their ids are 0, 1, 2 and 3."""

# words and signs with the space before them, digits one by one, then whatever white space is left
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML; a system message is a message like any other, ``enable_thinking`` is accepted and ignored."""


def render(messages: Iterable[Mapping[str, str]], add_generation_prompt: bool = False) -> str:
    """Render messages as `CHAT_TEMPLATE` does, without Jinja, for the training loop."""
    turns = [f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages]
    return "".join(turns) + (f"{START}assistant\n" if add_generation_prompt else "")


def train_tokenizer(num_examples: int = 4000, vocab_size: int = VOCAB_SIZE, seed: int = 42) -> Tokenizer:
    """Learn the merges from a number of training conversations of each family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_examples, seed), trainer)
    return tokenizer


def _texts(num_examples: int, seed: int) -> Iterator[str]:
    yield "system user assistant " * num_examples
    for family in FAMILIES:
        for example in islice(examples(family, "train", f"tokenizer/{seed}"), num_examples):
            yield example.prompt
            yield example.response


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which `AutoTokenizer.from_pretrained` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [START],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


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
class PackedBatch:
    """Holds R rows of T tokens.

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
class EncodedConversation:
    """Holds the tokens of a conversation, and the weight of each in the loss."""

    tokens: list[int]
    weights: list[float]


def encode_conversation(
    tokenizer: Tokenizer, turns: list[tuple[str, str]], system: str | None = None
) -> EncodedConversation:
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
    return EncodedConversation(tokens, [0.0, *weights[1:]])


def conversations(tokenizer: Tokenizer, num_tokens: int, seed: str) -> list[EncodedConversation]:
    """Draw conversations of at least ``num_tokens`` in all; some have two turns, some a system message."""
    dice = Dice(f"packing/{seed}")
    sources = {family: examples(family, "train", seed) for family in FAMILIES}
    found = []
    while num_tokens > 0:
        drawn = [next(sources[dice.pick(MIXTURE)]) for _ in range(2 if dice.chance(TWO_TURNS) else 1)]
        system = dice.pick(SYSTEM_MESSAGES) if dice.chance(SYSTEM_SHARE) else None
        found.append(encode_conversation(tokenizer, [(each.prompt, each.response) for each in drawn], system))
        num_tokens -= len(found[-1].tokens)
    return found


def pack_rows(found: list[EncodedConversation], num_rows: int, row_length: int, pad_id: int) -> PackedBatch:
    """Pack the longest first, each into the fullest row that has room; what fits nowhere is left out."""
    rows: list[list[EncodedConversation]] = [[] for _ in range(num_rows)]
    room = [row_length] * num_rows
    for conversation in sorted(found, key=lambda each: -len(each.tokens)):
        length = len(conversation.tokens)
        fitting = [index for index in range(num_rows) if room[index] >= length]
        if fitting:
            best = min(fitting, key=lambda index: room[index])
            rows[best].append(conversation)
            room[best] -= length
    batch = PackedBatch(
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


def training_batch(tokenizer: Tokenizer, num_rows: int, row_length: int, seed: int, step: int) -> PackedBatch:
    """Make the batch of one step."""
    # a fifth more than fits, so that the rows fill up
    found = conversations(tokenizer, int(1.2 * num_rows * row_length), f"{seed}/{step}")
    return pack_rows(found, num_rows, row_length, pad_id=0)
