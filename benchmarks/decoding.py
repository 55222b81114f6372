"""Decoding on the embedded targets: autoregressive speed beside transformers, where a round's time goes, verify cost.

    make bench                          # everything, to stdout and results/decoding.json
    python benchmarks/decoding.py       # this one alone

All in one process, taking turns, batch 1, float32, greedy.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch

from blockdraft.decoding import generate
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.targets import Target, UnsupportedTargetError, load_target

from measuring import save, table

THREADS, NUM_TOKENS, PROMPT = 2, 96, "What is a river? Explain it in a few sentences."


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def autoregressive(target: Target, rounds: int) -> dict[str, float]:
    """Tokens/s of our loop without a drafter and of transformers' generate, turn by turn."""
    ids = target.render([{"role": "user", "content": PROMPT}])
    tokens = torch.tensor([ids])
    mask = torch.ones_like(tokens)

    def ours() -> None:
        assert len(generate(target, None, ids, rule="greedy", max_new_tokens=NUM_TOKENS).tokens) == NUM_TOKENS

    def theirs() -> None:
        out = target.model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0
        )
        assert out.shape[1] == len(ids) + NUM_TOKENS

    ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, other = (NUM_TOKENS / statistics.median(t) for t in zip(*times, strict=True))
    return {"blockdraft": mine, "transformers": other, "ratio": mine / other}


def phases(target: Target, rounds: int) -> dict[str, float]:
    """Shares of a round with the paper's drafter shape, random weights, 15 proposals."""
    torch.manual_seed(0)
    num_features = min(5, target.num_layers - 3)
    drafter = build_drafter(DrafterConfig.for_target("dflash", target, num_features=num_features)).eval()
    spent = dict.fromkeys(("draft", "verify", "rest"), 0.0)
    for number in range(rounds + 1):
        out = generate(target, drafter, PROMPT, rule="block", max_new_tokens=32, seed=number)
        for record in out.rounds if number else []:
            for phase, value in record.seconds.items():
                spent[phase] += value
    total = sum(spent.values())
    return {phase: value / total for phase, value in spent.items()}


def verify_cost(target: Target, rounds: int) -> dict[str, float]:
    """Time of one pass over 1, 4, 8 and 16 tokens behind 128, over that of 1."""
    cache = target.new_cache(160)
    target.forward(torch.arange(128)[None] % 100 + 50, cache)

    def run(num: int) -> None:
        target.logits(target.forward(torch.full((1, num), 60), cache).hidden)
        cache.rollback(128)

    times: dict[int, list[float]] = {1: [], 4: [], 8: [], 16: []}
    for _ in range(5 * rounds):
        for num, taken in times.items():
            taken.append(seconds(functools.partial(run, num)))
    return {str(num): statistics.median(taken) / statistics.median(times[1]) for num, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    results, rows = {}, []
    for name in ("pocket", "smollm2"):
        try:
            target = load_target(name)
        except UnsupportedTargetError as error:
            print(f"{name} is left out: {error}\n")
            continue
        target.eos_ids = frozenset()
        speed = autoregressive(target, arguments.rounds)
        share, cost = phases(target, arguments.rounds), verify_cost(target, arguments.rounds)
        results[name] = {"autoregressive": speed, "phases": share, "verify_cost": cost}
        rows.append(
            [
                name,
                f"{speed['blockdraft']:.1f}",
                f"{speed['transformers']:.1f}",
                f"{speed['ratio']:.2f}",
                *(f"{share[p]:.1%}" for p in ("draft", "verify", "rest")),
                *(f"{cost[n]:.2f}" for n in ("4", "8", "16")),
            ]
        )
    header = ["target", "tokens/s", "transformers", "ratio", "draft", "verify", "rest", "4 tokens", "8", "16"]
    print(table(header, rows))
    path = save("decoding", {"results": results})
    print(f"\nwritten to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
