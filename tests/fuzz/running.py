"""One case in a process of its own, forked from this one, which has PyTorch and everything else loaded.

The child gets a copy of the good artefacts, damages it, and runs the command line. Its memory, the size of its files
and its time are limited, names of hosts cannot be looked up, and what it prints is read from pipes.
"""

import contextlib
import ctypes
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from blockdraft.cli import main

from fuzz import bench

NOBODY = 65534
PR_SET_PDEATHSIG = 1
BROKEN = 70
LOOK_EVERY = 2.0
MEMORY = 6 * 2**30
"""Bytes that a child may map beyond what it has at the start: a case that wants more fails in it, and not elsewhere."""


class Expect(StrEnum):
    """What the right outcome is.

    REFUSED: one line that begins with ``error:``, exit code 2. SAID: it works, and a line on stderr says what was odd.
    WORKS: exit code 0. EITHER: refused or accepted, where nobody could tell that the input is wrong.
    """

    REFUSED = "refused"
    SAID = "said"
    WORKS = "works"
    EITHER = "either"


class Verdict(StrEnum):
    """What came of a case; all but the first two are faults."""

    REFUSED = "refused"
    ACCEPTED = "rightly accepted"
    TRACEBACK = "traceback"
    SILENT = "silently accepted"
    HANG = "hang"
    UNTIDY = "badly said"


@dataclass(frozen=True)
class Case:
    """A command line, and what is wrong.

    name: unique in its class.
    arguments: what follows ``blockdraft``; ``{url}`` stands for what `prepare` returned.
    prepare: damages the sandbox, in the child, whose working directory it is; may return a server's URL.
    needs: the artefacts that the sandbox holds; all if empty.
    says: a piece of text that stderr must hold.
    leaves: names in the sandbox that a refusal may leave changed, since the documentation says so.
    file_size: bytes after which writing any file fails, as on a full disk.
    unprivileged: run as a user who owns nothing here.
    """

    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[], object] | None = None
    expect: Expect = Expect.REFUSED
    needs: tuple[str, ...] = ()
    says: str = ""
    leaves: tuple[str, ...] = ()
    file_size: int | None = None
    unprivileged: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a case ended. why: what is wrong with that, or the line that refused it."""

    verdict: Verdict
    code: int
    why: str
    err: str
    seconds: float

    @property
    def good(self) -> bool:
        """Whether it is as it must be."""
        return self.verdict in (Verdict.REFUSED, Verdict.ACCEPTED)


def run(case: Case, good: Path, room: Path, limit: float) -> Outcome:
    """Run a case on a copy of the good artefacts in ``room``; it hangs if it works or waits for ``limit`` seconds."""
    sandbox = room / "sandbox"
    shutil.rmtree(sandbox, ignore_errors=True)
    room.chmod(0o755)
    if case.needs:
        sandbox.mkdir()
        for name in case.needs:
            _copy(good / name, sandbox / name)
    else:
        bench.copy(good, sandbox)
    started = time.monotonic()
    reads, writes = zip(*(os.pipe() for _ in range(4)), strict=True)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        for each in reads[:3]:
            os.close(each)
        _child(case, sandbox, writes, reads[3])
    for each in (*writes[:3], reads[3]):
        os.close(each)
    texts, before, hung = _communicate(child, reads[:3], writes[3], sandbox, limit)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    out, err = texts[0].decode(errors="replace"), texts[1].decode(errors="replace")
    seconds = time.monotonic() - started
    if code == BROKEN:
        raise RuntimeError(f"the case {case.name!a} is broken itself: {err}")
    if hung:
        return Outcome(Verdict.HANG, code, f"no end within {limit:g} s", err, seconds)
    left = [] if code == 0 else _left_behind(before, _files(sandbox), case.leaves)
    verdict, why = judge(case, code, out, err, left)
    return Outcome(verdict, code, why, err, seconds)


def judge(case: Case, code: int, out: str, err: str, left: list[str]) -> tuple[Verdict, str]:
    """Compare what a command did with what it should have done."""
    lines = err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if "Traceback (most recent call last)" in err or "Exception ignored" in err or code not in (0, 2):
        return Verdict.TRACEBACK, lines[-1] if lines else f"exit code {code} without a word"
    if code == 0:
        if case.expect is Expect.REFUSED:
            return Verdict.SILENT, f"accepted: {(out.strip().splitlines() or [''])[-1][:100]}"
        if case.expect is Expect.SAID and case.says not in err:
            return Verdict.SILENT, f"not said: {case.says}"
        return Verdict.ACCEPTED, ""
    if case.expect in (Expect.WORKS, Expect.SAID):
        return Verdict.UNTIDY, f"refused, but it should work: {err.strip()[-200:]}"
    if len(errors) != 1 or lines[-1] != errors[0]:
        return Verdict.UNTIDY, f"{len(errors)} error lines, the last of {len(lines)} lines is: {lines[-1:]}"
    if any(not each.isprintable() for each in errors[0]):
        return Verdict.UNTIDY, f"an error line with control characters: {errors[0]!r}"
    if len(errors[0]) < len("error: x") or len(errors[0]) > 2500:
        return Verdict.UNTIDY, f"an error line of {len(errors[0])} characters"
    if case.says not in errors[0]:
        return Verdict.UNTIDY, f"the error line does not say {case.says!r}: {errors[0]}"
    if left:
        return Verdict.UNTIDY, f"left behind: {', '.join(left[:4])}"
    return Verdict.REFUSED, errors[0]


def _copy(source: Path, destination: Path) -> None:
    if source.is_dir():
        bench.copy(source, destination)
    else:
        shutil.copyfile(source, destination)


def _communicate(
    child: int, reads: tuple[int, ...], go: int, sandbox: Path, limit: float
) -> tuple[list[bytearray], dict[str, tuple[int, int]], bool]:
    """Read what the child prints until all pipes close, or kill it after so many seconds of work, or of none.

    A machine that is busy with something else makes a child slow, and does not make it hang.
    The third pipe says that the sandbox is damaged as planned; the child waits until it has been looked at.
    """
    texts, before = [bytearray(), bytearray(), bytearray()], {}
    with selectors.DefaultSelector() as selector:
        for number, handle in enumerate(reads):
            selector.register(handle, selectors.EVENT_READ, number)
        used, moved = 0.0, time.monotonic()
        while selector.get_map():
            ready = selector.select(LOOK_EVERY)
            now = _seconds_used(child)
            if now > used or ready:
                used, moved = now, time.monotonic()
            if used > limit or time.monotonic() - moved > limit:
                os.kill(child, signal.SIGKILL)
                return texts, before, True
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                texts[key.data] += part
                if key.data == 2 and part:
                    before = _files(sandbox)
                    os.write(go, b"!")
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    os.close(go)
    return texts, before, False


def _seconds_used(child: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(case: Case, sandbox: Path, writes: tuple[int, ...], go: int) -> None:
    """Become the command; never returns."""
    code = BROKEN
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no case outlives the one that watches it
        os.dup2(writes[0], 1)
        os.dup2(writes[1], 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - until the end of the process
        sys.stdout, sys.stderr = (
            os.fdopen(os.dup(each), "w", buffering=1, errors="backslashreplace") for each in (1, 2)
        )
        os.chdir(sandbox)
        os.environ.update(case.environment)
        socket.getaddrinfo = _no_names
        prepared = case.prepare() if case.prepare is not None else None
        url = prepared if isinstance(prepared, str) else ""
        os.write(writes[2], b".")
        os.close(writes[2])
        os.read(go, 1)
        _limit(case)
        sys.argv = ["blockdraft", *(each.replace("{url}", url) for each in case.arguments)]
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException:  # of the case itself
        traceback.print_exc()
    finally:
        os._exit(code)


def _limit(case: Case) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    if case.file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.file_size, case.file_size))
    if case.unprivileged and os.getuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)


_real_lookup = socket.getaddrinfo


def _no_names(host: object, *arguments: object, **options: object) -> object:
    """Look up this machine alone: a case that asks for another one is told at once that there is no network."""
    if str(host) in ("127.0.0.1", "localhost", "::1", "None"):
        return _real_lookup(host, *arguments, **options)
    print(f"looked up: {host}", file=sys.stderr)
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def _files(sandbox: Path) -> dict[str, tuple[int, int]]:
    """Return what is in the sandbox: the size and the time of the last change of every file."""
    found = {}
    for folder, folders, files in os.walk(sandbox):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            found[str(path.relative_to(sandbox))] = (0, 0) if path.is_dir() else (about.st_size, about.st_mtime_ns)
    return found


def _left_behind(before: Mapping[str, object], after: Mapping[str, object], allowed: tuple[str, ...]) -> list[str]:
    """Return what is new or changed and should not be; unfinished files are never allowed."""
    changed = [name for name in after if before.get(name) != after[name]] + [
        name for name in before if name not in after
    ]
    return sorted(
        name
        for name in changed
        if ".unfinished" in name or not any(name == each or name.startswith(f"{each}/") for each in allowed)
    )
