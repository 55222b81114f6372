"""Take one optimizer step: batches made ahead of time, the pass through drafter and objective, optimizers.

On a GPU the drafter's layers are compiled, if compiled ones then compute what they should.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from blockdraft.data import (
    Batch,
    BatchSampler,
    CachedFeatures,
    Features,
    OnlineFeatures,
    TextAnchors,
    TextDataset,
    collate,
    partition,
)
from blockdraft.data.features import build_cache
from blockdraft.distributed import Distributed
from blockdraft.drafters import Drafter
from blockdraft.drafters.attention import Anchors, BlockAttention, ReferenceAttention, default_attention
from blockdraft.drafters.backbone import Layer
from blockdraft.drafters.config import DrafterConfig, SlotLayout
from blockdraft.losses import BlockStatistics, Objective, block_scores, block_statistics, fused_linear_objective
from blockdraft.losses.head_products import TargetIndex
from blockdraft.losses.reduced import ReducedTarget, draft_index, restrict_labels
from blockdraft.losses.rounds import check_runs
from blockdraft.losses.scores import check_labels
from blockdraft.muon import Muon
from blockdraft.recipes import Recipe
from blockdraft.recipes.schema import OptimizerSection, RuntimeSection
from blockdraft.selfcheck import compare, passes_check
from blockdraft.targets import Target, TargetOutput


class PrefetchingLoader:
    """Yields what this process trains on, step by step, ``accumulation`` batches each.

    ``prepare`` is applied to every batch in the thread: what can be checked, read or pinned before a step is.

    seconds_waited: time that the trainer has waited for batches.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        *,
        rank: int,
        world_size: int,
        accumulation: int,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self.sampler, self.rank, self.world_size, self.accumulation = sampler, rank, world_size, accumulation
        self.prepare = prepare
        self.seconds_waited = 0.0

    def steps(self, first: int, end: int) -> Iterator[list[Batch]]:
        """Yield the batches of the optimizer steps from ``first`` to ``end``, two steps prefetched."""
        with ThreadPoolExecutor(1) as pool:
            ahead: list[Future[list[Batch]]] = []
            for step in range(first, end):
                while len(ahead) < 2 and step + len(ahead) < end:
                    ahead.append(pool.submit(self.batches, step + len(ahead)))
                start = time.perf_counter()
                ready = ahead.pop(0).result()
                self.seconds_waited += time.perf_counter() - start
                yield ready

    def batches(self, step: int) -> list[Batch]:
        """Return the batches of one optimizer step, counted from the beginning of training."""
        chosen = self.sampler.step(*divmod(step, self.sampler.steps_per_epoch))
        parts = partition(chosen, self.world_size * self.accumulation, self.sampler.dataset)
        mine = parts[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        return [self.prepare(self._batch(part, chosen)) for part in mine]

    def _batch(self, part: list[TextAnchors], chosen: list[TextAnchors]) -> Batch:
        """Collate a part. An empty one becomes a block that counts for nothing: every process takes part."""
        dataset, num_proposals = self.sampler.dataset, self.sampler.num_proposals
        if part:
            return collate(part, dataset, num_proposals)
        some = chosen[0].text
        batch = collate([TextAnchors(some, np.array([dataset.prompt_lengths[some]]))], dataset, num_proposals)
        return replace(batch, valid=torch.zeros_like(batch.valid))


def make_features(
    recipe: Recipe,
    target: Target,
    dataset: TextDataset,
    layers: Sequence[int],
    normalizer_temperature: float | None,
    on_features: Callable[[int, int], None] | None = None,
) -> Features:
    """Return what gives batches the target's features: the target itself, or a cache, of which the rest is built first.

    All processes of a run build it together.

    Args:
        recipe, target, dataset: of the run.
        layers: the target layers that the drafter reads.
        normalizer_temperature: at which the target's normalizer is needed as well; None if it is not.
        on_features: called while a cache is built, with the tokens that are done and all there are.
    """
    data = recipe.data
    if data.features == "online":
        return OnlineFeatures(target, layers, normalizer_temperature)
    assert data.cache is not None
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        if on_features is not None:
            on_features(done, len(dataset.whole[0].tokens))

    build_cache(
        data.cache, target, dataset, layers, max_bytes=int(data.cache_gib * 2**30),
        normalizer_temperature=normalizer_temperature, on_tokens=count,
    )  # fmt: skip
    return CachedFeatures(data.cache, target, dataset, layers, normalizer_temperature)


class TrainingStep(nn.Module):
    """Runs the forward pass that touches all of the drafter's weights, as a module to be replicated or sharded.

    The target is no part of the module: it is frozen, and shares only its embedding and head.
    """

    def __init__(self, drafter: Drafter, target: Target, precision: torch.dtype, *, fused: bool = True) -> None:
        super().__init__()
        self.drafter = drafter
        self.target, self.precision, self.fused = target, precision, fused

    def forward(
        self, batch: Batch, output: TargetOutput, objective: Objective, *, stats: bool = True
    ) -> tuple[Tensor, Tensor, BlockStatistics | None, Tensor | None]:
        """Return the objective's numerator (with gradient) and denominator, and statistics and survival ``[A, B]``.

        The last two are None without ``stats``. The batch is taken as it is: see `check_batch`.
        """
        assert output.features is not None
        with torch.autocast(batch.tokens.device.type, self.precision, enabled=self.precision != torch.float32):
            features = output.features if self.precision != torch.float32 else output.features.float()
            hidden = self.drafter(features, batch.anchor_tokens, batch.anchors, self.target)
            markov = self.drafter.markov(hidden, batch.previous)
        head, labels, valid = self.drafter.head(self.target), batch.labels, batch.valid
        reduced = None
        if self.drafter.draft_ids is not None:
            labels, valid = restrict_labels(labels, valid, self._draft_index)
            reduced = self._reduced(batch, output, objective.temperature)
        if self.fused:
            value = fused_linear_objective(
                objective, hidden, batch.read_by_blocks(output.hidden), head, head, labels, valid, markov,
                reduced=reduced, segments=batch.segments, target_index=TargetIndex(batch.read_index, batch.read_bounds),
                checked=True, stats=stats,
            )  # fmt: skip
            return value.numerator, value.denominator, value.stats, value.survival
        logits = hidden.to(self.target.dtype) @ head.T
        if markov is not None:
            logits = logits + (markov[0] @ markov[1].T).to(logits.dtype)
        target_logits = linear(batch.at_blocks(output.hidden), head)
        options: dict[str, Any] = {"temperature": objective.temperature, "reduced": reduced}
        value = objective(logits, target_logits, labels, valid, reduced=reduced, segments=batch.segments)
        if not stats:
            return value.numerator, value.denominator, None, None
        measured = block_statistics(logits, target_logits, labels, valid, **options)
        log_sampled, _ = block_scores(logits.detach(), target_logits, labels, valid, **options)
        return value.numerator, value.denominator, measured, log_sampled.exp()

    def _reduced(self, batch: Batch, output: TargetOutput, temperature: float) -> ReducedTarget:
        """Return the target's normaliser and argmax at the blocks' positions, the argmax as an index into D."""
        assert output.normalizer is not None
        log_z, argmax = (batch.read_by_blocks(each) for each in (output.normalizer.log_z, output.normalizer.argmax))
        return ReducedTarget(log_z[batch.read_index], self._draft_index[argmax[batch.read_index]], temperature)

    @cached_property
    def _draft_index(self) -> Tensor:
        """Give the place of every token in the drafter's vocabulary ``[V]``; looked up once, since it is checked."""
        assert self.drafter.draft_ids is not None
        return draft_index(self.drafter.draft_ids, self.target.vocab_size)


def make_step(drafter: Drafter, target: Target, runtime: RuntimeSection, device: torch.device) -> TrainingStep:
    """Build the pass that a recipe asks for: its precision, by default bfloat16 on accelerators; layers compiled."""
    default = "float32" if device.type == "cpu" else "bfloat16"
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[runtime.precision or default]
    if compiles(runtime.compile, device, precision):
        for layer in drafter.layers:
            layer.compile()
    return TrainingStep(drafter, target, precision, fused=runtime.fused)


def check_batch(batch: Batch, vocab_size: int) -> None:
    """Refuse labels outside the vocabulary and masks with holes, on the CPU: a device would make the host wait."""
    check_labels(batch.labels, batch.valid, vocab_size)
    if batch.segments is not None:
        check_runs(batch.segments, batch.labels, batch.valid)


def make_optimizers(
    module: nn.Module, options: OptimizerSection, distributed: Distributed | None = None
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a recipe over a module's parameters; each parameter belongs to exactly one of them.

    On CUDA, AdamW takes one kernel for all of them. Muon's iterations are shared by the processes that train together.
    """
    adamw: dict[str, Any] = {
        "lr": options.learning_rate, "betas": options.betas, "weight_decay": options.weight_decay
    }  # fmt: skip
    if all(parameter.is_cuda for parameter in module.parameters()):
        adamw["fused"] = True
    if options.name == "adamw":
        return [torch.optim.AdamW(module.parameters(), **adamw)]
    named = dict(module.named_parameters())
    matrices = [parameter for name, parameter in named.items() if is_matrix(name, parameter)]
    others = [parameter for name, parameter in named.items() if not is_matrix(name, parameter)]
    muon = Muon(matrices, lr=options.learning_rate, weight_decay=options.weight_decay, distributed=distributed)
    return [muon, torch.optim.AdamW(others, **adamw)]


def scale_gradients(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply all gradients by a number on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and not any(isinstance(gradient, DTensor) for gradient in gradients):
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        return
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: matrices between hidden states, not tables over the vocabulary."""
    return parameter.dim() == 2 and not name.startswith("markov_head.markov_w")


def learning_rate_at(step: int, num_steps: int, options: OptimizerSection) -> float:
    """Return the learning rate of an optimizer step, counted from 0.

    ``learning_rate * (step + 1) / W`` for the first ``W = ceil(warmup_ratio * num_steps)`` steps, then half a cosine
    down to 0.
    """
    num_warmup = math.ceil(options.warmup_ratio * num_steps)
    if step < num_warmup:
        return options.learning_rate * (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


PART = "the drafter's compiled layers"
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
"""Products in float32 may round their factors to ten bits on a GPU."""


def compiles(asked: bool | None, device: torch.device, precision: torch.dtype) -> bool:
    """Return whether to compile: as asked; if not asked, on CUDA, where a small layer first has to pass a check.

    On CUDA a layer that is asked for and fails raises `SelfCheckError`.
    """
    if device.type != "cuda":
        return bool(asked)
    if asked is False:
        return False
    check = lambda: check_compiled(device, precision)  # noqa: E731
    return passes_check(PART, device, check, key=(str(precision),), strict=True if asked else None)


def check_compiled(device: torch.device, precision: torch.dtype) -> None:
    """Raise unless a compiled layer agrees with the definition of its attention: output, and gradients."""
    config = DrafterConfig(
        kind="dflash", slot_layout=SlotLayout.FILL_IN, num_proposals=7, num_layers=1, hidden_size=128,
        intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=10_000.0,
        vocab_size=32, mask_token_id=0, num_target_layers=8, target_layers=(1,),
    )  # fmt: skip
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        layer = Layer(config).to(device)
        x, context = (torch.randn(shape, device=device) for shape in ((5, 8, 128), (1, 300, 128)))
        position = torch.tensor([9, 40, 130, 200, 290], device=device)
        anchors = Anchors.of(torch.zeros_like(position), position)
        expected = _results(layer, x, context, ReferenceAttention(anchors), precision)
        compiled = Layer(config).to(device)
        compiled.load_state_dict(layer.state_dict())
        compiled.compile()
        found = _results(compiled, x, context, default_attention(anchors, 8, 1, 300, (4, 2, 64), precision), precision)
    for name, value in expected.items():
        compare(name, found[name], value, TOLERANCE[precision])


def _results(
    layer: Layer, x: Tensor, context: Tensor, attend: BlockAttention, precision: torch.dtype
) -> dict[str, Tensor]:
    x, context = x.clone().requires_grad_(), context.clone().requires_grad_()
    flat = [torch.ones(*each.shape[:2], 64, device=x.device) for each in (x, context)]
    rotary, context_rotary = ((each.cos(), each.sin()) for each in flat)
    with torch.autocast(x.device.type, precision, enabled=precision != torch.float32):
        out = layer(x.to(precision), rotary, context.to(precision), context_rotary, attend)
    out.float().square().mean().backward()
    assert x.grad is not None
    assert context.grad is not None
    gradients = {f"the gradient of {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"the output": out.detach(), "the gradient": x.grad, "the context's gradient": context.grad} | gradients
