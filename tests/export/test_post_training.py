"""Somebody else's drafter, tuned with BV and written back in the format it came in, by the commands of the guide."""

import json

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.drafters import load_drafter
from blockdraft.runs import Run
from blockdraft.targets import load_target

from commands import blockdraft
from patients import deepspec, patient, speculators, target, zlab
from runs import make_data
from tiny import tiny_drafter

SMALL = [
    "batch.num_texts=6", "batch.num_anchors=30", "data.num_heldout=6", "data.path=data", "target.name=./target",
    "logging.heldout_blocks=40", "optimizer.learning_rate=0.003", "drafter.initial=./theirs",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("post")
    target().save(folder / "target")
    make_data(folder / "data", num=18)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "write", "flavour"),
    [("dflash", zlab, "flat"), ("dspark", deepspec, "flat"), ("dflash", speculators, "speculators")],
)
def test_from_their_folder_to_a_tuned_one_of_the_same_format(place, kind, write, flavour):
    """Neither layers nor proposals nor ranks are said: they are the drafter's own."""
    drafter = tiny_drafter(kind, target(), num_layers=1, num_proposals=3)
    theirs = patient(place / "theirs", drafter, write)
    out = place / f"{write.__name__}-{kind}"
    ended = blockdraft("train", f"qwen3-4b-{kind}-bv-post", *SMALL, "--out", out, cwd=place)
    assert ended.code == 0, ended.err
    recipe = Run.open(out).recipe
    assert (recipe.annealing.initial, recipe.annealing.final) == (0.5, 1.0)
    assert (recipe.drafter.num_layers, recipe.drafter.num_proposals, recipe.drafter.num_features) == (1, 3, 3)
    ended = blockdraft("export", out, "--out", place / f"{out.name}-tuned", "--target", "./target", cwd=place)
    assert ended.code == 0, ended.err
    assert f"-tuned: {flavour}, " in ended.out
    before, after = (json.loads((each / "config.json").read_text()) for each in (theirs, place / f"{out.name}-tuned"))
    same = ["block_size", "dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids", "mask_token_id"]
    assert {key: before.get(key) for key in same} == {key: after.get(key) for key in same}
    old, new = (load_file(each / "model.safetensors") for each in (theirs, place / f"{out.name}-tuned"))
    assert old.keys() == new.keys()
    assert not torch.equal(old["fc.weight"], new["fc.weight"])
    tuned = load_drafter(place / f"{out.name}-tuned", load_target(place / "target"))
    assert tuned.config.num_proposals == 3
    strict = ("doctor", f"{out.name}-tuned", "--target", "./target", "--no-measure", "--strict")
    assert blockdraft(*strict, cwd=place).code == 0


@pytest.mark.slow
def test_the_same_command_resumes_and_the_recorded_recipe_trains_again(place):
    patient(place / "theirs", tiny_drafter("dflash", target(), num_layers=1, num_proposals=3), zlab)
    command = ("train", "qwen3-4b-dflash-bv-post", *SMALL, "--out", "again")
    assert blockdraft(*command, cwd=place).code == 0
    ended = blockdraft(*command, cwd=place)
    assert ended.code == 0, ended.err
    ended = blockdraft("train", "again/recipe.yaml", "--out", "anew", cwd=place)
    assert ended.code == 0, ended.err


def test_a_drafter_must_be_named(place):
    command = [each for each in SMALL if not each.startswith("drafter.initial")]
    ended = blockdraft("train", "qwen3-4b-dflash-bv-post", *command, "--out", "nobody", cwd=place)
    assert ended.code == 2
    assert "trains a drafter further: name it, as in drafter.initial=FOLDER" in ended.err
    assert not (place / "nobody" / "metrics.jsonl").exists()


def test_a_drafter_of_ours_has_no_format_to_go_back_to(place):
    patient(place / "flat", tiny_drafter("dflash", target(), num_layers=1), zlab)
    ended = blockdraft("export", "flat", "--out", "flat-again", "--target", "./target", cwd=place)
    assert ended.code == 0, ended.err
    assert "flat-again: flat, " in ended.out
    load_drafter(place / "flat-again", target())
    from blockdraft.drafters import save_drafter

    save_drafter(tiny_drafter("dflash", target()), place / "ours")
    ended = blockdraft("export", "ours", "--out", "nothing", "--target", "./target", cwd=place)
    assert ended.code == 2
    assert "say which: flat or speculators" in ended.err
