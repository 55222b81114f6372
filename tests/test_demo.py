"""The demonstration, very small: every stage, stopped and resumed."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockdraft import demo
from blockdraft.demo import Demo, DemoError, Size

SMALL = (
    "optimizer.max_steps=4", "drafter.num_layers=1", "drafter.num_proposals=4", "data.num_heldout=4",
    "logging.logging_steps=1",
    "logging.heldout_blocks=16", "logging.save_steps=2", "optimizer.num_train_epochs=2", "batch.num_texts=8",
)  # fmt: skip
TINY = Size("no", 20, 24, 3, 2, 16, (0.6,), 2, changes=SMALL)


class StopError(Exception):
    pass


SHIPPED = ("pocket-dflash-bv", "pocket-dspark-bv")
"""What stands beside the demo's own drafters."""


@pytest.mark.slow
def test_all_stages_and_going_on(tmp_path, monkeypatch):
    monkeypatch.setitem(demo.SIZES, "pocket", TINY)
    seen = []

    def stop(stage, *_):
        seen.append(stage)
        if stage == "predictions":
            raise StopError

    with pytest.raises(StopError):
        Demo("pocket", tmp_path, stop).run()
    assert list(dict.fromkeys(stage.partition(" with ")[0] for stage in seen)) == [
        "data: the target answers", "features of the target", "training", "texts of the target", "predictions",
    ]  # fmt: skip
    assert {"training with CE", "training with BV"} < set(seen)
    files = {name: tmp_path / "runs" / name / "checkpoint" / "model.safetensors" for name in ("ce", "bv")}
    weights = {name: file.read_bytes() for name, file in files.items()}
    assert weights["ce"] != weights["bv"]
    results, report = Demo("pocket", tmp_path, lambda *_: None).run()
    for name, before in weights.items():
        assert files[name].read_bytes() == before
    assert {(a.drafter, a.rule) for a in results.averages} == {
        (drafter, rule) for drafter in ("ce", "bv", *SHIPPED) for rule in ("greedy", "token", "block")
    }
    assert [each.objective for each in results.drafters][:2] == ["ce", "bv"]
    assert {(each.num_prompts, each.num_decoded) for each in results.tasks} == {(3, 2)}
    rows = {(each.rule, each.choice) for each in results.averages}
    assert {("block", "paper"), ("block", "one-hot"), ("token", "paper"), ("greedy", "paper")} <= rows
    assert [len(each.points) for each in results.dynamics] == [2, 2]
    assert "<html" in report.page.read_text()
    assert json.loads((tmp_path / "evaluation" / "results.json").read_text())["target"] == "pocket"


def test_drafters_that_were_shipped_with_bv_stand_beside(tmp_path, monkeypatch):
    def record(name, target, kind):
        return SimpleNamespace(name=name, target=target, recipe=SimpleNamespace(drafter=SimpleNamespace(kind=kind)))

    found = [
        record("pocket-dflash-bv", "pocket", "dflash"), record("pocket-dflash-ce", "pocket", "dflash"),
        record("pocket-dflash-dpace-bv", "pocket", "dflash"), record("pocket-dspark-bv", "pocket", "dspark"),
        record("smollm2-dspark-bv", "smollm2", "dspark"),
    ]  # fmt: skip
    monkeypatch.setattr(demo, "shipped_drafters", lambda: found)
    for target, names in (("pocket", ["pocket-dflash-bv", "pocket-dspark-bv"]), ("smollm2", ["smollm2-dspark-bv"])):
        assert Demo(target, tmp_path, lambda *_: None).shipped == names


def test_runs_compute_where_the_target_does(tmp_path):
    _, fields = Demo("pocket", tmp_path, lambda *_: None, device="cpu", dtype=torch.float16)._recipe("bv")
    assert {"runtime.device=cpu", "target.dtype=float16"} <= set(fields)


@pytest.mark.slow
def test_a_failed_run_is_named(tmp_path, monkeypatch):
    broken = replace(TINY, changes=(*SMALL, "drafter.num_layers=0"))
    monkeypatch.setitem(demo.SIZES, "pocket", broken)
    made = Demo("pocket", tmp_path, lambda *_: None)
    (tmp_path / "runs").mkdir()
    with pytest.raises(DemoError, match=r"training ce failed: .*num_layers"):
        made._train()


def test_runs_that_were_told_to_stop_are_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.setitem(demo.SIZES, "pocket", TINY)

    class Told:
        returncode = 143

        def poll(self):
            return 143

        def wait(self):
            return 143

    monkeypatch.setattr(demo.subprocess, "Popen", lambda *_, **__: Told())
    with pytest.raises(DemoError, match="told to stop; the same command resumes"):
        Demo("pocket", tmp_path, lambda *_: None)._train()
