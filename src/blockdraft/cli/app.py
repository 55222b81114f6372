"""The verbs, and what a mistake looks like: one line, exit code 2."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockdraft import __version__
from blockdraft.cli.data import data
from blockdraft.cli.demo import demo
from blockdraft.cli.evaluate import Spread, evaluate
from blockdraft.cli.export import export, export_target
from blockdraft.cli.recipes import estimate, recipes
from blockdraft.cli.report import report
from blockdraft.cli.study import study
from blockdraft.cli.train import train
from blockdraft.verification import RULES, Rule

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(data, name="data")
app.add_typer(recipes, name="recipes")
app.command()(estimate)
app.command()(train)
app.command(cls=Spread)(evaluate)
app.command()(report)
app.command()(demo)
app.command()(study)
app.command()(export)
app.command("export-target")(export_target)


@app.callback(invoke_without_command=True)
def blockdraft(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Drafters for speculative decoding, trained for block verification."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    target: Annotated[str, typer.Option(help="pocket, smollm2, a Hugging Face id or a folder.")] = "pocket",
    drafter: Annotated[Path | None, typer.Option(help="A drafter's folder; none is autoregressive.")] = None,
    rule: Annotated[str, typer.Option(help="greedy, token or block.")] = "block",
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the target; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Keep the most probable tokens of this mass.")] = 1.0,
    draft_temperature: Annotated[float | None, typer.Option(min=0.0, help="Of the drafter; else the target's.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Output budget.")] = 256,
    seed: Annotated[int, typer.Option(help="Of all random streams.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Token and block verification on the same prompt.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rounds as JSON instead of text.")] = False,
) -> None:
    """Decode one answer and show what verification kept: accepted tokens, corrections, bonus tokens."""
    from blockdraft.cli.streaming import Stream, as_dict
    from blockdraft.decoding import generate as decode
    from blockdraft.drafters import load_drafter
    from blockdraft.targets import load_target

    if rule not in RULES:
        raise typer.BadParameter(f"{rule!r} is not one of {', '.join(RULES)}", param_hint="--rule")
    if compare and drafter is None:
        raise typer.BadParameter("there is nothing to compare without --drafter", param_hint="--compare")
    model = load_target(target)
    small = None if drafter is None else load_drafter(drafter, model).to(model.device, model.dtype)
    chosen: tuple[Rule, ...] = ("token", "block") if compare else (rule,)
    console = Console(highlight=False, soft_wrap=True)
    results = {}
    for each in chosen:
        stream = Stream(model, console, max_new_tokens, silent=as_json)
        out = decode(
            model, small, prompt, rule=each, temperature=temperature, top_k=top_k, top_p=top_p,
            draft_temperature=draft_temperature, max_new_tokens=max_new_tokens, seed=seed, on_round=stream.show,
        )  # fmt: skip
        stream.close(out, each if small is not None else "no drafter")
        results[each] = as_dict(out)
    if as_json:
        json.dump(results, sys.stdout, indent=2)
        print()


def main() -> None:
    """Run a verb. A user's mistake is one message and exit code 2; anything else is a bug and shows its traceback."""
    try:
        app()
    except SystemExit:
        raise  # before the names of all mistakes are looked up
    except _mistakes() as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _mistakes() -> tuple[type[Exception], ...]:
    from blockdraft.data import DataError, EngineError, PromptError
    from blockdraft.distributed import DeviceError
    from blockdraft.drafters import CheckpointError
    from blockdraft.evaluation import EvaluationError
    from blockdraft.recipes import RecipeError
    from blockdraft.targets import UnsupportedTargetError

    return (
        CheckpointError, DataError, DeviceError, EngineError, EvaluationError, PromptError, RecipeError,
        UnsupportedTargetError,
    )  # fmt: skip
