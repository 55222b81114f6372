"""Which drafter is which: names, labels, checkpoints, fingerprints."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from blockdraft.drafters import save_drafter
from blockdraft.evaluation import EvaluationError, load_candidates
from blockdraft.evaluation.candidates import label_of, shipped_drafters
from blockdraft.recipes import load_recipe, override, parse, shipped_names
from blockdraft.targets import load_target

import runs
from tiny import tiny_drafter, tiny_target


@pytest.mark.parametrize(
    ("assignments", "label"),
    [
        ([], "BV"),
        (["drafter.kind=dspark"], "BV"),
        (["objective.options.form=log", "objective.options.estimator=integrated"], "BV"),
        (["annealing.ratio=0.5", "annealing.final=1"], "BV"),
        (["annealing.final=0.5"], "BV (beta to 0.5)"),
        (["annealing.final=0.5", "annealing.ratio=1"], "BV (beta to 0.5 over 100%)"),
        (["annealing.ratio=0.25"], "BV (beta over 25%)"),
        (["annealing.initial=0.1"], "BV (beta from 0.1)"),
        (["annealing.ratio=0"], "BV w/o annealing"),
        (["annealing=null"], "BV w/o annealing"),
        (["annealing.initial=1"], "BV w/o annealing"),
        (["annealing=null", "objective.options.beta=0.5"], "BV w/o annealing (beta 0.5)"),
        (["annealing.ratio=0", "annealing.final=0"], "BV w/o annealing (beta 0)"),
        (["objective.options.estimator=sampled"], "BV sampled"),
        (["objective.options.estimator=sampled", "annealing=null"], "BV sampled w/o annealing"),
        (["objective.options.form=linear"], "BV linear"),
        (["objective.options.form=population"], "BV population"),
        (["objective.options.ramp_floor=null"], "BV (no ramp floor)"),
        (["objective.options.control_variate=true"], "BV (control variate)"),
        (["drafter.kind=dspark", "objective.options.ramp_floor=1e-6"], "BV (ramp floor 1e-06)"),
        (["objective.options.length_floor=0.001", "annealing.final=0.5"], "BV (beta to 0.5, length floor 0.001)"),
        (["objective.options.temperature=2"], "BV (temperature 2)"),
        (["objective.name=ce"], "CE"),
        (["objective.name=ce", "drafter.kind=dspark"], "CE"),
        (["objective.name=ce", "objective.options.eta=7"], "CE"),
        (["objective.name=ce", "objective.options.eta=7", "drafter.kind=dspark"], "CE (eta 7)"),
        (["objective.name=lk", "annealing.final=0.5"], "LK"),
    ],
)
def test_a_label_says_in_what_a_recipe_is_not_the_papers(assignments, label):
    recipe = parse(override({}, assignments), "test")
    assert label_of(recipe) == label
    assert label_of(recipe.resolved()) == label  # as a run writes it down


def test_only_the_papers_recipes_are_called_bv():
    labels = {name: label_of(load_recipe(name)) for name in shipped_names()}
    assert {name for name, label in labels.items() if label == "BV"} == {
        f"qwen3-{size}-{kind}-bv" for size in ("4b", "8b") for kind in ("dflash", "dspark")
    }
    assert labels["pocket-dflash-ce"] == "CE"


def test_a_label_says_what_a_drafter_that_was_trained_further_began_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, further = runs.make_data(tmp_path / "data"), "annealing.initial=0.5"
    short = ["optimizer.max_steps=1", "logging.save_steps=1"]
    trainer = runs.train(data, tmp_path / "runs" / "dpace", "objective.name=dpace", *short)

    def label(initial, *changes):
        return label_of(runs.recipe(data, f"drafter.initial={initial}", *changes).resolved())

    assert label("./runs/dpace", further) == "D-PACE, then BV (beta from 0.5)"
    assert label("runs/dpace/best", further) == "D-PACE, then BV (beta from 0.5)"
    assert label("pocket-dflash-ce") == "CE, then BV"
    assert label("pocket-dflash-ce", "objective.name=ce") == "CE"
    assert label("pocket-dflash-dpace-bv", further) == "D-PACE, then BV (beta from 0.5)"
    assert label("pocket-dflash-dpace-bv", "objective.name=ce") == "D-PACE, then BV (beta from 0.5), then CE"
    save_drafter(trainer.drafter, tmp_path / "somebodys")
    for unknown in ("./somebodys", "./gone", "z-lab/Qwen3-4B-DFlash-b16"):
        assert label(unknown, further) == "BV (beta from 0.5), post-trained"
    assert label_of(load_recipe("qwen3-4b-dflash-bv-post")) == "BV (beta from 0.5), post-trained"
    runs.train(data, tmp_path / "runs" / "both", "drafter.initial=./runs/dpace", *short)
    (found,) = load_candidates(["runs/both"], trainer.target)
    assert found.label == "D-PACE, then BV"
    assert label("./runs/both", "objective.name=ce") == "D-PACE, then BV, then CE"
    shutil.rmtree("runs/dpace")
    Path("runs/dpace").symlink_to("both")  # a run that names itself
    assert label("./runs/both", "objective.name=ce") == "BV, post-trained, then BV, then CE"
    Path("runs/both/run.json").write_text("{")
    assert label("./runs/both") == "BV, post-trained"


def test_a_shipped_drafter_is_called_what_its_record_says():
    records = {record.name: record for record in shipped_drafters()}
    assert records["pocket-dflash-dpace-bv"].label == "D-PACE, then BV (beta from 0.5)"
    assert records["pocket-dspark-bv"].label == "BV (beta over 100%), then BV (beta from 0.5)"
    assert records["pocket-dspark-ce"].label == "CE"
    smollm2 = "BV (beta over 100%), then BV w/o annealing (beta 0.5, control variate)"
    assert records["smollm2-dspark-bv"].label == smollm2
    others = [each for each in records.values() if each.recipe.drafter.initial in ("scratch", "target")]
    assert len(others) == len(records) - 4
    assert [each.label for each in others] == [label_of(each.recipe) for each in others]
    target = load_target("pocket")
    (found,) = load_candidates(["pocket-dflash-dpace-bv"], target)
    assert found.label == "D-PACE, then BV (beta from 0.5)"


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


def test_names(target, tmp_path, monkeypatch):
    save_drafter(tiny_drafter("dflash", target), tmp_path / "mine")
    found = load_candidates([str(tmp_path / "mine"), f"other={tmp_path / 'mine'}"], target)
    assert [(each.name, each.label, each.step, each.checkpoint) for each in found] == [
        ("mine", "mine", None, None), ("other", "other", None, None),
    ]  # fmt: skip
    with pytest.raises(EvaluationError, match="two drafters are called 'mine'"):
        load_candidates([str(tmp_path / "mine")] * 2, target)
    with pytest.raises(EvaluationError, match="'autoregressive' is what decoding without a drafter is called"):
        load_candidates([f"autoregressive={tmp_path / 'mine'}"], target)
    for strange in ("rate=1e-3", "my drafter", "größer", "a@b"):
        save_drafter(tiny_drafter("dflash", target), tmp_path / strange)
        assert load_candidates([str(tmp_path / strange)], target)[0].name == strange
    monkeypatch.chdir(tmp_path / "mine")
    assert load_candidates(["."], target)[0].name == "mine"
    half = tiny_target(dtype=torch.bfloat16)
    assert load_candidates([str(tmp_path / "mine")], half)[0].drafter.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["../../ce", "a/b", "..", ".", "", " ", ".hidden", "-x", "a\n", "a:b", "a\\b", "x" * 101, "nul\0", "end."]
)
def test_names_that_are_no_file_names_are_refused(target, tmp_path, name):
    save_drafter(tiny_drafter("dflash", target), tmp_path / "mine")
    with pytest.raises(EvaluationError, match=r"cannot name a drafter: .*--drafter NAME=PATH"):
        load_candidates([f"{name}={tmp_path / 'mine'}"], target)


def test_best_and_last_of_a_run(tmp_path):
    data = runs.make_data(tmp_path / "data")
    trainer = runs.train(data, tmp_path / "run", "logging.keep_epoch_checkpoints=true", "objective.name=ce")
    target, run = trainer.target, trainer.run
    steps = sorted(run.checkpoints())
    assert len(steps) > 1
    (tmp_path / "run" / "best").unlink()
    (tmp_path / "run" / "best").symlink_to(f"steps/{steps[0]:08d}")

    def load(given, **options):
        (found,) = load_candidates([str(given)], target, **options)
        assert (found.name, found.label, found.objective) == ("run", "CE", "ce")
        return found.checkpoint, found.step

    folder = tmp_path / "run"
    assert load(folder) == load(f"{folder}@best") == ("best", steps[0])
    assert load(f"{folder}@last") == load(folder, checkpoint="last") == ("last", steps[-1])
    assert load(f"{folder}@best", checkpoint="last") == ("best", steps[0])
    assert load(folder / "checkpoint") == ("last", steps[-1])
    assert load(folder / "steps" / f"{steps[-1]:08d}") == ("last", steps[-1])
    (named,) = load_candidates([f"x={folder}@last"], target)
    assert (named.name, named.checkpoint) == ("x", "last")
    (tmp_path / "rate=1").symlink_to("run")
    assert load(f"{tmp_path / 'rate=1'}@last") == ("last", steps[-1])
    (folder / "best").unlink()
    (folder / "best").symlink_to(f"steps/{steps[-1]:08d}")  # both are the same
    assert load(folder) == ("best", steps[-1])
    assert load(f"{folder}@last") == ("last", steps[-1])
    (folder / "best").unlink()
    assert load(folder) == ("last", steps[-1])  # nothing was held out
    with pytest.raises(EvaluationError, match="a best and a last checkpoint, not 'first'"):
        load_candidates([f"{folder}@first"], target)
    with pytest.raises(EvaluationError, match="is not a training run, so it has no last checkpoint"):
        load_candidates([f"{folder / 'checkpoint'}@last"], target)


def test_a_checkpoint_of_a_run_that_has_not_ended_or_from_its_middle_is_unfinished(tmp_path):
    trainer = runs.train(runs.make_data(tmp_path / "data"), tmp_path / "run", "logging.keep_epoch_checkpoints=true")
    first, last = min(trainer.run.checkpoints()), max(trainer.run.checkpoints())

    def load(given):
        (found,) = load_candidates([f"{tmp_path / 'run'}{given}"], trainer.target)
        assert found.num_steps == last
        return found.step, found.unfinished

    def link(name, step):
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).symlink_to(f"steps/{step:08d}")

    link("best", first)
    assert [load(each) for each in ("@last", "@best")] == [(last, False), (first, False)]
    link("best", last)
    assert load(f"/steps/{first:08d}") == (first, True)
    link("best", first)
    link("checkpoint", first)  # as if it had been stopped there
    assert [load(each) for each in ("@last", "@best")] == [(first, True), (first, True)]
    (shipped,) = load_candidates(["pocket-dflash-bv"], load_target("pocket"))
    assert (shipped.step, shipped.num_steps, shipped.unfinished) == (3288, 3288, False)


def test_runs_on_the_same_texts_in_other_folders_have_the_same_budget(tmp_path):
    data, short = runs.make_data(tmp_path / "data"), ("optimizer.max_steps=1", "logging.save_steps=1")
    shutil.copytree(data, tmp_path / "copy")
    cached = ("data.features=cached", f"data.cache={tmp_path / 'cache'}", "data.cache_gib=1")
    trainer = runs.train(data, tmp_path / "ce", "objective.name=ce", *short)
    runs.train(tmp_path / "copy", tmp_path / "bv", *cached, "batch.gradient_accumulation_steps=2", *short)
    runs.train(data, tmp_path / "fewer", "data.num_heldout=5", *short)
    ce, bv, fewer = load_candidates([str(tmp_path / name) for name in ("ce", "bv", "fewer")], trainer.target)
    assert ce.data == bv.data == trainer.run.info.data
    assert ce.budget == bv.budget
    assert {name for name, value in fewer.budget.items() if value != ce.budget[name]} == {"data"}


def test_a_fingerprint_is_of_weights_and_configuration(target, tmp_path):
    one, other = tiny_drafter("dflash", target), tiny_drafter("dflash", target, seed=5)
    for name, drafter in (("one", one), ("same", one), ("other", other)):
        save_drafter(drafter, tmp_path / name)
    found = load_candidates([str(tmp_path / name) for name in ("one", "same", "other")], target)
    assert found[0].fingerprint == found[1].fingerprint != found[2].fingerprint
    found[1].drafter.config = found[1].drafter.config.replace(target_layers=(0, 1, 2))
    assert dataclasses.replace(found[1]).fingerprint != found[0].fingerprint
