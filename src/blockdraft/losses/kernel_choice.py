"""This module decides whether Triton kernels take the sums of an objective, after trying them on a small case.

The case is one of the very objective, dtypes and kind of vocabulary that are
about to run, so that it compiles the same kernels, which are then there.
"""

import importlib.util
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from blockdraft.losses.objective import Objective, measure
from blockdraft.losses.reduced import OUTSIDE, ReducedTarget
from blockdraft.losses.rows import Rows, RowSums
from blockdraft.losses.rows_triton import DTYPES, TritonRows
from blockdraft.losses.scores import Blocks
from blockdraft.selfcheck import SelfCheckError, compare, passes_check

PART = "the objective's Triton kernels"
KERNEL_DEVICES = ("cuda",)
"""Here the kernels are tried without being asked for."""

CHECK_VOCABULARY = 5_008
"""The small case has this many tokens or up to 15 more: several tiles of the kernels, the last one not full."""

VALUE_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Both paths compute in float32; the gradient is then rounded to the dtype of the logits."""


@dataclass(frozen=True)
class LogitKind:
    """LogitKind says what logits an objective will be given.

    draft_dtype, target_dtype: of the buffers; no target, no dtype.
    vocab_size: V.
    device: of everything.
    stats: whether statistics will be taken from them, too.
    is_partial: whether the target's normaliser is given (a reduced vocabulary).
    is_indexed: whether positions share rows of the target.
    """

    draft_dtype: torch.dtype
    target_dtype: torch.dtype | None
    vocab_size: int
    device: torch.device
    stats: bool = True
    is_partial: bool = False
    is_indexed: bool = False

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Give the dtypes of all logits."""
        return [self.draft_dtype] + ([] if self.target_dtype is None else [self.target_dtype])


def choose_rows(objective: Objective, kind: LogitKind, kernels: bool | None = None) -> type[RowSums]:
    """Return `TritonRows` where they solve a small case as `Rows` do, and `Rows` otherwise.

    Args:
        objective: the objective.
        kind: its logits.
        kernels: None for kernels on a GPU and on logits of at most 32 bits; True for kernels, or an error;
            False for none.
    """
    if kernels is None:
        kernels, strict = kind.device.type in KERNEL_DEVICES and all(dtype in DTYPES for dtype in kind.dtypes), None
    else:
        strict = True
    if not kernels:
        return Rows
    choices = tuple(getattr(objective, field.name) for field in fields(objective))
    key = (
        type(objective), *(choice for choice in choices if isinstance(choice, str)), *kind.dtypes, kind.stats,
        kind.is_partial, kind.is_indexed,
        kind.vocab_size if kind.vocab_size < CHECK_VOCABULARY else kind.vocab_size % 16,
    )  # fmt: skip
    usable = passes_check(PART, kind.device, lambda: check_kernels(objective, kind), key=key, strict=strict)
    return TritonRows if usable else Rows


def check_kernels(objective: Objective, kind: LogitKind) -> None:
    """Raise unless kernels and plain path agree on four blocks of four tokens: values, statistics, gradients."""
    if importlib.util.find_spec("triton") is None:
        raise SelfCheckError("Triton is not installed (pip install 'blockdraft[gpu]')")
    with torch.inference_mode(False), torch.autocast(kind.device.type, enabled=False):
        found, expected = (_results(objective, kind, rows) for rows in (TritonRows, Rows))
    for name, value in expected.items():
        tolerance = GRADIENT_TOLERANCE[kind.draft_dtype] if name == "the gradient" else VALUE_TOLERANCE
        compare(name, found[name], value, tolerance)


def _results(objective: Objective, kind: LogitKind, rows: type[RowSums]) -> dict[str, Tensor]:
    blocks = _case(kind, objective.temperature, rows)
    with torch.enable_grad():
        numerator, denominator = objective.sums(blocks)
    results = {"the numerator": numerator.detach(), "the denominator": denominator.detach()}
    if kind.stats:
        statistics = measure(blocks)
        results |= {f"the statistic {field.name}": getattr(statistics, field.name) for field in fields(statistics)}
    gradient = blocks.rows.draft_gradient([numerator], [torch.ones_like(numerator)])
    return results | {"the gradient": gradient.to(kind.draft_dtype)}


def _case(kind: LogitKind, temperature: float, rows: type[RowSums]) -> Blocks:
    """Make four blocks, one cut, one empty, one with a single token, with both outcomes of every comparison of tokens.

    Logits are multiples of 1/16, exact in every dtype: where q(v) is about s p(v), two correct paths may take
    different sides, and on a grid that is out of the question.
    """
    vocab_size = kind.vocab_size
    if vocab_size >= CHECK_VOCABULARY:
        vocab_size = CHECK_VOCABULARY + vocab_size % 16
    generator = torch.Generator().manual_seed(0)
    shape = (4, 4, vocab_size)
    target = (24 * torch.randn(shape, generator=generator)).round() / 16
    draft = target + (16 * torch.randn(shape, generator=generator)).round() / 16
    labels, best, other = torch.randint(vocab_size, (3, *shape[:2], 1), generator=generator)
    draft_best = torch.where(torch.tensor([[True, False, True, True]])[..., None], best, other)
    target.scatter_(-1, best, 8.0)
    draft.scatter_(-1, draft_best, 8.0)
    labels = torch.where(torch.tensor([[True, True, False, False]]), draft_best.squeeze(-1), labels.squeeze(-1))
    valid = torch.arange(4) < torch.tensor([[4], [3], [0], [1]])
    reduced = None
    if kind.is_partial:
        log_z = (target / temperature).logsumexp(-1) + 0.5
        reduced = ReducedTarget(log_z.to(kind.device), best.squeeze(-1).to(kind.device), temperature)
        labels[1, 2] = OUTSIDE
    index = None
    if kind.is_indexed and kind.target_dtype is not None:
        index = torch.randperm(16, generator=generator).view(4, 4)
        target = torch.empty_like(target).view(16, -1).index_copy(0, index.flatten(), target.flatten(0, 1))
    return Blocks(
        draft.to(kind.device, kind.draft_dtype),
        None if kind.target_dtype is None else target.to(kind.device, kind.target_dtype),
        labels.to(kind.device),
        valid.to(kind.device),
        temperature=temperature,
        reduced=reduced,
        target_index=None if index is None else index.to(kind.device),
        overwrite=True,
        for_statistics=kind.stats,
        rows=rows,
    )
