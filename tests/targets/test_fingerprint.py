"""One checkpoint has one fingerprint; another one has another."""

import torch

from blockdraft.targets import fingerprint, load_target, template_fingerprint

from tiny import tiny_model, tiny_target


def test_it_does_not_depend_on_precision_where_the_weights_are_the_same():
    rounded = tiny_target(dtype=torch.bfloat16)
    again = tiny_target(dtype=torch.bfloat16)
    again.model.float()
    assert fingerprint(rounded) == fingerprint(again)


def test_it_survives_being_saved_and_loaded(tmp_path):
    target = tiny_target(dtype=torch.float32)
    target.save(tmp_path)
    again = load_target(tmp_path)
    assert fingerprint(again) == fingerprint(target)
    assert template_fingerprint(again) == template_fingerprint(target)


def test_it_sees_another_seed_and_one_changed_layer():
    target = tiny_target(dtype=torch.float32)
    assert fingerprint(tiny_target(dtype=torch.float32, seed=1)) != fingerprint(target)
    before = fingerprint(target)
    with torch.no_grad():
        target.model.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    assert fingerprint(target) != before
    assert tiny_model().config.num_hidden_layers == 6


def test_another_template_has_another_fingerprint():
    target, bare = tiny_target(), tiny_target(tokenizer=False)
    assert template_fingerprint(target) is not None
    assert template_fingerprint(bare) is None
