import shutil

import pytest
from playwright.sync_api import sync_playwright

from blockdraft.reports import write_report

import synthetic

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def evaluations(tmp_path_factory):
    """Two targets; the second with one kind of drafter, without dynamics."""
    folder = tmp_path_factory.mktemp("evaluations")
    first = synthetic.paired(synthetic.results(), "dflash-bv", "dflash-ce")
    second = synthetic.results(
        "org/Qwen_3", drafters=(("dflash", "CE"), ("dflash", "KL"), ("dflash", "BV")), shift=0.5, with_dynamics=False
    )
    return [
        synthetic.write(folder / "a", first, synthetic.traces(first)),
        synthetic.write(folder / "b", second, synthetic.traces(second, num_prompts=1, seed=1)),
    ]


@pytest.fixture(scope="session")
def report(evaluations, tmp_path_factory):
    """Everything written from them."""
    return write_report(evaluations, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def browser():
    """The system's own Chromium, without a window."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield running
        running.close()
