"""`blockdraft demo`, as a user sees it, around a demonstration that ends at once."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockdraft import demo
from blockdraft.evaluation import Results

import synthetic
from commands import blockdraft


@pytest.fixture
def run(monkeypatch):
    """The verb, with stages that are told and not done; SIGTERM is as before afterwards."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments, fails=None):
        def finish(self):
            self.on_progress("training with BV", 1, 3, 0)
            if fails is not None:
                raise fails
            made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV"))).model_dump_json()
            page = Path("demo/pocket/report/index.html")
            report = SimpleNamespace(page=page, headlines=["DFlash: BV is ahead of CE."])
            return Results.model_validate_json(made.replace("dflash-", "")), report

        monkeypatch.setattr(demo.Demo, "run", finish)
        return blockdraft("demo", *arguments)

    yield call
    signal.signal(signal.SIGTERM, handler)


def test_a_table_and_the_gain(run):
    ended = run()
    assert ended.code == 0
    assert ended.out.index("predicted") < ended.out.index("measured") < ended.out.index("speed-up")
    assert "DFlash: BV is ahead of CE.\n" in ended.out
    assert ended.out.endswith("the report: demo/pocket/report/index.html\n")
    assert ended.err.startswith("pocket in demo/pocket: about fifteen minutes on two cores.")
    assert "training with BV: 1/3 (33%)" in ended.err


def test_json(run):
    found = json.loads(run("--json").out)
    assert found["report"] == "demo/pocket/report/index.html"
    assert found["headlines"] == ["DFlash: BV is ahead of CE."]
    assert {each["drafter"] for each in found["results"]["averages"]} == {"ce", "bv"}


def test_a_stage_that_fails_and_one_that_is_stopped(run):
    ended = run(fails=demo.DemoError("training bv failed: no space"))
    assert ended.code == 1
    assert ended.err.endswith("error: training bv failed: no space\n")
    ended = run(fails=KeyboardInterrupt())
    assert ended.code == 130
    assert ended.err.endswith("stopped; the same command resumes\n")
