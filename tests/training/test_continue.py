"""Training a drafter further: from a folder of ours, or of an export, or anyone's."""

import pytest
import torch

from blockdraft.drafters import load_drafter, save_drafter
from blockdraft.export import export_drafter
from blockdraft.recipes import RecipeError
from blockdraft.training.initialization import new_drafter

from runs import make_data, recipe, target, train, weights
from tiny import tiny_drafter


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "d")


@pytest.mark.parametrize("flavour", [None, "flat", "speculators"])
def test_a_run_begins_with_the_weights_of_the_folder(tmp_path, data, flavour):
    model = target()
    drafter = tiny_drafter("dspark", model)
    folder = tmp_path / "drafter"
    if flavour is None:
        save_drafter(drafter, folder)
    else:
        export_drafter(drafter, model, folder, flavour)
    options = ["drafter.kind=dspark", f"drafter.initial={folder}"]
    began = new_drafter(recipe(data, *options), model)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(began.state_dict()[name], tensor), name
    trainer = train(data, tmp_path / "run", *options, "optimizer.num_train_epochs=1")
    assert not torch.equal(weights(trainer)["fc.weight"], drafter.fc.weight)
    assert load_drafter(tmp_path / "run" / "checkpoint", model).config == drafter.config


def test_other_feature_layers_and_block_sizes_are_kept_or_chosen(tmp_path, data):
    model = target()
    save_drafter(tiny_drafter("dflash", model, target_layers=(0, 2, 4), num_proposals=7), tmp_path)
    began = new_drafter(recipe(data, f"drafter.initial={tmp_path}"), model)
    assert began.config.target_layers == (0, 2, 4)
    assert began.config.num_proposals == 4  # of the recipe: no tensor depends on it


def test_a_confidence_head_is_left_behind(tmp_path, data):
    model = target()
    save_drafter(tiny_drafter("dspark", model, confidence_head=True), tmp_path)
    began = new_drafter(recipe(data, "drafter.kind=dspark", f"drafter.initial={tmp_path}"), model)
    assert not any(name.startswith("confidence_head") for name in began.state_dict())


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["drafter.num_layers=3"], "has num_layers 2, not 3; set drafter.num_layers=2"),
        (["drafter.kind=dflash"], "has kind dspark, not dflash; set drafter.kind=dspark"),
        (["drafter.num_features=2"], "set drafter.num_features=3"),
        (["drafter.markov_head=rnn", "drafter.markov_rank=8"], "set drafter.markov_head=vanilla drafter.markov_rank=6"),
    ],
)
def test_another_shape_is_refused_with_what_to_set(tmp_path, data, assignments, message):
    model = target()
    save_drafter(tiny_drafter("dspark", model), tmp_path)
    with pytest.raises(RecipeError, match=message):
        new_drafter(recipe(data, "drafter.kind=dspark", f"drafter.initial={tmp_path}", *assignments), model)


def test_what_is_no_drafters_folder_is_refused(data):
    with pytest.raises(RecipeError, match=r"drafter.initial: \./nowhere: no such folder"):
        new_drafter(recipe(data, "drafter.initial=./nowhere"), target())
    with pytest.raises(RecipeError, match="must be scratch, target, a shipped drafter or a drafter's folder"):
        recipe(data, "drafter.initial=scrach")
