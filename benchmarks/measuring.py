"""Side-by-side measurement: each case in a process of its own, rounds interleaved, ratios of medians.

The machine may be shared and noisy. Cases therefore take turns, round after
round, so that a slow minute falls on all of them, and no time is ever asserted.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def measure(run: Callable[[], object], *, warm_up: int = 1, repeat: int = 2) -> dict[str, Any]:
    """Seconds of each repetition of ``run``, and how far the process's memory rose above its level before."""
    peak = Peak()
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "extra_bytes": peak.extra_bytes()}


def take_turns(script: str, cases: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Run ``script --case NAME`` for every case, ``rounds`` times over; median and least time, largest memory."""
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    extra: dict[str, int] = dict.fromkeys(cases, 0)
    for number in range(rounds):
        for case in cases:
            print(f"\rround {number + 1}/{rounds}: {case:<40}", end="", file=sys.stderr, flush=True)
            done = subprocess.run([sys.executable, script, "--case", case], stdout=subprocess.PIPE, check=True)
            result = json.loads(done.stdout)
            seconds[case] += result["seconds"]
            extra[case] = max(extra[case], result["extra_bytes"])
    print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
    return {
        case: {"median": statistics.median(seconds[case]), "least": min(seconds[case]), "extra_bytes": extra[case]}
        for case in cases
    }


def save(name: str, content: dict[str, Any]) -> Path:
    """Write the results with what they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    path.write_text(json.dumps({"machine": machine, **content}, indent=2) + "\n")
    return path


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


class Worker:
    """A process that was set up once and takes a step whenever it is asked; the other end of `serve`."""

    def __init__(self, *command: str | Path) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()

    def take(self) -> dict[str, Any]:
        """What one step measured."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(take: Callable[[], dict[str, Any]]) -> None:
    """Answer every line of standard input with what a step measured, as JSON; first of all that we are ready."""
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(take()), flush=True)


class Peak:
    """How far the process's memory rose above its level now."""

    def __init__(self) -> None:
        self._before = _reset_peak_memory()

    def extra_bytes(self) -> int:
        return _peak_memory() - self._before


def _reset_peak_memory() -> int:
    """Forget the process's peak where the system allows it (Linux); returns the level to count from, in bytes.

    What was freed is given back to the system first: memory that the C library keeps would count as in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _peak_memory() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
