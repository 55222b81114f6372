"""A finished run shares its recipe with its cell; a run's record may add to it."""

import pytest

from blockdraft.drafters import DrafterConfig
from blockdraft.recipes import load_recipe
from blockdraft.study import load_study
from blockdraft.study.changes import changes, differences
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


def test_a_study_goes_on_with_more_seeds_and_objectives_and_another_way_to_compute_a_step():
    before = load_study("pocket-short", ["set=[runtime.precision=float32, runtime.threads=2]"])
    more = ["set=[runtime.precision=float32, runtime.compile=false]", "hardware.devices=2", "baseline=bv"]
    now = load_study("pocket-short", [*more, "seeds=[42,43,44,45]", "objectives.kl={recipe: kl}"])
    assert changes(before, now) == []
    assert changes(now, before) == ["objectives", "seeds"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("set=[runtime.precision=bfloat16]", "set"),
        ("set=['runtime={precision: bfloat16}']", "set"),
        ("set=[runtime.device=cuda]", "set"),
        ("targets.pocket.set=[runtime.precision=bfloat16]", "targets"),
        ("objectives.bv.set=[runtime.precision=bfloat16]", "objectives"),
        ("evaluation.num_prompts=2", "evaluation"),
    ],
)
def test_a_study_does_not_go_on_with_another_precision(change, field):
    before = ["set=[]"]
    assert changes(load_study("pocket-short", before), load_study("pocket-short", [*before, change])) == [field]


def test_a_run_in_another_precision_is_told_apart():
    assert differences(recorded("runtime.precision=bfloat16"), wanted()) == ["runtime.precision"]
    assert differences(recorded("runtime.compile=true", "runtime.device=cuda"), wanted()) == []


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
