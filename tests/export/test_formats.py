"""Configurations in engines' formats: every trap written as it must be, and everybody's files read as ours."""

import json

import pytest
import torch

from blockdraft.drafters import CheckpointError, DrafterConfig, SlotLayout, load_drafter
from blockdraft.drafters.checkpoint import write_config_json, write_tensors
from blockdraft.drafters.formats import FormatError, Surroundings, format_of, read_config, write_config
from blockdraft.targets import fingerprint

from tiny import tiny_drafter, tiny_target

AROUND = Surroundings(4096, "bfloat16", "someone/target", ("Qwen3ForCausalLM",))


def config(kind="dflash", **changes) -> DrafterConfig:
    values = {
        "kind": kind, "slot_layout": "fill_in" if kind == "dflash" else "next_token", "num_proposals": 15,
        "num_layers": 5, "hidden_size": 2560, "intermediate_size": 9728, "num_heads": 32, "num_kv_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151_936, "mask_token_id": 151_669,
        "num_target_layers": 36, "target_layers": (1, 9, 17, 25, 33),
    }  # fmt: skip
    if kind == "dspark":
        values |= {"markov_rank": 256, "markov_head": "vanilla"}
    return DrafterConfig(**(values | changes))


QWEN3 = {
    "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 40_960, "num_attention_heads": 32,
    "num_hidden_layers": 5, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "vocab_size": 151_936,
    "layer_types": ["full_attention"] * 5,
}  # fmt: skip
ZLAB = QWEN3 | {
    "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 36, "rope_scaling": None,
    "rope_theta": 1_000_000, "torch_dtype": "bfloat16", "tie_word_embeddings": True, "auto_map": {"AutoModel": "x"},
    "dflash_config": {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
DEEPSPEC = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_target_layers": 36, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}, "tie_word_embeddings": False,
    "target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151_669, "num_anchors": 512, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "dspark", "speculators_version": "0.9.0", "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "block_size": 8, "draft_vocab_size": 151_936,
    "mask_token_id": 151_669, "sliding_window_non_causal": False, "target_hidden_size": None, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "speculators_config": {"algorithm": "dspark", "default_proposal_method": "greedy", "proposal_methods": [
        {"proposal_type": "greedy", "speculative_tokens": 8}], "verifier": {"name_or_path": "x", "architectures": []}},
    "transformer_layer_config": QWEN3 | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
}  # fmt: skip


class TestWriting:
    def test_flat_dflash_is_z_labs(self):
        values = write_config("flat", config(), AROUND)
        assert values["architectures"] == ["DFlashDraftModel"]
        assert (values["model_type"], values["block_size"], values["num_target_layers"]) == ("qwen3", 16, 36)
        assert values["dflash_config"] == {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]}
        assert "mask_token_id" not in values  # nested for DFlash
        assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e6
        assert values["layer_types"] == ["full_attention"] * 5

    def test_flat_dspark_has_its_keys_at_the_top(self):
        values = write_config("flat", config("dspark", confidence_head=True), AROUND)
        assert values["architectures"] == ["Qwen3DSparkModel"]
        assert "dflash_config" not in values  # vLLM would look there first
        top = {"block_size": 15, "target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151_669, "markov_rank": 256,
               "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
               "tie_word_embeddings": False, "sample_from_anchor": True}  # fmt: skip
        assert top.items() <= values.items()

    def test_flat_dspark_has_every_key_that_deepspecs_class_asserts(self):
        values = write_config("flat", config("dspark"), AROUND)
        asserted = {"target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"}
        assert asserted | {"markov_head_type", "confidence_head_with_markov", "block_size"} <= values.keys()
        assert values["num_anchors"] == 512
        assert "num_anchors" not in write_config("flat", config(), AROUND)

    @pytest.mark.parametrize("flavour", ["flat", "speculators"])
    def test_the_targets_fingerprint_is_written_if_it_is_known(self, flavour):
        assert "target_fingerprint" not in write_config(flavour, config(), AROUND)
        known = config(target_fingerprint="0123456789abcdef")
        values = write_config(flavour, known, AROUND)
        assert values["target_fingerprint"] == "0123456789abcdef"
        assert read_config(values) == known

    @pytest.mark.parametrize(
        ("kind", "layout", "block_size", "anchor"),
        [("dflash", "fill_in", 16, False), ("dspark", "next_token", 15, True), ("dspark", "fill_in", 16, False)],
    )
    def test_speculators_states_the_slot_layout_thrice_and_consistently(self, kind, layout, block_size, anchor):
        values = write_config("speculators", config(kind, slot_layout=layout), AROUND)
        (method,) = values["speculators_config"]["proposal_methods"]
        assert (values["block_size"], values["sample_from_anchor"], method["speculative_tokens"]) == (
            block_size, anchor, 15,
        )  # fmt: skip

    def test_speculators_counts_layers_from_one_and_is_not_causal(self):
        values = write_config("speculators", config(), AROUND)
        assert values["aux_hidden_state_layer_ids"] == [2, 10, 18, 26, 34]
        assert values["sliding_window_non_causal"] is True
        verifier = {"name_or_path": "someone/target", "architectures": ["Qwen3ForCausalLM"]}
        assert values["speculators_config"]["verifier"] == verifier

    @pytest.mark.parametrize(
        ("kind", "changes", "flavour", "reason"),
        [
            ("dspark", {"markov_head": "gated"}, "speculators", "vanilla Markov head only; this one is gated"),
            ("dspark", {"markov_head": "rnn"}, "speculators", "vanilla Markov head only; this one is rnn"),
            ("dspark", {"slot_layout": "fill_in"}, "flat", "can be exported as speculators"),
            ("dflash", {"slot_layout": "next_token"}, "flat", "vLLM refuses"),
            ("dflash", {"slot_layout": "next_token"}, "speculators", "vLLM refuses"),
        ],
    )
    def test_what_no_engine_serves_is_refused(self, kind, changes, flavour, reason):
        with pytest.raises(FormatError, match=reason):
            write_config(flavour, config(kind, **changes), AROUND)

    @pytest.mark.parametrize("flavour", ["flat", "speculators"])
    @pytest.mark.parametrize("kind", ["dflash", "dspark"])
    def test_reading_is_the_inverse_of_writing(self, kind, flavour):
        ours = config(kind)
        values = json.loads(json.dumps(write_config(flavour, ours, AROUND)))
        assert format_of(values) == flavour
        assert read_config(values) == ours


class TestReading:
    def test_z_labs(self):
        assert read_config(ZLAB) == config()

    def test_z_labs_without_layer_ids_has_its_default(self):
        values = ZLAB | {"dflash_config": {"mask_token_id": 151_669}}
        assert read_config(values).target_layers == (1, 9, 17, 25, 33)

    def test_deepspecs(self):
        assert read_config(DEEPSPEC) == config("dspark", num_proposals=7, confidence_head=True)

    def test_deepspecs_dflash_is_a_dspark_without_heads(self):
        values = DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}
        del values["markov_head_type"], values["confidence_head_with_markov"]
        found = read_config(values)
        assert found == config("dflash", slot_layout="next_token", num_proposals=7)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({}, "a drafter of rank 0 does not have"),
            ({"confidence_head_with_markov": False}, "a drafter of rank 0 does not have"),
            ({"markov_head_type": None}, "a drafter of rank 0 does not have"),
            ({"markov_rank": 256, "confidence_head_with_markov": False}, "without confidence_head_with_markov"),
            ({"markov_rank": 256, "markov_head_type": None}, "markov_head_type is missing"),
            ({"markov_rank": 256, "markov_head_type": "linear"}, "markov_head is 'linear'"),
        ],
    )
    def test_deepspecs_heads_that_we_do_not_have_are_refused_with_the_reason(self, changes, reason):
        with pytest.raises(FormatError, match=reason):
            read_config(DEEPSPEC | {"markov_rank": 0} | changes)

    @pytest.mark.parametrize(
        ("tokens", "flag", "layout", "num"),
        [(8, None, "next_token", 8), (7, None, "fill_in", 7), (8, True, "next_token", 8), (7, False, "fill_in", 7)],
    )
    def test_speculators_layout_is_stated_or_follows_from_the_number_of_tokens(self, tokens, flag, layout, num):
        values = json.loads(json.dumps(SPECULATORS))
        values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
        if flag is not None:
            values["sample_from_anchor"] = flag
        found = read_config(values, 36)
        assert (found.slot_layout, found.num_proposals) == (SlotLayout(layout), num)
        assert found.target_layers == (1, 9, 17, 25, 33)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"sample_from_anchor": False}, "must equal the block size if the anchor's slot predicts"),
            ({"block_size": 12}, "neither layout has that"),
            ({"draft_vocab_size": 152_000}, "152000 draft tokens are more than the 151936"),
            ({"target_hidden_size": 4096}, "target_hidden_size is 4096"),
            ({"aux_hidden_state_layer_ids": [1, 9, 36]}, "0 to 34"),
            ({"aux_hidden_state_layer_ids": [0, 9]}, "count layers from 1"),
            ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
            ({"mask_token_id": None}, "mask_token_id is missing"),
            ({"mask_token_id": 151_936}, "no row"),
            ({"markov_rank": None}, "markov_rank is missing"),
            ({"markov_head_type": None}, "markov_head_type is missing"),
            ({"confidence_head_with_markov": False}, "confidence head"),
            ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
            ({"speculators_model_type": "eagle3"}, "'eagle3'; known"),
            ({"speculators_config": {"proposal_methods": []}}, "proposal_methods is missing|speculative_tokens is"),
        ],
    )
    def test_speculators_inconsistent(self, changes, reason):
        with pytest.raises(FormatError, match=reason):
            read_config(SPECULATORS | changes, 36)

    def test_speculators_of_an_unknown_target(self):
        with pytest.raises(FormatError, match="give the target"):
            read_config(SPECULATORS)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"architectures": ["LlamaForCausalLM"]}, "known: DFlashDraftModel"),
            ({"attention_bias": True}, "attention_bias is True"),
            ({"model_type": "llama"}, "model_type is 'llama'"),
            ({"layer_types": ["sliding_attention"] * 5}, "layer_types has sliding_attention"),
            ({"layer_types": ["full_attention"] * 4}, "names 4 layers"),
            ({"dflash_config": ZLAB["dflash_config"] | {"causal": True}}, "causal is True"),
            ({"dflash_config": ZLAB["dflash_config"] | {"use_swa": True}}, "use_swa is True"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
            ({"rope_theta": None}, "rope_theta is missing"),
            ({"rope_parameters": {"rope_theta": 1e4}}, "10000.0 and 1000000.0"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
            ({"num_target_layers": None}, "num_target_layers is missing"),
            ({"num_target_layers": 34}, "0 to 32"),
            ({"block_size": None}, "block_size is missing"),
            ({"block_size": "16"}, "wrong type"),
            ({"block_size": 16.0}, "num_proposals is 15.0"),
            ({"num_attention_heads": 0, "head_dim": None}, "wrong type"),
            ({"rope_theta": "much"}, "wrong type"),
            ({"num_hidden_layers": 10**12, "layer_types": None}, "num_layers is 1000000000000"),
            ({"num_hidden_layers": 10**12, "layer_types": None, "dflash_config": {"mask_token_id": 1}}, "is missing"),
            ({"target_fingerprint": "yes"}, "target_fingerprint is 'yes'"),
            ({"hidden_size": None}, "hidden_size is missing"),
            ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ],
    )
    def test_flat_that_is_not_what_our_layers_compute(self, changes, reason):
        with pytest.raises(FormatError, match=reason):
            read_config(ZLAB | changes)

    def test_dspark_keys_nested_as_those_of_dflash_are_not_guessed(self):
        values = {k: v for k, v in DEEPSPEC.items() if k not in ("target_layer_ids", "mask_token_id")}
        values["dflash_config"] = ZLAB["dflash_config"]
        with pytest.raises(FormatError, match="at the top level"):
            read_config(values)


class TestFolders:
    """Other people's folders, in their exact layout, tiny and random; they record no fingerprint."""

    def folder(self, tmp_path, kind, changes, *, dtype=torch.float32, extra=None):
        target = tiny_target(dtype=torch.float32)
        heads = {"confidence_head": True} if kind == "dspark" else {}
        drafter = tiny_drafter(kind, target, target_fingerprint=None, **heads)
        own = drafter.config
        layers = {
            "model_type": "qwen3", "head_dim": own.head_dim, "hidden_size": 32, "intermediate_size": 48,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 40,
            "rms_norm_eps": own.rms_norm_eps, "rope_theta": own.rope_theta, "max_position_embeddings": 512,
        }  # fmt: skip
        write_config_json(changes(layers, list(own.target_layers)), tmp_path)
        tensors = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
        write_tensors(tensors | (extra(target) if extra else {}), tmp_path)
        return target, drafter

    @staticmethod
    def deepspec(layers, ids):
        return layers | {
            "architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_target_layers": 6, "target_layer_ids": ids,
            "mask_token_id": 2, "num_anchors": 512, "markov_rank": 6, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "confidence_head_with_markov": True, "tie_word_embeddings": False,
        }  # fmt: skip

    @staticmethod
    def zlab(layers, ids):
        nested = {"mask_token_id": 2, "target_layer_ids": ids}
        arch = {"architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 6}
        return layers | arch | {"dflash_config": nested}

    def test_z_labs(self, tmp_path):
        target, drafter = self.folder(tmp_path, "dflash", self.zlab)
        loaded = load_drafter(tmp_path, target)
        assert loaded.config == drafter.config
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)

    def test_deepspecs_with_its_frozen_copies_in_bfloat16(self, tmp_path):
        def copies(target):
            return {
                "embed_tokens.weight": target.embedding.bfloat16(),
                "lm_head.weight": target.head.clone().bfloat16(),
            }

        target, drafter = self.folder(tmp_path, "dspark", self.deepspec, dtype=torch.bfloat16, extra=copies)
        loaded = load_drafter(tmp_path, target)
        assert loaded.config == drafter.config
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())

    def test_deepspecs_dflash_drafts_with_slot_0(self, tmp_path):
        """Its DSpark with rank 0: no heads in the folder, copies of the target's tensors, and slot 0 predicts."""

        def without_heads(layers, ids):
            values = self.deepspec(layers, ids) | {"markov_rank": 0, "enable_confidence_head": False}
            return {k: v for k, v in values.items() if k not in ("markov_head_type", "confidence_head_with_markov")}

        target, drafter = self.folder(
            tmp_path, "dflash", without_heads, extra=lambda target: {"lm_head.weight": target.head.clone()}
        )
        loaded = load_drafter(tmp_path, target)
        assert loaded.config == drafter.config.replace(slot_layout="next_token")
        assert loaded.config.num_slots == 4

    def test_a_fine_tuned_target_may_take_over_a_drafter_with_copies_of_the_old_one(self, tmp_path):
        old, drafter = self.folder(
            tmp_path, "dspark", self.deepspec, extra=lambda target: {"lm_head.weight": target.head.clone()}
        )
        tuned = tiny_target(dtype=torch.float32, seed=9)
        assert fingerprint(tuned) != fingerprint(old)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not a copy"):
            load_drafter(tmp_path, tuned)
        loaded = load_drafter(tmp_path, tuned, same_target=False)
        assert torch.equal(loaded.fc.weight, drafter.fc.weight)

    def test_a_head_of_its_own_is_refused(self, tmp_path):
        target, _ = self.folder(
            tmp_path, "dspark", self.deepspec, extra=lambda target: {"lm_head.weight": target.head + 0.1}
        )
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not a copy of that of tiny qwen3"):
            load_drafter(tmp_path, target)

    def test_weights_in_several_files(self, tmp_path):
        target, drafter = self.folder(tmp_path, "dflash", self.zlab)
        (tmp_path / "model.safetensors").unlink()
        names = sorted(drafter.state_dict())
        parts = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
        for file, part in parts.items():
            write_tensors({name: drafter.state_dict()[name] for name in part}, tmp_path)
            (tmp_path / "model.safetensors").rename(tmp_path / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        loaded = load_drafter(tmp_path, target)
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match="no model-00002"):
            load_drafter(tmp_path, target)

    def test_cut_short(self, tmp_path):
        target, _ = self.folder(tmp_path, "dflash", self.zlab)
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_drafter(tmp_path, target)
        (tmp_path / "config.json").write_text('{"architectures": [')
        with pytest.raises(CheckpointError, match="not JSON"):
            load_drafter(tmp_path, target)
