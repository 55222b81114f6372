"""How good a built model is, on the fixed held-out prompts."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from blockdraft.pocket.arithmetic import parse_answer
from blockdraft.pocket.corpus import FAMILIES, Example, heldout
from blockdraft.pocket.functions import parses
from blockdraft.pocket.packing import encode_conversation
from blockdraft.pocket.tokenizer import END, PAD, render


def measure(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, num_prompts: int = 300, max_new_tokens: int = 256
) -> dict[str, Any]:
    """Perplexity of held-out responses, right answers to math problems, code that parses; greedy decoding.

    num_prompts: of each family for perplexity and for math; a third as many for code.
    """
    model.eval()
    samples = {family: heldout(family, num_prompts) for family in FAMILIES}
    code = samples["code"][: max(1, num_prompts // 3)]
    solutions = answers(model, tokenizer, samples["math"], max_new_tokens)
    functions = answers(model, tokenizer, code, max_new_tokens)
    return {
        "num_prompts": num_prompts,
        "perplexity": {family: perplexity(model, tokenizer, samples[family]) for family in FAMILIES},
        "math_exact_answers_by_steps": exact_answers(samples["math"], solutions),
        "code_that_parses": sum(map(parses, functions)) / len(functions),
    }


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, tokenizer: Tokenizer, samples: list[Example]) -> float:
    """Per token of the responses, their end token included."""
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
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, samples: list[Example], max_new_tokens: int, batch_size: int = 25
) -> list[str]:
    """Greedy responses, in batches that are padded on the left."""
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    generate = cast(Any, model).generate
    texts: list[str] = []
    for start in range(0, len(samples), batch_size):
        rows = []
        for example in samples[start : start + batch_size]:
            prompt = render([{"role": "user", "content": example.prompt}], add_generation_prompt=True)
            rows.append(tokenizer.encode(prompt).ids)
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


def exact_answers(samples: list[Example], solutions: list[str]) -> dict[str, float]:
    """Share of right answers, by the number of steps of the problem."""
    right: dict[str, list[bool]] = {}
    for example, solution in zip(samples, solutions, strict=True):
        right.setdefault(str(example.difficulty), []).append(str(parse_answer(solution)) == example.answer)
    return {steps: sum(marks) / len(marks) for steps, marks in sorted(right.items())}
