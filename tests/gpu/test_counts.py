"""Training steps, decoding rounds and data slots, counted on a fake GPU at full size, stay within their budgets.

The counting runs once for all tests, in a process of its own (`counting.py`), in about 25 seconds of a core; here
are the numbers that it must not exceed, and which may only shrink.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from blockdraft.losses import objective_names
from blockdraft.recipes import load_recipe
from blockdraft.training import estimate

COUNTING = Path(__file__).parent / "counting.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Give what `counting.py` found, once for all processes; skip by name where PyTorch has not what it needs."""
    folder = tmp_path_factory.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "counted.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            done = subprocess.run([sys.executable, COUNTING], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            file.write_text(done.stdout)
    found = json.loads(file.read_text())
    if "skipped" in found:
        pytest.skip(f"no fake GPU: {found['skipped']}")
    return found


def test_a_whole_step_stays_within_its_budget(counted):
    """Target, drafter, objective, optimizer: 2,048 blocks of Qwen3-4B, on a step that is not logged."""
    found = counted["steps"]["qwen3-4b-dflash-bv"]
    assert found["launches"] <= 4_221
    assert found["waits"] == 0, found["waits_by_line"]
    assert found["copies"] <= 9, found["copies_by_line"]
    assert found["blocking_copies"] == 0
    assert found["bytes_per_logit"] <= 16.4
    assert found["fused_adamw"] == 1  # one call for all weights


def test_a_step_of_any_recipe_waits_for_nothing(counted):
    """The same for all four, with the target's output given, which leaves its 2,251 launches out, and beta constant."""
    assert len(counted["steps"]) == 4
    for name, found in counted["steps"].items():
        assert (found["waits"], found["blocking_copies"], found["fused_adamw"]) == (0, 0, 1), name
        assert found["launches"] <= (4_221 if name == "qwen3-4b-dflash-bv" else 1_842), name
        assert found["bytes_per_logit"] <= (18.6 if "dspark" in name else 16.6), name


def test_every_objective_and_both_drafters_run_on_a_gpu(counted):
    """Devices meet nowhere, every weight gets a gradient, nothing is waited for, and at most 20 bytes a logit move."""
    assert list(counted["objectives"]) == ["qwen3-4b-dflash-bv", "qwen3-4b-dspark-bv"]
    for recipe, found in counted["objectives"].items():
        assert sorted(found) == sorted([*objective_names(), "bv-cv"])
        for name, each in found.items():
            assert (each["waits"], each["blocking_copies"]) == (0, 0), (recipe, name, each["waits_by_line"])
            assert each["copies"] <= 9, (recipe, name, each["copies_by_line"])
            assert each["bytes_per_logit"] <= 20, (recipe, name)
            assert each["launches"] <= {"rounds": 464, "bv-cv": 405}.get(name, 371), (recipe, name)


def test_a_step_that_is_logged_waits_once(counted):
    found = counted["logged"]["bv"]
    assert (found["waits"], found["blocking_copies"]) == (1, 0), found["waits_by_line"]


def test_the_estimate_is_within_a_tenth_of_the_counted_peak(counted):
    fields = ["batch.num_texts=4", "batch.num_anchors=2048", "runtime.device=cuda"]
    for name, found in counted["steps"].items():
        said = estimate(load_recipe(name, fields), num_devices=1, num_texts=100, tokens_per_text=1000.0)
        assert said.device_bytes / 2**30 == pytest.approx(found["peak_gib"], rel=0.1), name


ROUND_LAUNCHES = {
    "dflash, static": 1_074, "dspark, static": 1_417, "autoregressive, static": 798,
    "dflash, plain": 431, "dspark, plain": 774, "autoregressive, plain": 220,
}  # fmt: skip
"""Kernels of a round: with static shapes, which CUDA graphs hold, and of a target of nine layers without."""


def test_a_round_of_decoding_reads_once_and_copies_nothing(counted):
    """Full-size targets in bfloat16, both drafters and none: no phase waits, so that each can be a CUDA graph."""
    rounds = [pair for found in counted["rounds"].values() for pair in found.items()]
    assert sorted(key for key, _ in rounds) == sorted(ROUND_LAUNCHES)
    for key, each in rounds:
        assert each["waits"] == 1, (key, each["waits_by_line"])
        assert each["waits_in_phases"] == 0, key
        assert each["copies"] == 0, (key, each["copies_by_line"])
        assert each["launches"] <= ROUND_LAUNCHES[key], key


def test_sampling_texts_side_by_side_waits_once_for_all_of_them(counted):
    """A token for each of 64 slots: tokens and lengths go to the device, uniform numbers go there, tokens come back."""
    for what, copies in (("read", 3), ("step", 2)):
        found = counted["slots"][what]
        assert found["waits"] == 1, (what, found["waits_by_line"])
        assert found["copies"] <= copies, (what, found["copies_by_line"])
        assert found["blocking_copies"] == 0, what
        assert found["launches"] <= 573, what
