"""Classes of bad arguments: numbers, seeds, sizes, devices, names, paths, outputs, things in each other's place."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from blockdraft.cli.app import app
from blockdraft.recipes.loading import sections

from fuzz.bench import EVALUATE, REGENERATE, SAMPLING
from fuzz.file_classes import EXPORT, INSPECT, NEW_EVALUATION, few
from fuzz.running import Case, Expect

NEEDS = ("target", "data", "run", "prompts.jsonl", "recipe.yaml", "evaluation", "study.yaml", "study")
VERBS: dict[str, tuple[str, ...]] = {
    "generate": ("w7 w8", "--target", "target", "--max-new-tokens", "3"),
    "data prompts": ("--from", "pocket", "--num", "3", "--out", "new.jsonl"),
    "data regenerate": (*REGENERATE[2:], *SAMPLING, "--out", "new"),
    "data inspect": INSPECT.arguments[2:],
    "recipes show": ("recipe.yaml",),
    "recipes validate": ("recipe.yaml",),
    "estimate": ("recipe.yaml",),
    "train": ("recipe.yaml", "--dry-run"),
    "evaluate": (*EVALUATE[1:], "--drafter", "bv=run", "--out", "new"),
    "report": ("evaluation", "--out", "new"),
    "study": ("study.yaml", "--plan", "--out", "study"),
    "doctor": ("run", "--target", "target", "--texts", "2", "--max-new-tokens", "4", "--no-measure"),
    "export": EXPORT.arguments[1:],
    "export-target": ("target", "--out", "new"),
}
"""Commands that work as they stand; an option that is given again replaces the value that it has here."""

LEAVES = ("new",)
"""What verbs that resume may leave: their output folder."""

NUMBERS = (
    "", " ", "x", "nan", "inf", "-inf", "-1", "-0.5", "0", "1.5", "1e3", "1e999", "1e-320", "0x10", "1_000", "1,000",
    "²", "10%", "None", "null", "true", "[1]", "2**3", str(2**31), str(2**63), str(2**64), str(10**15), str(10**30),
    "9" * 5000, "--", "\udcff", "\x1b[31m3",
)  # fmt: skip
NO_NUMBERS = (
    "",
    " ",
    "x",
    "nan",
    "0x10",
    "1,000",
    "²",
    "10%",
    "None",
    "null",
    "true",
    "[1]",
    "2**3",
    "\udcff",
    "\x1b[31m3",
)


def options(*kinds: type) -> list[tuple[str, str]]:
    """Return all options of these types, as pairs of a verb and an option's name."""
    found = []
    for verb in VERBS:
        command: Any = get_command(app)
        for word in verb.split():
            command = command.commands[word]
        for param in command.params:
            name = next((each for each in param.opts if each.startswith("--")), None)
            if name is not None and param.type_descriptor.annotation in kinds:
                found.append((verb, name))
    return found


def command(verb: str, *more: str, expect: Expect = Expect.REFUSED, says: str = "", **about: Any) -> Case:
    """Make a case of a verb's good command line and more arguments."""
    words = (*verb.split(), *VERBS[verb], *more)
    name = f"{verb} {' '.join(more)}"[:150]
    about = {"needs": NEEDS, "leaves": LEAVES} | about
    return Case(name, words, expect=expect, says=says, **about)


def numbers(dice: random.Random, scale: int) -> Iterator[Case]:
    """Every option that takes a number: words, NaN, infinity, negative, beyond 64 bits."""
    every = options(int, float)
    for verb, option in dice.sample(every, 22) if scale == 1 else every:
        for value in dice.sample(NUMBERS, few(scale)):
            expect = Expect.REFUSED if value in NO_NUMBERS else Expect.EITHER
            yield command(verb, option, value, expect=expect)


def seeds(dice: random.Random, scale: int) -> Iterator[Case]:
    """Seeds that no random generator takes: negative, beyond 64 bits, fractions, words."""
    values = (
        "-1",
        str(2**63),
        str(2**64),
        str(2**64 + 1),
        str(10**30),
        "1.5",
        "x",
        "",
        "nan",
        "[1]",
        "null",
        "9" * 5000,
    )
    for verb, option in options(int):
        if option == "--seed":
            for value in dice.sample(values, 2 * scale):
                yield command(verb, option, value)
    for value in dice.sample(values, 2 * scale):
        yield command("train", f"seed={value}", says="seed")
        yield command("study", f"seeds=[{value}]", says="seed")


DEVICES = ("cuda", "cuda:0", "cuda:99", "cuda:-1", "cuda:x", "cuda:" + "9" * 30, "xpu", "mps", "tpu", "meta", "gpu",
"CPU", "",
           " ", "cpu:x", "0", "-1", "cuda cuda", "\x1b[31m", "\udcff", "vulkan", "hpu:1", "privateuseone")  # fmt: skip


def devices(dice: random.Random, scale: int) -> Iterator[Case]:
    """Devices that are not here, or that nothing can be computed on."""
    for value in dice.sample(DEVICES, 4) if scale == 1 else DEVICES:
        every = ("generate", "data regenerate", "data inspect", "evaluate", "doctor")
        for verb in every if scale > 2 else (dice.choice(every),):
            yield command(verb, "--device", value, says="device" if value.strip() else "")
        yield command("train", f"runtime.device={value if value.strip() else repr(value)}")  # a blank is null


VALUES = (
    "null", "nan", ".nan", ".inf", "-.inf", "-1", "0", "1.5", "1e30", "1e400", str(10**9), str(2**31), str(2**63),
    str(10**30), "true", "word", "''", "[]", "{}", "[1, 2]", "{a: 1}", "2024-01-01", "!!binary eA==", "1e-320",
    "\x1b[31m",
)  # fmt: skip
NEVER = (".nan", ".inf", "-.inf", "[]", "{}", "[1, 2]", "{a: 1}", "!!binary eA==", "2024-01-01", "word", "nan")


def fields(dice: random.Random, scale: int) -> Iterator[Case]:
    """Every field of a recipe: values that it cannot have, and sizes that cannot be allocated."""
    for name, kind in dice.sample(_number_fields(), 12) if scale == 1 else _number_fields():
        for value in dice.sample(VALUES, few(scale)):
            verb = dice.choice(("recipes show", "estimate", "train", "train"))
            expect = Expect.REFUSED if value in NEVER else Expect.EITHER
            if value in ("word", "nan") and kind not in ("int", "float"):
                expect = Expect.EITHER
            yield command(verb, f"{name}={value}", expect=expect)
    for text in (
        "",
        "=",
        "=1",
        "seed",
        "seed==1",
        ".=1",
        "a.b.c.d=1",
        "seed.x=1",
        "drafter=null",
        "\udcff=1",
        "[=1",
        "data..path=x",
    ):
        yield command(dice.choice(("recipes show", "estimate", "train", "study")), text)

    yield command("train", "logging.decode_prompts=10", says="4 held-out")


def _number_fields() -> list[tuple[str, str]]:
    found = []
    for name, section, _about in sections():
        for key, field in (section.model_fields if section is not None else {}).items():
            words = str(field.annotation)
            if any(kind in words for kind in ("int", "float")) and not _is_model(field.annotation):
                found.append((f"{name}.{key}", "int" if "int" in words else "float"))
    return found


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


PATHS = (
    "", ".", "..", "~nobody/x", "~", "nowhere", "nowhere/below", "x" * 300, "x/" * 3000, "\udcff\udcfe", "\x1b[31mred",
    "[bold]x[/bold]", "[/]", "[/red]", "-", "a\nb", "a\tb", " ", "/dev/null", "/dev/zero", "/etc/passwd",
    "/proc/self/mem",
    "https://example.com/x", "hf://datasets/x", "C:\\x", "*", "$HOME", "é/ü", "🙂", "run@first", "=", "name=", "=run",
    "prompts.jsonl/x", "run/run.json/x", "data/shard-00000.parquet", "nobody/nothing", "dead-link", "loop", "pipe",
)  # fmt: skip
INPUTS = (
    ("generate", "--target"), ("generate", "--drafter"), ("data prompts", "--from"), ("data regenerate", "--prompts"),
    ("data regenerate", "--target"), ("data inspect", "--target"), ("evaluate", "--drafter"), ("evaluate", "--tasks"),
    ("evaluate", "--prompts"), ("export", "--target"), ("evaluate", "--target"), ("doctor", "--target"),
    ("doctor", "--data"),
)  # fmt: skip
PLACES = (
    "data inspect",
    "recipes show",
    "recipes validate",
    "estimate",
    "train",
    "report",
    "study",
    "doctor",
    "export",
    "export-target",
)


def paths(dice: random.Random, scale: int) -> Iterator[Case]:
    """Names and paths that lead nowhere, or hold markup, control characters, bytes that are no text."""
    for verb, option in INPUTS:
        for value in dice.sample(PATHS, 1 if scale == 1 else 3 * scale):
            if value == "pipe" and (option in ("--from", "--tasks") or (verb, option) == INPUTS[3]):
                continue  # prompts may come through a pipe
            more = ("--tasks", "gsm8k") if option == "--prompts" and verb == "evaluate" else ()
            expect = Expect.EITHER if option == "--target" and verb == "export" else Expect.REFUSED
            yield command(verb, *more, option, value, expect=expect, prepare=_odd_places)
    for verb in PLACES:
        for value in dice.sample(PATHS, 1 if scale == 1 else 3 * scale):
            rest = tuple(each for each in VERBS[verb][1:])
            words = (*verb.split(), "--", value) if value.startswith("-") else (*verb.split(), value, *rest)
            yield Case(f"{verb} {value}"[:150], words, _odd_places, needs=NEEDS, leaves=LEAVES)


def _odd_places() -> None:
    Path("dead-link").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")


ARTEFACTS = (
    "target", "data", "begun", "run", "begun-run", "features", "evaluation", "flat", "speculators", "dspark", "study",
    "prompts.jsonl", "recipe.yaml", "study.yaml", "run/steps", "run/metrics.jsonl", "data/manifest.json",
    "categories.jsonl",
)  # fmt: skip
TAKES: dict[tuple[str, str], tuple[str, ...]] = {
    ("generate", "--target"): ("target",),
    ("generate", "--drafter"): ("run", "begun-run", "flat", "speculators", "dspark"),
    ("data prompts", "--from"): ("prompts.jsonl", "categories.jsonl"),
    ("data regenerate", "--prompts"): ("prompts.jsonl",),
    ("evaluate", "--drafter"): ("run", "begun-run", "flat", "speculators", "dspark"),
    ("evaluate", "--tasks"): ("prompts.jsonl", "categories.jsonl"),
    ("data inspect", ""): ("data",),
    ("recipes validate", ""): ("recipe.yaml", "run/recipe.yaml"),
    ("estimate", ""): ("recipe.yaml",),
    ("train", ""): ("recipe.yaml",),
    ("report", ""): ("evaluation",),
    ("study", ""): ("study.yaml",),
    ("doctor", ""): ("target", "run", "begun-run", "flat", "speculators", "dspark"),  # it says what they are
    ("doctor", "--data"): ("data", "begun"),  # the latter is a finding
    ("export", ""): ("run", "begun-run", "dspark", "flat", "speculators"),
    ("export-target", ""): ("target",),
}


def mixed_up(dice: random.Random, scale: int) -> Iterator[Case]:
    """Every artefact in the place of every other one: a run for data, data for a target, and so on."""
    pairs = [(where, each) for where, good in TAKES.items() for each in ARTEFACTS if each not in good]
    for (verb, option), value in dice.sample(pairs, 12) if scale == 1 else pairs:
        words = VERBS[verb] if option else (value, *VERBS[verb][1:])
        more = (option, value) if option else ()
        yield Case(f"{verb} {option} {value}", (*verb.split(), *words, *more), leaves=LEAVES)
    yield Case(
        "a drafter of another target", ("generate", "w7", "--target", "other", "--drafter", "run"), says="fingerprint"
    )
    yield Case("data of another target", ("train", "recipe.yaml", "target.name=other", "--out", "new"), leaves=LEAVES)
    yield Case("data inspected with another target", ("data", "inspect", "data", "--target", "other"))
    yield Case("a run of something else", ("train", "recipe.yaml", "seed=3", "--out", "run"), says="recipe.seed")
    again = (*NEW_EVALUATION.arguments[:-1], "evaluation", "--seed", "5")
    yield Case("an evaluation of something else", again, says="seed", leaves=("evaluation/.lock",))
    yield Case("data of other prompts", (*REGENERATE, "--out", "data"), says="max_length", leaves=("data/.lock",))


OUTPUTS = ("", "/dev/null", "/dev/full", "/dev/zero", "/proc/nothing/x", "recipe.yaml", "recipe.yaml/below", "x" * 300,
           "x/" * 3000, "target", "dead-link", "loop", "pipe")  # fmt: skip
WRITERS: dict[str, tuple[str, ...]] = {
    "data prompts": VERBS["data prompts"][:-2],
    "data regenerate": VERBS["data regenerate"][:-2],
    "train": ("recipe.yaml",),
    "evaluate": VERBS["evaluate"][:-2],
    "report": ("evaluation",),
    "study": ("study.yaml", "--jobs", "1"),
    "export": ("run", "--format", "flat"),
    "export-target": ("target",),
    "demo": (),
}


def outputs(dice: random.Random, scale: int) -> Iterator[Case]:
    """Outputs that cannot be written: devices, files in the way, names too long, folders of somebody else."""
    for verb, words in WRITERS.items():
        for value in dice.sample(OUTPUTS, 1) if scale == 1 else OUTPUTS:
            if value == "" and verb not in ("data prompts", "export", "export-target"):
                continue  # the working directory is a folder like any other
            mixed = value == "target" and verb not in ("data prompts", "export", "export-target")
            new_name = value in ("dead-link", "loop") and verb == "data prompts"  # which replaces the link
            expect = Expect.EITHER if mixed or new_name else Expect.REFUSED
            if mixed and verb in ("study", "demo"):
                continue  # they would begin to work there
            name, leaves = f"{verb} --out {value}"[:150], ("target",) if mixed else ()
            arguments = (*verb.split(), *words, "--out", value)
            yield Case(name, arguments, _odd_places, expect, NEEDS, leaves=leaves)
        if verb != "demo":
            name, into = f"{verb} into a folder of somebody else", (*verb.split(), *words, "--out", "locked/new")
            yield Case(name, into, _locked, needs=NEEDS, unprivileged=True, says="locked")


def _locked() -> None:
    Path("locked").mkdir(mode=0o555)


def full_disks(dice: random.Random, scale: int) -> Iterator[Case]:
    """A disk that is full after so many bytes, under every verb that writes."""
    sizes = (0, 1, 100, 1000, 5000, 20_000, 60_000)
    for verb, words in WRITERS.items():
        if verb in ("demo", "study"):
            continue  # their stages are the other verbs
        out = "new.jsonl" if verb == "data prompts" else "new"
        least = 3 if verb in ("data prompts", "data regenerate") else 5
        for size in dice.sample(sizes[:least], 1 if scale == 1 else least):
            yield Case(f"{verb}, full after {size} bytes", (*verb.split(), *words, "--out", out), needs=NEEDS,
                       file_size=size, leaves=LEAVES,
                       expect=Expect.REFUSED if size < 100 else Expect.EITHER)  # fmt: skip
    for verb in ("generate", "recipes show", "estimate", "data inspect"):
        yield command(verb, file_size=0, expect=Expect.WORKS)


def prompt_texts(_dice: random.Random, scale: int) -> Iterator[Case]:
    """Prompts that cannot be read: empty, bytes that are no text, longer than the context."""
    texts = {
        "": Expect.REFUSED, "\udcff": Expect.REFUSED, "w7 " * 600: Expect.REFUSED, "w7 " * 100_000: Expect.REFUSED,
        " ": Expect.EITHER, "\x00": Expect.EITHER, "\x1b[31m": Expect.EITHER, "[bold]": Expect.EITHER,
        "🙂": Expect.EITHER,
        "<eos>": Expect.EITHER, "{{ x }}": Expect.EITHER, "a\r\nb": Expect.EITHER,
    }  # fmt: skip
    for text, expect in texts.items():
        for more in ((), ("--raw",)) if scale > 1 else ((),):
            words = ("generate", "--target", "target", "--max-new-tokens", "3", *more, "--", text)
            yield Case(
                f"generate {' '.join(more)} {text[:20]!r} of {len(text)}", words, needs=("target",), expect=expect
            )
    for name, value in (("top-p", "0"), ("temperature", "1e-300"), ("temperature", "0"), ("max-new-tokens", "513")):
        yield Case(
            f"generate --{name} {value}",
            ("generate", "w7", "--target", "target", f"--{name}", value),
            needs=("target",),
        )
    for context in (505, 506):  # with 4 proposals, "user w7 assistant" and 505 new tokens fill 512 positions exactly
        words = ("generate", "w7", "--target", "target", "--drafter", "run", "--max-new-tokens", str(context))
        expect = Expect.WORKS if context == 505 else Expect.REFUSED
        yield Case(f"generate up to the end of the context, {context}", words, needs=("target", "run"), expect=expect)


MISSPELT = (
    ("generate", ("generate", "hi", "--target"), ("poket", "pockt", "pocket2", "Pocket", "smollm", "smolm2",
    "SmolLM2", "smol-lm2")),
    ("data regenerate", ("data", "regenerate", "--prompts", "prompts.jsonl", "--out", "new", "--target"), ("pokcet",
    "smollm-2")),
    ("evaluate", ("evaluate", "--drafter", "run", "--out", "new", "--target"), ("pocke", "smollm2x")),
    ("export-target", ("export-target", "--out", "new"), ("pcoket", "smollm2.")),
    ("recipes show", ("recipes", "show"), ("pocket-dflash-vb", "pocket-dflsh-bv", "qwen3-4-dflash-bv")),
    ("train", ("train",), ("pocket-dspark-cee", "smollm2-dflash-b")),
    ("train", ("train", "recipe.yaml", "--out", "new"), ("target.name=poket", "target.name=smollm")),
    ("estimate", ("estimate", "recipe.yaml"), ("target.name=pocet", "target.name=smollm3")),
    ("study", ("study",), ("pockett", "papr", "smollm22")),
    ("evaluate", ("evaluate", "--target", "target", "--drafter", "run", "--out", "new", "--tasks"), ("gsm8",
    "pocket-mth", "humaneva")),
    ("data prompts", ("data", "prompts", "--num", "3", "--out", "new.jsonl", "--from"), ("poket", "open-perfectblen")),
    ("recipe field", ("train", "recipe.yaml"), ("optimizer.learning_rat=1", "sed=3", "drafter.num_layer=2",
    "optimiser.max_steps=3")),
    ("drafter", ("generate", "w7", "--target", "target", "--drafter"), ("runn", "dspar", "fla")),
    ("doctor", ("doctor", "run", "--target"), ("poket", "smolm2")),
    ("doctor", ("doctor", "--target", "target"), ("runn", "flatt")),
)  # fmt: skip


def misspelt(_dice: random.Random, scale: int) -> Iterator[Case]:
    """Names with a slip of the finger: answered with the right one, and without asking the network."""
    for verb, words, names in MISSPELT:
        for name in names[: 1 if scale == 1 else None]:
            yield Case(f"{verb} {name}", (*words, name), says="did you mean", leaves=LEAVES)
    for words in (("trian",), ("data", "prompt"), ("generate", "x", "--tempeature", "1"), ("recipes", "shw")):
        yield Case(" ".join(words), words, needs=("prompts.jsonl",))
