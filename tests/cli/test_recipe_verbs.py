"""`blockdraft recipes` and `blockdraft estimate`, as a user types them."""

import json

import pytest
import yaml

from commands import blockdraft


def test_ls_show_validate():
    names = blockdraft("recipes", "ls").out.split()
    assert "qwen3-8b-dspark-lk" in names
    assert json.loads(blockdraft("recipes", "ls", "--json").out) == names
    show = ["recipes", "show", "pocket-dflash-ce", "seed=7"]
    shown = yaml.safe_load(blockdraft(*show).out)
    assert (shown["seed"], shown["objective"]["name"]) == (7, "ce")
    assert json.loads(blockdraft(*show, "--json").out) == shown
    ended = blockdraft("recipes", "validate", "pocket-dflash-ce", "smollm2-dspark-bv")
    assert (ended.code, ended.out) == (0, "pocket-dflash-ce: valid\nsmollm2-dspark-bv: valid\n")


def test_every_wrong_recipe_is_named(tmp_path):
    (tmp_path / "wrong.yaml").write_text("sed: 7\n")
    names = ["wrong.yaml", "pocket-dflash-ce", "nowhere.yaml"]
    ended = blockdraft("recipes", "validate", *names, cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "pocket-dflash-ce: valid\n")
    first, second = ended.err.splitlines()
    assert first.startswith("error: wrong.yaml")
    assert "sed" in first
    assert second.startswith("error: nowhere.yaml")
    ended = blockdraft("recipes", "validate", *names, "--json", cwd=tmp_path)
    assert ended.code == 2
    assert [(each["recipe"], each["valid"]) for each in json.loads(ended.out)] == [
        ("wrong.yaml", False), ("pocket-dflash-ce", True), ("nowhere.yaml", False),
    ]  # fmt: skip


def test_estimate_prints_sizes_and_json():
    ended = blockdraft("estimate", "qwen3-4b-dflash-bv", "--devices", "8")
    assert ended.code == 0
    assert "537.4 M" in ended.out
    assert "if they were not fused" in ended.out
    found = json.loads(blockdraft("estimate", "qwen3-4b-dflash-bv", "--devices", "8", "--json").out)
    assert found["num_devices"] == 8
    held = sum(found[f"{part}_bytes"] for part in ("target", "drafter", "optimizer", "activation"))
    assert found["device_bytes"] == held + max(found["backward_bytes"], found["fused_bytes"])
    slower = blockdraft("estimate", "qwen3-4b-dflash-bv", "runtime.peak_tflops=98.9", "--devices", "8", "--json")
    assert json.loads(slower.out)["hours"] == pytest.approx(10 * found["hours"])
    refused = blockdraft("estimate", "qwen3-4b-dflash-bv", "runtime.peak_tflops=0")
    assert refused.code == 2
    assert "runtime.peak_tflops" in refused.err
