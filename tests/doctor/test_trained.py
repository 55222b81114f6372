"""The doctor on a drafter that was really trained, the shipped one, in folders that are spoilt in one way each."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from blockdraft.doctor import examine
from blockdraft.drafters import DrafterConfig, build_drafter, find_drafter, save_drafter
from blockdraft.targets import load_target

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))
table = importlib.import_module("doctor_table")


@pytest.fixture(scope="module")
def pocket():
    return load_target("pocket")


def case(words, form="flat"):
    (found,) = [each for each in table.DFLASH if each.form == form and words in each.words]
    return found


@pytest.mark.parametrize("each", [each for each in table.DFLASH if not each.other_target], ids=lambda e: e.words[:30])
def test_what_needs_no_measurement_is_seen_without_one(tmp_path, pocket, each):
    folder = table.spoil(find_drafter("pocket-dflash-ce"), pocket, each, tmp_path / "p")
    found = examine(folder, pocket, measure=False)
    said = {line.check for line in found.findings if line.level != "ok"}
    assert {check for check in each.checks if not check.endswith("measured")} - said == set()
    if each.words == "nothing":
        assert said == set()


@pytest.mark.parametrize("each", table.DSPARK, ids=lambda e: e.words[8:40])
def test_the_same_for_dspark_whose_weights_do_not_matter_here(tmp_path, pocket, each):
    drafter = build_drafter(DrafterConfig.for_target("dspark", pocket, num_layers=1, markov_rank=4))
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    save_drafter(drafter, tmp_path / "untrained")
    found = examine(table.spoil(tmp_path / "untrained", pocket, each, tmp_path / "p"), pocket, measure=False)
    said = {line.check for line in found.findings if line.level != "ok"}
    assert said == {check for check in each.checks if not check.endswith("measured")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "form", "field", "advice"),
    [
        ("slot_layout", "blockdraft", "slot convention", "set slot_layout to fill_in and num_proposals to 10"),
        ("[1, 2, 3]", "flat", "layer ids", "set dflash_config.target_layer_ids to [1, 7, 13]"),
        ("mask_token_id: 2`", "flat", "mask token", "set dflash_config.mask_token_id to 3"),
        ("is_causal", "flat", "causality", "to false in config.json"),
    ],
)
def test_the_reading_that_a_trained_drafter_fits_is_found(tmp_path, pocket, words, form, field, advice):
    folder = table.spoil(find_drafter("pocket-dflash-ce"), pocket, case(words, form), tmp_path / "p")
    found = examine(folder, pocket, num_texts=6, max_new_tokens=32)
    (line,) = found.of(f"{field}, measured")
    assert line.level == "wrong", found.findings
    assert advice in line.advice
