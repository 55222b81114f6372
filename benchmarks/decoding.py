"""Decoding on a CPU at batch size 1: what a round of speculation costs, in tokens of autoregressive decoding.

    make bench                                            # everything, to stdout and results/decoding.json
    python benchmarks/decoding.py                         # this one alone
    python benchmarks/decoding.py --target pocket-16      # a target of a given shape with random weights
    python benchmarks/decoding.py --drafter runs/mine     # a drafter that was trained, instead of random weights

One process, one thread. Passes through the target are timed turn by turn, through transformers and through
the package's own decoder. The time is the thread's own: what else the machine does is not counted, though it still
takes cache and memory bandwidth away. A round costs

    draft + pass over 1 + B tokens + rest,

and breaks even when it yields as many tokens as that costs one-token passes.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from blockdraft.decoding import generate, generation
from blockdraft.drafters import Drafter, DrafterConfig, build_drafter, load_drafter
from blockdraft.targets import BUILT_IN, DTYPES, Target, UnsupportedTargetError, load_target

from measuring import save, table

HELD, REPEATS = 128, 6
PATHS = ("transformers", "blockdraft")


def random_target(num_layers: int, dtype: torch.dtype) -> Target:
    """A target as wide as pocket and as deep as wanted, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=48, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    return Target(model, None, name=f"pocket-{num_layers}", mask_token_id=5)


def target_named(name: str, dtype: torch.dtype = torch.float32) -> Target:
    """A built-in target, or ``pocket-L`` of L layers."""
    is_random = name.startswith("pocket-")
    target = random_target(int(name.removeprefix("pocket-")), dtype) if is_random else load_target(name, dtype=dtype)
    target.eos_ids = frozenset()
    return target


def drafter_for(target: Target, kind: str, num_layers: int, num_proposals: int) -> Drafter:
    torch.manual_seed(0)
    options: dict[str, Any] = {"markov_rank": 64} if kind == "dspark" else {}
    config = DrafterConfig.for_target(kind, target, num_layers=num_layers, num_proposals=num_proposals, **options)
    return build_drafter(config).to(target.dtype).eval()


def timed(run: Callable[[], object]) -> float:
    """Seconds of the thread that one call takes, after one that is not counted."""
    run()
    start = time.thread_time()
    for _ in range(REPEATS):
        run()
    return (time.thread_time() - start) / REPEATS


def passes(target: Target, rows: tuple[int, ...], layers: tuple[int, ...], turns: int) -> dict[str, dict[int, float]]:
    """Seconds of a pass over so many tokens behind `HELD` others, by path; turn by turn."""
    cases = {}
    for path in PATHS:
        target.use_decoder = path == "blockdraft"
        cache = target.new_cache(HELD + max(rows))
        target.forward(torch.arange(HELD)[None] % 100 + 50, cache)
        cases[path] = cache, target._decoder
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(turns):
        for num in rows:
            for path, (cache, decoder) in cases.items():
                target._decoder = decoder
                taken.setdefault((path, num), []).append(timed(functools.partial(one_pass, target, cache, num, layers)))
    target.use_decoder = True
    return {path: {num: statistics.median(taken[path, num]) for num in rows} for path in PATHS}


def one_pass(target: Target, cache: Any, num: int, layers: tuple[int, ...]) -> None:
    with torch.inference_mode():
        target.logits(target.forward(torch.full((1, num), 60), cache, layers if num > 1 else ()).hidden)
        cache.rollback(HELD)


def phases(target: Target, drafter: Drafter, rule: str, turns: int) -> dict[str, float]:
    """Seconds by phase of a round of `generate`, medians over rounds."""
    prompt = list(range(50, 50 + HELD))
    spent: dict[str, list[float]] = {"draft": [], "verify": [], "rest": []}
    with mock.patch.object(generation, "clock", time.thread_time):
        for number in range(turns + 1):
            out = generate(target, drafter, prompt, rule=rule, max_new_tokens=16, seed=number)
            for record in out.rounds[1:] if number else []:
                for phase, value in record.seconds.items():
                    spent[phase].append(value)
    return {phase: statistics.median(values) for phase, values in spent.items()}


def step(target: Target, turns: int) -> float:
    """Seconds of a token without a drafter in `generate`, sampling included; median over tokens."""
    prompt, spent = list(range(50, 50 + HELD)), []
    with mock.patch.object(generation, "clock", time.thread_time):
        for number in range(turns + 1):
            out = generate(target, None, prompt, max_new_tokens=16, seed=number)
            spent += [sum(record.seconds.values()) for record in out.rounds[1:]] if number else []
    return statistics.median(spent)


def measured(target: Target, drafter: Drafter, turns: int) -> dict[str, Any]:
    """All of it for one target and drafter."""
    num = 1 + drafter.config.num_proposals
    by_path = passes(target, (1, num), drafter.config.target_layers, turns)
    round_, token = phases(target, drafter, "block", turns), step(target, turns)
    total = sum(round_.values())
    return {
        "passes": {path: {str(rows): value for rows, value in each.items()} for path, each in by_path.items()},
        "token": token,
        "round": round_,
        "break_even": total / token,
        "rest_share": round_["rest"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns (default: %(default)s)")
    parser.add_argument("--target", action="append", help="target; may be repeated (default: the built-in ones)")
    parser.add_argument("--drafter", help="drafter to load (default: random weights, DFlash and DSpark)")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of random drafters (default: %(default)s)")
    parser.add_argument("--num-proposals", type=int, default=10, help="B of random drafters (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results, rows = {}, []
    for name in arguments.target or BUILT_IN:
        try:
            target = target_named(name, DTYPES[arguments.dtype])
        except UnsupportedTargetError as error:
            print(f"{name} is left out: {error}\n")
            continue
        if arguments.drafter:
            drafters = {arguments.drafter: load_drafter(arguments.drafter, target)}
        else:
            sizes = arguments.num_layers, arguments.num_proposals
            drafters = {kind: drafter_for(target, kind, *sizes) for kind in ("dflash", "dspark")}
        for kind, drafter in drafters.items():
            found = measured(target, drafter, arguments.turns)
            results[f"{name}, {kind}"] = found
            few, many = (str(1 + n) for n in (0, drafter.config.num_proposals))
            cells = []
            for path in PATHS:
                one, block = found["passes"][path][few], found["passes"][path][many]
                cells += [f"{1e3 * one:.2f}", f"{1e3 * block:.2f}", f"{block / one:.2f}"]
            costs = [f"{1e3 * found['round'][phase]:.2f}" for phase in ("draft", "verify", "rest")]
            shares = [f"{found['rest_share']:.1%}", f"{1e3 * found['token']:.2f}", f"{found['break_even']:.2f}"]
            rows.append([name, kind, many, *cells, *costs, *shares])
    header = ["target", "drafter", "1+B", "transformers: 1", "1+B", "ratio", "ours: 1", "1+B", "ratio"]
    header += ["draft", "pass", "rest", "share", "token", "break-even"]
    print("milliseconds of one thread; break-even in tokens per round\n")
    print(table(header, rows))
    path = save("decoding", {"results": results})
    print(f"\nwritten to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
