"""One training step of ours, taken apart: a worker that `training.py` asks for steps, one at a time.

The trainer, its loader and its batches are the product's own; only clocks are hung around the calls that make up a
step. Texts have random tokens: what a step costs does not depend on which ones, if the drafter can propose them.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.data import Batch, Conversation, Engine, Features, GenerationSettings, Prompt, regenerate
from blockdraft.recipes import load_recipe
from blockdraft.targets import DTYPES, Sampling, Target, TargetOutput, load_target
from blockdraft.training import Trainer, step, trainer

from measuring import Peak, serve

PROMPT, RESPONSE = (12, 48), (64, 256)
"""Shortest and longest, in tokens."""

DIFFERENT_TOKENS = 4000
"""Number of tokens that responses are drawn from, fewer than any reduced draft vocabulary here."""

SQUARE = 1536
"""Side of the matrices whose product gives the machine's rate."""


class Dice(Engine):
    """Responses of random tokens and random lengths."""

    name, repeatable = "dice", True

    def prepare(self, target: Target, sampling: Sampling) -> None:
        pass

    def run(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        for each in conversations:
            rng = np.random.default_rng(each.index)
            last = min(each.target.vocab_size, 100 + DIFFERENT_TOKENS)
            each.answer(rng.integers(100, last, rng.integers(*RESPONSE)).tolist())
            yield each

    def describe(self) -> dict[str, Any]:
        return {}


def make_data(folder: Path, target: Target, num: int) -> None:
    """A data folder with so many texts."""
    rng = np.random.default_rng(0)
    words = ["river", "stone", "light", "garden", "engine", "letter", "winter", "market"]
    prompts = [Prompt(f"p{i}", (" ".join(rng.choice(words, rng.integers(*PROMPT) // 2)),)) for i in range(num)]
    regenerate(prompts, target, GenerationSettings(max_length=768), folder, engine=Dice())


class Clock:
    """Seconds by phase; what no phase counts is the rest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, phase: str) -> None:
        """Count the time spent in ``owner.name`` as that phase's."""
        run: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = run(*arguments, **options)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            return result

        setattr(owner, name, timed)


def hang_clocks(run: Trainer) -> Clock:
    clock = Clock()
    clock.around(type(run.features), "__call__", "target")
    clock.around(run.drafter, "forward", "drafter")
    clock.around(step, "fused_linear_objective", "objective")
    clock.around(Tensor, "backward", "backward")
    clock.around(trainer, "clip_grad_norm_", "optimizer")
    for optimizer in run.optimizers:
        clock.around(optimizer, "step", "optimizer")
        clock.around(optimizer, "zero_grad", "optimizer")
    return clock


def work(run: Trainer, batch: Batch) -> dict[str, float]:
    """Floating-point operations that a step cannot do without, by phase: two for each multiplication of its products.

    Only what is asked for counts: tokens inside of texts, context that a block sees, positions that have a label. A
    product's backward pass is two of its size, but for the features, which need no gradient. The objective's products
    are the drafter's logits, the target's, and the gradient of the hidden states.
    """
    config, target = run.config, run.target
    lengths = np.array([span.end - span.start for span in batch.spans])
    num_tokens, num_slots = int(lengths.sum()), len(batch.anchors) * config.num_slots
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width, seen = config.hidden_size, batch.anchors.position - batch.anchors.start
    layer = 2 * width * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    features = 2 * num_tokens * len(config.target_layers) * width**2
    attention = 4 * queries * config.num_slots * int((seen + config.num_slots).sum())
    drafter = features + config.num_layers * (layer * num_slots + 4 * num_tokens * width * keys + attention)
    matrices = sum(p.numel() for p in target.model.model.layers.parameters() if p.dim() == 2)
    causal = 4 * target.num_layers * queries * int((lengths * (lengths + 1) // 2).sum())
    return {
        "target": 2.0 * num_tokens * matrices + causal,
        "drafter": float(drafter),
        "objective": 6.0 * int(batch.valid.sum()) * width * target.vocab_size,
        "backward": float(2 * drafter - features),
    }


def matrix_product_rate(repeat: int = 3) -> float:
    """Operations per second of a large square product in float32."""
    a, b = torch.ones(2, SQUARE, SQUARE)
    out = torch.empty_like(a)
    start = time.perf_counter()
    for _ in range(repeat):
        torch.mm(a, b, out=out)
    return repeat * 2 * SQUARE**3 / (time.perf_counter() - start)


class Given(Features):
    """What the target computed once, for a step that does not run it."""

    def __init__(self, output: TargetOutput) -> None:
        self.output = output

    def __call__(self, batch: Batch) -> TargetOutput:
        del batch
        return self.output


def export(run: Trainer, batch: Batch, path: Path) -> None:
    """The same step for another package: texts end to end, features, anchors, all weights.

    Padding behind the last text leaves its blocks room to end.
    """
    target, config = run.target, run.config
    before_norm: list[Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0]))
    output = run.features(batch)
    hook.remove()
    assert output.features is not None
    documents = torch.full_like(batch.tokens, -1)
    for number, span in enumerate(batch.spans):
        documents[span.row, span.start : span.end] = number
    labels = batch.anchors.position[:, None] + 1 + torch.arange(config.num_proposals)
    mask = torch.zeros_like(documents)
    mask[batch.anchors.row[:, None].expand_as(labels)[batch.valid], labels[batch.valid]] = 1
    inside = documents.flatten() >= 0
    place = (inside.cumsum(0) - 1).view_as(documents)
    by_token = {
        "tokens": batch.tokens, "features": output.features, "hidden": before_norm[0], "mask": mask,
        "documents": documents, "positions": batch.positions,
    }  # fmt: skip
    tensors = {name: tensor.flatten(0, 1)[inside] for name, tensor in by_token.items()}
    for name, tensor in tensors.items():
        padding = tensor.new_full((config.num_slots, *tensor.shape[1:]), -1 if name == "documents" else 0)
        tensors[name] = torch.cat([tensor, padding])
    tensors |= {
        "anchors": place[batch.anchors.row, batch.anchors.position], "head": target.head.clone(),
        "embedding": target.embedding, "norm": target.model.model.norm.weight,
    }  # fmt: skip
    tensors |= {f"drafter.{name}": tensor for name, tensor in run.drafter.state_dict().items()}
    about = {"config": json.dumps(config.to_dict()), "optimizer": run.recipe.optimizer.model_dump_json()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("assignments", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--given", type=Path, help="one batch, its features given; the step is written to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"data.path={folder}/data",
            f"data.cache={folder}/cache",
            "data.num_heldout=0",
            "optimizer.num_train_epochs=100000",
            *options.assignments,
        ]
        recipe = load_recipe(options.recipe, settings)
        dtype = recipe.target.dtype
        target = load_target(recipe.target.name, dtype=None if dtype is None else DTYPES[dtype])
        make_data(Path(folder) / "data", target, recipe.batch.num_texts)
        run = Trainer(recipe, target, Path(folder) / "run")
        batches = run.loader.steps(0, run.num_steps)
        if options.given:
            first = next(batches)
            export(run, first[0], options.given)
            run.features = Given(run.features(first[0]))
            batches = itertools.repeat(first)
        clock, peak = hang_clocks(run), Peak()

        def take() -> dict[str, Any]:
            products = [matrix_product_rate()]
            clock.seconds.clear()
            start = time.perf_counter()
            parts = next(batches)
            waited = time.perf_counter() - start
            metrics = run.take_step(parts)
            seconds = time.perf_counter() - start
            phases = clock.seconds | {"data": waited}
            products.append(matrix_product_rate())
            return {
                "seconds": seconds, "phases": phases | {"rest": seconds - sum(phases.values())},
                "work": work(run, parts[0]), "product_rates": products, "num_blocks": metrics["num_blocks"],
                "loss": metrics["loss"], "extra_bytes": peak.extra_bytes(),
            }  # fmt: skip

        serve(take)


if __name__ == "__main__":
    main()
