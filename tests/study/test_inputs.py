"""A study checks what it reads before it trains: tasks, folders of prompts, and the package that downloads them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockdraft.errors import BlockdraftError
from blockdraft.study import Study, StudyError, inputs, load_study
from blockdraft.targets import Sampling

from commands import blockdraft
from tiny_study import TINY


@pytest.fixture
def folder(tmp_path):
    """A folder with a study, and prompts of one benchmark."""
    (tmp_path / "s.yaml").write_text(TINY)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "gsm8k.jsonl").write_text(json.dumps({"id": "a", "turns": ["What is 1 + 1?"]}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["evaluation.tasks=[pockt]"], "unknown task 'pockt'; did you mean 'pocket"),
        (["evaluation.tasks=[pocket, pocket-math]"], "'pocket-math' is named twice"),
        (["evaluation.tasks=[gsm8k]", "evaluation.prompts=nowhere"], "nowhere/gsm8k.jsonl"),
        (["evaluation.tasks=[gsm8k, aime25]", "evaluation.prompts=prompts"], "prompts/aime25.jsonl"),
        (["evaluation.tasks=[benchmarks]", "evaluation.prompts=prompts"], "prompts/math500.jsonl"),
    ],
)
def test_an_evaluation_that_could_not_begin_is_refused_before_training(folder, monkeypatch, changes, reason):
    planned = blockdraft("study", "s.yaml", *changes, "--plan", cwd=folder)
    assert planned.code == 2
    assert reason in planned.err
    assert not planned.out
    monkeypatch.chdir(folder)
    with pytest.raises(BlockdraftError) as refused:
        Study(load_study("s.yaml", changes), "out").run()
    assert reason in str(refused.value)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("options", [["--plan"], ["--plan", "--slurm"]])
def test_benchmarks_that_are_named_twice_are_refused_in_the_plan(folder, options):
    planned = blockdraft("study", "s.yaml", "evaluation.tasks=[benchmarks, gsm8k]", *options, cwd=folder)
    assert planned.code == 2
    assert "twice" in planned.err


def test_prompts_from_the_hub_need_the_package_that_downloads_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "datasets", None)
    hub = ["evaluation.tasks=[gsm8k]"]
    with pytest.raises(BlockdraftError, match=r"pip install 'blockdraft\[datasets\]'"):
        Study(load_study("s.yaml", hub), "out").run()
    assert not (folder / "out").exists()
    planned = blockdraft("study", "s.yaml", *hub, "--plan")  # which may be for another machine
    assert planned.code == 0
    assert "pip install 'blockdraft[datasets]'" in planned.err
    assert "2 cells" in planned.out
    planned = blockdraft("study", "s.yaml", *hub, "evaluation.prompts=prompts", "--plan")
    assert (planned.code, planned.err) == (0, "")


def test_training_dynamics_of_runs_that_keep_no_epochs_are_refused(folder):
    planned = blockdraft("study", "s.yaml", "evaluation.dynamics_texts=8", "--plan", cwd=folder)
    assert planned.code == 2
    assert "pocket-dflash-ce-seed1 keeps no checkpoints of its epochs" in planned.err


def test_best_checkpoints_of_runs_that_hold_no_texts_out_are_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    changes = ["set=[logging.logging_steps=1]", "objectives.bv.set=[data.num_heldout=0]", "evaluation.checkpoint=best"]
    said = refused_at_once(*changes)
    assert "pocket-dflash-bv-seed1 holds no texts out; set data.num_heldout, or evaluation.checkpoint=last" in said
    planned = blockdraft("study", "s.yaml", *changes[:2], "--plan")  # the last checkpoint
    assert planned.code == 0, planned.err


def refused_at_once(*changes):
    """Return the words in which a study is refused, by its plan and before it writes anything."""
    planned = blockdraft("study", "s.yaml", *changes, "--plan", "--out", "out")
    assert planned.code == 2
    with pytest.raises(StudyError) as refused:
        Study(load_study("s.yaml", list(changes)), "out").run()
    assert planned.err == f"error: {refused.value}\n"
    assert not Path("out").exists()
    return str(refused.value)


@pytest.mark.parametrize(
    ("sampled_from", "sampling", "changes", "said"),
    [
        ("smollm2", Sampling(), [], "texts was sampled from smollm2, and pocket-dflash-ce-seed1 trains for pocket."),
        ("./pocket-2", Sampling(), [], "was sampled from ./pocket-2"),
        ("pocket", Sampling(0.7), [], "texts: sampled with temperature 0.7, top_k 0, top_p 1, and the objective of"),
        ("models/pocket", Sampling(1.0, 20), [], "top_k 20"),
        ("pocket", Sampling(1.0, 0, 0.9), [], "top_p 0.9"),
        (
            "pocket", Sampling(), ["objectives.bv.set=[objective.options.temperature=0.5]"],
            "the objective of pocket-dflash-bv-seed1 assumes temperature 0.5 over the whole vocabulary",
        ),
    ],
)  # fmt: skip
def test_texts_of_another_target_or_distribution_are_refused_at_once(
    folder, monkeypatch, sampled_from, sampling, changes, said
):
    monkeypatch.chdir(folder)
    (folder / "texts").mkdir()
    (folder / "texts" / "manifest.json").touch()
    about, identity = SimpleNamespace(target=sampled_from), SimpleNamespace(sampling=sampling)
    found = SimpleNamespace(complete=True, about=about, identity=identity)
    monkeypatch.setattr(inputs, "read_manifest", lambda _folder: found)
    assert said in refused_at_once("targets.pocket.data=texts", *changes)


def test_texts_that_the_study_makes_are_sampled_as_the_objectives_assume(folder, monkeypatch):
    monkeypatch.chdir(folder)
    said = refused_at_once("objectives.bv.set=[objective.options.temperature=0.5]")
    assert said.startswith("the texts that a study makes: sampled with temperature 1, ")


def test_a_plan_takes_texts_that_are_not_there_to_be_elsewhere(folder):
    planned = blockdraft("study", "s.yaml", "targets.pocket.data=nowhere", "--plan", cwd=folder)
    assert planned.code == 0, planned.err


def test_a_drafter_to_train_further_that_is_not_there_or_of_another_kind_is_refused_at_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    post = "objectives.post={recipe: bv-post, set: [drafter.initial=%s]}"
    assert "pocket-dflash-post-seed1 trains a drafter further: ./nowhere: no such folder" in refused_at_once(
        post % "./nowhere"
    )
    said = refused_at_once(post % "pocket-dflash-ce", "drafters=[dflash, dspark]", "set=[]")
    assert "pocket-dspark-post-seed1 trains a drafter further" in said
    assert "kind dflash, not dspark" in said
    planned = blockdraft("study", "s.yaml", post % "owner/drafter", "--plan")  # on the Hub: nothing is downloaded
    assert planned.code == 0, planned.err


def test_a_given_folder_that_is_not_complete_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(inputs, "read_manifest", lambda _folder: SimpleNamespace(complete=False))
    with pytest.raises(StudyError, match="given is not complete; let `blockdraft data regenerate` finish it"):
        Study(load_study("s.yaml", ["targets.pocket.data=given"]), "out").run()


def test_a_plan_for_the_folder_of_another_study_is_refused(folder):
    (folder / "out").mkdir()
    (folder / "out" / "study.yaml").write_text(TINY.replace("max_new_tokens: 12", "max_new_tokens: 13"))
    assert (folder / "out" / "study.yaml").read_text() != TINY
    planned = blockdraft("study", "s.yaml", "--plan", "--out", "out", cwd=folder)
    assert planned.code == 2
    assert "out holds another study" in planned.err


def test_prompts_of_evaluations_that_are_complete_are_not_read_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Study, "evaluations_left", lambda *_: [])
    planned = blockdraft("study", "s.yaml", "evaluation.tasks=[gone.jsonl]", "--plan")
    assert planned.code == 0, planned.err
    assert "answers left" not in planned.out
