"""Say what the commands of a study are, and start them so that none outlives it for long, even if it is killed.

A child is told to stop when its parent is gone (on Linux). It also holds a lock that it has inherited: whoever runs the
study again waits for that lock, and so for children that are still saving.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from blockdraft.study.plan import StudyError


def jobs_at_once(num_processes: int, *, num_gpus: int, num_cores: int, device: str | None = None) -> int:
    """Return how many cells a machine trains side by side, if each takes so many processes with a device each.

    Processes run on CPUs if the study needs one for each cell and there is no GPU, or if ``device`` says so.
    """
    if num_processes == 1:
        return num_gpus or num_cores
    if device == "cpu":
        return max(1, num_cores // num_processes)
    if num_gpus < num_processes:
        raise StudyError(
            f"each cell is trained by {num_processes} processes with a GPU each (hardware.devices), and "
            f"{num_gpus or 'no'} {'GPU' if num_gpus == 1 else 'GPUs'} can be used here; set "
            f"hardware.devices={num_gpus or 1}. A step stays the same: `train` raises "
            "batch.gradient_accumulation_steps until it fits into a GPU, or you set it yourself"
        )
    return num_gpus // num_processes


@dataclass(frozen=True)
class Job:
    """Holds a command of a study.

    name: what it makes.
    arguments: of ``blockdraft``.
    needs: names of the jobs that must end before it starts.
    num_processes: how many processes run it together, under torchrun if there are several.
    num_threads: threads of each process, unless ``OMP_NUM_THREADS`` is set; None is its share of the cores.
    """

    name: str
    arguments: list[str]
    needs: frozenset[str] = frozenset()
    num_processes: int = 1
    num_threads: int | None = None

    @property
    def command(self) -> list[str]:
        """Give the command line, for this Python."""
        module = ["-m", "blockdraft", *self.arguments]
        if self.num_processes > 1:
            module = ["-m", "torch.distributed.run", *self._torchrun_options, *module]
        return [sys.executable, *module]

    @property
    def _torchrun_options(self) -> list[str]:
        # standalone: a free port, so that several can run on one machine
        return ["--standalone", "--nproc-per-node", str(self.num_processes)]

    def __str__(self) -> str:
        if self.num_processes == 1:
            return shlex.join(["blockdraft", *self.arguments])
        return shlex.join(["torchrun", *self._torchrun_options, "-m", "blockdraft", *self.arguments])


STOP_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):  # it died in between
    sys.exit(128 + signal.SIGTERM)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the command, which is sent SIGTERM when its parent dies; unlike a ``preexec_fn``, safe beside threads."""


@contextmanager
def leftovers_ended(file: Path, on_wait: Callable[[int], None]) -> Iterator[int | None]:
    """Wait until the children of a study that was killed have ended; yields the lock for this one's own children.

    Args:
        file: is locked; the lock is free when the last process that holds it has ended.
        on_wait: called with 0 if there is somebody to wait for, and with 1 once they have ended.
    """
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            on_wait(1)
        yield lock
    finally:
        os.close(lock)


def start(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], lock: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a command that writes into a log, is told to stop if this process dies, and holds the lock to its end."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", STOP_WITH_PARENT, str(os.getpid()), *command]
    inherited = () if lock is None else (lock,)
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, pass_fds=inherited)
