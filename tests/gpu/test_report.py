"""`make test-gpu` here: everything that needs a device is skipped by name, and the report says so.

What a CPU can do of these tests is rehearsed, so that the first user with a GPU does not find mistakes in the tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent / "test_device.py"


def report(tmp_path, *arguments, **environment):
    """Run the tests of a device in a process of their own, and return the report that they write."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", str(TESTS), *arguments]
    environment |= {"BLOCKDRAFT_GPU_REPORT": str(file)}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: run make test-gpu")
def test_a_rehearsal_runs_what_it_can_and_names_what_it_skips(tmp_path):
    found = report(tmp_path, "-k", "not nccl", BLOCKDRAFT_REHEARSAL="1")
    assert found["machine"]["devices"] == []
    assert found["machine"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    tests = found["tests"]
    for name, each in tests.items():
        needs = any(part in name for part in ("flex", "triton", "compiled"))
        assert each["outcome"] == ("skipped" if needs else "passed"), (name, each)
        assert each["why"] == ("needs a CUDA device, and there is none" if needs else ""), name
    assert found["counts"] == {
        "passed": sum(each["outcome"] == "passed" for each in tests.values()), "failed": 0,
        "skipped": sum(each["outcome"] == "skipped" for each in tests.values()),
    }  # fmt: skip
    steps = tests["test_twenty_steps_beside_the_estimate"]["found"]
    assert len(steps["seconds"]) == 20
    assert steps["estimated_bytes"] > 0
    assert "seconds a round" in tests["test_cuda_graphs_decode_as_plain_rounds_do[dflash-block]"]["found"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: run make test-gpu")
def test_without_a_device_every_part_is_skipped_by_name(tmp_path):
    found = report(tmp_path, BLOCKDRAFT_REHEARSAL="0")
    assert found["counts"]["passed"] == found["counts"]["failed"] == 0
    assert all("CUDA device" in each["why"] for each in found["tests"].values())
    listed = ("flex", "objective", "triton", "compiled", "nccl", "greedy", "cuda_graphs", "twenty_steps")
    assert all(any(part in name for name in found["tests"]) for part in listed)
