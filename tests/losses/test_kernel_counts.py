"""What the objective moves per logit, and how often it launches, counted on tensors without storage.

Triton need not be installed: its kernels are operators, and here only their shapes are worked out.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockdraft.losses import fused, fused_linear_objective, head_products, objective, rows

NO_LAUNCH = {"empty", "empty_like", "new_empty", "detach", "scalar_tensor", "_local_scalar_dense"}
BLOCKS, BLOCK_SIZE, VOCAB_SIZE, WIDTH = 32, 15, 151_936, 64


class Traffic(TorchDispatchMode):
    """Counts launches, and the bytes that operators read and write in tensors of the size of a chunk's logits."""

    def __init__(self, num_logits):
        super().__init__()
        self.num_logits, self.num_bytes, self.launches = num_logits, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns = func._schema.returns
        makes_a_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if makes_a_view or func.namespace == "prim" or func.__name__.split(".")[0] in NO_LAUNCH:
            return result
        self.launches += 1
        if func is torch.ops.aten.gather.default:  # of one logit per row
            return result
        written = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        read = []
        for value, argument in zip(args, func._schema.arguments, strict=False):
            tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
            read += tensors
            if argument.alias_info is not None and argument.alias_info.is_write and not returns:
                written += tensors
        self.num_bytes += sum(x.numel() * x.itemsize for x in read + written if x.numel() == self.num_logits)
        return result


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """No values to check, and tiles of all rows."""
    monkeypatch.setattr(rows, "CPU_TILE", 2**40)
    monkeypatch.setattr(fused, "passes_check", lambda *_, **__: True)
    monkeypatch.setattr(fused, "check_labels", lambda labels, valid, *_, **__: (valid, labels))


def count(name, *, kernels, stats=False, markov=False, dtype=torch.bfloat16, chunks=1):
    """Return bytes per logit and launches of a forward pass that leaves the gradients of the drafter's states."""
    with FakeTensorMode():
        hidden = torch.empty(BLOCKS * chunks, BLOCK_SIZE, WIDTH, dtype=dtype)
        head = torch.empty(VOCAB_SIZE, WIDTH, dtype=dtype)
        labels = torch.zeros(BLOCKS * chunks, BLOCK_SIZE, dtype=torch.long)
        bias = (torch.empty(BLOCKS * chunks, BLOCK_SIZE, 16), torch.empty(VOCAB_SIZE, 16).requires_grad_())
        with Traffic(BLOCKS * BLOCK_SIZE * VOCAB_SIZE) as traffic:
            fused_linear_objective(
                objective(name),
                hidden.requires_grad_(),
                hidden.detach(),
                head,
                head,
                labels,
                torch.ones_like(labels, dtype=torch.bool),
                bias if markov else None,
                chunk_blocks=BLOCKS,
                stats=stats,
                kernels=kernels,
            )
    return traffic.num_bytes / (traffic.num_logits * chunks), traffic.launches


@pytest.mark.parametrize(
    ("name", "stats", "expected"),
    [
        ("ce", False, 2 + 2 + 4 + 2),
        ("bv", False, 4 + 4 + 4 + 6 + 2),
        ("kl", False, 4 + 4 + 4 + 6 + 2),
        ("tv", False, 4 + 4 + 4 + 6 + 2),
        ("lk-hybrid", False, 4 + 4 + 4 + 6 + 2),
        ("bv", True, 4 + 4 + 4 + 6 + 2),
        ("kl", True, 4 + 4 + 4 + 6 + 2),
        ("lk-hybrid", True, 4 + 4 + 4 + 6 + 2),
        ("rkl", True, 4 + 4 + 4 + 4 + 6 + 2),
    ],
)
def test_bytes_per_logit(name, stats, expected):
    """Products write logits, then normalisers, sums, gradient, and the product that reads the gradient."""
    assert count(name, kernels=True, stats=stats)[0] == expected


def test_the_plain_path_moves_many_times_as_much():
    few, _ = count("bv", kernels=True, stats=True)
    many, _ = count("bv", kernels=False, stats=True)
    assert many > 10 * few


def test_a_bias_in_float32_makes_no_copy_of_the_gradient(monkeypatch):
    """It is added to the logits, and two products read the gradient; on a GPU it comes with the head's product."""
    assert count("bv", kernels=True, markov=True)[0] == 20 + (2 + 2) + 2
    monkeypatch.setattr(head_products, "SEPARATE_DEVICES", ())
    assert count("bv", kernels=True, markov=True)[0] == 20 + 2


def test_launches_per_chunk():
    """2,048 blocks of 15 are nine chunks of at most 1 GiB."""
    once, twice = (count("bv", kernels=True, stats=True, chunks=n)[1] for n in (1, 2))
    assert 9 * (twice - once) + once < 3_000
    assert twice - once < count("bv", kernels=False, stats=True)[1]
