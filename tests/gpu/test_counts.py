"""Training steps and decoding rounds, counted on a fake GPU at full size, stay within budgets that may only shrink.

The counting runs in a process of its own (`counting.py`); here are the numbers that it must not exceed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft.losses import objective_names
from blockdraft.recipes import load_recipe
from blockdraft.training import estimate

COUNTING = Path(__file__).parent / "counting.py"


def count(*arguments):
    """Return what `counting.py` found, by recipe; skip by name where PyTorch has not what it needs."""
    done = subprocess.run([sys.executable, COUNTING, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if "skipped" in lines[0]:
        pytest.skip(f"no fake GPU: {lines[0]['skipped']}")
    return {line["recipe"]: line["found"] for line in lines}


@pytest.mark.slow
def test_a_whole_step_stays_within_its_budget():
    """Target, drafter, objective, optimizer: 2,048 blocks of Qwen3-4B, on a step that is not logged."""
    found = count("qwen3-4b-dflash-bv")["qwen3-4b-dflash-bv"]
    assert found["launches"] <= 4_221
    assert found["waits"] == 0, found["waits_by_line"]
    assert found["copies"] <= 9, found["copies_by_line"]
    assert found["blocking_copies"] == 0
    assert found["bytes_per_logit"] <= 16.8


@pytest.mark.slow
def test_every_objective_and_both_drafters_run_on_a_gpu_at_full_size():
    """Devices meet nowhere, every weight gets a gradient, and the host waits once, to read what is logged."""
    kinds = ("qwen3-4b-dflash-bv", "qwen3-4b-dspark-bv")
    for recipe, found in count("--objectives", *kinds).items():
        assert sorted(found) == objective_names()
        assert {each["waits"] for each in found.values()} == {1}
        first = next(iter(found))  # its step also brings the rotary frequencies to the device, once
        for name, each in found.items():
            assert each["copies"] <= 9 + (name == first), name
            assert each["blocking_copies"] == int(name == first), name
        assert all(each["bytes_per_logit"] <= (29 if "dspark" in recipe else 21) for each in found.values())
        assert all(each["launches"] <= 3_200 for each in found.values())


@pytest.mark.slow
def test_the_estimate_is_within_a_tenth_of_the_counted_peak():
    names = [f"qwen3-{size}-{kind}-bv" for size in ("4b", "8b") for kind in ("dflash", "dspark")]
    fields = ["batch.num_texts=4", "batch.num_anchors=2048", "runtime.device=cuda"]
    for name, found in count("--skip-target", *names).items():
        said = estimate(load_recipe(name, fields), num_devices=1, num_texts=100, tokens_per_text=1000.0)
        assert said.device_bytes / 2**30 == pytest.approx(found["peak_gib"], rel=0.1), name


ROUND_LAUNCHES = {"dflash": 1_074, "dspark": 1_417, "autoregressive": 798}
"""Kernels of a round with static shapes, which CUDA graphs hold; Qwen3-4B and 8B have as many layers."""


@pytest.mark.slow
def test_a_round_of_decoding_reads_once_and_copies_nothing():
    """Full-size targets in bfloat16, both drafters and none: no phase waits, so that each can be a CUDA graph."""
    for name, found in count("--decoding", "qwen3-4b-dflash-bv", "qwen3-8b-dspark-bv").items():
        drafter = name.split("-")[2]
        kinds = [f"{kind}, {path}" for kind in (drafter, "autoregressive") for path in ("plain", "static")]
        assert list(found) == kinds
        for key, each in found.items():
            assert each["waits"] == 1, (name, key, each["waits_by_line"])
            assert each["waits_in_phases"] == 0, (name, key)
            assert each["copies"] == 0, (name, key, each["copies_by_line"])
            assert each["launches"] <= ROUND_LAUNCHES[key.split(",")[0]], (name, key)
