"""The card states what the run's folder tells, and says so where it tells nothing."""

import json

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from blockdraft.data import Prompt
from blockdraft.drafters import find_drafter, load_drafter, save_drafter
from blockdraft.evaluation import Evaluation, EvaluationError, Protocol, Task, load_candidates, read_profile
from blockdraft.export import RunFacts, export_drafter, run_facts
from blockdraft.export.card import evaluated, licence_of
from blockdraft.targets import fingerprint, load_target

from runs import make_data, target, train
from tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(make_data(folder / "data"), folder / "run", "optimizer.num_train_epochs=1", "drafter.kind=dspark")
    return folder


def card(checkpoint, out, flavour="flat", model=None, **options):
    model = model or target()
    drafter = load_drafter(checkpoint, model)
    export_drafter(drafter, model, out, flavour, facts=run_facts(checkpoint), **options)
    return (out / "README.md").read_text()


def test_a_trained_drafters_card_says_what_was_done(run, tmp_path):
    text = card(run / "run" / "best", tmp_path / "out")
    facts = run_facts(run / "run" / "best")
    about = json.loads((run / "run" / "run.json").read_text())
    assert facts.target == "tiny qwen3"
    assert f"| objective | {about['recipe']['objective']['name']} |" in text
    assert f"| steps | {facts.step} of {about['num_steps']} |" in text
    assert f"| fingerprint of its weights | {fingerprint(target())} |" in text
    assert f"| revision | {about['provenance']['git']} |" in text
    assert "36 texts with" in text
    assert "at temperature 1.0, top-k 0, top-p 1.0" in text
    for rule in ("greedy", "token", "block"):
        assert f"| {rule} verification | {facts.measured[f'heldout_length_{rule}']:.3f} |" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["optimizer"] == about["recipe"]["optimizer"]
    assert str(run) not in text  # no path of this machine is published


def test_measured_lengths_are_of_this_very_step(run, tmp_path):
    lines = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    facts = run_facts(run / "run" / "checkpoint")
    (own,) = [line for line in lines if line["step"] == facts.step and "heldout_length_block" in line]
    assert facts.measured["heldout_length_block"] == own["heldout_length_block"]
    bare = tmp_path / "steps" / "00000007"
    save_drafter(load_drafter(run / "run" / "checkpoint", target()), bare)
    (tmp_path / "run.json").write_text((run / "run" / "run.json").read_text())
    assert run_facts(bare).measured is None
    assert "Accepted lengths: not recorded." in card(bare, tmp_path / "out")


def test_the_card_holds_the_acceptance_profile_of_an_evaluation(run, tmp_path):
    model, checkpoint = target(), run / "run" / "best"
    tasks = [
        Task(name, name.title(), "chat", "here", [Prompt(f"{name}{i}", (f"w{7 + i} w9",)) for i in range(num)])
        for name, num in (("one", 3), ("two", 1))
    ]
    protocol = Protocol(max_new_tokens=10, num_bootstrap=20, num_traces=0, dynamics_texts=0, draft_temperatures=())
    Evaluation(model, load_candidates([f"it={checkpoint}"], model), tasks, protocol, tmp_path / "evaluation").run()
    drafter = load_drafter(checkpoint, model)
    facts = RunFacts(evaluation=evaluated(tmp_path / "evaluation", drafter))
    export_drafter(drafter, model, tmp_path / "out", "flat", facts=facts)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "By decoding 3 prompts of One, 1 prompt of Two" in text
    assert "Macro is the mean over the tasks" in text
    entries = read_profile(tmp_path / "evaluation").entries
    assert {each.rule for each in entries} == {"greedy", "token", "block"}
    for each in entries:
        lengths = f"| {each.macro.acceptance_length:.2f} | {each.micro.acceptance_length:.2f} | {each.num_rounds} |"
        assert lengths in text
        marginal = " | ".join(f"{value:.2f}" for value in each.micro.marginal)
        assert f"| marginal | {marginal} |" in text
    rows = [line for line in text.splitlines() if "| conditional |" in line]
    assert len(rows) == len(entries)
    other = tiny_drafter(drafter.config.kind, model)
    with pytest.raises(EvaluationError, match=r"no drafter with these weights.*it has it"):
        evaluated(tmp_path / "evaluation", other)


def test_a_shipped_drafters_card_says_what_is_recorded_of_it(tmp_path):
    model, folder = load_target("pocket"), find_drafter("pocket-dflash-bv")
    assert run_facts(folder).target == "pocket"
    text = card(folder, tmp_path / "out", model=model)
    record = json.loads((folder / "drafter.json").read_text())
    assert f"| objective | {record['label']} |" in text
    assert record["commands"][-1] in text
    assert "| block | 1 (paper) |" in text
    assert "blockdraft export-target pocket --out pocket" in text  # no hub knows it by this name


def test_a_drafter_without_a_run_says_so(tmp_path):
    model = target()
    save_drafter(tiny_drafter("dflash", model), tmp_path / "bare")
    text = card(tmp_path / "bare", tmp_path / "out")
    assert run_facts(tmp_path / "bare") == RunFacts()
    assert "Objective, data and recipe: not recorded." in text
    assert "| licence | not recorded |" in text
    assert "The drafter's own: not recorded" in text


@pytest.mark.parametrize(
    ("kind", "changes", "flavour"),
    [
        ("dflash", {}, "flat"), ("dspark", {}, "flat"), ("dspark", {}, "speculators"),
        ("dspark", {"markov_head": "rnn"}, "flat"),
    ],
)  # fmt: skip
def test_how_to_serve_it(tmp_path, kind, changes, flavour):
    save_drafter(tiny_drafter(kind, target(), **changes), tmp_path / "ours")
    text = card(tmp_path / "ours", tmp_path / "out", flavour, verifier="hub/target")
    if changes:
        assert "vLLM 0.32 does not serve this folder: it has the vanilla Markov head only" in text
    else:
        settings = json.loads(text.split("--speculative-config \\\n    '")[1].split("'")[0])
        assert settings == {
            "method": kind, "model": "PATH_OF_THIS_FOLDER", "num_speculative_tokens": 4,
            "rejection_sample_method": "block", "draft_sample_method": "probabilistic",
        }  # fmt: skip
    if flavour == "speculators":
        assert "SGLang 0.5.23 does not serve this folder" in text
    elif kind == "dflash":
        assert "--speculative-num-draft-tokens 5" in text
        assert "SGLang 0.5.23: greedy drafts, token verification" in text
    else:
        assert "--speculative-dspark-block-size 4 --speculative-use-block-verification" in text
        assert "SGLang 0.5.23: sampled drafts, block verification" in text


def test_the_hub_reads_its_metadata(tmp_path):
    save_drafter(tiny_drafter("dflash", target()), tmp_path / "ours")
    card(tmp_path / "ours", tmp_path / "out", verifier="hub/target")
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.base_model, data.pipeline_tag) == ("hub/target", "text-generation")
    assert data.tags == ["speculative-decoding", "dflash", "flat"]
    assert data.license is None  # its publisher's to state


def test_no_path_of_this_machine_is_published(tmp_path):
    save_drafter(tiny_drafter("dflash", target()), tmp_path / "ours")
    text = card(tmp_path / "ours", tmp_path / "out", verifier=str(tmp_path / "a-target"))
    assert str(tmp_path) not in text
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model == "a-target"


def test_licences_are_read_and_never_invented(tmp_path):
    assert licence_of(load_target("pocket")) == "apache-2.0"
    model = tiny_target(dtype=torch.float32)
    model.save(tmp_path)
    again = load_target(tmp_path)
    assert licence_of(again) is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert licence_of(again) == "mit"
    (tmp_path / "README.md").write_text("# A model, under the MIT licence or not\n")
    assert licence_of(again) is None
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n# A model\n")
    assert licence_of(again) is None
