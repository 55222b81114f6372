"""This module says what an objective is: two sums per block, how sums become a loss, and the schedule of its beta.

Beside the loss an objective returns statistics: how many tokens a verifier would
accept, estimated from the same target-generated blocks, without gradient.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from blockdraft.losses.reduced import ReducedTarget
from blockdraft.losses.scores import Blocks


@dataclass(frozen=True)
class BlockStatistics:
    """BlockStatistics holds sums over blocks, so that chunks, steps and processes add up; means are properties.

    num_blocks: scalar, blocks with at least one valid position.
    num_positions: ``[B]`` valid positions.
    greedy, token, block: ``[B]`` summed prefix retention under each rule, valid positions only.
        block: abar_i, the chance that block verification keeps i tokens or more.
        token: prod_{j<i} min(1, q_j/p_j)(y_j) * sum_v min(p_i, q_i), the same for token verification.
        greedy: whether argmax q = argmax p at positions 1..i. Exact on the target's
            own greedy paths; on sampled paths the later prefixes are not those of greedy decoding.
    accuracy: ``[B]`` positions where argmax q is the stored token (the paper's token accuracy).
    agreement: ``[B]`` positions where argmax q is argmax p.

    Over a reduced draft vocabulary all of it is exact as well: a prefix that holds a token which cannot be
    drafted is never kept, so the positions behind a label outside of it, which are masked, would add nothing.
    """

    num_blocks: Tensor
    num_positions: Tensor
    greedy: Tensor
    token: Tensor
    block: Tensor
    accuracy: Tensor
    agreement: Tensor

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def retention(self, rule: str) -> Tensor:
        """Return Pr(num_accepted >= i) ``[B]`` over all blocks, under ``"greedy"``, ``"token"`` or ``"block"``.

        A block cut to L positions counts as one that could not keep more than L.
        """
        sums: dict[str, Tensor] = {"greedy": self.greedy, "token": self.token, "block": self.block}
        if rule not in sums:
            raise ValueError(f"unknown verification rule {rule!r} (known: {', '.join(sums)})")
        return sums[rule] / self.num_blocks.clamp(min=1)

    def expected_length(self, rule: str) -> Tensor:
        """Return the expected number of accepted draft tokens per block, correction or bonus token excluded."""
        return self.retention(rule).sum()

    @property
    def token_accuracy(self) -> Tensor:
        """Give the share of valid positions where the draft's argmax is the stored token."""
        return self.accuracy.sum() / self.num_positions.sum().clamp(min=1)

    @property
    def argmax_agreement(self) -> Tensor:
        """Give the share of valid positions where the draft's argmax is the target's."""
        return self.agreement.sum() / self.num_positions.sum().clamp(min=1)


@torch.no_grad()
def measure(blocks: Blocks) -> BlockStatistics:
    """Return the statistics of these blocks, reusing whatever an objective has computed on them."""
    valid, dtype = blocks.valid, blocks.num_valid.dtype
    agrees = blocks.draft_argmax == blocks.target_argmax

    def total(values: Tensor) -> Tensor:
        return torch.where(valid, values.detach().to(dtype), 0).sum(0)

    return BlockStatistics(
        num_blocks=(blocks.num_valid > 0).to(dtype).sum(),
        num_positions=total(valid),
        greedy=total(agrees.to(dtype).cumprod(-1)),
        token=total(blocks.log_token.exp()),
        block=total(blocks.log_integrated.exp()),
        accuracy=total(blocks.draft_argmax == blocks.labels),
        agreement=total(agrees),
    )


def block_statistics(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduced: ReducedTarget | None = None,
) -> BlockStatistics:
    """Return expected accepted lengths and agreement on ``[N, B, V]`` logits along target-generated labels."""
    logits = draft_logits.detach(), target_logits.detach()
    return measure(Blocks(*logits, labels, valid, temperature=temperature, reduced=reduced, for_statistics=True))


@dataclass(frozen=True)
class ObjectiveValue:
    """An ObjectiveValue is what an objective returns for a batch of N blocks.

    loss: scalar, ``objective.reduce(numerator, denominator)``.
    numerator, denominator: scalars, each additive over blocks, hence over chunks,
        accumulation steps and processes. Only the numerator carries gradients.
    per_block: ``[N]`` the loss of each block alone, 0 where a block has no valid position.
    stats: acceptance statistics of the same blocks, where they were asked for.
    survival: ``[N, B]`` with the statistics: a~_i = min(1, r_1, .., r_i), the chance that a round of block
        verification which writes this very text keeps at least i of its tokens.
    """

    loss: Tensor
    numerator: Tensor
    denominator: Tensor
    per_block: Tensor
    stats: BlockStatistics | None = None
    survival: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """An Objective turns blocks into a loss; a subclass names itself and implements `sums`.

    temperature: of p and q alike, 1 in the paper.

    ``needs_target`` says whether it looks at the target's logits, ``couples_blocks`` whether at the other blocks
    of a run (``segments``).
    """

    name: ClassVar[str]
    needs_target: ClassVar[bool] = True
    couples_blocks: ClassVar[bool] = False

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def describe(self) -> dict[str, Any]:
        """Return the name and every option with its resolved value.

        ``objective(**described)`` makes an equal objective, so a run that writes this down can be repeated
        whatever the defaults of a later version are.
        """
        return {"name": self.name} | {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def sums(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return the ``[N]`` numerators (with gradient) and ``[N]`` denominators (without) of the blocks."""

    def reduce(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """Return the loss of summed numerators and denominators, 0 where the denominator is 0."""
        return torch.where(denominator > 0, numerator / denominator.clamp(min=1e-30), 0)

    def gradient_scale(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """Return the derivative of `reduce` by its numerator, 0 where the denominator is 0.

        With sums over all steps and processes, the gradient of the global loss is
        this number times the gradient of each local numerator.
        """
        del numerator
        return torch.where(denominator > 0, 1 / denominator.clamp(min=1e-30), 0)

    def __call__(
        self,
        draft_logits: Tensor,
        target_logits: Tensor | None,
        labels: Tensor,
        valid: Tensor | None = None,
        *,
        reduced: ReducedTarget | None = None,
        segments: Tensor | None = None,
    ) -> ObjectiveValue:
        """Evaluate the objective on full logits.

        Args:
            draft_logits, target_logits: ``[N, B, V]``, aligned to the same prediction positions.
                The target is taken as frozen: no gradient reaches its logits.
            labels: ``[N, B]`` tokens generated by the target.
            valid: ``[N, B]`` bool, a contiguous prefix of every block; None for all.
            reduced: for a drafter over a reduced vocabulary of V tokens, what is known of the target beyond it.
            segments: ``[N]`` the run of consecutive anchors that each block belongs to; None for none.
        """
        blocks = Blocks(
            draft_logits,
            target_logits,
            labels,
            valid,
            temperature=self.temperature,
            reduced=reduced,
            segments=segments,
        )
        numerator, denominator = differentiate(self.sums, draft_logits, blocks)
        return self.value(numerator, denominator)

    def value(
        self,
        numerator: Tensor,
        denominator: Tensor,
        total: Tensor | None = None,
        stats: BlockStatistics | None = None,
    ) -> ObjectiveValue:
        """Assemble the value from the ``[N]`` sums of the blocks, and their total if that has a graph of its own."""
        total = numerator.sum() if total is None else total
        weight = denominator.sum()
        return ObjectiveValue(self.reduce(total, weight), total, weight, self.reduce(numerator, denominator), stats)


def differentiate(
    compute: Callable[[Blocks], tuple[Tensor, ...]], draft_logits: Tensor, blocks: Blocks
) -> tuple[Tensor, ...]:
    """Return ``compute(blocks)`` as a differentiable function of the draft logits ``[N, B, V]``."""
    outputs: tuple[Tensor, ...] = _OfDraftLogits.apply(draft_logits, compute, blocks)
    return outputs


class _OfDraftLogits(torch.autograd.Function):
    """_OfDraftLogits joins the small graph over a `Blocks` to the graph of the draft logits."""

    @staticmethod
    def forward(ctx: Any, draft_logits: Tensor, compute: Callable[[Blocks], tuple[Tensor, ...]], blocks: Blocks) -> Any:
        with torch.enable_grad():
            ctx.outputs = compute(blocks)
        ctx.blocks = blocks
        ctx.draft_dtype = draft_logits.dtype
        ctx.set_materialize_grads(True)
        results = tuple(output.detach() for output in ctx.outputs)
        pairs = zip(results, ctx.outputs, strict=True)
        ctx.mark_non_differentiable(*(result for result, output in pairs if not output.requires_grad))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, blocks = ctx.blocks.rows, ctx.blocks
        gradient = rows.draft_gradient(list(ctx.outputs), list(grads))
        return gradient.view(*blocks.labels.shape, rows.vocab_size).to(ctx.draft_dtype), None, None


_REGISTRY: dict[str, type[Objective]] = {}

T = TypeVar("T", bound=type[Objective])


def register(cls: T) -> T:
    """Make the decorated class known to `objective` by its ``name``, which must be new."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"{cls.__name__} needs a class attribute `name`")
    known = _REGISTRY.setdefault(name, cls)
    if known.__qualname__ != cls.__qualname__:
        raise ValueError(f"there is an objective {name!r} already: {known.__qualname__}")
    _REGISTRY[name] = cls
    return cls


def objective_names() -> list[str]:
    """Return the names that `objective` knows."""
    return sorted(_REGISTRY)


PAPER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dflash": {"eta": 7.0, "ramp_floor": 1e-6},
    "dspark": {"eta": 4.0, "ramp_floor": None},
}
"""The paper sets these per drafter: the decay of the position weights, and the score floor of the ramp."""


def objective(name: str, *, drafter: str | None = None, **options: Any) -> Objective:
    """Make an objective by name: ``ce kl rkl tv lk bv``, a rival (see `objective_names`), or one that `register` added.

    Args:
        name: see `objective_names`.
        drafter: ``"dflash"`` or ``"dspark"`` fills in the paper's settings for that
            drafter (`PAPER_SETTINGS`) where ``options`` does not give them.
        options: fields of the objective's class, e.g. ``eta=7.0`` or ``form="log", beta=0.5``.
    """
    cls = _REGISTRY.get(name)
    if cls is None:
        raise ValueError(_unknown("objective", name, objective_names()))
    known = [field.name for field in fields(cls)]
    for option in options:
        if option not in known:
            raise ValueError(_unknown(f"option of objective {name!r}", option, known))
    if drafter is not None:
        if drafter not in PAPER_SETTINGS:
            raise ValueError(_unknown("drafter", drafter, list(PAPER_SETTINGS)))
        options = {k: v for k, v in PAPER_SETTINGS[drafter].items() if k in known} | options
    return cls(**options)


def _unknown(what: str, given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}{hint} (known: {', '.join(known)})"


@dataclass
class Annealing:
    """Annealing raises beta linearly from ``initial`` to ``final`` over the first ``share`` of training, then keeps it.

    The paper's runs take ``share = 0.5`` (three of six epochs) from 0 to 1.

    ``num_steps`` is the number of optimizer steps of the whole run; ``step`` the
    number already taken. A trainer calls `advance` once per optimizer step and
    trains with ``annealing.apply(objective)``, or asks `beta_at` for any step.
    """

    num_steps: int
    share: float = 0.5
    initial: float = 0.0
    final: float = 1.0
    step: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 0 or not 0 <= self.share <= 1:
            raise ValueError(f"annealing needs num_steps >= 0 and 0 <= share <= 1: {self.num_steps}, {self.share}")
        if not (0 <= self.initial <= 1 and 0 <= self.final <= 1):
            raise ValueError(f"beta must stay in [0, 1]: from {self.initial} to {self.final}")

    def beta_at(self, step: int) -> float:
        """Return beta for the optimizer step of this index, counted from 0."""
        ramp = self.share * self.num_steps
        if step >= ramp:
            return self.final
        return self.initial + (self.final - self.initial) * step / ramp

    @property
    def beta(self) -> float:
        """Give beta for the step about to be taken."""
        return self.beta_at(self.step)

    def advance(self) -> None:
        """Count one optimizer step."""
        self.step += 1

    def apply(self, objective: Objective) -> Objective:
        """Return the objective at the present beta, if it has one.

        Every objective with a field ``beta`` takes it, unless it also has a ``form`` and that is not ``"log"``;
        any other is returned as it is.
        """
        has_beta = any(field.name == "beta" for field in fields(objective))
        if not has_beta or getattr(objective, "form", "log") != "log":
            return objective
        changed: dict[str, Any] = {"beta": self.beta}
        return replace(objective, **changed)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`."""
        self.step = int(state["step"])
