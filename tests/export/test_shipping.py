"""Drafters in the box: a small run becomes a folder of the package, found by name, described, and loaded exactly."""

import importlib
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from blockdraft.data import Prompt
from blockdraft.drafters import SHIPPED, CheckpointError, DrafterConfig, find_drafter, load_drafter
from blockdraft.evaluation import Evaluation, EvaluationError, Protocol, Task, load_candidates, read_results
from blockdraft.evaluation.candidates import ShippedDrafter, shipped_drafters, shipped_record
from blockdraft.evaluation.results import Interval
from blockdraft.export.card import record_in_words
from blockdraft.export.shipping import measurement, public_recipe, training_command, write_shipped_card
from blockdraft.recipes import Recipe, load_recipe
from blockdraft.runs import Run
from blockdraft.targets import fingerprint

import runs
from commands import blockdraft
from tiny import tiny_target

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
tool = importlib.import_module("ship_drafter")

FEW = Protocol(max_new_tokens=10, num_bootstrap=20, num_traces=0, dynamics_texts=0, draft_temperatures=(0.6, 1.0))
SOURCE = "blockdraft data prompts --source pocket"


@pytest.fixture(scope="module")
def target():
    return runs.target()


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """A run, an evaluation of it, and the folder of shipped drafters with it in it."""
    root = tmp_path_factory.mktemp("shipping")
    data = runs.make_data(root / "data", target)
    runs.train(data, root / "run", "optimizer.max_steps=3", "target.name=tiny", model=target)
    tasks = [Task("one", "One", "math", "here", [Prompt(f"p{i}", (f"w{7 + i} w9",)) for i in range(2)])]
    Evaluation(target, load_candidates([f"it={root / 'run'}"], target), tasks, FEW, root / "evaluation").run()
    arguments = [root / "run", "--name", "tiny-dflash-bv", "--evaluation", root / "evaluation", "--out", root / "box"]
    assert tool.main([*map(str, arguments), "--command", SOURCE]) == 0
    return root


@pytest.fixture
def shipped(made, monkeypatch):
    monkeypatch.setitem(SHIPPED, "tiny-dflash-bv", made / "box" / "tiny-dflash-bv")
    return made / "box" / "tiny-dflash-bv"


def test_the_weights_are_those_of_the_run_rounded(shipped, made, target):
    stored = load_file(shipped / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.bfloat16}
    original = load_file(made / "run" / "best" / "model.safetensors")
    loaded = load_drafter("tiny-dflash-bv", target)
    assert find_drafter("tiny-dflash-bv") == shipped
    for name, tensor in original.items():
        assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16).float()), name


def test_it_may_propose_fewer_tokens_than_it_was_trained_with(made, target, tmp_path, capsys):
    trained = Run.open(made / "run").recipe.drafter.num_proposals
    fewer = trained - 1
    arguments = [str(made / "run"), "--name", "fewer", "--out", str(tmp_path), "--num-proposals"]
    assert tool.main([*arguments, str(fewer)]) == 0
    assert (
        f"| proposals per block | {fewer}, trained with {trained} |" in (tmp_path / "fewer" / "README.md").read_text()
    )
    drafter = load_drafter(tmp_path / "fewer", target)
    assert drafter.config.num_proposals == fewer
    (whole,) = load_candidates([f"it={made / 'run'}"], target)
    assert ShippedDrafter.read(tmp_path / "fewer").fingerprint == whole.with_proposals(fewer).fingerprint
    for wrong in (0, trained + 1):
        assert tool.main([*arguments, str(wrong), "--force"]) == 2
        assert f"was trained to propose {trained} tokens, not {wrong}" in capsys.readouterr().err


def test_the_label_says_what_it_began_from_though_the_path_is_not_kept(made, target, tmp_path):
    changes = ("optimizer.max_steps=1", "objective.name=ce", f"drafter.initial={made / 'run'}")
    runs.train(made / "data", tmp_path / "run", *changes, model=target)
    assert tool.main([str(tmp_path / "run"), "--name", "further", "--out", str(tmp_path)]) == 0
    record = ShippedDrafter.read(tmp_path / "further")
    assert (record.label, record.recipe.drafter.initial) == ("BV, then CE", "./run")
    assert "| objective | BV, then CE |" in (tmp_path / "further" / "README.md").read_text()


def test_another_target_of_the_same_shapes_is_refused(shipped):
    del shipped
    with pytest.raises(CheckpointError, match="made for the target with fingerprint"):
        load_drafter("tiny-dflash-bv", tiny_target(dtype=torch.float32, seed=1))
    with pytest.raises(CheckpointError, match=r"did you mean tiny-dflash-bv\?"):
        find_drafter("tiny-dflash-vb")
    with pytest.raises(CheckpointError, match=r"elephant: no such folder, and no shipped drafter: .*tiny-dflash-bv"):
        find_drafter("elephant")


def test_the_record_says_how_it_was_made_and_nothing_of_the_machine(shipped, made, target):
    record = ShippedDrafter.read(shipped)
    run, results = Run.open(made / "run"), read_results(made / "evaluation")
    assert (record.name, record.target, record.target_fingerprint) == (
        "tiny-dflash-bv",
        "tiny qwen3",
        fingerprint(target),
    )
    assert record.recipe.objective == run.recipe.resolved().objective
    assert record.recipe.optimizer == run.recipe.optimizer
    assert (record.step, record.num_steps) == (Run.of_checkpoint(made / "run" / "best")[1], 3)
    assert record.data.num_texts == 36
    assert record.commands == [SOURCE, "blockdraft train recipe.yaml --out runs/tiny-dflash-bv"]
    assert record.num_bytes == 2 * record.num_parameters
    measured = record.measured
    assert (measured.weights, measured.tasks, measured.num_decoded) == ("run", {"one": 2}, {"one": 2})
    assert (measured.num_processes, measured.num_threads) == (1, torch.get_num_threads())
    for each in results.averages:
        assert measured.length(each.rule, each.choice) == each.predicted_length
    lengths = measured.lengths_by_proposals["block"]
    assert lengths[-1] == pytest.approx(measured.length("block", "paper").value)
    for file in ("drafter.json", "README.md", "config.json"):
        text = (shipped / file).read_text()
        assert str(made) not in text
        assert "/tmp" not in text


def test_the_card_has_the_lengths_and_the_recipe(shipped):
    card, record = (shipped / "README.md").read_text(), ShippedDrafter.read(shipped)
    assert card.startswith("---\n")
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "tiny qwen3"
    predicted = record.measured.length("block", "paper")
    assert f"{predicted.value:.2f} [{predicted.low:.2f}, {predicted.high:.2f}]" in card
    speedup = next(each.speedup for each in record.measured.lengths if each.rule == "block")
    assert speedup.bounds is not None
    assert f"| {speedup.value:.2f} [{speedup.low:.2f}, {speedup.high:.2f}] |" in card
    assert "means over 2 prompts of one; measured lengths and speed-ups over the same, which were all decoded" in card
    for command in record.commands:
        assert command in card
    inside = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert inside["objective"]["options"] == record.recipe.objective.options


def test_the_card_says_what_was_predicted_what_was_decoded_and_how_it_was_timed(shipped):
    record = ShippedDrafter.read(shipped)

    def said(**changes):
        measured = record.measured.model_copy(update={"tasks": {"gsm8k": 6, "aime25": 6}} | changes)
        return record_in_words(record.model_copy(update={"measured": measured}))

    means = "Predicted lengths are means over 6 prompts of each of 2 tasks (gsm8k, aime25); "
    two = said(num_decoded={"gsm8k": 2, "aime25": 2}, num_processes=2, num_threads=1)
    assert f"{means}measured lengths and speed-ups over 2 of each that were decoded." in two
    assert "those of the machine that measured them, by 2 processes of 1 thread each." in two
    uneven = said(num_decoded={"gsm8k": 2, "aime25": 1}, num_processes=1, num_threads=8)
    assert "over those that were decoded: 2 prompts of gsm8k, 1 prompt of aime25." in uneven
    assert "those of the machine that measured them, by 8 threads." in uneven
    unknown = said(num_decoded=None, num_processes=None, num_threads=None)
    assert f"{means}measured lengths and speed-ups over those that were decoded, whose number is not" in unknown
    assert "those of the machine that measured them." in unknown
    none = dict.fromkeys(("acceptance_length", "speedup"))
    only = said(lengths=[each.model_copy(update=none) for each in record.measured.lengths])
    assert f"{means}nothing was decoded." in only
    assert "speed-up" not in only.lower()
    names, wide = ("predicted_length", "acceptance_length", "speedup"), Interval(value=2, low=1, high=3)
    bounded = record.measured.lengths[0].model_copy(update=dict.fromkeys(names, wide))
    assert "95% intervals over prompts. " in said(lengths=[bounded])
    point = bounded.model_copy(update={"speedup": Interval(value=2, low=2, high=2)})
    assert "95% intervals over prompts; numbers without are of too few prompts for one." in said(lengths=[point])


def test_an_evaluation_of_an_earlier_version_knows_how_answers_were_last_decoded(made):
    results = read_results(made / "evaluation")
    (about,) = results.drafters
    older = results.model_copy(
        update={
            "drafters": [about.model_copy(update={"speed_settings": []})],
            "provenance": results.provenance | {"num_processes": 2, "threads": 3},
        }
    )
    measured = measurement(older, about.fingerprint)
    assert (measured.num_processes, measured.num_threads) == (2, 3)
    both = [about.speed_settings[0], about.speed_settings[0].model_copy(update={"threads": 99})]
    mixed = results.model_copy(update={"drafters": [about.model_copy(update={"speed_settings": both})]})
    assert measurement(mixed, about.fingerprint).num_threads is None


def test_it_is_evaluated_under_its_recipes_label(shipped, target):
    del shipped
    (candidate,) = load_candidates(["tiny-dflash-bv"], target)
    assert (candidate.name, candidate.label, candidate.objective) == ("tiny-dflash-bv", "BV", "bv")
    assert candidate.fingerprint == shipped_drafters()[-1].fingerprint
    (named,) = load_candidates(["mine=tiny-dflash-bv"], target)
    assert named.name == "mine"


def test_drafters_ls(shipped):
    record = shipped_record(shipped)
    ended = blockdraft("drafters", "ls")
    assert ended.code == 0
    (line,) = [line for line in ended.out.splitlines() if line.startswith("tiny-dflash-bv")]
    length = record.measured.length("block", "paper").value
    size = f"{(shipped / 'model.safetensors').stat().st_size / 1e6:.1f}"
    assert line.split() == ["tiny-dflash-bv", "tiny", "qwen3", "dflash", "BV", "2", "4", size, "MB", f"{length:.2f}"]
    (found,) = [
        each for each in json.loads(blockdraft("drafters", "ls", "--json").out) if each["target"] == "tiny qwen3"
    ]
    assert found["predicted_length"] == {"block": length, "token": record.measured.length("token", "paper").value} | {
        "greedy": record.measured.length("greedy", "paper").value
    }


def test_drafters_ls_gives_the_number_of_proposals_that_a_drafter_makes_and_not_that_of_its_training(
    tmp_path, monkeypatch
):
    folder = shutil.copytree(SHIPPED["pocket-dspark-bv"], tmp_path / "pocket-dspark-bv")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_proposals": 7}))
    monkeypatch.setitem(SHIPPED, "pocket-dspark-bv", folder)
    assert ShippedDrafter.read(folder).recipe.drafter.num_proposals == 15
    (found,) = [each for each in json.loads(blockdraft("drafters", "ls", "--json").out) if each["name"] == folder.name]
    assert found["num_proposals"] == 7
    (line,) = [line.split() for line in blockdraft("drafters", "ls").out.splitlines() if line.startswith(folder.name)]
    assert line[-4] == "7"


def test_no_shipped_drafter_is_said(monkeypatch):
    for name in list(SHIPPED):
        monkeypatch.delitem(SHIPPED, name)
    ended = blockdraft("drafters", "ls")
    assert ended.code == 0
    assert ended.out == ""
    assert "no drafters" in ended.err


def test_an_evaluation_of_another_drafter_is_refused(shipped, made, capsys):
    results = read_results(made / "evaluation")
    with pytest.raises(EvaluationError, match="no drafter with the fingerprint 0123"):
        measurement(results, "0123")
    assert tool.main([str(made / "run"), "--name", "tiny-dflash-bv", "--out", str(made / "box")]) == 2
    assert "--force" in capsys.readouterr().err
    assert ShippedDrafter.read(shipped).measured is not None


def test_paths_of_the_machine_lose_all_but_their_last_part():
    changes = ["data.path=datasets/texts", "data.cache=../cache", "drafter.initial=/elsewhere/best"]
    recipe = public_recipe(load_recipe("pocket-dflash-bv", changes))
    assert (str(recipe.data.path), str(recipe.data.cache)) == ("datasets/texts", "cache")
    assert recipe.drafter.initial == "./best"
    below = public_recipe(load_recipe("pocket-dflash-bv", ["drafter.initial=./runs/ce"]))
    assert below.drafter.initial == "./runs/ce"


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["optimizer.name=muon", "optimizer.betas=[0.8, 0.99]", "drafter.num_layers=2", "data.path=/somewhere/data"],
        ["annealing=null", "objective.options.beta=0.5", "runtime.precision=bfloat16", "runtime.threads=3"],
        ["drafter.initial=/elsewhere/best", "objective.options.summand_floor=0.5"],
    ],
)
def test_the_training_command_gives_the_recipe(changes):
    recipe = public_recipe(load_recipe("pocket-dflash-bv", changes).resolved())
    words = shlex.split(training_command(recipe, "it"))
    assert words[:3] == ["blockdraft", "train", "pocket-dflash-bv"]
    again = load_recipe(words[2], words[3:-2]).resolved()
    for section in set(Recipe.model_fields) - {"runtime", "logging"}:
        assert getattr(again, section) == getattr(recipe, section), section
    assert again.runtime == recipe.runtime
    assert "threads" not in " ".join(words)
    assert "where" not in " ".join(words)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_cards_are_those_that_the_code_writes(name, tmp_path):
    folder = Path(SHIPPED[name])
    config = DrafterConfig.model_validate_json((folder / "config.json").read_text())
    write_shipped_card(tmp_path, ShippedDrafter.read(folder), config)
    assert (tmp_path / "README.md").read_text() == (folder / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_command_on_a_card_trains_by_the_recipe_that_it_was_trained_by(name):
    record = ShippedDrafter.read(SHIPPED[name])
    program, verb, recipe, *changes, out, _run = shlex.split(record.commands[-1])
    assert (program, verb, out) == ("blockdraft", "train", "--out")
    found, trained = load_recipe(recipe, changes).resolved(), record.recipe.resolved()
    for section in ("target", "drafter", "objective", "annealing", "data", "batch", "optimizer", "seed"):
        assert getattr(found, section) == getattr(trained, section), section


def test_the_card_names_the_drafter_that_training_started_from():
    record = ShippedDrafter.read(SHIPPED["pocket-dflash-dpace-bv"])
    card = (SHIPPED["pocket-dflash-dpace-bv"] / "README.md").read_text()
    assert "| starts from | the drafter runs/long-dflash-dpace |" in card
    assert record.commands[-2].endswith("--out runs/long-dflash-dpace")
    assert "starts from" not in (SHIPPED["pocket-dflash-bv"] / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_is_shipped_is_whole(name):
    record, files = ShippedDrafter.read(SHIPPED[name]), {file.name for file in SHIPPED[name].iterdir()}
    assert files == {"config.json", "model.safetensors", "drafter.json", "README.md"}
    assert record.name == name
    assert record.measured is not None
    assert record.num_bytes < 50e6
