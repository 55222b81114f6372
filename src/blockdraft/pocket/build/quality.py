"""This module measures how good a built model is, on the fixed held-out prompts."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from blockdraft.pocket.build.text import END, PAD, encode_conversation, render
from blockdraft.pocket.corpus import FAMILIES, Example, heldout
from blockdraft.pocket.corpus.arithmetic import parse_answer
from blockdraft.pocket.corpus.functions import fulfils, parses
from blockdraft.pocket.corpus.knowledge import is_right

CHAT_KINDS = ("definition", "definitions", "comparison", "fact", "unknown")
"""The kinds of family ``chat`` whose answers are right or wrong."""

SAMPLES = (
    "What is a river?", "what is a river", "Tell me about rivers.", "What is a river, and what is a lake?",
    "What does a baker do?", "How many legs has a spider?", "What is the capital of France?",
    "What is speculative decoding?", "What is a quargle?", "Give me a word that rhymes with light.",
    "Write one line about rain.",
    "Tell me a very short story.", "Hello", "Hi", "Who are you?", "Thanks", "What is 3 + 4?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Write a Python function that reverses a string.", "How do I make a cup of tea?", "I cannot sleep. What can I do?",
)  # fmt: skip
"""Prompts of the documents and others that a person would try first; the quality file holds the answers to them."""


def measure_quality(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, num_prompts: int = 300, max_new_tokens: int = 256
) -> dict[str, Any]:
    """Measure the perplexity of held-out responses, and how many greedy answers are right.

    num_prompts: held-out prompts of each family for perplexity, of math, and of definitions; a third as many of code
        and of each other kind of chat.
    """
    model.eval()
    samples = {family: heldout(family, num_prompts) for family in FAMILIES}
    few = max(1, num_prompts // 3)
    math_answers = answers(model, tokenizer, prompts_of(samples["math"]), max_new_tokens)
    code = samples["code"][:few]
    functions = answers(model, tokenizer, prompts_of(code), max_new_tokens)
    right = {}
    for kind in CHAT_KINDS:
        asked = heldout("chat", num_prompts if kind == "definition" else few, kind)
        replies = answers(model, tokenizer, prompts_of(asked), max_new_tokens)
        right[kind] = sum(is_right(e.answer or "", reply) for e, reply in zip(asked, replies, strict=True)) / len(asked)
    passed = [fulfils(each.prompt, text, each.answer or "") for each, text in zip(code, functions, strict=True)]
    return {
        "num_prompts": num_prompts,
        "perplexity": {family: perplexity(model, tokenizer, samples[family]) for family in FAMILIES},
        "math_exact_answers_by_steps": exact_answers(samples["math"], math_answers),
        "code_that_parses": sum(map(parses, functions)) / len(functions),
        "code_that_passes_its_tests": sum(passed) / len(passed),
        "chat_right_by_kind": right,
        "samples": dict(zip(SAMPLES, answers(model, tokenizer, SAMPLES, max_new_tokens), strict=True)),
    }


def prompts_of(samples: Sequence[Example]) -> list[str]:
    """Return the prompts of examples."""
    return [example.prompt for example in samples]


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, tokenizer: Tokenizer, samples: Sequence[Example]) -> float:
    """Return the perplexity per token of the responses, their end token included."""
    total, count = 0.0, 0
    for example in samples:
        conversation = encode_conversation(tokenizer, [(example.prompt, example.response)])
        tokens = torch.tensor([conversation.tokens])
        is_response = torch.tensor(conversation.weights[1:]) == 1
        losses = F.cross_entropy(model(input_ids=tokens).logits[0, :-1].float(), tokens[0, 1:], reduction="none")
        total += float(losses[is_response].sum())
        count += int(is_response.sum())
    return math.exp(total / count)


@torch.no_grad()
def answers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int, batch_size: int = 25
) -> list[str]:
    """Return greedy responses to one-turn prompts, in batches that are padded on the left."""
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    generate = cast(Any, model).generate
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        rows = []
        for prompt in prompts[start : start + batch_size]:
            text = render([{"role": "user", "content": prompt}], add_generation_prompt=True)
            rows.append(tokenizer.encode(text).ids)
        width = max(map(len, rows))
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        output: Tensor = generate(
            input_ids=tokens,
            attention_mask=seen,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=pad,
        )
        replies = (row[: row.index(end)] if end in row else row for row in output[:, width:].tolist())
        texts += [tokenizer.decode(reply) for reply in replies]
    return texts


def exact_answers(samples: Sequence[Example], solutions: Sequence[str]) -> dict[str, float]:
    """Return the share of right answers, by the number of steps of the problem."""
    right: dict[str, list[bool]] = {}
    for example, solution in zip(samples, solutions, strict=True):
        right.setdefault(str(example.difficulty), []).append(str(parse_answer(solution)) == example.answer)
    return {steps: sum(marks) / len(marks) for steps, marks in sorted(right.items())}
