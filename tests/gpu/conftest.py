"""One JSON file about the tests of a device: what ran, what it measured, what was skipped and why."""

import json
import os
import platform
from pathlib import Path

import pytest
import torch

REPORT = "BLOCKDRAFT_GPU_REPORT"
"""This environment variable names the file; `make test-gpu` sets it."""

_outcomes = {}


@pytest.fixture
def found(record_property):
    """Give a dictionary whose contents go into the report, whether the test passes or not."""
    values = {}
    record_property("found", values)
    return values


def pytest_runtest_logreport(report):
    """Remember how each test ended, and whatever went wrong before or after it."""
    if report.when == "call" or not report.passed:
        why = ""
        if report.skipped:
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            why = str(report.longrepr)[-2000:]
        _outcomes[report.nodeid.split("::", 1)[-1]] = {
            "outcome": report.outcome, "seconds": round(report.duration, 3), "why": why,
            "found": dict(report.user_properties).get("found", {}),
        }  # fmt: skip


def pytest_sessionfinish():
    """Write the file."""
    if REPORT in os.environ:
        counts = {
            name: sum(each["outcome"] == name for each in _outcomes.values())
            for name in ("passed", "failed", "skipped")
        }
        report = {"machine": _machine(), "counts": counts, "tests": _outcomes}
        Path(os.environ[REPORT]).write_text(json.dumps(report, indent=1, default=str) + "\n")


def _machine():
    """Say where this ran."""
    from blockdraft.files import package_version

    packages = ("blockdraft", "torch", "triton", "transformers")
    about = {"python": platform.python_version(), "cuda": torch.version.cuda, "devices": []}
    about |= {name: package_version(name) for name in packages}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        about["devices"].append(
            {"name": device.name, "memory": device.total_memory, "capability": [device.major, device.minor]}
        )
    return about
