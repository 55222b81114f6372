"""Shows that a refactoring changed no number: one small pocket run, made before and after, compared value by value.

    python tools/same_numbers.py run OUT            make data, train two drafters, evaluate them; a minute or two
    python tools/same_numbers.py run OUT --names 0.1    the same with the names that version 0.1 gave to recipe fields
    python tools/same_numbers.py compare BEFORE AFTER

Data shards must be equal byte for byte, metrics and results value by value. Seconds, and what is made of them, are
left out.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RENAMED = {
    "optimizer.learning_rate": "optimizer.rate",
    "logging.logging_steps": "record.log_every",
    "logging.heldout_blocks": "record.heldout_blocks",
    "logging.tensorboard": "record.tensorboard",
    "data.num_heldout": "data.heldout",
}
"""Fields that the runs below set, with their names in version 0.1."""

METRICS = {"rate": "learning_rate", "norm": "grad_norm"}
"""Keys of ``metrics.jsonl``: old names and new ones."""

RESULT_KEYS = {"choice": "draft_temperature_choice"}
TIMINGS = {
    "steps_per_second", "waiting_for_data", "blocks_per_second", "seconds", "baseline_seconds", "tokens_per_second",
    "baseline_tokens_per_second", "speedup", "provenance", "path", "recipe", "settings", "format", "label",
    "peak_memory_gib",
}  # fmt: skip

RUNS = {
    "dflash-bv": ("pocket-dflash-bv", []),
    "dspark-ce": ("pocket-dspark-ce", ["data.features=cached", "data.cache=CACHE"]),
}
SMALL = [
    "optimizer.max_steps=12", "optimizer.learning_rate=1e-3", "data.num_heldout=8", "logging.logging_steps=1",
    "logging.heldout_blocks=64", "logging.tensorboard=false", "runtime.threads=1", "runtime.device=cpu",
]  # fmt: skip


def run(out: Path, names: str) -> None:
    """Make data, two runs and an evaluation in ``out``, by the command line alone."""
    prompts, data = out / "prompts.jsonl", out / "data"
    blockdraft("data", "prompts", "--from", "pocket", "--num", "48", "--out", prompts)
    limits = ("--max-new-tokens", "48", "--max-length", "256", "--shard-size", "16")
    blockdraft("data", "regenerate", "--target", "pocket", "--prompts", prompts, "--out", data, *limits)
    for name, (recipe, extra) in RUNS.items():
        fields = [f"data.path={data}", *SMALL, *(each.replace("CACHE", str(out / "cache")) for each in extra)]
        if names == "0.1":
            fields = [f"{RENAMED.get(key, key)}={value}" for key, value in (each.split("=", 1) for each in fields)]
        blockdraft("train", recipe, *fields, "--out", out / "runs" / name)
    drafters = [part for name in RUNS for part in ("--drafter", f"{name}={out / 'runs' / name}")]
    sizes = ("--num-prompts", "3", "--max-new-tokens", "32", "--dynamics-texts", "0")
    blockdraft("evaluate", "--target", "pocket", *drafters, *sizes, "--out", out / "evaluation")


def blockdraft(*arguments: Any) -> None:
    """Run one verb in a process of its own, with one thread."""
    command = [sys.executable, "-m", "blockdraft", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def numbers(out: Path) -> dict[str, Any]:
    """Everything in such a folder that a refactoring must not change."""
    found: dict[str, Any] = {}
    for shard in sorted((out / "data").glob("*.parquet")):
        found[f"data/{shard.name}"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    for name in RUNS:
        lines = (out / "runs" / name / "metrics.jsonl").read_text().splitlines()
        found[f"runs/{name}/metrics.jsonl"] = [_plain(json.loads(line)) for line in lines]
        if name.endswith("-ce"):  # version 0.1 logged the schedule of beta also where no objective read it
            for line in found[f"runs/{name}/metrics.jsonl"]:
                line.pop("beta", None)
    results = json.loads((out / "evaluation" / "results.json").read_text())
    found["evaluation/results.json"] = _plain(results)
    return found


def _plain(value: Any) -> Any:
    """Nested values under their new names, without timings."""
    if isinstance(value, dict):
        renamed = {(METRICS | RESULT_KEYS).get(key, key): inner for key, inner in value.items()}
        return {key: _plain(inner) for key, inner in renamed.items() if key not in TIMINGS}
    if isinstance(value, list):
        return [
            _plain(inner) for inner in value if not (isinstance(inner, dict) and inner.get("quantity") == "speedup")
        ]
    return value


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Where two nested values differ. What only the second has is new, and no difference."""
    if isinstance(before, dict) and isinstance(after, dict):
        missing = [f"{place}/{key} is gone" for key in before if key not in after]
        return missing + [
            line for key in before if key in after for line in differences(before[key], after[key], f"{place}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and all(map(_key, [*before, *after])):
        return differences(*({_key(each): each for each in side} for side in (before, after)), place)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            line
            for i, pair in enumerate(zip(before, after, strict=True))
            for line in differences(*pair, f"{place}/{i}")
        ]
    return [] if before == after else [f"{place}: {before!r} before, {after!r} after"]


def _key(value: Any) -> str:
    """What tells an entry of cells, averages or comparisons from the others, wherever it stands; else empty."""
    if not isinstance(value, dict) or not {"drafter", "rule", "draft_temperature_choice"} <= value.keys():
        return ""
    names = ("drafter", "rule", "draft_temperature_choice", "task", "quantity")
    return "/".join(str(value.get(name, "")) for name in names)


def count(value: Any) -> int:
    """Leaves of a nested value."""
    if isinstance(value, dict):
        return sum(map(count, value.values()))
    return sum(map(count, value)) if isinstance(value, list) else 1


def main() -> None:
    """Run or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runner = verbs.add_parser("run", help="make the small run")
    runner.add_argument("out", type=Path)
    runner.add_argument("--names", choices=("0.1", "now"), default="now", help="which names recipe fields have")
    comparer = verbs.add_parser("compare", help="compare two of them")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.verb == "run":
        run(given.out, given.names)
        return
    before, after = numbers(given.before), numbers(given.after)
    found = differences(before, after)
    print("\n".join(found) or f"the same numbers: {count(before):,} values compared")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
