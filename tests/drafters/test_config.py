"""A drafter's configuration: the paper's by default, strict in every field, and no field wrong without being named."""

import json

import pytest
import torch
from pydantic import ValidationError

from blockdraft.drafters import DrafterConfig, DrafterConfigError, SlotLayout
from blockdraft.errors import BlockdraftError
from blockdraft.targets import fingerprint, load_target, target_shape

from tiny import tiny_drafter, tiny_target

KINDS = ["dflash", "dspark"]


@pytest.fixture(scope="module")
def values():
    return DrafterConfig.for_target("dflash", tiny_target(), num_layers=2, num_proposals=4).to_dict()


def test_the_papers_shape_by_default():
    target = tiny_target(num_layers=12)
    dflash, dspark = (DrafterConfig.for_target(k, target) for k in KINDS)
    assert (dflash.num_layers, dflash.num_proposals, dflash.num_slots) == (5, 15, 16)
    assert (dspark.num_layers, dspark.num_proposals, dspark.num_slots) == (5, 15, 15)
    assert (dspark.markov_rank, dspark.markov_head, dspark.confidence_head) == (256, "vanilla", False)
    assert len(dflash.target_layers) == 5


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(3, (1,)), (4, (2,)), (5, (1, 2)), (6, (1, 2, 3)), (7, (1, 2, 3, 4)), (8, (1, 2, 3, 4, 5))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_small_targets_have_as_many_features_as_they_can(kind, num_layers, expected):
    assert DrafterConfig.for_target(kind, tiny_target(num_layers=num_layers)).target_layers == expected


def test_pocket_has_a_drafter_by_default():
    pocket = load_target("pocket")
    assert DrafterConfig.for_target("dflash", pocket).num_target_layers == pocket.num_layers


def test_a_target_of_two_layers_has_no_place_for_features():
    with pytest.raises(DrafterConfigError, match="a target of 2 layers has those of layers 0 to 0"):
        DrafterConfig.for_target("dflash", tiny_target(num_layers=2))


def test_the_targets_fingerprint_is_recorded_where_it_tells_something():
    target = tiny_target(dtype=torch.float32)
    assert DrafterConfig.for_target("dflash", target).target_fingerprint == fingerprint(target)
    half = tiny_target(dtype=torch.float16)
    assert DrafterConfig.for_target("dflash", half).target_fingerprint is None
    assert DrafterConfig.for_target("dflash", target_shape("pocket")).target_fingerprint is None
    assert DrafterConfig.for_target("dflash", target, target_fingerprint=None).target_fingerprint is None


@pytest.mark.parametrize("kind", KINDS)
def test_plain_values_and_back(kind):
    config = tiny_drafter(kind, tiny_target()).config
    plain = json.loads(json.dumps(config.to_dict()))
    assert DrafterConfig.from_dict(plain) == config
    assert hash(DrafterConfig.from_dict(plain)) == hash(config)
    assert (plain["slot_layout"], plain["target_layers"]) == (str(config.slot_layout), list(config.target_layers))
    del plain["target_fingerprint"]  # checkpoints of older versions have none
    assert DrafterConfig.from_dict(plain) == config.replace(target_fingerprint=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, "unknown key 'num_layer'; did you mean 'num_layers'?"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"kind": "eagle"}, "kind is 'eagle'"),
        ({"slot_layout": "sideways"}, "slot_layout is 'sideways'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_layers": 2.0}, "num_layers is 2.0"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        ({"num_layers": 10**30}, "num_layers is 1000"),
        ({"num_proposals": -1}, "num_proposals is -1"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": [32]}, r"hidden_size is \[32\]"),
        ({"head_dim": 7}, "multiple of 2"),
        ({"num_kv_heads": 3}, "4 heads cannot share 3"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"mask_token_id": 40}, "mask token 40 has no row in an embedding of 40"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"target_layers": []}, "target_layers is"),
        ({"target_layers": [1, 5]}, r"features of layers \[1, 5\]: a target of 6 layers has those of layers 0 to 4"),
        ({"target_layers": [-1]}, r"features of layers \[-1\]"),
        ({"target_layers": [1, "2"]}, r"target_layers.1 is '2'"),
        ({"markov_head": "linear"}, "markov_head is 'linear'"),
        ({"markov_head": "vanilla", "markov_rank": 4}, "a DFlash drafter has none"),
        ({"confidence_head": True}, "a DFlash drafter has no confidence head"),
        ({"confidence_head": 1}, "confidence_head is 1"),
        ({"target_fingerprint": "xyz"}, "target_fingerprint is 'xyz'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values, changes, message):
    with pytest.raises(DrafterConfigError, match=message):
        DrafterConfig.from_dict(values | changes)


def test_missing_keys_are_named_all_at_once(values):
    short = {key: value for key, value in values.items() if key not in ("slot_layout", "vocab_size")}
    with pytest.raises(DrafterConfigError, match="slot_layout is missing; vocab_size is missing"):
        DrafterConfig.from_dict(short)


def test_it_is_frozen_and_changes_are_checked(values):
    config = DrafterConfig.from_dict(values)
    with pytest.raises(ValidationError, match="frozen"):
        config.num_layers = 3
    assert config.replace(slot_layout=SlotLayout.NEXT_TOKEN).num_slots == 4
    with pytest.raises(DrafterConfigError, match="num_proposals is 0"):
        config.replace(num_proposals=0)


def test_options_are_checked():
    target = tiny_target()
    with pytest.raises(BlockdraftError, match="unknown drafter option 'num_layer'; did you mean 'num_layers'"):
        DrafterConfig.for_target("dflash", target, num_layer=3)
    with pytest.raises(BlockdraftError, match="a DFlash drafter has none"):
        DrafterConfig.for_target("dflash", target, num_features=3, markov_rank=4, markov_head="vanilla")
    with pytest.raises(BlockdraftError, match="no confidence head"):
        tiny_drafter("dspark", target).confidence(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.long))
