"""Drafters that really draft, in folders that say something else: the reading that fits is found and named."""

import copy
import re

import pytest
import torch

from blockdraft.data import TextDataset, check_sampling
from blockdraft.doctor import Measured, examine
from blockdraft.doctor.examination import PROMPTS, questions, sample_texts
from blockdraft.doctor.folder import Folder
from blockdraft.doctor.readings import CausalAttention, Clinic, Reading, reading_findings
from blockdraft.drafters import Anchors, ReferenceAttention
from blockdraft.evaluation.prediction import Predictor

from patients import LAYERS, deepspec, ours, patient, put, speculators, target, trained, zlab
from runs import make_data
from tiny import TEMPLATE, tiny_drafter, tiny_target

SIZES = {"num_texts": 10, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "d", num=10)


def together(*changes):
    def change(values, tensors):
        for each in changes:
            each(values, tensors)

    return change


def random_head(_values, tensors):
    tensors["lm_head.weight"] = torch.randn_like(tensors["lm_head.weight"])


def as_dspark_without_heads(values, _tensors):
    """What DeepSpec calls DFlash, and what is easily made of a z-lab folder by mistake: slot 0 predicts."""
    values |= {"sample_from_anchor": True}


MISREAD = [
    # kind, format, what is changed, field, what to do
    ("dflash", zlab, as_dspark_without_heads, "slot convention", "SGLang|set sample_from_anchor|engines"),
    ("dflash", speculators, together(put("sample_from_anchor", True), put("block_size", 4)), "slot convention",
     "set sample_from_anchor to false in config.json, and speculative_tokens to 3"),
    ("dspark", deepspec, put("sample_from_anchor", False), "slot convention", "markov_rank|sample_from_anchor"),
    ("dspark", ours, together(put("slot_layout", "fill_in"), put("num_proposals", 3)), "slot convention",
     "set slot_layout to next_token and num_proposals to 4"),
    ("dflash", zlab, put("dflash_config.target_layer_ids", [2, 4]), "layer ids",
     r"set dflash_config.target_layer_ids to \[1, 3\] in config.json \(counted from 0"),
    ("dspark", deepspec, put("target_layer_ids", [0, 2]), "layer ids", r"set target_layer_ids to \[1, 3\]"),
    ("dflash", speculators, put("aux_hidden_state_layer_ids", [1, 3]), "layer ids",
     r"set aux_hidden_state_layer_ids to \[2, 4\] in config.json \(counted from 1"),
    ("dflash", zlab, put("dflash_config.mask_token_id", 1), "mask token", "set dflash_config.mask_token_id to 2"),
    ("dspark", speculators, put("mask_token_id", 39), "mask token", "set mask_token_id to 2"),
    ("dflash", zlab, put("is_causal", True), "causality", "set is_causal, or causal in dflash_config, to false"),
    ("dspark", deepspec, random_head, "head and embedding", "copy the target's head and embedding"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "write", "change", "field", "advice"), MISREAD)
def test_the_reading_that_fits_is_found(tmp_path, data, kind, write, change, field, advice):
    folder = patient(tmp_path / "p", trained(data, kind), write, change)
    found = examine(folder, target(), data=data, **SIZES)
    (line,) = found.of(f"{field}, measured")
    assert line.level == "wrong", found.findings
    assert re.search(advice, line.advice), line
    (given,) = (each for each in found.measured if each.field == field and each.given)
    (fits,) = (each for each in found.measured if each.field == field and each.fits)
    assert not fits.given
    assert fits.length > 1.1 * given.length
    others = [each for each in found.findings if each.check.endswith("measured") and each is not line]
    assert {each.level for each in others} == {"ok"}, others
    assert "as it fits best" in found.of("drafting")[0].found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "write"), [("dflash", zlab), ("dspark", deepspec), ("dflash", speculators)])
def test_a_good_folder_is_read_as_it_says(tmp_path, data, kind, write):
    folder = patient(tmp_path / "p", trained(data, kind), write)
    found = examine(folder, target(), data=data, **SIZES)
    assert found.healthy, found.wrong
    assert all(each.given == each.fits for each in found.measured)
    assert {each.field for each in found.measured} >= {"slot convention", "layer ids", "mask token", "causality"}
    assert found.of("drafting")[0].level == "ok"


@pytest.mark.slow
def test_two_mistakes_at_once_are_both_found(tmp_path, data):
    change = together(put("dflash_config.mask_token_id", 1), put("dflash_config.target_layer_ids", [2, 4]))
    found = examine(patient(tmp_path / "p", trained(data, "dflash"), zlab, change), target(), data=data, **SIZES)
    assert {each.check for each in found.wrong} == {"mask token, measured", "layer ids, measured"}
    fits = {each.field: each.value for each in found.measured if each.fits}
    assert (fits["layer ids"], fits["mask token"]) == (LAYERS, 2)


@pytest.mark.slow
def test_a_rope_theta_that_was_lost_is_found(tmp_path, data):
    folder = patient(tmp_path / "p", trained(data, "dflash"), zlab, put("rope_theta", 3.0))
    found = examine(folder, target(), data=data, **SIZES)
    (line,) = found.of("rotary positions, measured")
    assert line.level == "wrong"
    assert "set rope_theta to 10000 in config.json, there and in rope_parameters" in line.advice


@pytest.mark.slow
def test_a_drafter_of_nothing_is_called_that(tmp_path, data):
    """Random weights draft no better with the text's features than with those of other positions."""
    folder = patient(tmp_path / "p", tiny_drafter("dflash", target(), num_layers=1), zlab)
    found = examine(folder, target(), data=data, **SIZES)
    (line,) = found.wrong
    assert line.check == "drafting"
    assert "does not make use of the text" in line.found


@pytest.mark.slow
def test_a_template_that_thinks(tmp_path, data):
    """A drafter that knows the texts of one mode by heart, and texts of both."""
    model = tiny_target(dtype=torch.float32)
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.chat_template = TEMPLATE + "{% if not enable_thinking %} w20 w21 w22{% endif %}"
    folder = patient(tmp_path / "p", trained(data, "dflash"), zlab)
    found = examine(folder, model, prompts=["w5 w6", "w6 w7"], num_texts=2, max_new_tokens=12)
    (line,) = found.of("thinking")
    assert re.search(r"tokens per call without thinking, [\d.]+ with it", line.found)


@pytest.mark.parametrize(
    ("length", "saving", "level", "found"),
    [
        (2.45, -9.0, "ok", "2.45$"),
        (2.49, -1.2, "ok", "too close to tell apart"),
        (2.56, 2.5, "ok", "too close to tell apart"),
        (2.56, 3.5, "warning", "2.56, a little more, and clearly so"),
        (2.505, 9.0, "ok", "too close to tell apart"),  # as good as equal, however clearly
    ],
)
def test_how_far_readings_are_apart_is_said(tmp_path, length, saving, level, found):
    folder = Folder(patient(tmp_path / "p", tiny_drafter("dflash", target(), num_layers=1), zlab))
    given = Measured("layer ids", "[1, 3], as given", [1, 3], 2.5, 0.0, given=True, fits=True)
    other = Measured("layer ids", "[2, 4], one layer later", [2, 4], length, saving, given=False, fits=False)
    (line,) = reading_findings(folder, [given, other])
    assert line.level == level
    assert re.search(found, line.found), line
    assert ("target_layer_ids to [2, 4]" in line.advice) == (level == "warning")
    (line,) = reading_findings(folder, [given, other], drafts=False)
    assert line.level == "ok"  # of a drafter that drafts nothing, no reading is better by little


def test_savings_are_paired_differences_in_standard_errors():
    """Recomputed from the rounds; a reading saves nothing against itself, and as much as the other one loses."""
    model, drafter = target(), tiny_drafter("dflash", target(), num_layers=1)
    texts = sample_texts(model, [[7, 8], [9, 10, 11], [12]], 20, seed=1)
    clinic = Clinic(model, dict(drafter.state_dict()), None, texts, max_new_tokens=10)
    one, other = Reading(drafter.config), Reading(drafter.config, foreign=True)
    saved = torch.tensor([b.num - a.num for a, b in zip(clinic.rounds(one), clinic.rounds(other), strict=True)])
    expected = float(saved.double().mean() / (saved.double().std() / 3**0.5))
    assert clinic.saving(one, other) == pytest.approx(expected, rel=1e-5)
    assert clinic.saving(other, one) == pytest.approx(-expected, rel=1e-5)
    assert clinic.saving(one, one) == 0.0


def test_pocket_is_asked_what_it_knows():
    model = tiny_target(dtype=torch.float32)
    assert questions(model, 4) is PROMPTS
    model.name = "pocket"
    asked = questions(model, 7)
    assert len(set(asked)) == 7
    assert not set(asked) & set(PROMPTS)


def test_lengths_are_those_of_the_predictor():
    """Shared features, own budgets: the same number as a predictor that runs the target for itself."""
    model, drafter = target(), tiny_drafter("dflash", target(), num_layers=1)
    texts = sample_texts(model, [[7, 8], [9, 10, 11]], 20, seed=1)
    clinic = Clinic(model, dict(drafter.state_dict()), None, texts, max_new_tokens=10)
    plain = Predictor(model, drafter, 1.0, 10, seed=0)
    for text, rounds in zip(texts, clinic.rounds(Reading(drafter.config)), strict=True):
        assert len(text.response_ids) >= 14
        expected = plain.predict(text, {"block": [1.0]})["block"][0]
        assert (rounds.num, rounds.tokens) == pytest.approx((expected.num, expected.tokens))


def test_causal_slots_see_what_a_shorter_block_sees():
    """Slot j of a causal block attends as the last slot of a block of j + 1 slots."""
    anchors = Anchors.of(torch.tensor([0, 1]), torch.tensor([3, 5]))
    q, k, v = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)
    context = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    causal, whole = CausalAttention(anchors)(q, k, v, *context), ReferenceAttention(anchors)
    for j in range(4):
        expected = whole(q[:, :, : j + 1], k[:, :, : j + 1], v[:, :, : j + 1], *context)[:, :, -1]
        torch.testing.assert_close(causal[:, :, j], expected)


def test_texts_are_the_targets_own():
    model = target()
    texts = sample_texts(model, [[5 + i % 30] for i in range(60)], 16, seed=0)
    assert [each.response_ids for each in sample_texts(model, [[5], [6]], 4, seed=3)] == [
        each.response_ids for each in sample_texts(model, [[5], [6]], 4, seed=3)
    ]
    for text in texts:
        assert not set(text.response_ids[:-1]) & model.eos_ids
        assert (text.finish_reason == "stop") == (text.response_ids[-1] in model.eos_ids)
    assert check_sampling(TextDataset.of(texts), model).plain
