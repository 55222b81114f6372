"""A round reads from the device once: the budget of host waits, which may only shrink."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockdraft.decoding import generate

from tiny import tiny_drafter, tiny_target

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
           "aten::_unique2", "aten::unique_consecutive", "aten::multinomial"}  # fmt: skip
"""Operators for which the host waits on a GPU; indexing with a mask is one too, and is counted by its index."""

COPIED = ("tolist", "numpy", "cpu")
"""Methods that bring values to the host; on CPU tensors they do not go through the dispatcher."""

DRAFTERS = [(None, {}), ("dflash", {}), ("dflash", {"draft_vocab_size": 20}), ("dspark", {}),
            ("dspark", {"markov_head": "rnn"})]  # fmt: skip
PROMPT = [7, 3, 9, 30, 12]


class Counter(TorchDispatchMode):
    """Count what would make the host wait for a GPU, on CPU tensors."""

    def __init__(self):
        super().__init__()
        self.reads, self.written = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in WAITING:
            self.reads.append(name)
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            self.reads += [f"{name} by a mask" for index in args[1] if index is not None and index.dtype == torch.bool]
        if name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            self.written.append(name)  # a tensor made of Python numbers: a copy to the device
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting():
    with contextlib.ExitStack() as stack:
        counter = Counter()
        for name in COPIED:
            method = getattr(torch.Tensor, name)

            def counted(self, *args, _name=name, _method=method, **options):
                counter.reads.append(_name)
                return _method(self, *args, **options)

            stack.enter_context(mock.patch.object(torch.Tensor, name, counted))
        yield stack.enter_context(counter)


def test_the_counter_sees_what_waits():
    with counting() as counter:
        x = torch.arange(4.0)
        _ = int(x[1]), x.tolist(), x[x > 2], bool(x.any()), torch.multinomial(x, 1), x.nonzero(), torch.tensor([1, 2])
    seen = ["aten::_local_scalar_dense", "tolist", "aten::index by a mask", "aten::_local_scalar_dense",
            "aten::multinomial", "aten::nonzero"]  # fmt: skip
    assert [read for read in counter.reads if read in seen] == seen
    assert len(counter.written) == 1


@pytest.mark.parametrize("eos", [0, None])
@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (None, {}),
        ("dflash", {}),
        ("dflash", {"draft_vocab_size": 20}),
        ("dspark", {}),
        ("dspark", {"markov_head": "rnn"}),
    ],
    ids=str,
)
def test_a_round_reads_once_and_writes_nothing(kind, changes, rule, eos):
    target = tiny_target(eos=eos, tokenizer=False, mask_token_id=2, dtype=torch.float32)
    drafter = None if kind is None else tiny_drafter(kind, target, **changes)
    reads, written = [], []
    with counting() as counter:

        def mark(_round):
            reads.append(len(counter.reads))
            written.append(len(counter.written))

        generate(target, drafter, PROMPT, rule=rule, max_new_tokens=25, seed=3, on_round=mark)
    assert len(reads) > 3
    assert {after - before for before, after in itertools.pairwise(reads)} == {1}, counter.reads
    assert written[0] == written[-1]
