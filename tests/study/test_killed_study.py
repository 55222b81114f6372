"""Studies that are killed with SIGKILL, children and all left behind: the same command ends with the same report."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from killing import TIMES
from tiny_study import TINY

TIMED = ("second", "speedup", "speed-up", "cost")
"""Words in the names of tables and columns that depend on the clock."""


def study(folder, out):
    command = [sys.executable, "-m", "blockdraft", "study", "s.yaml", "--jobs", "2", "--device", "cpu", "--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def report(out):
    """Return all numbers of a report that do not depend on the clock: the tables' columns, the wins and the traces."""
    found = {}
    for file in sorted((out / "report" / "tables").glob("*.csv")):
        rows = list(csv.DictReader(file.read_text().splitlines()))
        if not any(word in file.stem for word in TIMED):
            found[file.stem] = [{k: v for k, v in row.items() if not any(w in k for w in TIMED)} for row in rows]
    for name in ("wins.json", "means/pocket/traces.json"):
        found[name] = json.loads((out / "report" / name).read_text())
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_killed_studies_end_with_the_report_of_one_that_was_not(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)
    whole = study(tmp_path, "whole")
    said, _ = whole.communicate()
    assert whole.returncode == 0, said
    dice = random.Random(0)
    parts = tmp_path / "parts"
    begun = ("data/pocket", "runs/pocket-dflash-ce-seed1/metrics.jsonl", "evaluations/pocket-seed1/plan.json")
    for place in begun:
        for attempt in range(TIMES):
            killed = study(tmp_path, "parts")
            while not (parts / place).exists() and killed.poll() is None:
                time.sleep(0.02)
            time.sleep(dice.uniform(0.0, 8.0 if attempt else 0.5))  # what is there was there at once in later attempts
            killed.send_signal(signal.SIGKILL)
            said, _ = killed.communicate()
            assert killed.returncode == -signal.SIGKILL or attempt, said
    ended = study(tmp_path, "parts")
    said, _ = ended.communicate()
    assert ended.returncode == 0, said
    found = report(tmp_path / "whole")
    assert {"main", "lengths", "retention-pocket", "study-acceptance-length-over-ce", "study-wins"} <= found.keys()
    assert all(found.values())
    assert report(parts) == found
