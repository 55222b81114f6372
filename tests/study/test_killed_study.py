"""Studies that are killed with SIGKILL, children and all left behind: the same command ends with the same tables."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from killing import TIMES
from tiny_study import TINY

TABLES = ("predicted-length", "acceptance-length", "predicted-length-over-ce")


def study(folder, out):
    command = [sys.executable, "-m", "blockdraft", "study", "s.yaml", "--jobs", "2", "--device", "cpu", "--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def tables(out):
    return {name: (out / "report" / "tables" / f"study-{name}.csv").read_text() for name in TABLES}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_killed_studies_end_with_the_tables_of_one_that_was_not(tmp_path):
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
    assert tables(parts) == tables(tmp_path / "whole")
