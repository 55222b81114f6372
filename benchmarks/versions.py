"""Two versions of the package side by side on a CPU: objectives, training and decoding, now over before.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before .

Every case is a process for each version, and the two take turns. Times are the CPU time of the process, one thread:
what else the machine does is not counted, though it still takes cache and memory bandwidth away. Objectives are taken
with statistics, on 8 blocks of 15, V = 151,936, H = 256, float32. A training step has 64 blocks of 10 in four texts
of random tokens for smollm2, whose whole vocabulary of 49,152 tokens is drafted. Decoding is timed by the round, since
two versions may draw other tokens for the same seed; its target has twelve layers and its drafters two, all with random
weights.
"""

import argparse
import atexit
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from measuring import Worker, save, serve, table

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, WIDTH = 8, 15, 151_936, 256


def objective_step(name: str) -> Callable[[], int]:
    """Return what takes a step of an objective: its value, statistics and the gradient of the hidden states."""
    from blockdraft.losses import fused_linear_objective, objective

    torch.manual_seed(0)
    draft_hidden, target_hidden = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, WIDTH)
    draft_head, target_head = 0.06 * torch.randn(2, VOCAB_SIZE, WIDTH)
    labels = torch.randint(VOCAB_SIZE, (NUM_BLOCKS, BLOCK_SIZE))
    draft_hidden.requires_grad_()

    def run() -> int:
        value = fused_linear_objective(objective(name), draft_hidden, target_hidden, draft_head, target_head, labels)
        value.loss.backward()
        return 1

    return run


def training_step(kind: str) -> Callable[[], int]:
    """Return what takes a step of the product's own trainer with annealed BV, the target's pass included."""
    from training_step import make_data

    from blockdraft.recipes import load_recipe
    from blockdraft.targets import load_target
    from blockdraft.training import Trainer

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    settings = {
        "target.name": "smollm2", "drafter.num_layers": 2, "drafter.num_proposals": 10, "drafter.num_features": 3,
        "drafter.vocab_size": "null", "drafter.initial": "scratch", "batch.num_texts": 4, "batch.num_anchors": 64,
        "batch.anchors": "uniform", "optimizer.name": "adamw", "optimizer.num_train_epochs": 100_000,
        "data.path": folder / "data", "data.num_heldout": 0, "runtime.threads": 1,
    }  # fmt: skip
    recipe = load_recipe(f"qwen3-4b-{kind}-bv", ["target.shape=null", *(f"{k}={v}" for k, v in settings.items())])
    target = load_target("smollm2")
    make_data(folder / "data", target, recipe.batch.num_texts)
    run = Trainer(recipe, target, folder / "run")
    steps = run.loader.steps(0, run.num_steps)

    def take() -> int:
        run.take_step(next(steps))
        return 1

    return take


def decoding(kind: str | None) -> Callable[[], int]:
    """Return what decodes 32 tokens, with a drafter or without, and says in how many rounds."""
    from blockdraft.decoding import generate
    from blockdraft.drafters import DrafterConfig, build_drafter
    from blockdraft.targets import Target

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(shape), None, name="random", mask_token_id=5)
    target.eos_ids = frozenset()
    drafter = None
    if kind is not None:
        config = DrafterConfig.for_target(kind, target, num_layers=2, num_proposals=10, num_features=3)
        drafter = build_drafter(config).eval()
    prompt = list(range(50, 178))
    return lambda: len(generate(target, drafter, prompt, rule="block", max_new_tokens=32, seed=0).rounds)


CASES: dict[str, Callable[[], Callable[[], int]]] = {
    **{f"objective {name}": lambda name=name: objective_step(name) for name in ("bv", "kl", "ce")},
    "training step, DFlash": lambda: training_step("dflash"),
    "training step, DSpark": lambda: training_step("dspark"),
    "decoding, no drafter": lambda: decoding(None),
    "decoding, DFlash": lambda: decoding("dflash"),
    "decoding, DSpark": lambda: decoding("dspark"),
}


def work(case: str, tree: Path) -> None:
    """Serve steps of a case with the package of this tree."""
    import blockdraft

    torch.set_num_threads(1)
    if tree not in Path(blockdraft.__file__).resolve().parents:
        raise SystemExit(f"{blockdraft.__file__} is not in {tree}")
    run = CASES[case]()

    def timed() -> dict[str, Any]:
        start = time.process_time()
        num = run()
        return {"seconds": (time.process_time() - start) / num}

    serve(timed)


def compare(case: str, trees: list[Path], rounds: int) -> dict[str, Any]:
    """Return the medians of both versions and their ratio, round by round, after a step that does not count."""
    workers = []
    for tree in trees:
        environment = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable]
        workers.append(Worker(*command, __file__, *map(str, trees), "--serve", case, "--tree", tree))
    found = [[worker.take()["seconds"] for worker in workers] for _ in range(rounds + 1)][1:]
    for worker in workers:
        worker.close()
    before, now = zip(*found, strict=True)
    ratios = [b / a for a, b in found]
    return {
        "before": statistics.median(before), "now": statistics.median(now), "ratio": statistics.median(ratios),
        "least": min(ratios), "most": max(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout of the older version")
    parser.add_argument("now", type=Path, help="checkout of the newer version")
    parser.add_argument("--rounds", type=int, default=3, help="turns that count (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        work(options.serve, options.tree.resolve())
        return
    trees, results, rows = [options.before.resolve(), options.now.resolve()], {}, []
    for case in options.cases:
        print(f"\r{case:<40}", end="", file=sys.stderr, flush=True)
        results[case] = r = compare(case, trees, options.rounds)
        times = [f"{1e3 * r[name]:.1f} ms" for name in ("before", "now")]
        rows.append([case, *times, f"{r['ratio']:.2f}", f"{r['least']:.2f} to {r['most']:.2f}"])
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    print(table(["case", "before", "now", "now over before", "round by round"], rows))
    path = save("versions", {"rounds": options.rounds, "cores": os.cpu_count(), "cases": results})
    print(f"\nwritten to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
