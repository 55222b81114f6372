"""Training dynamics: those of fixed blocks, measured once, shared out; what stands in the way is said."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from blockdraft.data import Completion, TextDataset, open_dataset
from blockdraft.distributed import Distributed
from blockdraft.drafters.checkpoint import WEIGHTS
from blockdraft.evaluation import (
    Evaluation,
    EvaluationError,
    Protocol,
    Results,
    dynamics,
    load_candidates,
    read_results,
)
from blockdraft.evaluation.dynamics import NO_EPOCH_YET, NO_EPOCHS, fixed_blocks, measure_checkpoint, training_dynamics
from blockdraft.evaluation.metrics import learning_curve
from blockdraft.verification import RULES

import runs
from evaluating import B, bigram_target, equal_drafter, tasks

FEW = Protocol(rules=("greedy",), max_new_tokens=8, num_bootstrap=5, num_traces=0, dynamics_texts=9, dynamics_blocks=3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with the data and two runs, of which one kept its epochs."""
    folder = tmp_path_factory.mktemp("kept")
    data = runs.make_data(folder / "data")
    runs.train(data, folder / "run", "logging.keep_epoch_checkpoints=true")
    runs.train(data, folder / "bare", "optimizer.max_steps=1")
    return folder


@pytest.fixture
def measured(monkeypatch):
    """Every measurement of a checkpoint, counted as it is made."""
    made = []

    def count(*arguments):
        made.append(arguments)
        return measure_checkpoint(*arguments)

    monkeypatch.setattr(dynamics, "measure_checkpoint", count)
    return made


def copy(kept, folder):
    shutil.copytree(kept / "run", folder, symlinks=True)


def of(folder, *names):
    return load_candidates([str(folder / name) for name in names], runs.target())


def measure(candidates, out, protocol=FEW, processes=None):
    return training_dynamics(candidates, runs.target(), protocol, out, processes or Distributed("cpu"))


def test_the_seed_of_the_evaluation_decides_draws_and_not_contexts(kept, tmp_path):
    found = of(kept, "run")
    assert (found[0].name, found[0].label, found[0].objective) == ("run", "BV", "bv")
    ((one,), none), ((again,), _), ((other,), _) = (
        measure(found, tmp_path / str(number), replace(FEW, seed=seed)) for number, seed in enumerate((1, 1, 2))
    )
    assert none == {}
    assert one == again
    assert [point.accuracy for point in one.points] == [point.accuracy for point in other.points]
    assert [point.draft_length for point in one.points] != [point.draft_length for point in other.points]
    assert [point.epoch for point in one.points] == [1.0, 2.0]
    assert (one.num_texts, one.num_blocks) == (9, 27)
    assert all(0 <= point.accuracy <= 1 and 0 <= point.draft_length <= B for point in one.points)


def test_an_interrupted_evaluation_measures_every_checkpoint_once(kept, tmp_path, measured):
    class StopError(Exception):
        pass

    def stop(stage, done, _of, _tokens):
        if (stage, done) == ("training dynamics", 1):
            raise StopError

    with pytest.raises(StopError):
        Evaluation(runs.target(), of(kept, "run"), tasks(2), FEW, tmp_path, on_progress=stop).run()
    assert len(measured) == 1
    first = Evaluation(runs.target(), of(kept, "run"), tasks(2), FEW, tmp_path).run()
    assert len(measured) == 2
    assert first == read_results(tmp_path)
    assert first.dynamics == measure(of(kept, "run"), tmp_path / "alone")[0]
    copy(kept, tmp_path / "added")
    both = Evaluation(
        runs.target(), [*of(kept, "run"), *of(tmp_path, "added")], tasks(2), FEW, tmp_path
    ).run()  # fmt: skip
    assert len(measured) == 2 + 2 + 2, "two alone, and two of the drafter that was added"
    assert [each.drafter for each in both.dynamics] == ["run", "added"]
    assert both.dynamics[0] == first.dynamics[0]


def test_a_learning_curve_is_what_the_run_measured_up_to_the_checkpoint(kept):
    (found,) = of(kept, "run")
    lines = {line["step"]: line for line in found.run.metrics() if line["heldout_length_block"] is not None}
    curve = learning_curve(found)
    assert [point.step for point in curve] == sorted(lines)
    assert curve[-1].step == found.step
    for point in curve:
        line = lines[point.step]
        assert point.accuracy == line["heldout_token_accuracy"]
        assert point.draft_length == {rule: line[f"heldout_length_{rule}"] for rule in RULES}
    trained = [line["num_blocks"] for line in found.run.metrics() if "num_blocks" in line]
    assert curve[0].num_blocks == 0
    assert curve[-1].num_blocks == sum(trained)  # every step is logged here
    first = sorted(lines)[1]
    assert [point.step for point in learning_curve(replace(found, step=first))] == sorted(lines)[:2]
    assert learning_curve(replace(found, run=None)) == []


def test_a_learning_curve_counts_the_blocks_of_steps_that_were_not_logged(tmp_path):
    """The last step of an epoch has one text instead of six, and is always logged."""
    data, curves = runs.make_data(tmp_path / "data"), []
    for every in (1, 4):
        fields = [f"logging.logging_steps={every}", "data.num_heldout=5", "optimizer.num_train_epochs=3"]
        trainer = runs.train(data, tmp_path / f"run-{every}", *fields)
        (found,) = of(tmp_path, f"run-{every}")
        lines = [line for line in found.run.metrics() if "num_blocks" in line]
        assert len(lines) == {1: trainer.num_steps, 4: 6}[every]
        curves.append([(point.step, point.num_blocks) for point in learning_curve(found)])
    assert curves[0] == curves[1]
    assert curves[0] == [(6 * epoch, epoch * (5 * 30 + 15)) for epoch in range(4)]


def test_what_was_measured_otherwise_is_measured_again(kept, tmp_path, measured):
    copy(kept, tmp_path / "run")
    out = tmp_path / "out"
    measure(of(tmp_path, "run"), out)
    for changed in (replace(FEW, seed=7), replace(FEW, dynamics_texts=8), replace(FEW, dynamics_blocks=2)):
        del measured[:]
        measure(of(tmp_path, "run"), out, changed)
        assert len(measured) == 2
    first, last = of(tmp_path, "run")[0].run.epoch_checkpoints().values()
    shutil.copy(last / WEIGHTS, first / WEIGHTS)
    del measured[:]
    ((found,), _) = measure(of(tmp_path, "run"), out, changed)
    assert len(measured) == 1
    assert found.points[0].draft_length == found.points[-1].draft_length


class Process:
    """One of two processes, which hears what the other one has said before."""

    world_size = 2

    def __init__(self, rank, heard):
        self.rank, self.heard = rank, heard

    def all_gather(self, value):
        self.heard.append(value)
        return list(reversed(self.heard))


def test_processes_share_the_checkpoints_out(kept, tmp_path, measured):
    heard = []
    measure(of(kept, "run", "bare"), tmp_path, processes=Process(1, heard))
    assert len(measured) == 1
    found, obstacles = measure(of(kept, "run", "bare"), tmp_path, processes=Process(0, heard))
    assert len(measured) == 2
    assert obstacles == {"bare": NO_EPOCHS}
    assert (found, obstacles) == measure(of(kept, "run", "bare"), tmp_path)
    assert len(measured) == 2


def test_what_stops_one_process_stops_the_figure_of_all(kept, tmp_path):
    copy(kept, tmp_path / "run")
    last = max(of(tmp_path, "run")[0].run.checkpoints().values())
    found, heard = of(tmp_path, "run"), []
    (last / WEIGHTS).unlink()
    measure(found, tmp_path / "out", processes=Process(1, heard))
    assert measure(found, tmp_path / "out", processes=Process(0, heard)) == (
        [], {"run": f"{last} has no {WEIGHTS}; put the file back"},
    )  # fmt: skip


def test_what_stands_in_the_way_is_said_and_stored_and_no_more(kept, tmp_path, capsys):
    candidates, many = of(kept, "run", "bare"), replace(FEW, dynamics_texts=99)
    results = Evaluation(runs.target(), candidates, tasks(2), many, tmp_path / "out").run()
    assert results.dynamics == []
    assert results.dynamics_obstacles["bare"] == NO_EPOCHS
    assert "30 training texts have 3 full blocks" in results.dynamics_obstacles["run"]
    assert read_results(tmp_path / "out") == results
    assert f"no training dynamics of bare: {NO_EPOCHS}\n" in capsys.readouterr().err
    assert {each.checkpoint for each in results.drafters} <= {"best", "last"}


def test_an_epoch_that_is_gone_stands_in_the_way(kept, tmp_path, measured):
    copy(kept, tmp_path / "run")
    (candidate,) = of(tmp_path, "run")
    first = min(candidate.run.epoch_checkpoints().values())
    shutil.rmtree(first)
    found, obstacles = measure(of(tmp_path, "run"), tmp_path / "out")
    assert found == []
    assert obstacles == {"run": "its run has no checkpoint of epoch 1 any more; put it back, or train again"}
    assert measured == []


def test_a_run_within_its_first_epoch_has_no_dynamics_yet(kept, tmp_path, measured):
    copy(kept, tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(info | {"steps_per_epoch": 1000, "num_steps": 2000}))
    assert measure(of(tmp_path, "run"), tmp_path / "out") == ([], {"run": NO_EPOCH_YET})
    assert measured == []


def test_data_that_is_gone_stands_in_the_way_of_what_was_not_measured(kept, tmp_path):
    measure(of(kept, "run"), tmp_path)
    hidden = (kept / "data").rename(kept / "hidden")
    try:
        assert measure(of(kept, "run"), tmp_path)[1] == {}
        found, obstacles = measure(of(kept, "run"), tmp_path / "new")
    finally:
        hidden.rename(kept / "data")
    assert found == []
    assert "its data folder" in obstacles["run"]


def test_dynamics_that_nobody_asked_for(kept, tmp_path):
    assert measure(of(kept, "run", "bare"), tmp_path, replace(FEW, dynamics_texts=0)) == ([], {})
    outside = [replace(each, run=None) for each in of(kept, "run")]
    assert measure(outside, tmp_path) == ([], {})
    assert list(tmp_path.iterdir()) == []


def test_results_from_before_the_obstacles_are_read():
    empty = {name: [] for name in ("tasks", "drafters", "cells", "averages", "dynamics")}
    old = Results.model_validate({"target": "t", "target_fingerprint": "f", "settings": {}, "provenance": {}, **empty})
    assert old.dynamics_obstacles == {}


def test_dynamics_take_full_blocks_of_as_many_texts_as_asked_for_or_none():
    lengths = [3, 4, 6, 7, 9, 30]  # with blocks of 4: -, 0, 2, 3, 5 and 26 anchors
    texts = TextDataset.of([Completion(f"t{i}#0", [5] * 7, [6] * length, "stop") for i, length in enumerate(lengths)])
    chosen = fixed_blocks(texts, 3, 3, B, seed=0)
    assert [each.text for each in chosen] == [3, 4, 5]
    for each in chosen:
        assert len(set(each.anchors.tolist())) == 3
        assert each.anchors.min() >= 7
        assert each.anchors.max() + B <= 7 + lengths[each.text] - 1
    with pytest.raises(EvaluationError, match="3 of 6 training texts have 3 full blocks of 4 tokens, and 4 are asked"):
        fixed_blocks(texts, 4, 3, B, seed=0)
    with pytest.raises(EvaluationError, match=r"0 of 6 .* --dynamics-texts 0 leaves it out"):
        fixed_blocks(texts, 1, 99, B, seed=0)


def test_dynamics_of_a_drafter_equal_to_its_target(tmp_path):
    """One draw per block keeps all of it; accuracy is that of the likeliest token."""
    target = bigram_target()
    texts = open_dataset(runs.make_data(tmp_path / "data", target), target)
    chosen = fixed_blocks(texts, 8, 3, B, seed=0)
    accuracy, length = measure_checkpoint(target, equal_drafter(target), texts, chosen, seed=0)
    assert length == B
    hits = total = 0
    for each in chosen:
        text = torch.tensor(texts[each.text].astype(np.int64))
        best = target.logits(target.forward(text[None]).hidden)[0].argmax(-1)
        for anchor in each.anchors.tolist():
            hits += int((best[anchor : anchor + B] == text[anchor + 1 : anchor + 1 + B]).sum())
            total += B
    assert accuracy == pytest.approx(hits / total)
