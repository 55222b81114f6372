"""Counts training steps, decoding rounds and data slots of full-size recipes on a fake CUDA device; prints JSON.

    python tests/gpu/counting.py qwen3-4b-dflash-bv qwen3-4b-dspark-bv
    python tests/gpu/counting.py --objectives qwen3-4b-dspark-bv
    python tests/gpu/counting.py --decoding qwen3-4b-dflash-bv
    python tests/gpu/counting.py --slots qwen3-4b-dflash-bv

Each recipe takes one step of one device's share of the paper's batch: 2,048 blocks in 4 texts of 1,000 tokens; or such
a step of every objective; or a round of its drafter, and one without it, behind a prompt of 100 tokens, plain and as a
CUDA graph would hold it; or its target samples a token for each of 64 texts. Without recipes, everything that the
tests hold to a budget is counted in one process.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from blockdraft.data import Batch, Completion, Features, LocalEngine, TextDataset
from blockdraft.data.conversation import Request, _Response
from blockdraft.decoding.rounds import Plan, RoundRunner
from blockdraft.distributed import Distributed
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.losses import objective, objective_names
from blockdraft.recipes import Recipe, load_recipe
from blockdraft.targets import BatchedKVCache, Sampling, Span, Target, TargetOutput, target_shape
from blockdraft.training import trainer

from fake_device import NoFakeDeviceError, Tally
from stand_ins import put_in_place

TEXTS, TOKENS, PROMPT, BLOCKS, SLOTS = 4, 1000, 100, 2048, 64
CHUNK, FEW_LAYERS = 224, 9
"""Blocks of one chunk of the objective, and layers of a target whose rounds are counted quickly."""

VARIANTS = {"bv-cv": ("bv", {"control_variate": True})}
"""Objectives with options, which are counted as well."""

END = 151_645
"""Qwen3's end of a turn."""


@dataclasses.dataclass
class Bench:
    """A fake device with the target of a recipe on it, and what counts."""

    target: Target
    mode: FakeTensorMode
    tally: Tally


@contextlib.contextmanager
def bench(name: str, num_layers: int | None = None) -> Iterator[Bench]:
    """Put the target of a shipped recipe on the fake device, in bfloat16; with fewer layers if asked for."""
    recipe = load_recipe(name)
    config = target_shape(recipe.target.name, recipe.target.shape).config
    if num_layers is not None:
        config.num_hidden_layers, config.layer_types = num_layers, config.layer_types[:num_layers]
    with FakeTensorMode() as mode, Tally() as tally:
        with torch.device("cuda"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        mask = recipe.target.mask_token_id or 151_669
        target = Target(model, None, name=recipe.target.name, mask_token_id=mask)
        target.eos_ids = frozenset([END])
        yield Bench(target, mode, tally)


def dataset() -> TextDataset:
    """Return texts long enough that a step has its blocks."""
    text = list(range(1000, 1000 + TOKENS))
    return TextDataset.of([Completion(str(i), text[:PROMPT], text[PROMPT:], "stop") for i in range(6 * TEXTS)])


@contextlib.contextmanager
def training(where: Bench, recipe: Recipe) -> Iterator[trainer.Trainer]:
    """Give the product's own trainer on the fake device, and free it afterwards."""
    trainer.open_dataset = lambda *_: dataset()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer.Trainer(recipe, where.target, Path(folder), Distributed("cuda"))
        load = run.loader.steps
        run.loader.steps = lambda *span: (without_storage(batches, where.mode) for batches in load(*span))
        yield run
    run.__dict__.clear()
    gc.collect()


def share(name: str, *assignments: str) -> Recipe:
    """Return a recipe with one device's share of the paper's batch."""
    fields = [
        f"batch.num_texts={TEXTS}", f"batch.num_anchors={BLOCKS}", "data.path=there", "data.num_heldout=0",
        "runtime.device=cuda", "runtime.compile=false", *assignments,
    ]  # fmt: skip
    return load_recipe(name, fields)


def without_storage(value: Any, mode: FakeTensorMode) -> Any:
    """Return batches with fake tensors in the place of real ones, however deep they lie."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list):
        return [without_storage(each, mode) for each in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, Span):
        return value
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return type(value)(**{name: without_storage(part, mode) for name, part in parts.items()})


class Given(Features):
    """Stands in for a pass of the target, whose output is there."""

    def __init__(self, target: Target, num_layers: int) -> None:
        self.target, self.num_layers = target, num_layers

    def __call__(self, batch: Batch) -> TargetOutput:
        made = torch.empty(
            *batch.tokens.shape, (1 + self.num_layers) * self.target.hidden_size, device="cuda", dtype=self.target.dtype
        )
        return TargetOutput(made[..., : self.target.hidden_size], made[..., self.target.hidden_size :])


class Seen(Exception):  # noqa: N818
    """The step that is counted is over."""


def count_step(
    name: str, *assignments: str, where: Bench | None = None, logged: bool = False, run_target: bool = True
) -> dict[str, Any]:
    """Train, and count the second step, in which the optimizer has its state; it is logged only if asked."""
    if where is None:
        with bench(name) as made:
            return count_step(name, *assignments, where=made, logged=logged, run_target=run_target)
    fields = [f"logging.logging_steps={1 if logged else 10}", *assignments]
    found: dict[str, Any] = {}
    with training(where, share(name, *fields)) as run:
        features = run.features
        run.features = given = Given(run.target, len(run.config.target_layers))

        def see(progress: trainer.Progress) -> None:
            if progress.step == 1:
                run.features = features if run_target else given
                where.tally.restart()
                return
            found.update(report(run, where.tally, BLOCKS))
            raise Seen

        with contextlib.suppress(Seen):
            run.train(see)
    return found


def report(run: trainer.Trainer, tally: Tally, num_blocks: int) -> dict[str, Any]:
    """Return what was counted in a step, after a look at what it left."""
    for parameter in run.drafter.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.device.type == "cuda"
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    config = run.config
    return tally.report(
        vocab_size=config.vocab_size,
        num_rows=num_blocks * config.num_proposals,
        tables={config.hidden_size, config.markov_rank, config.hidden_size + config.markov_rank},
    )


def count_given(
    name: str, *assignments: str, where: Bench | None = None, objectives: tuple[str, ...] = (), read: bool = False
) -> dict[str, Any]:
    """Take a step of each objective, or of the recipe's; the target's output is given, the optimizer has its state."""
    if where is None:
        with bench(name) as made:
            return count_given(name, *assignments, where=made, objectives=objectives, read=read)
    found = {}
    with training(where, share(name, *(["annealing=null"] if objectives else []), *assignments)) as run:
        run.features = Given(run.target, len(run.config.target_layers))
        with _disable_current_modes():
            batches = run.loader.batches(0)
        batches = without_storage(batches, where.mode)
        for parameter in run.drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in run.optimizers:
            optimizer.step()
        run.drafter.rotary(
            torch.zeros(1, 1, dtype=torch.long, device="cuda"), torch.bfloat16
        )  # its table goes there once
        for each in objectives or (run.objective.name,):
            if objectives:
                kind, options = VARIANTS.get(each, (each, {}))
                run.objective = objective(kind, drafter=run.config.kind, **options)
            where.tally.restart()
            run.take_step(batches, read=read)
            found[each] = report(run, where.tally, run.recipe.batch.num_anchors)
    return found


@torch.no_grad()
def count_decoding(
    name: str, paths: tuple[str, ...] = ("plain", "static"), *, where: Bench | None = None, alone: bool = True
) -> dict[str, Any]:
    """Count a round with this recipe's drafter and, unless it is left out, one ``alone``."""
    if where is None:
        with bench(name) as made:
            return count_decoding(name, paths, where=made, alone=alone)
    recipe, found, target = load_recipe(name), {}, where.target
    config = DrafterConfig.for_target(recipe.drafter.kind, target, **recipe.drafter.config_options())
    with torch.device("cuda"):
        drafter = build_drafter(config).to(target.dtype).eval()
    for who in (drafter, None) if alone else (drafter,):
        for path in paths:
            rounds = RoundRunner(target, who, Plan("block", Sampling(), 1.0), 512, static=path == "static")
            rounds.start(list(range(PROMPT)), 0)
            kind = "autoregressive" if who is None else config.kind
            found[f"{kind}, {path}"] = _count_round(rounds, where.tally)
    return found


def count_slots(name: str, *, where: Bench | None = None) -> dict[str, Any]:
    """Count what it takes to read texts into slots, and to sample one token for every text in them."""
    if where is None:
        with bench(name) as made:
            return count_slots(name, where=made)
    target, tally, found = where.target, where.tally, {}
    engine, slots = LocalEngine(target, SLOTS), BatchedKVCache(target, SLOTS, 512)
    request = Request(target, (), list(range(PROMPT)), Sampling(), 100, 0)
    responses = [_Response(None, request) for _ in range(SLOTS)]  # type: ignore[arg-type]
    slots.add([request.prompt_ids] * (SLOTS - 8))
    for what in ("read", "step", "step"):
        tally.restart()
        hidden = slots.add([request.prompt_ids] * 8) if what == "read" else slots.step([END] * SLOTS)
        rows = responses[: len(hidden)]
        engine._draw(hidden, rows)
        found[what] = _counted(tally)
        assert tally.product_dtypes == {torch.bfloat16}
        assert hidden.device.type == "cuda"
    return found


def count_all() -> dict[str, Any]:
    """Count everything that has a budget, without counting twice what is the same.

    Objectives take steps of one chunk of blocks, with one layer of the drafter. Plain rounds, and slots, have nine of
    the target's layers. All layers and all chunks have the same counts.
    """
    every = (*objective_names(), *VARIANTS)
    small = ["drafter.num_layers=1", "batch.num_texts=1", f"batch.num_anchors={CHUNK}"]
    (dflash, dspark), (large_dflash, large_dspark) = (
        [f"qwen3-{size}-{kind}-bv" for kind in ("dflash", "dspark")] for size in ("4b", "8b")
    )
    with bench(dflash) as where:
        steps = {dflash: count_step(dflash, where=where)} | {dspark: count_given(dspark, where=where)["bv"]}
        objectives = {name: count_given(name, *small, where=where, objectives=every) for name in (dflash, dspark)}
        logged = count_given(dflash, *small, where=where, read=True)
        rounds = {dflash: count_decoding(dflash, ("static",), where=where)}
    with bench(dflash, FEW_LAYERS) as where:
        plain = count_decoding(dflash, ("plain",), where=where)
        plain |= count_decoding(dspark, ("plain",), where=where, alone=False)
    with bench(large_dflash) as where:
        steps |= {name: count_given(name, where=where)["bv"] for name in (large_dflash, large_dspark)}
        rounds[large_dspark] = count_decoding(large_dspark, ("static",), where=where, alone=False)
    with bench(large_dflash, FEW_LAYERS) as where:
        slots = count_slots(large_dflash, where=where)
    rounds[f"{dflash}, {FEW_LAYERS} layers"] = plain
    return {"steps": steps, "objectives": objectives, "logged": logged, "rounds": rounds, "slots": slots}


def _count_round(rounds: RoundRunner, tally: Tally) -> dict[str, Any]:
    """Count the second round, phase by phase; the first makes what is made once."""
    by_phase: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for _ in range(2):
        tally.restart()
        for name in rounds.phases:
            before = tally.launches.total(), tally.waits.total()
            rounds.run(name)
            by_phase[name], waiting[name] = tally.launches.total() - before[0], tally.waits.total() - before[1]
            if name == "decide":
                rounds.read()
    block = rounds.proposal.tokens.shape[1]
    vocab_size = rounds.target.vocab_size
    assert rounds.logits.shape == rounds.target_probs.shape == (1, 1 + block, vocab_size)
    assert rounds.logits.dtype == torch.bfloat16
    assert rounds.target_probs.dtype == rounds.proposal.probs.dtype == torch.float32
    assert rounds.decision.shape == (block + 3,)
    assert {x.device.type for x in (rounds.logits, rounds.decision, rounds.anchor, rounds.proposal.probs)} == {"cuda"}
    assert tally.product_dtypes == {torch.bfloat16}, tally.product_dtypes
    return _counted(tally) | {"by_phase": by_phase, "waits_in_phases": sum(waiting.values())}


def _counted(tally: Tally) -> dict[str, Any]:
    return {
        "launches": tally.launches.total(), "waits": tally.waits.total(), "copies": tally.copies.total(),
        "blocking_copies": tally.blocking.total(), "waits_by_line": dict(tally.waits.most_common()),
        "copies_by_line": dict(tally.copies.most_common()), "most": dict(tally.launches.most_common(12)),
    }  # fmt: skip


def main() -> None:
    """Count the recipes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--logged", action="store_true", help="count a step that is logged")
    parser.add_argument("--objectives", action="store_true", help="take a step of every objective instead")
    parser.add_argument("--decoding", action="store_true", help="count rounds of decoding instead")
    parser.add_argument("--slots", action="store_true", help="count what sampling 64 texts side by side takes instead")
    parser.add_argument("--skip-target", action="store_true", help="leave the pass of the target out")
    options = parser.parse_args()
    gc.freeze()  # what is imported stays, and need not be looked at again and again
    try:
        put_in_place()
    except NoFakeDeviceError as error:
        json.dump({"skipped": str(error)}, sys.stdout)
        return
    if not options.recipes:
        json.dump(count_all(), sys.stdout)
    for name in options.recipes:
        if options.objectives:
            every = (*objective_names(), *VARIANTS)
            found = count_given(name, *options.set, objectives=every, read=options.logged)
        elif options.decoding:
            found = count_decoding(name)
        elif options.slots:
            found = count_slots(name)
        else:
            found = count_step(name, *options.set, logged=options.logged, run_target=not options.skip_target)
        json.dump({"recipe": name, "found": found}, sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # whatever it is: the process must not wait for the fake device's thread
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
