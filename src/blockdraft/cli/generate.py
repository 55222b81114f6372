"""``blockdraft generate`` decodes one answer, coloured by what verification made of each token.

``demo`` runs everything once, from data to a report, or with ``--quick`` answers prompts in seconds.
"""

import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from blockdraft.cli.evaluate import show_results
from blockdraft.cli.options import (
    AsJson,
    Device,
    Dtype,
    NumProposals,
    RuleName,
    Seed,
    TargetName,
    TopK,
    TopP,
    as_num_proposals,
    finite,
    precision,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.decoding import Generation, Round, RoundCosts
    from blockdraft.demo import QuickAnswer
    from blockdraft.drafters import Drafter
    from blockdraft.targets import Target
    from blockdraft.verification import Rule

TOKEN_STYLES = {"accepted": "green", "correction": "yellow", "bonus": "cyan", "target": ""}


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The user's message; with --raw, the text to continue.")
    ],
    target: TargetName = "pocket",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The drafter: one that comes with blockdraft (see drafters ls), a drafter's or a run's folder, or a "
            "Hugging Face id.",
            show_default="none: decode autoregressively",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT as it stands instead of answering it as a chat message.")
    ] = False,
    rule: Annotated[
        RuleName | None,
        typer.Option(
            help="How drafts are verified: block and token sample, greedy takes the target's most probable tokens.",
            show_default="block",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=finite,
            help="The target's temperature; the rule greedy takes none.",
            show_default="1",
        ),
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    draft_temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=finite,
            help="The drafter's temperature, which changes the speed and never the distribution of the text.",
            show_default="the target's",
        ),
    ] = None,
    num_proposals: NumProposals = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Stop after N tokens.")] = 256,
    seed: Seed = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer twice, with token and with block verification.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Decode one answer and show what verification kept.

    Accepted tokens are green, corrections yellow, bonus tokens cyan.
    """
    from rich.console import Console

    from blockdraft.decoding import AdaptiveProposals, prompt_ids, round_costs
    from blockdraft.decoding import generate as decode
    from blockdraft.drafters import load_drafter
    from blockdraft.targets import load_target

    if compare and drafter is None:
        raise typer.BadParameter("there is nothing to compare without --drafter", param_hint="--compare")
    if compare and rule is not None:
        raise typer.BadParameter("it runs the rules token and block; leave --rule out", param_hint="--compare")
    if num_proposals is not None and drafter is None:
        raise typer.BadParameter("nothing is proposed without --drafter", param_hint="--num-proposals")
    asked = as_num_proposals(num_proposals)
    model = load_target(target, device=device, dtype=precision(dtype))
    small = None if drafter is None else load_drafter(drafter, model)
    rules = ["token", "block"] if compare else [str(rule or RuleName.block)]
    console = Console(highlight=False, soft_wrap=True)
    results = {}
    costs: RoundCosts | None = None
    if small is not None and asked is not None:
        read, last = prompt_ids(model, prompt, raw=raw), cast("Rule", rules[-1])
        settings: dict[str, Any] = {"rule": last, "temperature": temperature, "draft_temperature": draft_temperature}
        if asked == "adaptive":
            costs = round_costs(model, small, [read], **settings)
        else:
            best = _best_number(model, small, str(drafter), read, **settings) if asked == "auto" else asked
            small = small.with_proposals(best)
    for name in rules:
        stream = Stream(model, console, max_new_tokens, silent=as_json)
        out = decode(
            model, small, prompt, raw=raw, rule=cast("Rule", name), temperature=temperature, top_k=top_k, top_p=top_p,
            draft_temperature=draft_temperature, max_new_tokens=max_new_tokens, seed=seed, on_round=stream.show,
            num_proposals=None if costs is None else AdaptiveProposals(costs),
        )  # fmt: skip
        number = 0 if small is None else small.config.num_proposals
        said = "no drafter" if small is None else f"{name}, {'up to ' if costs else ''}{number} proposals"
        stream.close(out, said)
        results[name] = generation_facts(out) | {"num_proposals": number}
    if as_json:
        print_json(results)


def _best_number(
    target: "Target",
    drafter: "Drafter",
    name: str,
    prompt: list[int],
    rule: "Rule",
    temperature: float | None,
    draft_temperature: float | None,
) -> int:
    """Choose the number of proposals for this prompt; of a shipped drafter, the lengths are those of its card."""
    from blockdraft.decoding import choose_num_proposals
    from blockdraft.drafters import find_drafter
    from blockdraft.evaluation.candidates import shipped_record

    record = shipped_record(find_drafter(name))
    known = None if record is None or record.measured is None else record.measured.lengths_by_proposals.get(rule)
    usual = temperature in (None, 1.0) and draft_temperature in (None, 1.0)  # what the card was measured at
    choice = choose_num_proposals(
        target, drafter, [prompt], rule=rule, temperature=temperature, draft_temperature=draft_temperature,
        lengths=known if usual else None,
    )  # fmt: skip
    return choice.num_proposals


class Stream:
    """Prints rounds as they come, up to the budget, and a closing line."""

    def __init__(self, target: "Target", console: "Console", max_new_tokens: int, *, silent: bool = False) -> None:
        self.target, self.console, self.max_new_tokens, self.silent = target, console, max_new_tokens, silent
        self.tokens: list[int] = []
        self.shown = 0

    def show(self, record: "Round") -> None:
        """Print one round: its accepted tokens, then the token that the target added."""
        whole = record.accepted == len(record.drafted)
        last = "target" if not record.drafted else "bonus" if whole else "correction"
        kinds = ["accepted"] * record.accepted + ([] if record.next_token is None else [last])
        for token, kind in zip(record.tokens, kinds, strict=True):
            if len(self.tokens) < self.max_new_tokens:
                self._print(token, kind)

    def close(self, out: "Generation", label: str) -> None:
        """Print the acceptance length and the speed."""
        if self.silent:
            return
        num, speed = len(out.tokens), len(out.tokens) / out.seconds
        line = f"\n\n[{label}] {num} tokens, {out.acceptance_length:.2f} per verification, {speed:.1f} tokens/s"
        self.console.print(line, style="dim", markup=False)

    def _print(self, token: int, kind: str) -> None:
        """Print the text that this token completes; bytes of an unfinished character wait for the next one."""
        from rich.text import Text

        self.tokens.append(token)
        text = "" if self.silent else self.target.decode(self.tokens)
        if self.silent or text.endswith("�"):
            return
        self.console.print(Text(text[self.shown :], style=TOKEN_STYLES[kind]), end="")
        self.shown = len(text)


def generation_facts(out: "Generation") -> dict[str, Any]:
    """Return a generation as plain values."""
    return asdict(out) | {"acceptance_length": out.acceptance_length, "seconds": out.seconds}


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
