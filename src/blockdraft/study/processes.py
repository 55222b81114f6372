"""Start the commands of a study so that none outlives it for long, even if the study itself is killed.

A child is told to stop when its parent is gone (on Linux). It also holds a lock that it has inherited: whoever runs the
study again waits for that lock, and so for children that are still saving.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
