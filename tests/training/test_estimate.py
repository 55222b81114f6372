"""Estimates against models that are there, and against published sizes."""

import pytest
import torch

from blockdraft.data import Completion, OnlineFeatures, TextDataset, build_cache
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.recipes import RecipeError, load_recipe
from blockdraft.targets import load_target, target_shape
from blockdraft.training import estimate, fit
from blockdraft.training.measuring import named_peak_rate


def of(name, assignments=(), **changes):
    options = {"num_devices": 1, "num_texts": 100_000, "tokens_per_text": 1000.0}
    return estimate(load_recipe(name, list(assignments)), **(options | changes))


def test_parameters_are_those_of_the_models():
    target = load_target("pocket")
    recipe = load_recipe("pocket-dspark-bv")
    drafter = build_drafter(DrafterConfig.for_target("dspark", target, **recipe.drafter.config_options()))
    found = of("pocket-dspark-bv")
    assert found.drafter_parameters == sum(p.numel() for p in drafter.parameters())
    assert found.target_parameters == sum(p.numel() for p in target.model.parameters())
    assert found.target_bytes == 4 * found.target_parameters
    assert found.optimizer_bytes == 12 * found.drafter_parameters


def test_published_sizes():
    """537M drafter weights for a 4B target, 1.05B for 8B; 30.7 KB of features a token."""
    assert of("qwen3-4b-dflash-ce").drafter_parameters / 1e6 == pytest.approx(537, abs=1)
    assert of("qwen3-8b-dflash-ce").drafter_parameters / 1e9 == pytest.approx(1.05, abs=0.01)
    assert of("qwen3-4b-dflash-ce").target_parameters / 1e9 == pytest.approx(4.02, abs=0.01)
    assert of("qwen3-8b-dflash-ce").target_parameters / 1e9 == pytest.approx(8.19, abs=0.01)
    assert of("qwen3-4b-dflash-ce").cache_bytes / 1e8 == pytest.approx(30.7e3, rel=0.01)


@pytest.mark.slow
def test_smollm2_is_as_it_is_said_to_be():
    shape, target = target_shape("smollm2"), load_target("smollm2")
    assert shape.num_parameters == sum(p.numel() for p in target.model.parameters())
    assert (shape.num_layers, shape.vocab_size) == (target.num_layers, target.vocab_size)


def test_a_feature_cache_takes_what_was_said(tmp_path):
    target = load_target("pocket")
    paths = TextDataset.of([Completion("a", list(range(10, 30)), list(range(30, 70)), "stop")] * 5)
    recipe = load_recipe("pocket-dflash-bv")
    layers = target.feature_layers(recipe.drafter.num_features)
    build_cache(tmp_path, target, paths, layers, max_bytes=10**9)
    said = of("pocket-dflash-bv", num_texts=5, tokens_per_text=60).cache_bytes
    written = sum(file.stat().st_size for file in tmp_path.glob("*.npy"))
    assert said <= written <= said + 256
    assert OnlineFeatures(target, layers).layers == layers


def test_gradient_checkpointing_computes_the_layers_once_more():
    """It takes four passes over a layer instead of three, forward and two backward; target and heads are read once."""
    recipe = load_recipe("qwen3-4b-dflash-bv")
    shape = target_shape(recipe.target.name, recipe.target.shape)
    with torch.device("meta"):
        drafter = build_drafter(DrafterConfig.for_target("dflash", shape, **recipe.drafter.config_options()))
    layer = drafter.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    context = sum(p.numel() for p in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight))
    slots, tokens = 16_384 * drafter.config.num_slots, 32 * 1000
    once = 2 * len(drafter.layers) * (matrices * slots + context * tokens)
    plain, checkpointed = (of("qwen3-4b-dflash-bv", each) for each in ([], ["runtime.gradient_checkpointing=true"]))
    assert checkpointed.training_flops - plain.training_flops == pytest.approx(plain.num_steps * once)


def test_steps_and_shares():
    found = of("qwen3-4b-dflash-bv", num_texts=98_499)
    assert found.num_steps == 6 * 3079
    assert of("qwen3-4b-dflash-bv", ["optimizer.max_steps=7"]).num_steps == 7
    assert of("qwen3-4b-dflash-bv", ["optimizer.max_steps=99999"]).num_steps == 99_999  # beyond the epochs
    alone, many = of("qwen3-4b-dflash-bv"), of("qwen3-4b-dflash-bv", ["runtime.parallel=fsdp"], num_devices=8)
    assert many.optimizer_bytes == alone.optimizer_bytes // 8
    assert many.activation_bytes == pytest.approx(alone.activation_bytes / 8, rel=0.01)
    assert many.target_bytes == alone.target_bytes
    assert (
        of("qwen3-4b-dflash-bv", ["runtime.shard_target=true"], num_devices=8).target_bytes == alone.target_bytes // 8
    )
    assert alone.fused_bytes < alone.unfused_bytes / 8
    assert (
        of("qwen3-4b-dflash-bv", ["batch.gradient_accumulation_steps=4"]).activation_bytes < alone.activation_bytes / 3
    )


def fitted(assignments=(), gib=80, **changes):
    options = {"num_devices": 8, "num_texts": 100_000, "tokens_per_text": 1000.0}
    return fit(load_recipe("qwen3-8b-dflash-bv", list(assignments)), gib * 2**30, **(options | changes))


def test_accumulation_is_as_little_as_fits():
    assert fitted().batch.gradient_accumulation_steps == 1
    assert fitted(["batch.gradient_accumulation_steps=2"]).batch.gradient_accumulation_steps == 2
    alone = fitted(num_devices=1)
    steps = alone.batch.gradient_accumulation_steps
    assert 4 < steps <= 32
    peak = estimate(alone, num_devices=1, num_texts=100_000, tokens_per_text=1000.0).device_bytes
    assert peak + 2 * 2**30 <= 80 * 2**30


def test_what_cannot_fit_is_refused_with_what_to_set():
    with pytest.raises(
        RecipeError, match=r"needs \d+\.\d GiB a device.* 40\.0.*set runtime\.gradient_checkpointing=true"
    ):
        fitted(gib=40)
    with pytest.raises(RecipeError, match="train with more or larger devices"):
        fitted(gib=16, num_devices=1)


def test_peak_rates_are_known_by_name():
    assert named_peak_rate("NVIDIA H100 80GB HBM3") == 989e12
    assert named_peak_rate("NVIDIA H100 PCIe") == 756e12
    assert named_peak_rate("NVIDIA A100-SXM4-80GB") == 312e12
    assert named_peak_rate("NVIDIA L40S") == 362e12
    assert named_peak_rate("Something else") is None
