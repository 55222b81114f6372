"""One good artefact of every kind, made once on a tiny target; cases get a copy, and all paths are relative to it."""

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

import blockdraft as blockdraft_package
from blockdraft.data import DataError, EngineError, GenerationSettings, ServerEngine, read_prompts, regenerate
from blockdraft.drafters import save_drafter
from blockdraft.recipes import load_recipe
from blockdraft.study import load_study
from blockdraft.study.changes import COMPARED
from blockdraft.targets import Target, load_target
from blockdraft.training import Trainer

from commands import blockdraft
from scripted import WORDS, Scripted, completion
from tiny import tiny_drafter, tiny_target

RECIPE: dict[str, Any] = {
    "target": {"name": "target"},
    "drafter": {"kind": "dflash", "num_layers": 2, "num_proposals": 4, "num_features": 3},
    "objective": {"name": "bv"},
    "data": {"path": "data", "num_heldout": 4},
    "batch": {"num_texts": 6, "num_anchors": 24},
    "optimizer": {"num_train_epochs": 2, "learning_rate": 0.003},
    "runtime": {"device": "cpu"},
    "logging": {"heldout_blocks": 16, "logging_steps": 1, "save_steps": 1, "keep_epoch_checkpoints": True},
}

STUDY: dict[str, Any] = {
    "name": "small",
    "targets": {"pocket": {"recipe": "pocket", "num_prompts": 8}},
    "drafters": ["dflash"],
    "objectives": {"ce": {"recipe": "ce"}, "bv": {"recipe": "bv"}},
    "seeds": [1],
}

EVALUATE = (
    "evaluate", "--target", "target", "--tasks", "prompts.jsonl", "--max-new-tokens", "6", "--num-traces", "1",
    "--draft-temperatures", "1", "--dynamics-texts", "0", "--rules", "greedy", "block",
)  # fmt: skip
REGENERATE = ("data", "regenerate", "--target", "target", "--prompts", "prompts.jsonl", "--max-new-tokens", "8")
SAMPLING = ("--max-length", "60", "--shard-size", "8")


class _StopHereError(Exception):
    pass


def build(folder: Path) -> None:
    """Write everything into a new folder."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        target = _targets()
        _prompts()
        _data(target)
        _runs(target)
        _succeed("export", "run", "--format", "flat", "--out", "flat")
        _succeed("export", "dspark", "--format", "speculators", "--out", "speculators", "--target", "target")
        _succeed(*EVALUATE, "--drafter", "bv=run", "--out", "evaluation")
        shutil.copytree("evaluation", "begun-evaluation")
        for name in ("results.json", "profile.json", "traces.json"):
            Path("begun-evaluation", name).unlink()
        _study()


def _targets() -> Target:
    for name, seed in (("target", 0), ("other", 1)):
        tiny_target(dtype=torch.float32, seed=seed).save(name)
    shutil.copytree("target", "shards")
    tensors = Path("shards/model.safetensors").rename("shards/model-00001-of-00001.safetensors")
    names = _names_of(tensors)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, tensors.name)}
    Path("shards/model.safetensors.index.json").write_text(json.dumps(index))
    return load_target("target")


def _names_of(file: Path) -> list[str]:
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def _prompts() -> None:
    rows = [{"id": f"p{i}", "turns": [f"w{5 + i} w{6 + i % 7}"]} for i in range(16)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [{"messages": [{"role": "user", "content": f"w{i} w7"}, {"role": "assistant", "content": "w8"}]}
             for i in range(8)]  # fmt: skip
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    categories = [{"question_id": i, "category": "abc"[i % 3], "turns": [f"w{i + 5}"]} for i in range(6)]
    Path("categories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in categories))


def _data(target: Target) -> None:
    _succeed(*REGENERATE, *SAMPLING, "--out", "data")
    settings = GenerationSettings(max_new_tokens=8, max_length=60, seed=42)
    served = Scripted(lambda body, number: completion(body, WORDS) if number < 6 else (401, "enough", {}))
    try:
        engine = ServerEngine([served.url], concurrency=1, notify=lambda _: None)
        with contextlib.suppress(EngineError, DataError):
            regenerate(read_prompts("prompts.jsonl"), target, settings, "begun", engine=engine, shard_size=8)
    finally:
        served.stop()
    assert Path("begun/journal.jsonl").read_text().count("\n") >= 2


def _runs(target: Target) -> None:
    """A run that is finished, one that stopped after two steps, and a drafter of the other kind."""
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    cached = RECIPE | {"data": RECIPE["data"] | {"features": "cached", "cache": "features"}}
    Path("cached.yaml").write_text(yaml.safe_dump(cached, sort_keys=False))
    Trainer(load_recipe("recipe.yaml"), target, "run").train()
    Trainer(load_recipe("cached.yaml"), target, "cached-run")

    def stop(progress: Any) -> None:
        if progress.step == 2:
            raise _StopHereError

    with contextlib.suppress(_StopHereError):
        Trainer(load_recipe("recipe.yaml"), target, "begun-run").train(stop)
    shutil.rmtree("cached-run")
    save_drafter(tiny_drafter("dspark", target), "dspark")
    shutil.copytree("dspark", "sharded-drafter")
    tensors = Path("sharded-drafter/model.safetensors").rename("sharded-drafter/part.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(_names_of(tensors), tensors.name)}
    Path("sharded-drafter/model.safetensors.index.json").write_text(json.dumps(index))


def _study() -> None:
    Path("study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    shutil.copytree("data", "study/data/pocket")
    cell = load_study("study.yaml").cells[0]
    shutil.copytree("begun-run", Path("study/runs", cell.name), symlinks=True)
    record = Path("study/runs", cell.name, "run.json")  # a run by another recipe would be refused
    info = json.loads(record.read_text())
    info["recipe"] |= cell.recipe.resolved().model_dump(mode="json", include=set(COMPARED))
    record.write_text(json.dumps(info))


def _succeed(*arguments: str) -> None:
    ended = blockdraft(*arguments)
    assert ended.code == 0, ended.err


def copy(good: Path, sandbox: Path) -> None:
    """Give a case its own copy."""
    shutil.copytree(good, sandbox, symlinks=True, copy_function=_copy_file)


def _copy_file(source: str, destination: str) -> None:
    with io.FileIO(source) as before, io.FileIO(destination, "w") as after:
        os.sendfile(after.fileno(), before.fileno(), 0, 2**31 - 1)


def warm_up(good: Path, room: Path) -> None:
    """Import and initialise here what children would otherwise import and initialise one by one."""
    for each in pkgutil.walk_packages(blockdraft_package.__path__, "blockdraft."):
        if not each.name.endswith(("__main__", "kernels", "_triton")):
            importlib.import_module(each.name)
    for name in ("anyio", "httpx2", "tenacity", "matplotlib.pyplot", "huggingface_hub", "datasets"):
        importlib.import_module(name)
    with contextlib.chdir(good):
        for words in (("generate", "w7", "--target", "target", "--drafter", "run", "--max-new-tokens", "2"),
                      ("report", "evaluation", "--out", str(room / "warm")), ("data", "inspect", "data"),
                      ("study", "study.yaml", "--plan", "--out", "study")):  # fmt: skip
            _succeed(*words)
        shutil.rmtree(str(room / "warm"))
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and thereby copy, every page
