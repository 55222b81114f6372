"""Targets against transformers' own forward passes."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from blockdraft.targets import Target, UnsupportedTargetError, load_target

from tiny import EOS, FAMILIES, MASK, PAD, tiny_model, tiny_target, tiny_tokenizer

TOKENS = torch.tensor([[7, 3, 9, 30, 12, 5, 5, 18]])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_logits_and_features_are_those_of_transformers(family):
    target = tiny_target(family)
    layers = (0, 2, 4)
    output = target.forward(TOKENS, layers=layers)
    expected = target.model(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(target.logits(output.hidden), expected.logits)
    torch.testing.assert_close(output.hidden, expected.hidden_states[-1])
    wanted = torch.cat([expected.hidden_states[layer + 1] for layer in layers], -1)
    torch.testing.assert_close(output.features, wanted, atol=0, rtol=0)
    torch.testing.assert_close(target.embed(TOKENS), expected.hidden_states[0], atol=0, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_equals_recomputing_at_every_length(family):
    target = tiny_target(family)
    cache = target.new_cache(TOKENS.shape[1] + 4)
    target.forward(TOKENS, cache)
    detour = torch.tensor([[11, 29, 31]])
    for length in range(TOKENS.shape[1] - 1, 0, -1):
        target.forward(detour, cache)  # something that must leave no trace
        cache.rollback(length)
        tail = torch.tensor([[20, 21, 22]])
        resumed = target.forward(tail, cache).hidden
        whole = target.forward(torch.cat([TOKENS[:, :length], tail], 1)).hidden[:, length:]
        torch.testing.assert_close(resumed, whole)
        cache.rollback(length)


def test_a_cache_copies_nothing_and_says_when_it_is_full():
    target = tiny_target()
    cache = target.new_cache(6)
    target.forward(TOKENS[:, :3], cache)
    storage = [layer.keys.data_ptr() for layer in cache.layers]
    target.forward(TOKENS[:, 3:6], cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == storage
    with pytest.raises(ValueError, match="holds 6 tokens; 7 were needed"):
        target.forward(TOKENS[:, :1], cache)
    with pytest.raises(ValueError, match="cannot roll a cache of"):
        cache.rollback(7)


@pytest.mark.parametrize(("num_layers", "ids"), [(28, (1, 7, 13, 19, 25)), (36, (1, 9, 17, 25, 33))])
def test_the_papers_feature_layers(num_layers, ids):
    target = tiny_target()
    target.num_layers = num_layers
    assert target.feature_layers(5) == ids
    assert target.feature_layers(1) == (num_layers // 2,)


def test_the_last_layer_has_no_feature():
    with pytest.raises(ValueError, match="features of layers 0 to 4, not of 5"):
        tiny_target().forward(TOKENS, layers=(5,))
    with pytest.raises(UnsupportedTargetError, match="too few"):
        tiny_target(num_layers=4).feature_layers(4)


def test_a_target_is_frozen_and_in_evaluation_mode():
    target = tiny_target()
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.forward(TOKENS).hidden.requires_grad


def test_messages_are_rendered_by_the_template_without_thinking():
    target = tiny_target()
    ids = target.render([{"role": "user", "content": "w7 w9"}])
    assert target.decode(ids) == "user w7 w9 assistant"
    assert target.eos_ids == {EOS}


def test_a_template_with_the_switch_is_rendered_with_thinking_off(monkeypatch):
    target = tiny_target()
    switch = "{% if enable_thinking is defined and enable_thinking is false %} w9{% endif %}"
    template = target.tokenizer.chat_template.replace("assistant{%", "assistant" + switch + "{%")
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    assert target.decode(target.render([{"role": "user", "content": "w7"}])) == "user w7 assistant w9"


def test_the_mask_token_is_found_given_or_refused():
    assert tiny_target().mask_token_id == MASK
    assert tiny_target(mask_token_id=9).mask_token_id == 9
    for token, message in ((PAD, "padding or end"), (EOS, "padding or end"), (40, "no row in an embedding of 40")):
        with pytest.raises(UnsupportedTargetError, match=message):
            _ = tiny_target(mask_token_id=token).mask_token_id
    with pytest.raises(UnsupportedTargetError, match="no mask token is known for 'llama'"):
        _ = tiny_target("llama", tokenizer=False).mask_token_id
    with pytest.raises(UnsupportedTargetError, match="151669 has no row"):
        _ = tiny_target("qwen3", tokenizer=False).mask_token_id


def test_models_that_cannot_be_served_are_refused_with_the_reason():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "vocab_size": 20,
    }
    capped = Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=1, head_dim=8))
    with pytest.raises(UnsupportedTargetError, match=r"cannot be rolled back by length|not its head times"):
        Target(capped, None, name="gemma2")
    sliding = Qwen2Config(
        **sizes, num_key_value_heads=1, use_sliding_window=True, max_window_layers=0, sliding_window=4
    )
    with pytest.raises(UnsupportedTargetError, match="sliding_attention"):
        Target(Qwen2ForCausalLM(sliding), None, name="sliding")
    scaled = tiny_model()
    scaled.lm_head.register_forward_hook(lambda _m, _i, out: out * 0.5)
    with pytest.raises(UnsupportedTargetError, match="not its head times its last hidden state"):
        Target(scaled, None, name="scaled")
    with pytest.raises(UnsupportedTargetError, match="no chat template"):
        tiny_target(tokenizer=False).render([{"role": "user", "content": "w7"}])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_round_trip(family, tmp_path):
    target = tiny_target(family, dtype=torch.float32)
    target.save(tmp_path)
    loaded = load_target(tmp_path)
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.forward(TOKENS).hidden, target.forward(TOKENS).hidden)
    assert load_target(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert loaded.eos_ids == {EOS}
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template


def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnsupportedTargetError, match="no such folder"):
        load_target(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedTargetError, match="neither a built-in target"):
        load_target(tmp_path / "empty")


@pytest.mark.parametrize("vocab_size", [40, 256, 700])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_normalizer_is_log_z_and_argmax_of_the_whole_vocabulary(vocab_size, temperature):
    model = tiny_target(vocab_size=vocab_size)
    hidden = 9 * torch.randn(3, 7, model.hidden_size, generator=torch.Generator().manual_seed(1), dtype=model.dtype)
    logits = model.logits(hidden)
    found = model.normalizer(hidden, temperature)
    torch.testing.assert_close(found.log_z, (logits / temperature).logsumexp(-1))
    assert torch.equal(found.argmax, logits.argmax(-1))
