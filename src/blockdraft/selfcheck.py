"""This module compares code that may never have run on your device with the plain path, before it is used there.

A part that is faster but not trusted yet, a kernel for instance, comes with a
small case that it must solve as the plain path does, on that very device. The
case runs on first use, once per process. If the results differ or anything is
raised, one warning says so with the versions it happened with, and the caller
takes the plain path; with ``BLOCKDRAFT_STRICT_KERNELS=1`` it is an error.
"""

import os
import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

import blockdraft
from blockdraft.errors import BlockdraftError

STRICT = "BLOCKDRAFT_STRICT_KERNELS"
"""This environment variable, set to anything but 0, makes a failed check an error."""

_failures: dict[tuple[Hashable, ...], str | None] = {}
"""What was wrong, None for nothing, by part, device and what else the caller distinguishes."""


class SelfCheckError(BlockdraftError):
    """A part of the package does not work here as its plain path does."""


class SelfCheckWarning(RuntimeWarning):
    """A part of the package is slower here than it could be, because its fast path failed the check."""


def cpu_multiplies_bfloat16() -> bool:
    """Return whether this processor has arithmetic for bfloat16, and PyTorch the library that uses it."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def passes_check(
    part: str,
    device: torch.device,
    check: Callable[[], None],
    *,
    key: tuple[Hashable, ...] = (),
    strict: bool | None = None,
) -> bool:
    """Return whether ``check`` raises nothing; it runs once per process for each part, device and key.

    Args:
        part: what is checked, in words for the user, as in "the Triton kernels".
        device: where.
        check: solves a small case both ways and raises if the results differ; see `compare`.
        key: what else needs a check of its own, a dtype for instance.
        strict: raise `SelfCheckError` instead of returning False; None asks the environment (`STRICT`).
    """
    known = (part, str(device), *key)
    is_new = known not in _failures
    if is_new:
        _failures[known] = _failure(check)
    failure = _failures[known]
    if failure is None:
        return True
    message = f"{part} cannot be used on {_name(device)}: {failure} [{versions(device)}]"
    if os.environ.get(STRICT, "0") not in ("", "0") if strict is None else strict:
        raise SelfCheckError(
            f"{message}; unless asked for, by argument or by {STRICT}, the plain path takes their place"
        )
    if is_new:
        text = f"{message}; the plain path is used instead ({STRICT}=1 makes this an error)"
        warnings.warn(text, SelfCheckWarning, stacklevel=3)
    return False


def compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise `SelfCheckError` if the largest difference exceeds ``tolerance`` times the largest value expected."""
    if found.shape != expected.shape:
        raise SelfCheckError(f"{name} is {list(found.shape)} and not {list(expected.shape)}")
    scale = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    difference = float((found.double() - expected.double()).abs().max()) / scale if expected.numel() else 0.0
    if not difference <= tolerance:  # nor NaN
        raise SelfCheckError(f"{name} is off by {difference:.1e} of its largest value (tolerance {tolerance:.0e})")


def versions(device: torch.device) -> str:
    """Return the versions that a report of a failure needs."""
    from blockdraft.files import package_version  # not with the package: it takes longer than all of this module

    parts = [f"blockdraft {blockdraft.__version__}", f"torch {torch.__version__}"]
    parts.append(f"triton {package_version('triton')}")
    if device.type == "cuda":
        parts.append(f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}")
    return ", ".join(parts)


def _failure(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:  # whatever it is, the plain path is better
        text = " ".join(str(error).split())
        return text if isinstance(error, SelfCheckError) else f"{type(error).__name__}: {text[:300]}"
    return None


def _name(device: torch.device) -> str:
    """Return the device with its model, where that can be found out."""
    if device.type != "cuda":
        return str(device)
    try:
        properties = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError):  # no driver, or no such device
        return str(device)
    return f"{device} ({properties.name}, {properties.major}.{properties.minor})"
