"""What a training step would do to a GPU, counted at full size against budgets that may only shrink.

The counting runs in a process of its own (`counting.py`); here are the numbers that it must not exceed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft.losses import objective_names

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
    """Target, drafter, objective, optimizer: 2,048 blocks of Qwen3-4B."""
    found = count("qwen3-4b-dflash-bv")["qwen3-4b-dflash-bv"]
    assert found["launches"] <= 4_797
    assert found["waits"] <= 8, found["waits_by_line"]
    assert found["copies"] <= 10, found["copies_by_line"]
    assert found["bytes_per_logit"] <= 20
    assert found["peak_gib"] <= 44.4


@pytest.mark.slow
def test_every_objective_and_both_drafters_run_on_a_gpu_at_full_size():
    """Devices meet nowhere, every weight gets a gradient, and none waits for the device more often than another."""
    kinds = ("qwen3-4b-dflash-bv", "qwen3-4b-dspark-bv")
    for found in count("--objectives", *kinds).values():
        assert sorted(found) == objective_names()
        assert {each["waits"] for each in found.values()} == {7}
        assert {each["copies"] for each in found.values()} == {9}
        assert all(each["bytes_per_logit"] <= 32 for each in found.values())
