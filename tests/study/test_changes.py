"""A finished run shares its recipe with its cell; a run's record may add to it."""

import pytest

from blockdraft.drafters import DrafterConfig
from blockdraft.recipes import load_recipe
from blockdraft.study.changes import differences
from blockdraft.targets import target_shape
from blockdraft.training.initialization import with_shape

FROM_A_FOLDER = "drafter.initial=./drafter"


def recorded(*assignments, **shape):
    """Return the recipe that a run records, with the shape of its drafter."""
    recipe = load_recipe("qwen3-4b-dspark-bv", list(assignments)).resolved()
    options = recipe.drafter.config_options() | shape
    shape_of_target = target_shape(recipe.target.name, recipe.target.shape)
    return with_shape(recipe, DrafterConfig.for_target("dspark", shape_of_target, **options))


def wanted(*assignments):
    return load_recipe("qwen3-4b-dspark-bv", list(assignments))


@pytest.mark.parametrize("assignments", [[], ["drafter.num_layers=1"], ["drafter.initial=target"], [FROM_A_FOLDER]])
def test_a_run_has_the_recipe_of_its_cell(assignments):
    assert differences(recorded(*assignments), wanted(*assignments)) == []


def test_an_option_that_is_newer_than_a_run_stands_at_its_default():
    run = recorded()
    options = {name: value for name, value in run.objective.options.items() if name != "control_variate"}
    older = run.model_copy(update={"objective": run.objective.model_copy(update={"options": options})})
    assert differences(older, wanted()) == []
    assert differences(older, wanted("objective.options.control_variate=true")) == ["objective"]


@pytest.mark.parametrize(
    "change",
    [
        "drafter.num_layers=1", "drafter.num_proposals=3", "drafter.num_features=2", "drafter.markov_rank=8",
        "drafter.vocab_size=512", "drafter.initial=target", FROM_A_FOLDER,
    ],
)  # fmt: skip
def test_a_run_of_another_drafter_is_told_apart(change):
    assert differences(recorded(change), wanted()) == ["drafter"]
    assert differences(recorded(), wanted(change)) == ["drafter"]


def test_a_drafter_that_is_trained_further_has_its_own_shape_unless_the_recipe_states_it():
    cell = wanted(FROM_A_FOLDER)
    stated = cell.drafter.model_fields_set
    assert "markov_rank" not in stated
    assert differences(recorded(FROM_A_FOLDER, markov_rank=8), cell) == []
    assert differences(recorded(FROM_A_FOLDER, markov_rank=8), wanted(FROM_A_FOLDER, "drafter.markov_rank=6")) == [
        "drafter"
    ]
    assert differences(recorded("drafter.initial=./other"), cell) == ["drafter"]
