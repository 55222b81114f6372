"""A byte-level BPE tokenizer trained on the corpus, saved as an ordinary Hugging Face folder.

Every byte has an entry, so that any text survives the round trip; digits are never merged.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from blockdraft.pocket.corpus import FAMILIES, examples

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
    """Learn the merges from so many training conversations of each family."""
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
