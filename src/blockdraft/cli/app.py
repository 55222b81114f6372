"""Build the tree of verbs, and turn mistakes into one line on stderr and an exit code."""

import errno
import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from blockdraft import __version__
from blockdraft.cli.data import inspect, prompts, regenerate
from blockdraft.cli.drafters import doctor, export, export_target, list_drafters
from blockdraft.cli.evaluate import evaluate, report
from blockdraft.cli.generate import demo, generate
from blockdraft.cli.options import one_line
from blockdraft.cli.train import estimate, list_recipes, show_recipe, study, train, validate_recipes
from blockdraft.errors import BlockdraftError, first_line, is_out_of_memory

MISTAKE, INTERRUPTED = 2, 130
"""Exit codes: the user can mend it; the user pressed Ctrl-C. A bug shows its traceback and exits with 1."""


OUT_OF_MEMORY = "there is not enough memory; ask for smaller batches, shorter texts or a smaller model"


class Verb(TyperCommand):
    """Tells what went wrong in one line if the user can do something about it."""

    resumes = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command; mistakes, file errors and Ctrl-C become a line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except BlockdraftError as error:
            raise _failed(f"error: {error}", MISTAKE) from error
        except BrokenPipeError:
            raise  # the reader of our output has left; that is no error
        except OSError as error:
            raise _failed(f"error: {describe(error, ctx.params.get('out'))}", MISTAKE) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise _failed(f"error: {OUT_OF_MEMORY}: {first_line(error)}", MISTAKE) from error
        except KeyboardInterrupt as interrupt:
            again = "; the same command resumes" if self.resumes else ""
            raise _failed(f"stopped{again}", INTERRUPTED) from interrupt


class ResumableVerb(Verb):
    """Continues where it was stopped when the same command is given again.

    SIGTERM and SIGHUP end it as Ctrl-C does, in order and with a word about resuming; `nohup` keeps its meaning.
    """

    resumes = True

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn signals that would end the process without a word into exceptions."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                    before[number] = signal.signal(number, _stop)
        try:
            return super().invoke(ctx)
        except StopSignalError as stop:
            raise _failed("stopped; the same command resumes", 128 + stop.number) from stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class StopSignalError(BaseException):
    """A signal asked the process to end; like ``KeyboardInterrupt`` it passes everything that handles errors."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number


def _stop(number: int, _frame: Any) -> None:
    raise StopSignalError(number)


class EvaluateVerb(ResumableVerb):
    """Lets repeatable options also take all values at once: ``--rules greedy token block``.

    This is only for commands without positional arguments.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of such an option before each of its further values, then parse."""
        several = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread: list[str] = []
        last: str | None = None
        fresh = False
        for arg in args:
            if arg.startswith("--"):
                last, fresh = (arg if arg in several else None), True
            elif last is not None and not fresh:
                spread.append(last)
            else:
                fresh = False
            spread.append(arg)
        return super().parse_args(ctx, spread)


class VerbTree(TyperGroup):
    """Lists the verbs in the order in which one needs them."""

    ORDER = (
        "demo", "generate", "drafters", "data", "recipes", "estimate", "train", "evaluate", "report", "study", "doctor",
        "export", "export-target",
    )  # fmt: skip

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, those that are not in the list last."""
        return sorted(super().list_commands(ctx), key=[*self.ORDER, *super().list_commands(ctx)].index)


def describe(error: OSError, out: object = None) -> str:
    """Return the path and the reason of a file error; writes that fail name no path, so ``out`` stands for it."""
    path = error.filename if error.filename is not None else out
    reason = error.strerror or str(error) or type(error).__name__
    if path is None:
        return f"standard output: {reason}" if error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF) else reason
    return f"{os.fsdecode(path) if isinstance(path, bytes) else path}: {reason}"


def _failed(line: str, code: int) -> typer.Exit:
    print(one_line(line), file=sys.stderr)
    return typer.Exit(code)


app = typer.Typer(
    cls=VerbTree, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
data = typer.Typer(no_args_is_help=True, help="Choose prompts, sample answers to them, inspect the data.")
drafters = typer.Typer(no_args_is_help=True, help="List the drafters that come with blockdraft.")
recipes = typer.Typer(no_args_is_help=True, help="List, show and check training recipes.")

app.command(cls=ResumableVerb)(demo)
app.command(cls=Verb)(generate)
app.add_typer(drafters, name="drafters")
drafters.command("ls", cls=Verb)(list_drafters)
app.add_typer(data, name="data")
data.command(cls=Verb)(prompts)
data.command(cls=ResumableVerb)(regenerate)
data.command(cls=Verb)(inspect)
app.add_typer(recipes, name="recipes")
recipes.command("ls", cls=Verb)(list_recipes)
recipes.command("show", cls=Verb)(show_recipe)
recipes.command("validate", cls=Verb)(validate_recipes)
app.command(cls=Verb)(estimate)
app.command(cls=ResumableVerb)(train)
app.command(cls=EvaluateVerb)(evaluate)
app.command(cls=Verb)(report)
app.command(cls=ResumableVerb)(study)
app.command(cls=Verb)(doctor)
app.command(cls=Verb)(export)
app.command("export-target", cls=Verb)(export_target)


@app.callback(invoke_without_command=True)
def blockdraft(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Train drafters for speculative decoding, and decode with them.

    A drafter proposes a block of tokens, and the target verifies them in one pass; the text keeps the target's own
    distribution.
    """
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the verb that the command line names, and exit with its code."""
    usage_error: type[Any] = typer.BadParameter.__mro__[1]
    try:
        code = app(prog_name="blockdraft", standalone_mode=False)
    except usage_error as error:
        sys.exit(_explain(error))
    except BrokenPipeError:
        raise
    except OSError as error:  # of the help or the version, which belong to no verb
        print(one_line(f"error: {describe(error)}"), file=sys.stderr)
        sys.exit(MISTAKE)
    except typer.Abort as abort:
        raise abort.__cause__ or abort from None  # typer's word for a file that ends too early
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Any) -> int:
    """Tell a mistake in the command line itself, and where its help is."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return MISTAKE
    hint = "" if error.ctx is None else f" (see {error.ctx.command_path} --help)"
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    print(one_line(f"error: {message}{hint}"), file=sys.stderr)
    return MISTAKE
