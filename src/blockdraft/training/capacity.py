"""What a device can do: its peak rate, its memory, and the batch that fits into it."""

import resource
import sys

import torch

PEAK_TFLOPS = {
    "A10": 125.0, "A40": 149.7, "A100": 312.0, "A800": 312.0, "L4": 121.0, "L40": 181.0, "L40S": 362.0,
    "RTX 4090": 165.2, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "H200": 989.0, "GH200": 989.0,
    "B200": 2250.0, "GB200": 2500.0,
}  # fmt: skip
"""Dense bfloat16 products, in TFLOP/s, by what a device's name contains; the longest match counts."""


def peak_rate(device: torch.device) -> float | None:
    """Return the floating-point operations per second that a device could do at most; None if it is not known."""
    if device.type != "cuda":
        return None
    return named_peak_rate(torch.cuda.get_device_properties(device).name)


def named_peak_rate(name: str) -> float | None:
    """Return the peak rate of a device of this name, in operations per second."""
    words = f" {name.replace('-', ' ')} "
    known = [each for each in PEAK_TFLOPS if f" {each} " in words]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held on a device so far, or in the host's memory for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's own memory; None where it shares the host's."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
