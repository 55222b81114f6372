"""A training step on the built-in targets: where its time goes, how near to the machine, beside `speculators`.

    make bench                          # everything, to stdout and results/training.json
    python benchmarks/training.py       # this one alone

DFlash in the shape of the shipped recipes, float32; for smollm2 also with what saves work in a step. Steps are those of
our trainer; each case is a process of its own (`training_step.py`, `speculators_step.py`), and they take one step each
in turn.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from measuring import Worker, save, table

HERE = Path(__file__).parent
PHASES = ("target", "drafter", "objective", "backward", "optimizer", "data", "rest")
Steps = dict[str, list[dict[str, Any]]]
"""What was measured, round by round, of each case."""


def take_turns(workers: dict[str, Callable[[], Worker]], rounds: int) -> Steps:
    """One step of each worker in turn, after one that does not count. They are set up in order, and end together."""
    steps: Steps = {name: [] for name in workers}
    with ExitStack() as stack:
        ready = {}
        for name, start in workers.items():
            ready[name] = start()
            stack.callback(ready[name].close)
        for number in range(rounds + 1):
            for name, worker in ready.items():
                print(f"\rround {number}/{rounds}: {name:<40}", end="", file=sys.stderr, flush=True)
                measured = worker.take()
                steps[name] += [measured] if number else []
    print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
    return steps


def ours(recipe: str, settings: list[str], *options: str | Path) -> Callable[[], Worker]:
    return lambda: Worker(sys.executable, HERE / "training_step.py", recipe, *settings, *options)


def split(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the phases, and the arithmetic rate beside that of a matrix product."""
    seconds = statistics.median(step["seconds"] for step in steps)
    shares = {p: statistics.median(step["phases"][p] / step["seconds"] for step in steps) for p in PHASES}
    rate = statistics.median(sum(step["work"].values()) / step["seconds"] for step in steps)
    product = statistics.median(rate for step in steps for rate in step["product_rates"])
    rates = {p: statistics.median(step["work"][p] / step["phases"][p] for step in steps) for p in steps[0]["work"]}
    return {
        "seconds": seconds, "shares": shares, "rate": rate, "product_rate": product, "ratio": rate / product,
        "rates": rates, "work": steps[-1]["work"],
    }  # fmt: skip


WHOLE = "drafter.vocab_size=null"
CACHED = "data.features=cached"
SAVINGS = {
    "whole vocabulary, target run at every step": (WHOLE,),
    "whole vocabulary, features cached": (WHOLE, CACHED),
    "12,288 draft tokens, target run at every step": (),
    "12,288 draft tokens, features cached": (CACHED,),
    "the same in bfloat16": (CACHED, "target.dtype=bfloat16", "runtime.precision=bfloat16"),
}
"""Settings of the recipe of smollm2 that save work in a step, by name; the first one saves nothing."""


def compare(steps: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of these steps over those of the base, round by round."""
    ratios = [theirs["seconds"] / step["seconds"] for step, theirs in zip(base, steps, strict=True)]
    return {
        "blocks_per_second": statistics.median(step["num_blocks"] / step["seconds"] for step in steps),
        "median_ratio": statistics.median(ratios), "least_ratio": min(ratios), "loss": steps[-1]["loss"],
        "extra_bytes": steps[-1]["extra_bytes"],
    }  # fmt: skip


def measure(target: str, options: argparse.Namespace, file: Path) -> dict[str, Any]:
    """All cases on one target."""
    threads = ("--threads", str(options.threads))
    found: dict[str, Any] = {}
    recipe = f"{target}-dflash-bv"
    steps = take_turns({"as shipped": ours(recipe, options.settings, *threads)}, options.rounds)
    found["split"] = split(steps["as shipped"])
    if target == "smollm2":
        cases = {name: ours(recipe, [*options.settings, *changes], *threads) for name, changes in SAVINGS.items()}
        steps = take_turns(cases, options.rounds)
        found["savings"] = {name: compare(each, steps[next(iter(SAVINGS))]) for name, each in steps.items()}
    # without decay over positions or warm-up, so that both packages minimise the same number at the same rate
    settings = [*options.settings, "objective.options.eta=.inf", "optimizer.warmup_ratio=0"]
    cases = {"blockdraft": ours(f"{target}-dflash-kl", settings, *threads, "--given", file)}
    if options.speculators.exists():
        for attention in options.attention:
            command = (options.speculators, HERE / "speculators_step.py", file, *threads, "--attention", attention)
            cases[f"speculators, {attention}"] = lambda command=command: Worker(*command)
    else:
        print(f"there is no {options.speculators}: speculators is left out", file=sys.stderr)
    steps = take_turns(cases, options.rounds)
    found["packages"] = {name: compare(each, steps["blockdraft"]) for name, each in steps.items()}
    losses = {name: round(case["loss"], 3) for name, case in found["packages"].items()}
    if max(losses.values()) - min(losses.values()) > 0.01:
        raise RuntimeError(f"these are not the same steps: their losses are {losses}")
    return found


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, r in results.items():
        s = r["split"]
        shares = [f"{s['shares'][phase]:.1%}" for phase in PHASES]
        work = sum(s["work"].values())
        numbers = [f"{x / 1e9:,.0f}" for x in (work, s["rate"], s["product_rate"])]
        rows.append([name, f"{s['seconds']:.2f} s", *shares, *numbers, f"{s['ratio']:.2f}"])
    header = ["recipe", "step", *PHASES, "GFLOP", "GFLOP/s", "of a product", "ratio"]
    tables = [table(header, rows)]
    rows = [
        [
            name, case, f"{c['blocks_per_second']:,.1f}", f"{c['median_ratio']:.2f}", f"{c['least_ratio']:.2f}",
            f"{c['extra_bytes'] / 2**20:,.0f} MiB", f"{c['loss']:.4f}",
        ]
        for name, r in results.items()
        for case, c in r["packages"].items()
    ]  # fmt: skip
    tables.append(table(["target", "case", "blocks/s", "time over ours", "least", "extra memory", "loss"], rows))
    rows = [
        [name, case, f"{c['blocks_per_second']:,.1f}", f"{1 / c['median_ratio']:.2f}"]
        for name, r in results.items()
        for case, c in r.get("savings", {}).items()
    ]
    if rows:
        tables.append(table(["target", "settings", "blocks/s", "times the first row"], rows))
    return "\n\n".join(tables)


def goals(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, at least)."""
    found = []
    if "smollm2" in results:
        found.append(("smollm2: arithmetic rate / that of a product", results["smollm2"]["split"]["ratio"], 0.5))
        saved = 1 / min(case["median_ratio"] for case in results["smollm2"]["savings"].values())
        found.append(("smollm2: blocks/s in the fastest setting, over nothing saved", saved, 3.0))
    for name, r in results.items():
        others = [case for case in r["packages"] if case != "blockdraft"]
        if others:
            fastest = min(others, key=lambda case: r["packages"][case]["median_ratio"])
            mine, theirs = r["packages"]["blockdraft"], r["packages"][fastest]
            found.append((f"{name}: blocks/s over {fastest}", theirs["median_ratio"], 1.5))
            least = min(r["packages"][case]["extra_bytes"] for case in others)
            found.append((f"{name}: the least memory of theirs over ours", least / mine["extra_bytes"], 1.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="of the recipe, key.path=value, to measure another shape")
    parser.add_argument("--rounds", type=int, default=3, help="turns that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--targets", nargs="+", default=["pocket", "smollm2"])
    parser.add_argument("--attention", nargs="+", default=["sdpa"], help="how speculators attends: sdpa, eager")
    parser.add_argument("--speculators", type=Path, default=HERE.parent / ".venv-speculators" / "bin" / "python")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.targets:
            results[name] = measure(name, options, Path(folder) / f"{name}.safetensors")
    print(report(results))
    checks = goals(results)
    rows = [
        [what, f"{got:.2f}", f"{least:.2f}", "reached" if got >= least else "missed"] for what, got, least in checks
    ]
    print("\n" + table(["goal", "measured", "at least", ""], rows))
    settings = {"rounds": options.rounds, "threads": options.threads, "settings": options.settings}
    path = save("training", settings | {"results": results, "goals": checks})
    print(f"\nwritten to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
