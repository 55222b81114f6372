"""The package's own forward pass against transformers'."""

import copy
import pickle

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from blockdraft.selfcheck import SelfCheckWarning
from blockdraft.targets import Target, decoder, load_target
from blockdraft.targets.attention import MASKED_ROWS
from blockdraft.targets.decoder import PACKED_SIZE, Decoder, FusedLayer, Product, can_pack, decoder_of

from tiny import FAMILIES, tiny_model, tiny_target

TOLERANCE = {
    torch.float64: {"atol": 1e-7, "rtol": 1e-6},  # transformers' norms are computed in float32
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
MODELS = [*((family, {}) for family in FAMILIES), ("llama", {"attention_bias": True}),
          ("llama", {"rope_parameters": SCALED}), ("qwen3", {"num_key_value_heads": 4})]  # fmt: skip


def jittered(model):
    """Norms and biases are ones and zeros in a new model; a mistake in them would not show."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def path(target, *, own, steps, layers=(0, 2, 4)):
    """Outputs of passes over so many tokens each, with a detour that is rolled back before each of them."""
    target.use_decoder = own
    cache = target.new_cache(sum(steps) + 8)
    assert (target._decoder is not None) == own
    tokens = torch.randint(40, (1, sum(steps)), generator=torch.Generator().manual_seed(1))
    outputs = []
    for part in tokens.split(steps, 1):
        if held := cache.length:
            target.forward(part[:, :3].flip(1), cache)
            cache.rollback(held)
        out = target.forward(part, cache, layers)
        outputs.append((out.hidden, out.features, target.logits(out.hidden)))
    return [torch.cat(each, 1) for each in zip(*outputs, strict=True)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("family", "changes"), MODELS, ids=str)
def test_hidden_states_features_and_logits_are_those_of_transformers(family, changes, dtype):
    target = Target(jittered(tiny_model(family, **changes)).to(dtype), None, name=family)
    steps = [6, 1, 5, 1, 16, MASKED_ROWS + 3]
    found, expected = (path(target, own=own, steps=steps) for own in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


def test_in_bfloat16_it_is_as_close_to_the_truth_as_transformers():
    model = jittered(tiny_model())
    exact = path(Target(copy.deepcopy(model), None, name="exact"), own=False, steps=[6, 1, 5])
    target = Target(model.to(torch.bfloat16), None, name="rounded")
    found, expected = (path(target, own=own, steps=[6, 1, 5]) for own in (True, False))
    for ours, theirs, truth in zip(found, expected, exact, strict=True):
        assert (ours - truth).abs().mean() < 1.3 * (theirs - truth).abs().mean() < 0.1 * truth.abs().mean()


def test_weights_large_enough_to_be_packed_give_the_same_numbers():
    target = Target(
        jittered(tiny_model(hidden_size=256, intermediate_size=PACKED_SIZE // 256, initializer_range=0.05)),
        None,
        name="wide",
    )
    found, expected = (path(target, own=own, steps=[4, 1, 11, 2]) for own in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [None, 0.5])
@pytest.mark.parametrize("shape", [(PACKED_SIZE // 128, 128), (24, 40)])
def test_products_of_any_number_of_rows_copied_and_pickled(shape, bias, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator).to(dtype)
    added = None if bias is None else torch.full((shape[0],), bias, dtype=dtype)
    product = Product(*weight.split(8), bias=added)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 2e-2}
    if dtype == torch.float32:
        assert can_pack(weight) == (shape[0] > 24 and torch.backends.mkldnn.is_available())
    for each in (product, copy.deepcopy(product), pickle.loads(pickle.dumps(product))):
        for rows in (1, 2, 7, 8, 11, 17):
            x, residual = (torch.randn(rows, width, generator=generator).to(dtype) for width in reversed(shape))
            before = residual.clone()
            expected = x.float() @ weight.float().T + (bias or 0)
            torch.testing.assert_close(each(x).float(), expected, **tolerance)
            torch.testing.assert_close(each.add_to(residual, x).float(), residual + expected, **tolerance)
            assert torch.equal(residual, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_model_is_not_copied_and_gives_the_same_numbers(family, monkeypatch):
    monkeypatch.setattr(decoder, "COPIED_BYTES", 1000)
    target = Target(jittered(tiny_model(family)), None, name=family)
    found, expected = (path(target, own=own, steps=[4, 1, 11]) for own in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float32])
    made = decoder_of(target.model)
    theirs = {parameter.data_ptr() for parameter in target.model.parameters()}
    products = [each for layer in made.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert {weight.data_ptr() for product in products for weight in product.weights} <= theirs


def test_both_paths_read_one_cache():
    target = tiny_target(dtype=torch.float32)
    tokens = torch.tensor([[7, 3, 9, 30, 12, 5, 5, 18]])
    whole = target.forward(tokens).hidden
    cache = target.new_cache(8)
    own, parts = target._decoder, []
    for which, part in zip((own, None, own, None), tokens.split(2, 1), strict=True):
        target._decoder = which
        parts.append(target.forward(part, cache).hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TOLERANCE[torch.float32])


def test_a_new_cache_sees_weights_that_were_changed():
    target = tiny_target(dtype=torch.float32)
    tokens = torch.tensor([[7, 3, 9, 30]])
    before = target.forward(tokens, target.new_cache(4)).hidden
    with torch.no_grad():
        target.model.model.layers[2].mlp.up_proj.weight.mul_(1.5)
        target.head.mul_(2)
    after = target.forward(tokens, target.new_cache(4)).hidden
    assert not torch.allclose(after, before, atol=1e-3)
    torch.testing.assert_close(after, target.forward(tokens).hidden, **TOLERANCE[torch.float32])
    torch.testing.assert_close(target.logits(after), after @ target.head.T, **TOLERANCE[torch.float32])


def test_models_that_are_not_as_they_left_the_library_go_through_transformers():
    usual = tiny_model()
    assert isinstance(decoder_of(usual), Decoder)
    usual(torch.tensor([[3, 4]]), output_hidden_states=True, output_attentions=True)
    assert isinstance(decoder_of(usual), Decoder)
    hooked = tiny_model()
    hooked.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, out: out * 2)
    assert decoder_of(hooked) is None
    mixed = tiny_model()
    mixed.model.norm.to(torch.float64)
    assert decoder_of(mixed) is None
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 20, "num_experts": 2, "moe_intermediate_size": 8}  # fmt: skip
    assert decoder_of(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))) is None


@pytest.mark.slow
def test_rounding_that_grows_through_a_deep_model_is_no_mistake():
    """In bfloat16, SmolLM2's two passes end far apart on some tokens; each is as far from the exact one."""
    target = load_target("smollm2", dtype=torch.bfloat16)
    cache = target.new_cache(8)
    assert target.decoder is not None
    tokens = torch.arange(7)[None]
    found, theirs = (target.forward(tokens, each).hidden.float() for each in (cache, None))
    assert (found - theirs).abs().max() > 0.05 * theirs.abs().max()
    exact = load_target("smollm2").forward(tokens).hidden
    assert (found - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mistake", ["layer 0", "the last hidden state", "a feature"])
def test_a_pass_that_computes_something_else_is_reported_and_not_used(mistake, dtype, monkeypatch):
    call, forward, norm_of = FusedLayer.__call__, Decoder.forward, decoder.norm_of

    def wrong_layer(self, x, *others):
        return call(self, x, *others) * 1.2

    def wrong_feature(self, tokens, cache, layers):
        hidden, features = forward(self, tokens, cache, layers)
        return hidden, features * 1.2

    def wrong_norm(module):
        norm = norm_of(module)
        return norm if norm.weight is not target.model.model.norm.weight else lambda x: norm(x) * 1.2

    target = tiny_target(dtype=dtype)
    if mistake == "layer 0":
        monkeypatch.setattr(FusedLayer, "__call__", wrong_layer)
    elif mistake == "a feature":
        monkeypatch.setattr(Decoder, "forward", wrong_feature)
    else:
        monkeypatch.setattr(decoder, "norm_of", wrong_norm)
    with pytest.warns(SelfCheckWarning, match=f"own forward pass cannot be used on cpu: {mistake} is off"):
        cache = target.new_cache(4)
    assert target._decoder is None
    tokens = torch.tensor([[7, 3, 9, 30]])
    torch.testing.assert_close(target.forward(tokens, cache).hidden, target.forward(tokens).hidden)
