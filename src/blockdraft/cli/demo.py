"""``blockdraft demo`` runs everything once, from data to a report, or with ``--quick`` answers prompts in seconds."""

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.evaluate import show_results
from blockdraft.cli.generate import TOKEN_STYLES, Stream, generation_facts
from blockdraft.cli.options import AsJson, Device, Dtype, precision, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.demo import QuickAnswer


def demo(
    target: Annotated[
        str, typer.Option(help="pocket, which takes about a quarter of an hour, or smollm2, which takes hours.")
    ] = "pocket",
    out: Annotated[Path | None, typer.Option(help="The folder to write.", show_default="demo/TARGET")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Train and write nothing: answer a few prompts with a shipped drafter and without, in seconds.",
        ),
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --quick, the drafter: a shipped one (see drafters ls), or a folder.",
            show_default="the one with the longest predicted length",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Run everything once, from data to a report.

    The target answers prompts; two drafters are trained on the answers, with CE and with BV; both are evaluated.
    Stop it whenever you like: the same command resumes.
    """
    from blockdraft.demo import SIZES

    if target not in SIZES:
        raise typer.BadParameter(f"{target!r} is not one of {', '.join(SIZES)}", param_hint="--target")
    if quick and out is not None:
        raise typer.BadParameter("the quick demo writes nothing; leave --out out", param_hint="--quick")
    if drafter is not None and not quick:
        raise typer.BadParameter("the whole demo trains its own drafters; add --quick", param_hint="--drafter")
    if quick:
        _quick(target, drafter, as_json, device=device, dtype=precision(dtype))
    else:
        _whole(target, out or Path("demo") / target, as_json, device=device, dtype=precision(dtype))


def _whole(target: str, folder: Path, as_json: bool, **where: Any) -> None:
    from blockdraft.cli.progress import Stages
    from blockdraft.demo import SIZES, Demo, DemoError

    print(
        f"{target} in {folder}: about {SIZES[target].minutes} minutes on two cores. "
        "Stop it whenever you like: the same command resumes.",
        file=sys.stderr,
    )
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the runs it started are told to stop, too
    try:
        with Stages() as stages:
            results, written = Demo(target, folder, stages.show, **where).run()
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        lines = list(map(str, written.headlines))
        print_json({"report": str(written.page), "headlines": lines, "results": results.model_dump(mode="json")})
    else:
        show_results(results)
        for headline in written.headlines:
            print(headline)
        print(f"the report: {written.page}")
    print(f"{time.monotonic() - started:.0f} seconds", file=sys.stderr)


def _quick(target: str, drafter: str | None, as_json: bool, **where: Any) -> None:
    from rich.console import Console

    from blockdraft.demo import best_shipped

    name = drafter or best_shipped(target).name  # before the seconds that PyTorch and the target take
    show = Show(Console(highlight=False, soft_wrap=True), silent=as_json)
    answers = show.run(target, name, **where)
    if as_json:
        print_json(in_numbers(target, name, answers))


class Show:
    """Prints the quick demonstration: prompts, coloured answers, and how fast each was beside plain decoding."""

    MAX_NEW_TOKENS = 128

    def __init__(self, console: "Console", *, silent: bool) -> None:
        self.console, self.silent = console, silent

    def run(self, target_name: str, drafter_name: str, **where: Any) -> list["QuickAnswer"]:
        """Load the models, answer the prompts, and return the answers; ``where`` is as `load_target` takes it."""
        import torch

        from blockdraft.decoding import round_costs
        from blockdraft.demo import SIZES, answer_twice, pooled_speed, quick_prompts, speedup, tokens_per_call
        from blockdraft.drafters import load_drafter
        from blockdraft.targets import load_target

        threads = SIZES[target_name].threads
        if threads is not None:
            torch.set_num_threads(threads)
        self.target = load_target(target_name, **where)
        drafter = load_drafter(drafter_name, self.target)
        num = drafter.config.num_proposals
        self._legend(f"{drafter_name} proposes up to {num} tokens at a time, {target_name} verifies them in one call")
        prompts = quick_prompts(target_name)
        costs = round_costs(self.target, drafter, prompts)
        answers = answer_twice(
            self.target, drafter, prompts, costs=costs, max_new_tokens=self.MAX_NEW_TOKENS,
            on_prompt=self._prompt, on_round=lambda record: self.stream.show(record), on_answer=self._answer,
        )  # fmt: skip
        drafted, alone = [each.drafted for each in answers], [each.alone for each in answers]
        speeds = f"{pooled_speed(drafted):.0f} and {pooled_speed(alone):.0f} tokens/s, measured in turns"
        self._say(
            f"\nAll together: {tokens_per_call(drafted):.2f} tokens per call, {speedup(answers):.2f}x as fast as "
            f"without a drafter ({speeds}).",
            style="bold",
        )
        return answers

    def _legend(self, opening: str) -> None:
        """Say who does what, and where there are colours what they mean."""
        kinds = {"accepted": "accepted", "correction": "corrected", "bonus": "added after a whole block"}
        shown = kinds if self.console.color_system is not None else {}
        self._say(opening, end=": " if shown else ".\n")
        for number, (kind, words) in enumerate(shown.items(), 1):
            self._say(words, style=TOKEN_STYLES[kind], end=", " if number < len(shown) else ".\n")

    def _prompt(self, prompt: str) -> None:
        self._say(f"\n{prompt}", style="bold")
        self.stream = Stream(self.target, self.console, self.MAX_NEW_TOKENS, silent=self.silent)

    def _answer(self, answer: "QuickAnswer") -> None:
        self._say(
            f"\n[{answer.drafted.acceptance_length:.2f} tokens per call, {answer.speedup:.2f}x as fast as without]",
            style="dim",
        )

    def _say(self, text: str, **options: Any) -> None:
        if not self.silent:
            self.console.print(text, markup=False, **options)


def in_numbers(target: str, drafter: str, answers: list["QuickAnswer"]) -> dict[str, Any]:
    """Return the quick demonstration as plain values."""
    from blockdraft.demo import speedup, tokens_per_call

    return {
        "target": target, "drafter": drafter, "speedup": speedup(answers),
        "acceptance_length": tokens_per_call([each.drafted for each in answers]),
        "answers": [
            {"prompt": each.prompt, "speedup": each.speedup}
            | {"drafted": generation_facts(each.drafted), "alone": generation_facts(each.alone)}
            for each in answers
        ],
    }  # fmt: skip
