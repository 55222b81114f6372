"""A CUDA device that is not there: PyTorch believes in it, tensors on it have no storage, and everything is counted.

`FakeTensorMode` works out the device, dtype and shape of every operator and raises where two devices meet. Autograd
also asks for a device guard and for hooks, which a CPU build of PyTorch lacks: `pretend` puts empty ones in their
place through private symbols of the tested versions. The guard's autograd thread cannot be joined, so all of this
belongs into a process of its own, which leaves with `os._exit`.
"""

import ctypes
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = 1
"""Of `c10::DeviceType`."""

REGISTRY, HOOKS = "_ZN3c104impl26device_guard_impl_registryE", "_ZN2at6detail12getCUDAHooksEv"
IS_BUILT, HAS_CONTEXT, NUM_VIRTUAL = 2, 4, 96
"""Places in the hooks' table of virtual functions, behind two destructors; and how much of it is copied."""

_kept: list[Any] = []
"""What C++ points at must not be collected."""


class NoFakeDeviceError(RuntimeError):
    """This PyTorch has not the private symbols that a fake device needs."""


def pretend() -> None:
    """Make a CPU build of PyTorch believe that it was built for CUDA and has one device."""
    if torch.version.cuda is not None:
        raise NoFakeDeviceError("PyTorch is built for CUDA: the pretence is for CPU builds")
    folder = Path(torch.__file__).parent / "lib"
    try:
        registry = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(str(folder / "libc10.so")), REGISTRY)
        get_hooks = getattr(ctypes.CDLL(str(folder / "libtorch_cpu.so")), HOOKS)
        ensure = torch._C._ensureCUDADeviceGuardSet
    except (AttributeError, OSError, ValueError) as error:
        raise NoFakeDeviceError(f"torch {torch.__version__}: {error}") from error
    # a guard that reports no devices, whatever it is asked, is what PyTorch replaces by its own empty one
    nothing = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: 0)
    address = ctypes.cast(nothing, ctypes.c_void_p).value
    table = (ctypes.c_void_p * NUM_VIRTUAL)(*[address] * NUM_VIRTUAL)
    guard = ctypes.c_void_p(ctypes.addressof(table))
    registry[CUDA] = ctypes.addressof(guard)
    ensure()
    # the hooks, with `isBuilt` saying yes
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    old = ctypes.cast(hooks[0], ctypes.POINTER(ctypes.c_void_p * NUM_VIRTUAL)).contents
    copied = (ctypes.c_void_p * NUM_VIRTUAL)(*old)
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _hooks: True)
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda _hooks, _device: False)
    copied[IS_BUILT] = ctypes.cast(yes, ctypes.c_void_p).value
    copied[HAS_CONTEXT] = ctypes.cast(no, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(copied)
    _kept.extend([nothing, table, guard, yes, no, copied])
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.mem_get_info = lambda *_: (40 * 2**30, 80 * 2**30)
    torch.cuda.memory_reserved = torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda *_: 0
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    for module in (_foreach_utils, sys.modules["torch.optim.optimizer"]):
        module._foreach_supported_types.append(FakeTensor)


NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "scalar_tensor", "lift_fresh",
    "_local_scalar_dense", "resize_", "_unsafe_view",
}  # fmt: skip

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}

WAITS = {
    "nonzero",
    "unique_consecutive",
    "_unique2",
    "unique_dim",
    "equal",
    "masked_select",
    "is_nonzero",
    "multinomial",
}
"""Operators that make the host wait for the device, `repeat_interleave` without a size and `.item()` apart."""


class Tally(TorchDispatchMode):
    """Counts what a device would do, and answers reads of values, which a tensor without storage cannot.

    launches: kernels, by name.
    waits: how often the host would wait for the device, by the line that asks.
    copies: from the host to the device, by the line; ``blocking`` are those that the host waits for.
    product_dtypes: of the factors of matrix products.
    by_shape: bytes read and written, by the last two sizes of the tensors.
    live, peak: bytes on the device now and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.blocking: Counter[str] = Counter()
        self.by_shape: Counter[tuple[int, int]] = Counter()
        self.product_dtypes: set[torch.dtype] = set()
        self.live = self.peak = 0
        self._storages: dict[int, Any] = {}
        self._there_before: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, writes_only, launches = _about(func)
        tensors = _tensors(args) + _tensors(kwargs.values())
        on_device = any(x.device.type == "cuda" for x in tensors)
        if name == "_local_scalar_dense":
            if on_device:
                self.waits[_caller()] += 1
            value = args[0]
            if value.constant is not None:
                with _disable_current_modes():
                    return value.constant.item()
            return 0.0 if value.is_floating_point() else False if value.dtype is torch.bool else 0
        if on_device and (name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None)):
            self.waits[_caller()] += 1
        if name in INDEXING and args[0].device.type == "cuda":
            for index in args[1]:  # one that lies on the host is sent each time, and waited for
                if isinstance(index, torch.Tensor) and index.device.type == "cpu":
                    self.copies[_caller()] += 1
                    self.blocking[_caller()] += 1
        for x in tensors if name in ("_to_copy", "copy_") else ():
            x.constant = None  # a known value would be copied to the device for real
        result = func(*args, **kwargs)
        out = _tensors((result,))
        self._count_transfer(name, args, kwargs, tensors, out)
        if not any(x.device.type == "cuda" for x in tensors + out):
            return result
        for x in out:
            self._track(x)
        if not launches:
            return result
        self.launches[name] += 1
        if name in PRODUCTS:
            self.product_dtypes |= {x.dtype for x in tensors}
        if func is torch.ops.aten.gather.default:  # of one logit per row
            return result
        read = _tensors(args)
        for place in writes_only:
            out = out + _tensors(args[place : place + 1])
        masks = [x for x in read if x.dtype is torch.bool] if func.namespace == "blockdraft" else []
        for x in read + out:
            if x.dim() >= 2 and x.untyped_storage()._cdata not in self._there_before:
                rows = len(masks[0]) if masks and x.dim() == 2 else x.shape[-2]  # a kernel reads shared rows again
                num = x.numel() // max(1, x.shape[-2]) * rows
                self.by_shape[x.shape[-2], x.shape[-1]] += num * x.itemsize
        return result

    def restart(self) -> None:
        """Count anew from here; what is alive stays alive."""
        for counter in (self.launches, self.waits, self.copies, self.blocking, self.by_shape):
            counter.clear()
        self.product_dtypes = set()
        self.peak = self.live
        self._there_before = set(self._storages)  # weights, which are no logits even where they have as many columns

    def report(self, *, vocab_size: int, num_rows: int, tables: set[int]) -> dict[str, Any]:
        """Return plain numbers.

        Bytes are those of logits, per logit of the drafter, of which a step has ``num_rows`` rows of ``vocab_size``;
        tensors over the vocabulary whose other side is in ``tables`` are heads and their gradients.
        """
        by_shape = {shape: size for shape, size in self.by_shape.items() if vocab_size in shape}
        of_logits = [size for shape, size in by_shape.items() if not tables & set(shape)]
        return {
            "launches": self.launches.total(),
            "waits": self.waits.total(),
            "copies": self.copies.total(),
            "blocking_copies": self.blocking.total(),
            "bytes_per_logit": sum(of_logits) / (num_rows * vocab_size),
            "peak_gib": self.peak / 2**30,
            "resident_gib": self.live / 2**30,
            "fused_adamw": self.launches["_fused_adamw_"],
            "waits_by_line": dict(self.waits.most_common()),
            "copies_by_line": dict(self.copies.most_common()),
        }

    def _count_transfer(self, name: str, args: Any, kwargs: Any, tensors: Any, out: Any) -> None:
        if name == "_to_copy" and tensors and out:
            source, destination = tensors[0], out[0]
        elif name == "copy_":
            destination, source = args[0], args[1]
        else:
            return
        kinds = source.device.type, destination.device.type
        if kinds == ("cpu", "cuda"):
            self.copies[_caller()] += 1
            if not (kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))):
                self.blocking[_caller()] += 1
        elif kinds == ("cuda", "cpu") and not kwargs.get("non_blocking", False):
            self.waits[_caller()] += 1

    def _track(self, x: torch.Tensor) -> None:
        if x.device.type != "cuda":
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_ref: Any) -> None:
            self._storages.pop(key, None)
            self._there_before.discard(key)
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)


@functools.cache
def _about(func: Any) -> tuple[str, tuple[int, ...], bool]:
    """Return an operator's name, which arguments it writes if it returns nothing, and whether it launches a kernel."""
    name, schema = func.__name__.split(".")[0], func._schema
    written = [i for i, each in enumerate(schema.arguments) if each.alias_info is not None and each.alias_info.is_write]
    makes_a_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    launches = not (makes_a_view or func.namespace == "prim" or name in NO_LAUNCH)
    return name, () if schema.returns else tuple(written), launches


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results, which come alone or in lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _caller() -> str:
    """Name the line of this package, or of the model, that led here."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/blockdraft/" in file or "/transformers/models" in file or file.endswith("optim/adamw.py"):
            return f"{Path(file).parent.name}/{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
