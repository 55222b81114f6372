"""`torchrun -m blockdraft train` as a user types it: stopped, gone on with, and the same run as one process makes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.recipes import load_recipe
from blockdraft.targets import load_target
from blockdraft.training import Trainer

from runs import make_data

SETTINGS = [
    "data.path=d", "data.num_heldout=4", "batch.num_texts=4", "batch.num_anchors=24", "optimizer.num_train_epochs=6",
    "optimizer.learning_rate=3.0e-4", "logging.heldout_blocks=16", "logging.logging_steps=1",
    "logging.tensorboard=false",
]  # fmt: skip
TRAIN = ["--standalone", "--nproc-per-node", "2", "-m", "blockdraft", "train", "pocket-dflash-bv", *SETTINGS]


def torchrun(folder):
    command = [str(Path(sys.executable).with_name("torchrun")), *TRAIN, "--out", "two"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def lines(run):
    """What was logged so far, without a line that is being written."""
    path = run / "metrics.jsonl"
    written = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in written]


@pytest.mark.slow
def test_two_processes_stop_go_on_and_end_like_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = load_target("pocket")
    make_data("d", target, num=16)
    alone = Trainer(load_recipe("pocket-dflash-bv", SETTINGS), target, tmp_path / "one")
    alone.train()
    assert alone.num_steps == 18

    begun = torchrun(tmp_path)
    while len(lines(tmp_path / "two")) < 3 and begun.poll() is None:
        time.sleep(0.02)
    begun.terminate()
    out, err = begun.communicate()
    assert begun.returncode != 0
    assert out == ""
    assert err.count("saved; the same command resumes") == 1
    stopped = lines(tmp_path / "two")[-1]["step"]
    assert 2 <= stopped < 18
    assert (tmp_path / "two" / "checkpoint").resolve().name == f"{stopped:08d}"

    resumed = torchrun(tmp_path)
    out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert out.startswith("two: 18 steps\n")
    assert out.count("block verification") == 1
    assert err.count("18/18") <= 1  # one bar
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    ours, theirs = (load_file(tmp_path / run / "checkpoint" / "model.safetensors") for run in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=2e-3, atol=2e-4)
    assert [x["step"] for x in lines(tmp_path / "two")] == list(range(19))
    for mine, other in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        assert mine.keys() == other.keys()
        for key in {"loss", "num_blocks", "rate", "heldout_length_block"} & mine.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-3), (mine["step"], key)
