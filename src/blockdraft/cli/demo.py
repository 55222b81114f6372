"""``blockdraft demo``."""

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def demo(
    target: Annotated[str, typer.Option(help="pocket (ten minutes) or smollm2 (more than an hour).")] = "pocket",
    out: Annotated[Path | None, typer.Option(help="Where everything goes; demo/TARGET if not given.")] = None,
) -> None:
    """All of it once: data from the target, a drafter trained with CE and one with BV, both evaluated, a report.

    Stop it at any moment; the same command goes on.
    """
    from blockdraft.cli.evaluate import show
    from blockdraft.cli.progress import Stages
    from blockdraft.demo import SIZES, Demo, DemoError

    if target not in SIZES:
        raise typer.BadParameter(f"{target!r} is not one of {', '.join(SIZES)}", param_hint="--target")
    folder = out or Path("demo") / target
    print(
        f"{target} in {folder}: about {SIZES[target].minutes} minutes on two cores. "
        "Stop it whenever you like; the same command goes on.",
        file=sys.stderr,
    )
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the runs it started are told to stop, too
    try:
        with Stages() as stages:
            results, report = Demo(target, folder, stages.show).run()
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    show(results)
    for headline in report.headlines:
        print(headline)
    print(f"the report: {report.page}")
    print(f"{time.monotonic() - started:.0f} seconds", file=sys.stderr)
