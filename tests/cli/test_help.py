"""The first seconds with the package: what it imports, and whether its help can be read by a stranger."""

import pkgutil
import re
import subprocess
import sys

import pytest
import typer

import blockdraft
from blockdraft.cli.app import app

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "rich", "matplotlib")

ASK_EVERYTHING = """
import contextlib, io, sys
from blockdraft.cli.app import app
for words in {verbs!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        app([*words, "--help"], standalone_mode=False)
    assert "Usage:" in out.getvalue(), words
print([name for name in {heavy!r} if name in sys.modules])
"""


def verbs(command=None, words=()):
    """Every command of the tree, groups included, as (words, command)."""
    command = command or typer.main.get_command(app)
    yield list(words), command
    for name, each in getattr(command, "commands", {}).items():
        yield from verbs(each, (*words, name))


VERBS = list(verbs())


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_help_of_every_verb_imports_nothing_heavy():
    words = [each for each, _ in VERBS]
    assert len(words) >= 15
    assert run(ASK_EVERYTHING.format(verbs=words, heavy=HEAVY)) == "[]"


def test_importing_the_package_imports_nothing_heavy():
    assert run(f"import sys, blockdraft; print([name for name in {HEAVY!r} if name in sys.modules])") == "[]"


def test_names_at_the_root_are_those_of_the_parts():
    from blockdraft import decoding, drafters, errors, losses, targets, verification

    assert blockdraft.generate is decoding.generate
    assert blockdraft.load_target is targets.load_target
    assert blockdraft.load_drafter is drafters.load_drafter
    assert blockdraft.objective is losses.objective
    assert blockdraft.fused_linear_objective is losses.fused_linear_objective
    assert blockdraft.verify is verification.verify
    assert blockdraft.law is verification.law
    assert blockdraft.BlockdraftError is errors.BlockdraftError
    assert blockdraft.losses is losses
    assert dir(blockdraft) == sorted(blockdraft.__all__)
    with pytest.raises(AttributeError, match="module 'blockdraft' has no attribute 'nothing'"):
        _ = blockdraft.nothing


def test_every_subpackage_is_a_name_at_the_root():
    parts = {part.name for part in pkgutil.iter_modules(blockdraft.__path__) if part.ispkg} - {"cli"}
    assert parts <= set(blockdraft.__all__)
    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is not None


@pytest.mark.parametrize(("words", "command"), VERBS, ids=[" ".join(words) or "blockdraft" for words, _ in VERBS])
def test_help_lines_are_sentences(words, command):
    """A capital or a value first, a full stop at the end, and nothing that needs the line above it."""
    assert re.match(r"[A-Z].*\.$", command.help.strip().splitlines()[0]), command.help
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        assert text, f"{words} {parameter.name} has no help"
        assert text.endswith("."), text
        assert not re.match(r"(Of|That|It|Else|And)\b", text), text


def test_no_line_of_help_is_cut_short_at_eighty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    cut = []
    for words, command in VERBS:
        if hasattr(command, "commands"):
            app([*words, "--help"], standalone_mode=False)
            cut += [line for line in capsys.readouterr().out.splitlines() if line.endswith("...")]
    assert [line for line in cut if "COMMAND" not in line] == []
