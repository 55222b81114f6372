"""A bar on stderr: how far, how fast, how long still."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from blockdraft.training import Progress as Step


class _Shown:
    """On the screen from entering to leaving."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Bar(_Shown):
    """Counts things done, and tokens per second over what this run did itself.

    Where stderr is no terminal, the bar is drawn once, at the end.
    """

    def __init__(self, label: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(stderr=True),
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task(label, total=total, tokens=0)

    def skip(self, num: int = 1) -> None:
        """Count what was there before."""
        self._progress.update(self._task, completed=self._progress.tasks[0].completed + num)
        self._progress.reset(self._task, start=True, completed=int(self._progress.tasks[0].completed))

    def advance(self, num: int = 1, *, tokens: int = 0) -> None:
        """Count what was done now."""
        self._progress.tasks[0].fields["tokens"] += tokens
        self._progress.advance(self._task, num)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        seconds = task.elapsed or 0.0
        tokens = task.fields["tokens"]
        return Text(f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 and tokens else "")


class Stages(_Shown):
    """One bar after another, each for a stage of the work."""

    def __init__(self, *, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(stderr=True),
            disable=not shown,
            speed_estimate_period=120,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, done: int, of: int, tokens: int) -> None:
        """How far a stage is, and how many tokens were made since the last call."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=of, tokens=0)
        task = self._tasks[stage]
        if not self._progress.disable:
            self._progress._tasks[task].fields["tokens"] += tokens
        self._progress.update(task, completed=done, total=of)


class TrainingBar(_Shown):
    """Steps, with what the last one measured."""

    def __init__(self, label: str, num_steps: int, first: int, *, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(stderr=True),
            disable=not shown,
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task(label, total=num_steps, completed=first, numbers="")

    def show(self, progress: "Step") -> None:
        """After a step."""
        m = progress.metrics
        numbers = f"loss {m['loss']:.3f} accepted {m['length_block']:.2f} lr {m['learning_rate']:.1e}"
        numbers += f" {m['num_blocks'] * m['steps_per_second']:,.0f} blocks/s waiting {m['waiting_for_data']:.0%}"
        self._progress.update(self._task, completed=progress.step, numbers=numbers)
