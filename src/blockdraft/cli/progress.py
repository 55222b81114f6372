"""Show how far the work is, how fast it goes and how long it still takes: bars on a terminal, lines in a pipe."""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

Clock = Callable[[], float]


class Pace:
    """Counts one stage of the work, and tells its speed and the time that is left.

    Speed is measured over the last two minutes, or over the last two updates if these are rarer; tokens per second
    are those of the whole stage, and stand still once it is finished.
    """

    WINDOW = 120.0

    def __init__(self, name: str, done: int, total: int, clock: Clock = time.monotonic) -> None:
        self.name, self.total, self.clock = name, total, clock
        self.note = ""
        self.restart(done)

    def restart(self, done: int) -> None:
        """Count from here: what was done before, by an earlier run, says nothing about the speed of this one."""
        self.done, self.tokens = done, 0
        self.started = self.clock()
        self.finished = self.started if done >= self.total else None
        self._marks = deque([(self.started, done)])

    def update(self, done: int, total: int, tokens: int) -> None:
        """Set what is done, out of how much, and count the tokens that were made since the last call."""
        now = self.clock()
        self.done, self.total = done, total
        self.tokens += tokens
        if done < total:
            self.finished = None
        elif self.finished is None:
            self.finished = now
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] < now - self.WINDOW:
            self._marks.popleft()

    @property
    def seconds(self) -> float:
        """Give the time that the stage has taken so far, or took."""
        return (self.clock() if self.finished is None else self.finished) - self.started

    @property
    def rate(self) -> str:
        """Give tokens per second if tokens are made, else items per second; nothing in a stage's first second."""
        if self.seconds < 1:
            return ""
        if self.tokens:
            return f"{self.tokens / self.seconds:,.0f} tokens/s"
        speed = self._speed()
        return f"{speed:,.1f}/s" if speed >= 0.1 else f"{60 * speed:,.1f}/min" if speed > 0 else ""

    @property
    def left(self) -> str:
        """Give the time that is left, as ``2:05``; nothing if it is unknown or over."""
        speed = self._speed()
        if self.finished is not None or speed <= 0:
            return ""
        return clock_time((self.total - self.done) / speed)

    @property
    def time(self) -> str:
        """Give the time that the stage took, or that is left."""
        return f"{self.left or '-:--'} left" if self.finished is None else f"in {clock_time(self.seconds)}"

    @property
    def count(self) -> str:
        """Say what is done, out of how much."""
        return f"{self.done:,}/{self.total:,}"

    @property
    def line(self) -> str:
        """Give all of it in one line of text."""
        parts = [f"{self.name}: {self.count}"]
        if self.finished is not None:
            parts[0] += f" in {clock_time(self.seconds)}"
        elif self.total > 0:
            parts[0] += f" ({self.done / self.total:.0%})"
        parts.append(self.rate)
        if self.finished is None and self.seconds >= 1:
            parts += [f"{clock_time(self.seconds)} so far", f"{self.left} left" if self.left else ""]
        return ", ".join(part for part in (*parts, self.note) if part)

    def _speed(self) -> float:
        """Return the items per second over the window; time since the last update counts, so that a stall shows."""
        then, before = self._marks[0]
        seconds = (self.clock() if self.finished is None else self._marks[-1][0]) - then
        return (self.done - before) / seconds if seconds > 0 else 0.0


class Stages:
    """Shows the stages of some work on stderr, one after another or side by side.

    On a terminal each stage is a bar. Elsewhere it is a line when it begins, one for every ``interval`` seconds,
    and one when it ends; nothing at all unless ``shown``.
    """

    def __init__(
        self,
        *,
        shown: bool = True,
        console: Console | None = None,
        interval: float = 60.0,
        clock: Clock = time.monotonic,
    ) -> None:
        console = console or Console(stderr=True)
        is_screen = console.is_terminal and not console.is_dumb_terminal
        self._clock = clock
        self._paces: dict[str, Pace] = {}
        self._display: _Display | None = None
        if shown:
            self._display = _Bars(console) if is_screen else _Lines(console.file, interval)

    def __enter__(self) -> Self:
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def show(self, stage: str, done: int, total: int, tokens: int = 0, *, note: str = "", fresh: bool = True) -> None:
        """Say how far a stage is.

        Args:
            stage: its name; a new name begins a new stage.
            done: how many items are done, out of ``total``.
            tokens: how many tokens were made since the last call.
            note: something to read beside the counts.
            fresh: False if the last items had been done by an earlier run, which says nothing about the speed.
        """
        pace = self._paces.get(stage)
        is_new = pace is None
        if pace is None:
            pace = self._paces[stage] = Pace(stage, done, total, self._clock)
        elif not fresh:
            pace.restart(done)
        pace.update(done, total, tokens)
        pace.note = note
        if self._display is not None:
            self._display.show(pace, is_new=is_new)


class _Display(Protocol):
    def start(self) -> None: ...
    def show(self, pace: Pace, *, is_new: bool) -> None: ...
    def stop(self) -> None: ...


class _Lines:
    """Prints lines for pipes, files and terminals that cannot move their cursor."""

    def __init__(self, file: IO[str], interval: float) -> None:
        self.file, self.interval = file, interval
        self._running: list[Pace] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, pace: Pace, *, is_new: bool) -> None:
        with self._lock:
            was_running = pace in self._running
            if pace.finished is None and not was_running:
                self._running.append(pace)
            elif pace.finished is not None and was_running:
                self._running.remove(pace)
            if is_new or was_running != (pace in self._running):
                self._print(pace)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for pace in self._running:
            self._print(pace)

    def _repeat(self) -> None:
        while not self._stopped.wait(self.interval):
            with self._lock:
                for pace in self._running:
                    self._print(pace)

    def _print(self, pace: Pace) -> None:
        print(pace.line, file=self.file, flush=True)


class _Bars:
    """Draws bars on a terminal; where it is narrow, names and notes are cut and the numbers stay whole."""

    def __init__(self, console: Console) -> None:
        self._progress = RichProgress(
            _PaceColumn(lambda pace: pace.name, may_shrink=True),
            BarColumn(bar_width=10),
            _PaceColumn(lambda pace: pace.count),
            _PaceColumn(lambda pace: pace.time),
            _PaceColumn(lambda pace: pace.rate),
            _PaceColumn(lambda pace: pace.note, may_shrink=True),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def start(self) -> None:
        self._progress.start()

    def show(self, pace: Pace, *, is_new: bool) -> None:
        if is_new:
            self._tasks[pace.name] = self._progress.add_task(pace.name, total=pace.total, pace=pace)
        self._progress.update(self._tasks[pace.name], completed=pace.done, total=pace.total)

    def stop(self) -> None:
        self._progress.stop()


class _PaceColumn(ProgressColumn):
    """Shows one text about a stage's pace."""

    def __init__(self, text: Callable[[Pace], str], *, may_shrink: bool = False) -> None:
        super().__init__(table_column=Column(no_wrap=not may_shrink))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(task.fields["pace"]), no_wrap=True, overflow="ellipsis")


def clock_time(seconds: float) -> str:
    """Return a time as ``0:07``, ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
