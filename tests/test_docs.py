"""The documentation is true: code runs, commands parse, links lead somewhere, references are those of the code."""

import ast
import importlib
import inspect
import itertools
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from blockdraft.cli.app import app
from blockdraft.data.manifest import DataProvenance, Identity, Manifest, ShardRecord
from blockdraft.drafters import DrafterConfig
from blockdraft.evaluation import results
from blockdraft.evaluation.candidates import MeasuredLengths, Measurement, ShippedDrafter, TrainingTexts
from blockdraft.files import Provenance
from blockdraft.recipes import load_recipe, shipped_names
from blockdraft.runs import RunInfo, RunTarget
from blockdraft.study import load_study, shipped_studies

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
reference = importlib.import_module("reference")

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def fenced(language, pages=PAGES):
    """Return (page, number, content) of all fenced blocks of a language."""
    return [
        pytest.param(content, id=f"{page.relative_to(ROOT)}-{number}")
        for page in pages
        for number, (tag, content) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if tag == language
    ]


def names(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("code", fenced("python"))
def test_python_runs_as_it_stands(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    registered = importlib.import_module("blockdraft.losses.objective")
    monkeypatch.setattr(registered, "_REGISTRY", dict(registered._REGISTRY))  # an example may register its own
    exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})


def test_there_is_something_to_check():
    assert len(fenced("python")) >= 8
    assert len(COMMANDS) >= 30


# Commands


def commands(shell):
    """Return the words of every `blockdraft` and `make` command in a piece of shell, however it is started."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", shell).splitlines():
        words = list(itertools.takewhile(lambda word: word not in (">", "|"), shlex.split(line, comments=True)))
        for start in ("blockdraft", "make"):
            if start in words:
                found.append(words[words.index(start) :])
                break
    return found


COMMANDS = [
    pytest.param(words, id=f"{each.id}: {shlex.join(words)[:60]}")
    for each in fenced("sh")
    for words in commands(each.values[0])
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse(words):
    """Every option exists and has a value that it takes; recipes, studies and their fields exist, too."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in targets
        return
    command, words = get_command(app), words[1:]
    path = []
    while hasattr(command, "commands"):
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    given = command.make_context(path[-1], list(words)).params
    if path[-1] == "study" and given["recipe"] in shipped_studies():
        load_study(given["recipe"], given["assignments"])
    elif "assignments" in given and given["recipe"] in shipped_names():
        load_recipe(given["recipe"], given["assignments"])
    elif "assignments" in given:
        assert given["recipe"].endswith(".yaml"), f"{given['recipe']} is no shipped recipe or study"


def test_a_wrong_command_is_noticed():
    with pytest.raises(Exception, match="No such option"):
        test_commands_parse(["blockdraft", "estimate", "pocket-dflash-bv", "--nothing"])
    with pytest.raises(ValueError, match="unknown field"):
        test_commands_parse(["blockdraft", "estimate", "pocket-dflash-bv", "optimizer.rate=1"])


# Links and words


def anchors(page):
    """Return the anchors of a page's headings, as viewers of Markdown make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_no_placeholder_is_left(page):
    assert not re.search(r"@@|TODO|TBD|XXX", page.read_text(encoding="utf-8"))
    assert not re.search(r"^(<{7}|={7}|>{7})", page.read_text(), re.MULTILINE)  # of a merge


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if page not in nav and not page.startswith("theory/")]
    assert "theory/*.md" in nav
    assert not missing


# References


@pytest.mark.parametrize("page", reference.pages(), ids=names)
def test_reference_pages_are_those_of_the_code(page):
    assert page.read_text(encoding="utf-8") == reference.pages()[page], "run `make reference`"


SIGNATURES = [
    pytest.param(code.splitlines()[0].removeprefix("# "), node, id=node.name)
    for code in (each.values[0] for each in fenced("py", [ROOT / "docs" / "reference" / "python.md"]))
    if code.startswith("# blockdraft")
    for node in ast.parse(code).body
]


@pytest.mark.parametrize(("module", "node"), SIGNATURES)
def test_signatures_are_those_of_the_code(module, node):
    """What is documented exists, in this order, with this default; nothing that must be given is left out."""
    found = inspect.signature(getattr(importlib.import_module(module), node.name)).parameters
    documented = [each.arg for each in [*node.args.args, *node.args.kwonlyargs]]
    known = [name for name, each in found.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [name for name in known if name in documented] == documented
    assert {name for name in known if found[name].default is inspect.Parameter.empty} <= set(documented)
    assert all(found[each.arg].kind is inspect.Parameter.KEYWORD_ONLY for each in node.args.kwonlyargs)
    positional = node.args.args[len(node.args.args) - len(node.args.defaults) :]
    pairs = [
        *zip(positional, node.args.defaults, strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if default is None or (isinstance(default, ast.Constant) and default.value is ...):
            continue
        assert found[argument.arg].default == ast.literal_eval(default), argument.arg


MODELS = [
    Manifest, Identity, DataProvenance, ShardRecord, RunInfo, RunTarget, Provenance, DrafterConfig, results.Results,
    results.TaskAbout, results.DrafterAbout, results.Cell, results.Average, results.PairedRatio, results.DynamicsPoint,
    results.Profile, results.ProfileEntry, results.AcceptanceRates, results.Traces, results.TracedPrompt,
    results.AnswerTrace, results.TracedRound, results.TracedToken, ShippedDrafter, Measurement, MeasuredLengths,
    TrainingTexts,
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_file_formats_name_every_field(model):
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    assert [name for name in model.model_fields if f"`{name}`" not in page] == []


def test_the_parts_are_attributes_of_the_package():
    import blockdraft

    assert blockdraft.losses.objective("bv").name == "bv"
    assert callable(blockdraft.verification.verify)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = blockdraft.nothing
