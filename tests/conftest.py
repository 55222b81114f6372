"""What all tests share: one random state, no deadlines, marks by folder and fixture, and real prompts if asked for."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("blockdraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("blockdraft"), max_examples=20)  # make check
settings.load_profile("blockdraft")  # a machine that is busy with something else must not make a test fail

REAL_PROMPTS = "BLOCKDRAFT_REAL_PROMPTS"


def pytest_collection_modifyitems(items):
    """Mark what needs a serving engine or a browser, and what kills processes, so that `make check` leaves it out."""
    for item in items:
        if "engines" in item.path.parts:
            item.add_marker(pytest.mark.engine)
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
        if item.name.startswith("test_killed_"):
            item.add_marker(pytest.mark.kill)


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state and leaves a second core to its neighbour."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def real_prompts() -> Path:
    """The folder of benchmark and training prompts that the environment names; without it the test is skipped."""
    folder = os.environ.get(REAL_PROMPTS)
    if folder is None:
        pytest.skip(f"set {REAL_PROMPTS} to a folder of benchmark and training prompts to run this test")
    return Path(folder)
