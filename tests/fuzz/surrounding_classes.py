"""Classes of what surrounds a command: words in options, the environment, caches, models and prompts in other forms."""

import gzip
import io
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from blockdraft.decoding.proposals import costs_file
from blockdraft.drafters import load_drafter
from blockdraft.targets import load_target

from fuzz import damage
from fuzz.argument_classes import LEAVES, NEEDS, PATHS, VERBS, command
from fuzz.bench import STUDY as GOOD_STUDY
from fuzz.file_classes import GENERATE, PLAN, STUDY, few
from fuzz.running import Case, Expect

WORDS = (
    "",
    " ",
    "x",
    "None",
    "GREEDY",
    "float8",
    "-1",
    "0",
    "é",
    "\x1b[31m",
    "\udcff",
    "a\nb",
    "../x",
    "[bold]",
    "9" * 5000,
)
CHOICES = (
    ("generate", "--rule"), ("generate", "--dtype"), ("generate", "--num-proposals"), ("data prompts", "--family"),
    ("data regenerate", "--engine"), ("data regenerate", "--dtype"), ("data inspect", "--dtype"),
    ("evaluate", "--rules"), ("evaluate", "--dtype"), ("evaluate", "--num-proposals"), ("evaluate", "--checkpoint"),
    ("doctor", "--dtype"), ("export", "--format"), ("export", "--dtype"), ("export-target", "--dtype"),
)  # fmt: skip


def words(dice: random.Random, scale: int) -> Iterator[Case]:
    """Every option that takes one of a few words: others, in other cases, empty, not printable."""
    for verb, option in dice.sample(CHOICES, 5) if scale == 1 else CHOICES:
        more = ("--drafter", "run") if (verb, option) == ("generate", "--num-proposals") else ()
        for value in dice.sample(WORDS, few(scale)):
            yield command(verb, *more, option, value)
    for verb in VERBS:
        yield command(verb, "--no-such-option")
        if scale > 1 and verb != "recipes validate":  # which takes many, and tells of each
            yield command(verb, "one", "word", "too=many", "and one")


def text_fields(dice: random.Random, scale: int) -> Iterator[Case]:
    """Fields of a recipe that hold names, paths or words."""
    fields = {
        "target.name": Expect.REFUSED, "target.dtype": Expect.REFUSED, "target.shape": Expect.REFUSED,
        "drafter.kind": Expect.REFUSED, "drafter.initial": Expect.REFUSED, "drafter.markov_head": Expect.REFUSED,
        "objective.name": Expect.REFUSED, "objective.options": Expect.REFUSED, "data.path": Expect.REFUSED,
        "data.features": Expect.REFUSED, "data.cache": Expect.EITHER, "batch.anchors": Expect.REFUSED,
        "optimizer.name": Expect.REFUSED, "runtime.precision": Expect.REFUSED, "runtime.parallel": Expect.REFUSED,
    }  # fmt: skip
    for name, expect in dice.sample(list(fields.items()), 4) if scale == 1 else fields.items():
        for value in dice.sample(PATHS, few(scale)):
            quoted = json.dumps(value) if "\udcff" not in value else value
            null = value in ("~", "") and name in ("target.dtype", "target.shape", "runtime.precision")
            yield command("train", f"{name}={quoted}", expect=Expect.EITHER if null else expect)


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "WORLD_SIZE is a word": {"WORLD_SIZE": "x"}, "WORLD_SIZE is empty": {"WORLD_SIZE": ""},
    "WORLD_SIZE is 0": {"WORLD_SIZE": "0"}, "WORLD_SIZE without a rank": {"WORLD_SIZE": "2"},
    "a rank beyond the world": {"WORLD_SIZE": "2", "RANK": "7", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    "RANK is a word": {"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    "MASTER_PORT is a word": {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
}  # fmt: skip
AUTO = (
    "generate", "w7 w8", "--target", "target", "--drafter", "run", "--max-new-tokens", "3", "--num-proposals", "auto",
)  # fmt: skip


def environments(_dice: random.Random, scale: int) -> Iterator[Case]:
    """Variables of torchrun that say something impossible, and caches and homes that cannot be used."""
    for name, variables in ENVIRONMENTS.items():
        for verb in ("train", "evaluate") if scale > 1 else ("train",):
            arguments = (*verb.split(), *VERBS[verb])
            yield Case(f"{verb}: {name}", arguments, needs=NEEDS, leaves=LEAVES, says="torchrun", environment=variables)
    for home in ("recipe.yaml", "/dev/null", "recipe.yaml/x") if scale > 1 else ("recipe.yaml",):
        about = {"XDG_CACHE_HOME": home}
        yield Case(f"a cache in {home}", AUTO, expect=Expect.WORKS, needs=NEEDS, environment=about)


def remembered(dice: random.Random, scale: int) -> Iterator[Case]:
    """Costs of rounds that were measured earlier: a file that is damaged or lies is measured anew."""
    good = {"draft": [0.01] * 5, "verify": [0.02] * 5, "rest": [0.01] * 5}

    def put(change: Callable[[Path], object]) -> Callable[[], None]:
        def do() -> None:
            target = load_target("target")
            file = costs_file(target, load_drafter("run", target), "block")
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(good))
            change(file)

        return do

    def write(content: str) -> Callable[[Path], object]:
        return lambda file: file.write_text(content)

    changes: dict[str, Callable[[Path], object]] = {
        "whole": lambda _: None, "a list": write("[]"), "a number": write("3"), "deep": write("[" * 100_000),
        "not JSON": write("{"), "empty": write(""), "zeros": write(json.dumps(dict.fromkeys(good, [0] * 5))),
        "negative": write(json.dumps(good | {"rest": [-1] * 5})), "NaN": write('{"draft": [NaN]}'),
        "of other phases": write('{"prefill": [1, 2]}'), "of text": write(json.dumps(good | {"rest": "12345"})),
        "of lists": write(json.dumps(good | {"rest": [[1]] * 5})), "a number for a list": write('{"draft": 3}'),
        "a pipe": lambda file: (file.unlink(), os.mkfifo(file)), "a folder": lambda file: (file.unlink(), file.mkdir()),
        "of other lengths": write(json.dumps(good | {"rest": [1] * 4})),
    }  # fmt: skip
    for name in dice.sample(list(changes), 2) if scale == 1 else changes:
        about = {"XDG_CACHE_HOME": "cache"}
        yield Case(f"costs: {name}", AUTO, put(changes[name]), Expect.WORKS, NEEDS, environment=about)


class _Touch:
    """Leaves a file behind if it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("touched", "w")


def _without_weights() -> Path:
    Path("target/model.safetensors").unlink()
    return Path("target")


def _pickled(kind: str) -> Callable[[], None]:
    def do() -> None:
        _without_weights().joinpath(kind).write_bytes(pickle.dumps(_Touch()))

    return do


def _custom_code(key: str, file: str) -> Callable[[], None]:
    """Give the target code of its own, and say yes to every question."""

    def do() -> None:
        path = Path("target", file)
        values = json.loads(path.read_text())
        values["auto_map"] = {key: "own.Own"}
        values["model_type" if file == "config.json" else "tokenizer_class"] = "Own"
        path.write_text(json.dumps(values))
        Path("target/own.py").write_text("open('touched', 'w')\nclass Own: pass\n")
        sys.stdin = io.StringIO("y\n" * 20)

    return do


def _config(**changes: Any) -> Callable[[], None]:
    def do() -> None:
        path = Path("target/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return do


def _loop_of_links() -> None:
    shutil.rmtree("target")
    Path("target").symlink_to("target")


MODELS: dict[str, tuple[Callable[[], object], Expect]] = {
    "a pickle that runs code": (_pickled("pytorch_model.bin"), Expect.REFUSED),
    "a pickled checkpoint of TensorFlow": (_pickled("tf_model.h5"), Expect.REFUSED),
    "no weights": (_without_weights, Expect.REFUSED),
    "code for the model": (_custom_code("AutoModelForCausalLM", "config.json"), Expect.REFUSED),
    "code for the configuration": (_custom_code("AutoConfig", "config.json"), Expect.REFUSED),
    "code for the tokenizer": (_custom_code("AutoTokenizer", "tokenizer_config.json"), Expect.EITHER),
    "quantized in no known way": (_config(quantization_config={"quant_method": "none of these"}), Expect.EITHER),
    "quantized in a word": (_config(quantization_config="int8"), Expect.REFUSED),
    "of another kind": (_config(model_type="bert"), Expect.REFUSED),
    "of no known kind": (_config(model_type="qwen99"), Expect.REFUSED),
    "an encoder and a decoder": (_config(model_type="t5"), Expect.REFUSED),
    "more layers than weights": (_config(num_hidden_layers=7), Expect.REFUSED),
    "no positions": (_config(max_position_embeddings=0), Expect.REFUSED),
    "a link to itself": (_loop_of_links, Expect.REFUSED),
    "an adapter": (lambda: Path("target/adapter_config.json").write_text('{"peft_type": "LORA"}'), Expect.EITHER),
    "weights of GGUF": (lambda: _without_weights().joinpath("model.gguf").write_bytes(b"GGUF"), Expect.REFUSED),
}


def models(dice: random.Random, scale: int) -> Iterator[Case]:
    """Targets in other forms: pickles, code of their own, quantized, adapters, architectures that are none of ours."""
    for name in dice.sample(list(MODELS), 4) if scale == 1 else MODELS:
        prepare, expect = MODELS[name]
        yield GENERATE.case(name, prepare, expect)  # type: ignore[arg-type]


def _gzip(change: Callable[[bytes], bytes]) -> Callable[[], None]:
    def do() -> None:
        Path("prompts.jsonl.gz").write_bytes(change(gzip.compress(Path("prompts.jsonl").read_bytes())))

    return do


def _folder(name: str, content: bytes) -> Callable[[], None]:
    def do() -> None:
        Path("folder").mkdir()
        Path("folder", name).write_bytes(content)

    return do


def prompt_files(_dice: random.Random, scale: int) -> Iterator[Case]:
    """Prompts in other containers: gzip that is cut or none, folders of nothing, Parquet that is none."""
    cuts: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda b: b[: len(b) // 2], "without its end": lambda b: b[:-8], "empty": lambda _: b"",
        "not gzip": lambda _: b"{}", "with a bit flipped": lambda b: b[:30] + bytes([b[30] ^ 9]) + b[31:],
        "followed by garbage": lambda b: b + b"garbage",
    }  # fmt: skip
    for name, change in cuts.items() if scale > 1 else list(cuts.items())[:2]:
        take = ("data", "prompts", "--from", "prompts.jsonl.gz", "--out", "new.jsonl")
        yield Case(f"gzip {name}", take, _gzip(change), needs=("prompts.jsonl",))
    folders = {
        "x.parquet": b"PAR1", "x.json": b"{", "x.jsonl": b"\xff", "x.csv": b"", "x.txt": b"hello\n",
        "x.py": b"import os", "dataset_infos.json": b"[", "x.json.gz": b"\x1f\x8b",
    }  # fmt: skip
    for name, content in folders.items() if scale > 1 else list(folders.items())[:1]:
        take = ("data", "prompts", "--from", "folder", "--out", "new.jsonl")
        yield Case(f"a folder of {name}", take, _folder(name, content), needs=("prompts.jsonl",))


def studies(_dice: random.Random, scale: int) -> Iterator[Case]:
    """Studies whose names or cells collide, or lead out of the folder, and folders that hold another one."""

    def put(**changes: Any) -> Callable[[], None]:
        return lambda: _write_yaml("study.yaml", GOOD_STUDY | changes)  # type: ignore[return-value]

    target, objective = GOOD_STUDY["targets"]["pocket"], GOOD_STUDY["objectives"]["bv"]
    changes: dict[str, dict[str, Any]] = {
        "a target ..": {"targets": {"..": target}}, "a target .": {"targets": {".": target}},
        "a target -x": {"targets": {"-x": target}}, "an objective with a slash": {"objectives": {"a/b": objective}},
        "an objective ..": {"objectives": {"..": objective}}, "a seed twice": {"seeds": [1, 1]},
        "a drafter twice": {"drafters": ["dflash", "dflash"]}, "no seeds": {"seeds": []}, "no targets": {"targets": {}},
        "seeds of text": {"seeds": ["x"]}, "a negative seed": {"seeds": [-1]},
        "cells of one name": {"targets": {"a": target, "a-dflash": target},
                              "objectives": {"b": objective, "dflash-b": objective}},
        "a field that does not exist": {"set": ["nothing=1"]}, "a field without a value": {"set": ["seed"]},
        "no tasks": {"evaluation": {"tasks": []}}, "no rules": {"evaluation": {"rules": []}},
        "a rule twice": {"evaluation": {"rules": ["block", "block"]}},
    }  # fmt: skip
    for name, change in changes.items() if scale > 1 else list(changes.items())[:3]:
        yield PLAN.case(f"study: {name}", put(**change), Expect.REFUSED)
    nowhere = put(targets={"a": target | {"data": "nowhere"}})
    yield STUDY.case("study: data that are nowhere", nowhere, Expect.REFUSED, says="nowhere")
    for name, content in (
        ("a list", "- 1\n"),
        ("empty", ""),
        ("a word", "x\n"),
        ("not YAML", "{"),
        ("another", "name: x\n"),
    ):
        yield STUDY.case(f"before it: {name}", lambda c=content: _put("study/study.yaml", c), Expect.REFUSED)
    for name, do in damage.of_kind("study/study.yaml") if scale > 1 else ():
        if name != "missing":
            made = lambda d=do: (_put("study/study.yaml", "name: x\n"), d())  # noqa: E731
            yield STUDY.case(f"before it: {name}", made, Expect.REFUSED)  # type: ignore[arg-type]


def _write_yaml(path: str, values: Any) -> None:
    _put(path, yaml.safe_dump(values, sort_keys=False))


def _put(path: str, content: str) -> None:
    Path(path).write_text(content, encoding="utf-8")


def healthy(_dice: random.Random, scale: int) -> Iterator[Case]:
    """Everything as it should be: the commands that the classes damage work as they stand."""
    for verb in VERBS if scale > 1 else ("doctor", "export"):
        yield command(verb, expect=Expect.WORKS)
