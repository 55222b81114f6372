"""One folder for each thing that can be wrong with one: the doctor names it, and says what to change."""

import json
import re

import pytest
import torch

from blockdraft.data import GenerationSettings, LocalEngine, Prompt, regenerate
from blockdraft.doctor import examine
from blockdraft.drafters import load_drafter
from blockdraft.targets import Sampling

from patients import deepspec, ours, patient, put, speculators, target, zlab
from tiny import tiny_drafter, tiny_target


def drafter(kind="dflash", **changes):
    return tiny_drafter(kind, target(), **({"num_layers": 1} | changes))


def findings(folder, model=None, **options):
    return examine(folder, model or target(), measure=False, **options)


def dropping(*names):
    return lambda _values, tensors: [tensors.pop(name) for name in names]


def writing(name, make):
    def change(_values, tensors):
        tensors[name] = make(tensors.get(name))

    return change


def prefixed(_values, tensors):
    for name in list(tensors):
        tensors[f"draft.{name}"] = tensors.pop(name)


def nested(values, _tensors):
    values["dflash_config"] = {"mask_token_id": values.pop("mask_token_id")}


def broken(tensor):
    tensor[0, 0] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("kind", "write"),
    [("dflash", zlab), ("dspark", deepspec), ("dflash", speculators), ("dspark", speculators), ("dflash", ours)],
)
def test_a_good_folder_has_nothing_wrong(tmp_path, kind, write):
    folder = patient(tmp_path / "good", drafter(kind), write)
    found = findings(folder)
    assert found.healthy, found.wrong
    assert not [each for each in found.findings if each.level == "warning"]
    load_drafter(folder, target())


CONFIGURATIONS = [
    # format, what is changed, check, level, what was found, what to do
    (zlab, put("architectures", ["LlamaForCausalLM"]), "format", "wrong", "LlamaForCausalLM", "DFlashDraftModel"),
    (speculators, put("speculators_model_type", "eagle3"), "format", "wrong", "eagle3", "dflash, dspark"),
    (zlab, put("hidden_size", 64), "target's shape", "wrong", "width of tiny qwen3 is 32", "made for"),
    (zlab, put("vocab_size", 48), "target's shape", "wrong", "vocabulary of tiny qwen3 is 40", "vocab_size to 40"),
    (zlab, put("num_target_layers", 36), "target's shape", "wrong", "layers of tiny qwen3 is 6", "to 6"),
    (zlab, put("num_target_layers", None), "target's shape", "wrong", "is missing", "num_target_layers to 6"),
    (zlab, put("block_size", None), "slot convention", "wrong", "block_size is None", "number of slots"),
    (zlab, put("sample_from_anchor", True), "slot convention", "wrong", "predicts nothing", "measured readings"),
    (deepspec, put("sample_from_anchor", None), "slot convention", "warning", "is absent", "write sample"),
    (deepspec, put("sample_from_anchor", False), "slot convention", "wrong", "predicts the next token", "measured"),
    (speculators, put("sample_from_anchor", None), "slot convention", "wrong", "true to the package", "false agrees"),
    (speculators, put("sample_from_anchor", True), "slot convention", "wrong", "vLLM refuses", "false"),
    (speculators, put("block_size", 6), "slot convention", "wrong", "is 4 with a block_size of 6", "set it to 5"),
    (zlab, put("dflash_config.mask_token_id", None), "mask token", "wrong", "is missing", "that of tiny qwen3 is 2"),
    (zlab, put("dflash_config.mask_token_id", 40), "mask token", "wrong", "no row", "dflash_config.mask_token_id"),
    (deepspec, put("mask_token_id", 1), "mask token", "warning", "the padding token", "mask_token_id in config"),
    (speculators, put("mask_token_id", 0), "mask token", "warning", "an end token", "mask_token_id in config"),
    (ours, put("mask_token_id", 7), "mask token", "warning", "usually have 2", "measured readings"),
    (deepspec, nested, "mask token", "wrong", "stands in dflash_config", "top level"),
    (zlab, put("dflash_config.target_layer_ids", None), "layer ids", "warning", "absent", r"\[1, 2, 3\]"),
    (deepspec, put("target_layer_ids", None), "layer ids", "wrong", "is missing", "trained with"),
    (zlab, put("dflash_config.target_layer_ids", [1, 2]), "layer ids", "wrong", "names 2 layers.*reads 3", "set"),
    (zlab, put("dflash_config.target_layer_ids", [3, 4, 5]), "layer ids", "wrong", "has 5", r"from 1: try \[2, 3, 4"),
    (speculators, put("aux_hidden_state_layer_ids", [0, 2, 3]), "layer ids", "wrong", "has 0", r"from 0: try \[1, 3"),
    (zlab, put("dflash_config.target_layer_ids", [0, 2, 9]), "layer ids", "wrong", "has 9", "trained with"),
    (speculators, put("sliding_window_non_causal", False), "causality", "wrong", "every layer", "to true"),
    (speculators, put("sliding_window_non_causal", None), "causality", "wrong", "absent", "to true"),
    (zlab, put("is_causal", True), "causality", "warning", "earlier slots only", "false"),
    (zlab, put("dflash_config.causal", True), "causality", "warning", "dflash_config.causal is true", "false"),
    (zlab, put("layer_types", ["sliding_attention"]), "causality", "wrong", "within a window", "whole text"),
    (speculators, put("transformer_layer_config.use_sliding_window", True), "causality", "wrong", "window", "whole"),
    (zlab, put("rope_theta", None), "rotary positions", "wrong", "missing", "tiny qwen3 is 10000"),
    (zlab, put("rope_theta", 500.0), "rotary positions", "warning", "500; that of tiny qwen3 is 10000", "measured"),
    (zlab, put("rope_parameters", {"rope_theta": 5.0}), "rotary positions", "wrong", "top and 5 in", "one value"),
    (zlab, put("rope_scaling", {"rope_type": "yarn"}), "rotary positions", "wrong", "'yarn'", "without scaling"),
    (ours, put("rope_theta", "10000"), "rotary positions", "wrong", "'10000', not a number", "tiny qwen3 is 10000"),
    (ours, put("rope_theta", 10**400), "rotary positions", "wrong", "not a number", "tiny qwen3 is 10000"),
    (zlab, put("rope_theta", 10**400), "rotary positions", "wrong", "missing or no number", "tiny qwen3 is 10000"),
    (zlab, put("attention_bias", True), "layers", "wrong", "attention_bias is True", "False"),
    (zlab, put("quantization_config", {"bits": 4}), "layers", "wrong", "quantization_config", "not supported"),
    (deepspec, put("markov_rank", None), "heads", "wrong", "markov_rank is None", "rank"),
    (deepspec, put("markov_head_type", "linear"), "heads", "wrong", "'linear'", "vanilla, gated or rnn"),
    (speculators, put("markov_head_type", "rnn"), "heads", "wrong", "is rnn", "vanilla head only"),
    (deepspec, put("enable_confidence_head", True), "heads", "warning", "hidden state alone", "does not need it"),
    (deepspec, put("num_anchors", None), "heads", "warning", "own class refuses", "num_anchors: 512"),
    (deepspec, put("tie_word_embeddings", True), "head and embedding", "wrong", "is not its embedding", "false"),
    (zlab, put("dtype", "bfloat16"), "dtype", "warning", "float32; config.json says bfloat16", '"dtype": "float32"'),
    (zlab, put("dtype", ["float32"]), "dtype", "warning", r"config.json says \['float32'\]", '"dtype": "float32"'),
    (ours, put("target_fingerprint", "0" * 16), "target's weights", "wrong", "fingerprint 0000", "drafter.initial"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "change", "check", "level", "found", "advice"), CONFIGURATIONS)
def test_a_wrong_configuration(tmp_path, write, change, check, level, found, advice):
    markov = write is deepspec or advice == "vanilla head only"
    folder = patient(tmp_path / "bad", drafter("dspark" if markov else "dflash"), write, change)
    _expect(findings(folder), check, level, found, advice)


TENSORS = [
    (deepspec, dropping("norm.weight"), "tensors", "wrong", "missing norm.weight", "random"),
    (zlab, prefixed, "tensors", "wrong", "begin with 'draft.'", "rename"),
    (zlab, writing("extra.weight", lambda _: torch.ones(2, 2)), "tensors", "warning", "unexpected extra", "ignores"),
    (zlab, put("intermediate_size", 64), "tensors", "wrong", r"\[48, 32\], not \[64, 32\]", "another drafter"),
    (zlab, writing("fc.weight", broken), "numbers", "wrong", "NaN or infinity in fc.weight", "earlier checkpoint"),
    (deepspec, writing("markov_head.markov_w2.weight", torch.zeros_like), "numbers", "warning", "zero", "no effect"),
    (zlab, writing("norm.weight", lambda t: t.bfloat16()), "dtype", "warning", "1 of bfloat16", "in one"),
    (zlab, writing("norm.weight", lambda t: t.double()), "dtype", "wrong", "float64", "convert"),
    (zlab, writing("fc.weight", lambda t: t.long()), "dtype", "wrong", "fc.weight: int64", "convert"),
    (ours, writing("fc.weight", lambda t: t.int()), "dtype", "wrong", "fc.weight: int32", "convert"),
    (deepspec, dropping("lm_head.weight"), "head and embedding", "wrong", "lm_head.weight is missing", "copy"),
    (deepspec, writing("lm_head.weight", torch.randn_like), "head and embedding", "wrong", "left random", "copy"),
    (deepspec, writing("lm_head.weight", lambda t: 1.01 * t), "head and embedding", "wrong", "close to it", "copy"),
    (deepspec, writing("embed_tokens.weight", lambda t: t[:30].clone()), "head and embedding", "wrong", "30", "copy"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "change", "check", "level", "found", "advice"), TENSORS)
def test_wrong_tensors(tmp_path, write, change, check, level, found, advice):
    folder = patient(tmp_path / "bad", drafter("dspark" if write is deepspec else "dflash"), write, change)
    _expect(findings(folder), check, level, found, advice)


def as_ids(offsets):
    return offsets + torch.arange(len(offsets))


@pytest.mark.parametrize(
    ("change", "level", "found", "advice"),
    [
        (None, "ok", "9 of 40 tokens; d2t and t2d agree", ""),
        (dropping("d2t"), "wrong", "d2t is missing", "9 int64 offsets"),
        (writing("d2t", as_ids), "wrong", "leads outside|t2d marks", "it holds token ids"),
        (writing("t2d", torch.logical_not), "wrong", "does not lead to the tokens", "again from the list"),
        (writing("d2t", torch.zeros_like), "wrong", "does not lead to", "write d2t from t2d"),
        (dropping("t2d"), "warning", "t2d is missing", "write it"),
        (put("draft_vocab_size", 40), "warning", "whole vocabulary", "remove them"),
    ],
)
def test_maps_of_a_reduced_vocabulary(tmp_path, change, level, found, advice):
    small = drafter(draft_vocab_size=9)
    small.draft_ids = torch.tensor([0, 3, 5, 6, 11, 12, 20, 31, 39])
    _expect(findings(patient(tmp_path / "p", small, speculators, change)), "draft vocabulary", level, found, advice)


def test_a_tied_head_is_no_mistake_where_the_target_ties_it(tmp_path):
    tied = tiny_target(dtype=torch.float32, tie_word_embeddings=True)
    change = put("tie_word_embeddings", True)
    folder = patient(tmp_path / "p", tiny_drafter("dflash", tied, num_layers=1), zlab, change)
    assert findings(folder, tied).healthy


def test_several_mistakes_are_all_named_at_once(tmp_path):
    def change(values, tensors):
        values["num_target_layers"] = 5
        values["dflash_config"] = {"target_layer_ids": [3, 4, 5]}
        tensors["norm.weight"] = tensors["norm.weight"].bfloat16()

    found = findings(patient(tmp_path / "p", drafter(), zlab, change))
    assert {"target's shape", "mask token", "layer ids"} == {each.check for each in found.wrong}


def test_what_is_left_out_says_why(tmp_path):
    found = examine(patient(tmp_path / "p", drafter(), zlab, writing("fc.weight", broken)), target())
    assert found.measured == []
    assert "not measured: weights are NaN" in found.of("drafting")[0].found


def test_the_law_of_a_data_folder_is_checked(tmp_path):
    settings = GenerationSettings(Sampling(0.4), max_new_tokens=16, max_length=60)
    prompts = [Prompt(f"p{i}", (f"w{5 + i}",)) for i in range(30)]
    regenerate(prompts, target(), settings, tmp_path / "cool", engine=LocalEngine(target(), 8))
    folder = patient(tmp_path / "p", drafter(), zlab)
    _expect(findings(folder, data=tmp_path / "cool"), "data", "wrong", "temperature 0.4", "regenerate it")
    other = tiny_target(dtype=torch.float32, seed=3)
    _expect(findings(folder, other, data=tmp_path / "cool"), "data", "wrong", "was sampled from", "with this target")


def test_plain_values_are_json(tmp_path):
    found = findings(patient(tmp_path / "p", drafter(), zlab))
    values = json.loads(json.dumps(found.to_dict()))
    assert values["healthy"] is True
    assert (values["format"], values["target"]) == ("flat", "tiny qwen3")


def _expect(diagnosis, check, level, found, advice):
    """Some finding of this check has this level, and says what was found and what to do."""
    lines = [each for each in diagnosis.of(check) if each.level == level]
    assert any(re.search(found, each.found) and re.search(advice, each.advice) for each in lines), diagnosis.findings
    assert diagnosis.healthy == (not diagnosis.wrong)
