"""Processes of a study: how many take a cell, where they run, and what becomes of them if the study is killed."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from blockdraft.evaluation import read_results
from blockdraft.study import Study, StudyError, jobs_at_once, load_study
from blockdraft.study.processes import Job, leftovers_ended, start

from commands import blockdraft
from tiny_study import TINY


@pytest.mark.parametrize(
    ("num_processes", "num_gpus", "device", "at_once"),
    [
        (1, 0, None, 4), (1, 0, "cpu", 4), (1, 8, None, 8), (8, 8, None, 1), (2, 8, None, 4), (3, 8, "cuda", 2),
        (2, 0, "cpu", 2), (8, 0, "cpu", 1),
    ],
)  # fmt: skip
def test_as_many_cells_at_once_as_there_are_devices_for(num_processes, num_gpus, device, at_once):
    assert jobs_at_once(num_processes, num_gpus=num_gpus, num_cores=4, device=device) == at_once


@pytest.mark.parametrize(("num_gpus", "said"), [(0, "no GPUs can be used here"), (1, "1 GPU can"), (2, "2 GPUs can")])
def test_too_few_gpus_are_said_in_one_line_before_anything_runs(tmp_path, monkeypatch, num_gpus, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ended = blockdraft("study", "paper", "--out", "s", cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert said in ended.err
    assert f"set hardware.devices={num_gpus or 1}." in ended.err
    assert "batch.gradient_accumulation_steps" in ended.err
    assert not (tmp_path / "s").exists()


def test_several_devices_are_a_process_each_under_torchrun(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)

    def jobs(*changes):
        study = Study(load_study(tmp_path / "s.yaml", list(changes)), tmp_path)
        return study.data_jobs(), study.jobs_left()

    _data, left = jobs()
    assert [job.command[:3] for job in left] == [[sys.executable, "-m", "blockdraft"]] * 3
    data, left = jobs("hardware.devices=2")
    assert {job.num_processes for job in data} == {1}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "blockdraft"]
    for job in left:
        assert job.command == [sys.executable, *launcher, *job.arguments]
        assert shlex.split(str(job)) == ["torchrun", *launcher[2:], *job.arguments]
    assert [job.arguments[0] for job in left] == ["train", "train", "evaluate"]


def test_jobs_of_several_devices_have_as_many_gpus_and_share_the_cores(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path, gpus=["0", "3", "5", "7"])
    monkeypatch.setattr(Job, "command", property(lambda job: ["sh", "-c", *job.arguments]))
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def job(name, other):
        script = f"cd {tmp_path}; echo $CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS > {name}.new; mv {name}.new {name}; "
        return Job(name, [f"{script} until [ -e {other} ]; do sleep 0.05; done"], num_processes=2)

    study._run([job("one", "two"), job("two", "one")], 2)
    found = [(tmp_path / name).read_text().split() for name in ("one", "two")]
    assert found == [["0,3", "3"], ["5,7", "3"]]


def test_what_failed_is_said_in_its_own_words_and_not_in_torchruns(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path)
    monkeypatch.setattr(Job, "command", property(lambda job: ["sh", "-c", *job.arguments]))
    with pytest.raises(StudyError, match=r"cell failed: no texts \(all"):
        study._run([Job("cell", ["echo error: no texts; echo =====; exit 1"])], 1)
    with pytest.raises(StudyError, match=r"cell failed: Killed \(all"):
        study._run([Job("cell", ["echo Killed; exit 1"])], 1)
    with pytest.raises(StudyError, match=r"cell failed:  \(all"):
        study._run([Job("cell", ["exit 1"])], 1)


@pytest.mark.parametrize("num_jobs", [1, 4])
def test_on_cpus_a_cell_and_an_evaluation_compute_with_one_thread_however_many_run_at_once(
    tmp_path, monkeypatch, num_jobs
):
    (tmp_path / "s.yaml").write_text(TINY.replace("runtime.device=cpu, ", ""))
    recipe = load_study(tmp_path / "s.yaml")
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(study, jobs):
        return [study._environment(job, num_jobs, study.gpus[:1])["OMP_NUM_THREADS"] for job in jobs]

    on_cpus, on_gpus = Study(recipe, tmp_path), Study(recipe, tmp_path, gpus=["0", "1"])
    assert threads(on_cpus, on_cpus.jobs_left()) == ["1", "1", "1"]
    assert threads(on_gpus, on_gpus.jobs_left()) == [str(12 // num_jobs)] * 3
    assert {job.num_threads for job in on_cpus.data_jobs()} == {None}  # they run by themselves, on all cores
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(on_cpus, on_cpus.jobs_left()) == ["3", "3", "3"]


PARENT = """
import sys, time
from pathlib import Path
from blockdraft.study.processes import leftovers_ended, start
script = "trap 'sleep 1; touch saved; exit 143' TERM; touch begun; while :; do sleep 0.05; done"
with leftovers_ended(Path("lock"), print) as lock, open("log", "wb") as log:
    start(["sh", "-c", script], log, {}, lock)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_a_child_of_a_killed_parent_saves_and_stops_and_whoever_is_next_waits_for_it(tmp_path):
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path) as parent:
        while not (tmp_path / "begun").exists():
            assert parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
    waits = []
    with leftovers_ended(tmp_path / "lock", lambda done: waits.append((done, (tmp_path / "saved").exists()))):
        assert waits == [(0, False), (1, True)]
    with leftovers_ended(tmp_path / "lock", waits.append) as lock, (tmp_path / "log").open("wb") as log:
        assert start(["true"], log, os.environ, lock).wait() == 0
    assert len(waits) == 2


@pytest.mark.slow
def test_two_processes_on_cpus_train_and_evaluate_a_cell_and_its_epochs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "s.yaml").write_text(TINY)
    small = "drafter.num_layers=1,drafter.num_proposals=4,data.num_heldout=4"
    epochs = "batch.num_texts=10,optimizer.max_steps=4,logging.keep_epoch_checkpoints=true"  # of 20 texts
    changes = [f"set=[{small},{epochs}]", "evaluation.dynamics_texts=3"]
    ended = blockdraft("study", "s.yaml", *changes, "--devices", "2", "--device", "cpu", "--out", "s")
    assert ended.code == 0, ended.err
    study = Study(load_study("s.yaml", changes), "s")
    assert study.jobs_left() == []
    evaluation = tmp_path / "s" / "evaluations" / "pocket-seed1"
    found = read_results(evaluation)
    assert found.provenance["num_processes"] == 2
    assert found.dynamics_obstacles == {}
    assert [(each.drafter, [point.epoch for point in each.points]) for each in found.dynamics] == [
        ("dflash-ce", [1.0, 2.0]), ("dflash-bv", [1.0, 2.0]),
    ]  # fmt: skip
    assert len(list((evaluation / "dynamics").iterdir())) == 4
    for name in ("dynamics-pocket", "figure-3", "figure-4"):
        assert (tmp_path / "s" / "report" / "figures" / f"{name}.png").is_file()
