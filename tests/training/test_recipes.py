"""Recipes: strict, composed from small parts, every shipped one valid, the paper's numbers their defaults."""

import re

import pytest

from blockdraft.recipes import Recipe, RecipeError, load_recipe, reference_page, shipped_names, to_yaml


def test_the_defaults_are_the_papers():
    recipe = Recipe()
    assert recipe.drafter.num_layers == 5
    assert recipe.drafter.num_proposals == 15
    assert recipe.optimizer.learning_rate == 6e-4
    assert recipe.optimizer.warmup_ratio == 0.04
    assert recipe.optimizer.num_train_epochs == 6
    assert recipe.batch.num_texts == 32
    assert recipe.seed == 42
    assert recipe.annealing.model_dump() == {"ratio": 0.5, "initial": 0.0, "final": 1.0}
    assert recipe.drafter.initial == "scratch"


def test_every_combination_is_shipped_and_valid():
    names = shipped_names()
    assert len(names) == 4 * 2 * 15
    for name in names:
        recipe = load_recipe(name)
        kind, objective = re.fullmatch(r".+?-(dflash|dspark)-(.+)", name).groups()
        assert recipe.drafter.kind == kind
        assert recipe.objective.name == {
            "bv-no-annealing": "bv",
            "bv-post": "bv",
            "bv-cv": "bv",
            "dspark-mix": "dspark",
        }.get(objective, objective)
    for target in ("qwen3-4b", "qwen3-8b"):
        recipe = load_recipe(f"{target}-dflash-bv")
        assert recipe.logging.keep_epoch_checkpoints
        given, own = (
            load_recipe(f"{target}-dflash-bv", ["logging.keep_epoch_checkpoints=false"]),
            {"target", "objective"},
        )
        assert given.model_dump(exclude=own) == Recipe().model_dump(exclude=own)


@pytest.mark.parametrize(("kind", "eta"), [("dflash", 7.0), ("dspark", 4.0)])
def test_token_objectives_get_the_papers_eta_unless_the_recipe_says_otherwise(kind, eta):
    name = f"qwen3-4b-{kind}-ce"
    assert load_recipe(name).make_objective().eta == eta
    assert load_recipe(name, ["objective.options.eta=2.5"]).make_objective().eta == 2.5


def test_a_recipe_survives_being_written_and_read(tmp_path):
    recipe = load_recipe("pocket-dspark-bv", ["data.path=somewhere", "optimizer.betas=[0.8, 0.9]"])
    (tmp_path / "r.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "r.yaml") == recipe


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.learning_rat=3", "unknown field 'optimizer.learning_rat', did you mean 'learning_rate'?"),
        ("optimiser.rate=3", "unknown field 'optimiser', did you mean 'optimizer'?"),
        ("batch.num_texts=0", "batch.num_texts: input should be greater than or equal to 1, got 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: input should be a valid number"),
        ("objective.name=bw", "unknown objective 'bw'"),
        ("objective.options.betta=1", "did you mean 'beta'?"),
        ("drafter.kind=eagle", "drafter.kind: input should be 'dflash' or 'dspark'"),
        ("data.features=cached", "say where with data.cache"),
        ("seed=-1", "seed: input should be greater than or equal to 0, got -1"),
        ("optimizer.betas=[1.0, 2.0]", "optimizer.betas.0: input should be less than 1"),
        ("objective.options.beta=0.5", "would be overwritten by the schedule"),
        ("seed=99999999999999999999", "seed: input should be less than"),
        ("seed", "'seed' is not of the form key.path=value"),
        ("seed=[1", "the value is not YAML that can be used"),
        ("batch=3", "batch: input should be a valid dictionary"),
    ],
)
def test_mistakes_are_named(assignment, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe("pocket-dflash-bv", [assignment])
    assert message in str(caught.value)


def test_names_and_files_that_are_not_there_or_not_recipes(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'pocket-dflash-bv'"):
        load_recipe("pocket-dflash-bvv")
    with pytest.raises(RecipeError, match="recipes ls"):
        load_recipe(tmp_path / "no")
    (tmp_path / "r.yaml").write_text("- 1\n")
    with pytest.raises(RecipeError, match="a mapping of sections, not a list"):
        load_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("a: [1\n")
    with pytest.raises(RecipeError, match="is not YAML that can be used"):
        load_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("")
    assert load_recipe(tmp_path / "r.yaml") == Recipe()


def test_numbers_that_yaml_takes_for_text():
    recipe = load_recipe("pocket-dflash-bv", ["objective.options.ramp_floor=1e-6"])
    assert recipe.make_objective().ramp_floor == 1e-6


def test_a_resolved_recipe_states_everything_and_means_the_same():
    for name in shipped_names():
        recipe = load_recipe(name)
        resolved = recipe.resolved()
        assert resolved.resolved() == resolved
        assert resolved.make_objective() == recipe.make_objective()
        assert (resolved.annealing is not None) == name.endswith(("-bv", "-bv-post", "-bv-cv", "-token-bv", "-rounds"))
    options = load_recipe("qwen3-4b-dflash-bv").resolved().objective.options
    assert options == {
        "temperature": 1.0, "form": "log", "estimator": "integrated", "summand_floor": -80.0, "length_floor": 1e-6,
        "ramp_floor": 1e-6, "control_variate": False,
    }  # fmt: skip
    assert load_recipe("qwen3-4b-dspark-ce").resolved().objective.options["eta"] == 4.0


def test_a_constant_beta_needs_no_schedule():
    recipe = load_recipe("pocket-dflash-bv", ["annealing=null", "objective.options.beta=0.5"])
    assert recipe.resolved().objective.options["beta"] == 0.5
    assert recipe.make_objective().beta == 0.5


def test_an_explained_recipe_is_the_recipe_with_a_word_for_every_field(tmp_path):
    recipe = load_recipe("pocket-dspark-bv", ["data.path=somewhere"]).resolved()
    text = to_yaml(recipe, explain=True)
    (tmp_path / "r.yaml").write_text(text)
    assert load_recipe(tmp_path / "r.yaml") == recipe
    fields = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(fields) > 45
    assert all(" # " in line and line.split(" # ", 1)[1].strip() for line in fields)


def test_the_reference_page_is_the_schema():
    page = reference_page()
    assert page.count("\n| `") > 45
    assert "| `learning_rate` | `0.0006` |" in page
    assert "None |" not in page


def test_a_control_variate_needs_anchors_that_later_labels_do_not_choose():
    assert load_recipe("pocket-dspark-bv", ["batch.full_blocks=true"]).batch.full_blocks
    assert load_recipe("pocket-dspark-bv-cv").make_objective().control_variate
    with pytest.raises(RecipeError, match="full_blocks chooses anchors by tokens that come later"):
        load_recipe("pocket-dspark-bv-cv", ["batch.full_blocks=true"])


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_text("seed: 1\nseed: 2\n")
    with pytest.raises(RecipeError, match="'seed' appears twice"):
        load_recipe(tmp_path / "r.yaml")
