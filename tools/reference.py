"""Write the reference pages that are made from the code: recipe fields, and the command line.

    make reference    # or: python tools/reference.py

`tests/test_docs.py` compares the pages on disk with these.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from blockdraft.cli.app import app
from blockdraft.recipes import reference_page

FOLDER = Path(__file__).parent.parent / "docs" / "reference"

OPENING = """# Command line

<!-- made by tools/reference.py from the help texts; edit those -->

`blockdraft VERB --help` prints the same. Results go to files and to stdout, as tables or with `--json` as JSON;
progress and messages go to stderr. The exit code is 0 on success, 2 for a mistake that you can mend (one line says
what is wrong), 130 after Ctrl-C, 143 if training was stopped and saved itself, and 1 otherwise.

`train` and `evaluate` run over several processes under torchrun:
`torchrun --nproc-per-node N -m blockdraft train ...`.
"""


def pages() -> dict[Path, str]:
    """Return the content of every page that is made from the code."""
    return {FOLDER / "recipe-fields.md": reference_page(), FOLDER / "command-line.md": command_line_page()}


def command_line_page() -> str:
    """Return the reference of all verbs as Markdown, made from their help texts."""
    return "\n".join([OPENING, *(_section(name, command) for name, command in verbs())])


def verbs() -> Iterator[tuple[str, Any]]:
    """Yield every verb with its full name, in the order of the help."""
    yield from _verbs(get_command(app), "blockdraft")


def _verbs(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    for each in command.list_commands(None):
        yield from _verbs(command.commands[each], f"{name} {each}")


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [each.get_help_record(context) for each in command.get_params(context)]
    lines = [f"## {name}", "", " ".join((command.help or "").split()), "", "```", f"{name} {usage}", "```", ""]
    lines += ["| option | meaning |", "| --- | --- |"]
    lines += [f"| `{_option(name)}` | {_meaning(text)} |" for name, text in filter(None, rows) if name != "--help"]
    return "\n".join(lines) + "\n"


def _option(name: str) -> str:
    """Return an option as it is typed; the names of Python types tell nothing, choices do."""
    return _cell(re.sub(r" <(?!\w+\||list\[\w+\|)[^>]*>", "", name))


def _meaning(text: str) -> str:
    """Return the help of an option, what follows it in brackets as a sentence; ranges are left out."""
    help_text, bracket, notes = text.partition("  [")
    for note in notes.removesuffix("]").split("; ") if bracket else []:
        if note == "required":
            help_text += " Required."
        elif note.startswith("default: "):
            default = note.removeprefix("default: ")
            stated = default.startswith("(")
            help_text += f" Default: {default[1:-1] if stated else f'`{default}`'}."
    return _cell(help_text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
        print(path)
