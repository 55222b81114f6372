"""`blockdraft recipes` and `blockdraft estimate`, as a user types them."""

import json

import yaml
from typer.testing import CliRunner

from blockdraft.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_ls_show_validate():
    names = run("recipes", "ls").stdout.split()
    assert "qwen3-8b-dspark-lk" in names
    shown = yaml.safe_load(run("recipes", "show", "pocket-dflash-ce", "seed=7", "optimizer.num_train_epochs=2").stdout)
    assert (shown["seed"], shown["optimizer"]["num_train_epochs"], shown["objective"]["name"]) == (7, 2, "ce")
    out = run("recipes", "validate", "pocket-dflash-ce", "smollm2-dspark-bv")
    assert out.exit_code == 0
    assert out.stdout == "pocket-dflash-ce: valid\nsmollm2-dspark-bv: valid\n"


def test_estimate_prints_sizes_and_json():
    out = run("estimate", "qwen3-4b-dflash-bv", "--devices", "8")
    assert out.exit_code == 0
    assert "537.4 M" in out.stdout
    assert "if they were not fused" in out.stdout
    found = json.loads(run("estimate", "qwen3-4b-dflash-bv", "--devices", "8", "--json").stdout)
    assert found["num_devices"] == 8
    assert found["device_bytes"] == sum(
        found[f"{part}_bytes"] for part in ("target", "drafter", "optimizer", "activation", "fused")
    )
