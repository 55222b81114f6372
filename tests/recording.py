"""Imitate CUDA graphs on a CPU: operators are recorded with their tensors and replayed into the same memory.

Python runs once, while a phase is recorded. Whatever a phase asks of Python later, a number of the host's or a tensor
that takes another's place, a replay does not see, and its results are as wrong as a CUDA graph's would be.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _address(x):
    return None if x.layout != torch.strided else x.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """Records operators while they run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func.__name__.split(".")[0] not in ("_local_scalar_dense", "nonzero"), "no graph can wait"
        result = func(*args, **kwargs)
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        is_view = bool(made) and all(x.numel() and _address(x) in given for x in made)
        if func._schema.is_mutable or not is_view:
            self.calls.append((func, args, kwargs, None if func._schema.is_mutable else made))
        return result

    def replay(self):
        for func, args, kwargs, made in self.calls:
            result = func(*args, **kwargs)
            if made is not None:
                again = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
                for old, new in zip(made, again, strict=True):
                    old.copy_(new)


def record(phases, _streams):
    """Record phases, as `blockdraft.decoding.rounds.Capture` says."""
    replays = []
    for phase in phases:
        with Recording() as recording:
            phase()
        replays.append(recording.replay)
    return replays
