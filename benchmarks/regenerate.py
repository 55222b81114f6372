"""Sampling responses: our continuous batching beside transformers' `generate`, same model object, same batch size.

    make bench                          # everything, to stdout and results/regenerate.json
    python benchmarks/regenerate.py     # this one alone

One process, float32 unless told otherwise, temperature 1 over the whole vocabulary, lengths as they come (an end
token, or the budget).
transformers takes the prompts in batches and waits for the longest response of each; tokens after an end token
do not count.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator

import torch

from blockdraft.data import Conversation, GenerationSettings, LocalEngine, Prompt
from blockdraft.data.selection import pocket_prompts
from blockdraft.targets import Target, load_target

from measuring import save, table

THREADS, BUDGET = 2, 256
QUESTIONS = (
    "Name a colour.", "Is the sun a star? Answer yes or no.", "Explain how a sailing boat moves against the wind.",
    "What is the capital of France?", "Write a short story about a fox and a river.", "List the days of the week.",
    "How do I boil an egg?", "Give one word that rhymes with light.",
)  # fmt: skip


def prompts(target: Target, num: int) -> list[Prompt]:
    """pocket's own conversations; for another model short and long questions in turn."""
    if target.name == "pocket":
        singles: Iterator[Prompt] = (prompt for prompt in pocket_prompts(0) if len(prompt.turns) == 1)
        return list(itertools.islice(singles, num))
    return [Prompt(f"q{i}", (f"{QUESTIONS[i % len(QUESTIONS)]} ({i})",)) for i in range(num)]


def ours(target: Target, found: list[Prompt], batch_size: int, seed: int) -> tuple[int, float]:
    settings = GenerationSettings(max_new_tokens=BUDGET, max_length=768, seed=seed)
    conversations = [Conversation(prompt, target, settings) for prompt in found]
    start = time.perf_counter()
    num_tokens = sum(each.num_tokens for each in LocalEngine(target, batch_size).run(conversations))
    return num_tokens, time.perf_counter() - start


def theirs(target: Target, found: list[Prompt], batch_size: int, seed: int) -> tuple[int, float]:
    texts = [target.render([{"role": "user", "content": prompt.turns[0]}]) for prompt in found]
    torch.manual_seed(seed)
    num_tokens, start = 0, time.perf_counter()
    for batch in batched(texts, batch_size):
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(text)) + list(text) for text in batch])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in batch])
        out = target.model.generate(
            tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=BUDGET,
            eos_token_id=sorted(target.eos_ids), pad_token_id=0,
        )[:, longest:]  # fmt: skip
        for row in out.tolist():
            num_tokens += next((i + 1 for i, token in enumerate(row) if token in target.eos_ids), len(row))
    return num_tokens, time.perf_counter() - start


def batched(texts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    return (texts[i : i + size] for i in range(0, len(texts), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--targets", nargs="+", default=["pocket", "smollm2"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.targets:
        target = load_target(name, dtype=getattr(torch, options.dtype))
        found = prompts(target, options.prompts)
        speeds: dict[str, list[float]] = {"blockdraft": [], "transformers": []}
        for number in range(options.rounds):
            for label, run in (("blockdraft", ours), ("transformers", theirs)):
                num_tokens, seconds = run(target, found, options.batch_size, number)
                speeds[label].append(num_tokens / seconds)
                print(f"{name} {label}: {num_tokens:,} tokens, {num_tokens / seconds:,.0f} tokens/s", flush=True)
        mine, other = (statistics.median(speeds[label]) for label in ("blockdraft", "transformers"))
        results[name] = {"blockdraft": mine, "transformers": other, "ratio": mine / other}
    rows = [
        [name, f"{r['blockdraft']:,.0f}", f"{r['transformers']:,.0f}", f"{r['ratio']:.2f}"]
        for name, r in results.items()
    ]
    print(table(["target", "tokens/s", "transformers", "ratio"], rows))
    settings = {"batch_size": options.batch_size, "num_prompts": options.prompts, "dtype": options.dtype}
    path = save("regenerate", settings | {"threads": options.threads, "results": results})
    print(f"\nwritten to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
