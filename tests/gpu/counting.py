"""Counts training steps and decoding rounds of full-size recipes on a fake CUDA device, op by op; prints JSON.

    python tests/gpu/counting.py qwen3-4b-dflash-bv qwen3-4b-dspark-bv
    python tests/gpu/counting.py --decoding qwen3-4b-dflash-bv

Each recipe takes one step of one device's share of the paper's batch: 2,048 blocks in 4 texts of 1,000 tokens; or a
round of its drafter, and one without it, behind a prompt of 100 tokens, plain and as a CUDA graph would hold it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from blockdraft.data import Batch, Completion, Features, TextDataset
from blockdraft.decoding import rounds as decoding_rounds
from blockdraft.decoding.rounds import Plan, Rounds
from blockdraft.distributed import Distributed
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.drafters import attention as drafter_attention
from blockdraft.drafters import drafter as drafter_module
from blockdraft.losses import kernel_choice, objective, objective_names
from blockdraft.recipes import Recipe, load_recipe
from blockdraft.targets import Sampling, Span, Target, TargetOutput, decoder, layers, target_shape
from blockdraft.targets import attention as target_attention
from blockdraft.targets import target as target_module
from blockdraft.training import trainer

from fake_device import NoFakeDeviceError, Tally, pretend

TEXTS, TOKENS, PROMPT, BLOCKS = 4, 1000, 100, 2048
END = 151_645
"""Qwen3's end of a turn."""


class _Attended(torch.autograd.Function):
    """Stands in for compiled flex attention: one kernel forward, two backward, keeping what it keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query).zero_()
        log_sum = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        assert grad.shape == out.shape
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _flex(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
    assert query.dtype == key.dtype == value.dtype
    assert enable_gqa
    assert block_mask is not None
    result: Tensor = _Attended.apply(query, key, value)
    return result


def _block_mask(_visible: Any, _b: Any, _h: Any, num_queries: int, num_keys: int, device: str) -> dict[str, Tensor]:
    """Stands in for `create_block_mask`: counts and indices of tiles of 128 by 128, for both passes."""
    rows, columns = -(-num_queries // 128), -(-num_keys // 128)
    shapes = {"kv": (rows, columns), "full_kv": (rows, columns), "q": (columns, rows), "full_q": (columns, rows)}
    return {name: torch.zeros(1, 1, *shape, dtype=torch.int32, device=device) for name, shape in shapes.items()}


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Stands in for flash attention over one text."""
    assert query.dtype == key.dtype == value.dtype
    assert options["is_causal"]
    return torch.empty_like(query).zero_()


def _sdpa_in_decoding(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor:
    """Stands in for attention behind a cache; a mask has the queries' precision, and the sizes that kernels want."""
    assert query.dtype == key.dtype == value.dtype
    assert query.device == key.device == value.device
    assert is_causal or query.shape[1] == key.shape[1]  # keys are not repeated
    if attn_mask is not None:
        assert attn_mask.dtype == query.dtype
        assert attn_mask.shape == (query.shape[2], key.shape[2])
    return torch.empty_like(query).zero_()


def _norm_in_decoding(x: Tensor, _shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    assert eps is not None
    assert weight is None or weight.dtype == x.dtype
    return torch.empty_like(x).zero_()


class _Normed(torch.autograd.Function):
    """Stands in for CUDA's fused RMSNorm: one kernel forward and two backward, keeping input and a scale per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device))
        return torch.empty_like(x).zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        assert grad.dtype == x.dtype
        return torch.zeros_like(x), torch.zeros_like(weight)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Do as CUDA does: autocast computes norms in float32; dtypes that differ take a slow path, which is refused."""
    assert weight is not None
    del shape, eps
    if torch.is_autocast_enabled("cuda"):
        x, weight = x.float(), weight.float()
    assert x.dtype == weight.dtype
    with torch.autocast("cuda", enabled=False):
        result: Tensor = _Normed.apply(x, weight)
    return result


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Stands in for `nn.Module._apply`, which swaps tensors that this device's storages forbid to swap."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[name] = nn.Parameter(fn(parameter), parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def set_up() -> None:
    """Pretend a device, and put stand-ins where a kernel would run that no fake tensor can."""
    pretend()
    kernel_choice.passes_check = lambda *_, **__: True
    drafter_attention._flex = lambda _compiled: _flex
    drafter_attention._make_mask = lambda _compiled: _block_mask
    target_attention.scaled_dot_product_attention = _sdpa
    layers.scaled_dot_product_attention = _sdpa_in_decoding
    layers.rms_norm = _norm_in_decoding
    decoder.passes_check = lambda *_, **__: True
    decoder._is_supported = lambda model: model.config.model_type in decoder.FAMILIES
    target_module.weights_key = drafter_module.weights_key = lambda _module: 0
    torch.tensor = _tensor
    decoding_rounds.Generator = lambda _device=None: torch.Generator()  # there is none of the fake device
    decoding_rounds.Streams.seed = lambda *_: None
    trainer.Trainer.save = lambda *_: None
    nn.functional.rms_norm = _rms_norm
    nn.Module._apply = _apply  # type: ignore[method-assign]
    Target._refuse_unfaithful = lambda _self: None
    target_module._refuse_non_finite = lambda _model, _name: None
    target_module.weights_fingerprint = lambda _module: "0" * 16
    FakeTensor.tolist = lambda self: (self.flatten()[0].item(), [False] * self.numel())[1]
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Stands in for `torch.tensor`, which would ask the device for memory."""
    made = _make_tensor(data, **options)
    return made if device is None else made.to(device)


_make_tensor = torch.tensor


def make_target(name: str) -> Target:
    """Build the target of a shipped recipe on the fake device, in bfloat16."""
    recipe = load_recipe(name)
    config = target_shape(recipe.target.name, recipe.target.shape).config
    with torch.device("cuda"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Target(model, None, name=recipe.target.name, mask_token_id=recipe.target.mask_token_id or 151_669)


def dataset() -> TextDataset:
    """Return texts long enough that a step has its blocks."""
    text = list(range(1000, 1000 + TOKENS))
    return TextDataset.of([Completion(str(i), text[:PROMPT], text[PROMPT:], "stop") for i in range(6 * TEXTS)])


def make_trainer(recipe: Recipe, target: Target, folder: Path) -> trainer.Trainer:
    """Build the product's own trainer on the fake device."""
    trainer.open_dataset = lambda *_: dataset()
    device = Distributed("cuda")
    return trainer.Trainer(recipe, target, folder, device)


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


def count_step(name: str, *assignments: str, logged: bool = False, run_target: bool = True) -> dict[str, Any]:
    """Train, and count the second step, in which the optimizer has its state; it is logged only if asked."""
    fields = [f"logging.logging_steps={1 if logged else 10}", *assignments]
    found: dict[str, Any] = {}
    with FakeTensorMode() as mode, tempfile.TemporaryDirectory() as folder, Tally() as tally:
        run = make_trainer(share(name, *fields), make_target(name), Path(folder))
        if not run_target:
            run.features = Given(run.target, len(run.config.target_layers))
        load = run.loader.steps
        run.loader.steps = lambda *span: (without_storage(batches, mode) for batches in load(*span))

        def see(progress: trainer.Progress) -> None:
            if progress.step == 1:
                tally.restart()
                return
            found.update(report(run, tally))
            raise Seen

        with contextlib.suppress(Seen):
            run.train(see)
    return found


def report(run: trainer.Trainer, tally: Tally) -> dict[str, Any]:
    """Return what was counted in a step, after a look at what it left."""
    for parameter in run.drafter.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.device.type == "cuda"
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    config = run.config
    return tally.report(
        vocab_size=config.vocab_size,
        num_rows=BLOCKS * config.num_proposals,
        tables={config.hidden_size, config.markov_rank},
    )


def count_objectives(name: str) -> dict[str, Any]:
    """Take a step of every objective with the drafter of this recipe; the target's output is given."""
    found = {}
    with FakeTensorMode() as mode, tempfile.TemporaryDirectory() as folder, Tally() as tally:
        run = make_trainer(share(name, "annealing=null"), make_target(name), Path(folder))
        run.features, run.annealing = Given(run.target, len(run.config.target_layers)), None
        with _disable_current_modes():
            batches = run.loader.batches(0)
        batches = without_storage(batches, mode)
        for each in objective_names():
            run.objective = objective(each, drafter=run.config.kind)
            tally.restart()
            run.take_step(batches)
            found[each] = report(run, tally)
    return found


def count_decoding(name: str) -> dict[str, Any]:
    """Count a round with this recipe's drafter and one without, plain and with static shapes."""
    recipe, found = load_recipe(name), {}
    with FakeTensorMode(), Tally() as tally, torch.no_grad():
        target = make_target(name)
        target.eos_ids = frozenset([END])
        config = DrafterConfig.for_target(recipe.drafter.kind, target, **recipe.drafter.config_options())
        with torch.device("cuda"):
            drafter = build_drafter(config).to(target.dtype).eval()
        for who in (drafter, None):
            for static in (False, True):
                rounds = Rounds(target, who, Plan("block", Sampling(), 1.0), 512, static=static)
                rounds.start(list(range(PROMPT)), 0)
                key = f"{'autoregressive' if who is None else config.kind}, {'static' if static else 'plain'}"
                found[key] = _count_round(rounds, tally)
    return found


def _count_round(rounds: Rounds, tally: Tally) -> dict[str, Any]:
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
    return {
        "launches": tally.launches.total(), "by_phase": by_phase, "waits": tally.waits.total(),
        "waits_in_phases": sum(waiting.values()), "copies": tally.copies.total(),
        "waits_by_line": dict(tally.waits.most_common()), "copies_by_line": dict(tally.copies.most_common()),
        "most": dict(tally.launches.most_common(12)),
    }  # fmt: skip


def main() -> None:
    """Count the recipes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--logged", action="store_true", help="count a step that is logged")
    parser.add_argument("--objectives", action="store_true", help="take a step of every objective instead")
    parser.add_argument("--decoding", action="store_true", help="count rounds of decoding instead")
    parser.add_argument("--skip-target", action="store_true", help="leave the pass of the target out")
    options = parser.parse_args()
    try:
        set_up()
    except NoFakeDeviceError as error:
        json.dump({"skipped": str(error)}, sys.stdout)
        return
    for name in options.recipes:
        if options.objectives:
            found = count_objectives(name)
        elif options.decoding:
            found = count_decoding(name)
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
