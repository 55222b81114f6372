"""Ours to an engine's format and back: the same drafter, bit for bit; what is damaged on the way is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.decoding import generate
from blockdraft.drafters import CheckpointError, load_drafter, save_drafter
from blockdraft.export import check_export, export_drafter
from blockdraft.export.folders import probe_logits
from blockdraft.targets import fingerprint

from tiny import tiny_drafter, tiny_target

CASES = [
    ("dflash", {}, "flat"),
    ("dflash", {}, "speculators"),
    ("dspark", {}, "flat"),
    ("dspark", {"confidence_head": True}, "speculators"),
    ("dspark", {"slot_layout": "fill_in"}, "speculators"),
    ("dspark", {"markov_head": "gated"}, "flat"),
    ("dspark", {"markov_head": "rnn", "confidence_head": True}, "flat"),
]


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def exported(target, tmp_path):
    """A function that makes a checkpoint and an export of it."""

    def make(kind="dspark", flavour="speculators", **changes):
        save_drafter(tiny_drafter(kind, target, **changes), tmp_path / "checkpoint")
        export_drafter(load_drafter(tmp_path / "checkpoint", target), target, tmp_path / "out", flavour)
        return tmp_path / "checkpoint", tmp_path / "out"

    return make


@pytest.mark.parametrize(("kind", "changes", "flavour"), CASES)
def test_round_trips_are_exact(target, tmp_path, kind, changes, flavour):
    drafter = tiny_drafter(kind, target, **changes)
    export_drafter(drafter, target, tmp_path / "out", flavour)
    loaded = load_drafter(tmp_path / "out", target)
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(probe_logits(loaded, target), probe_logits(drafter, target))
    rounds = [
        [(r.drafted, r.accepted) for r in generate(target, each, [7, 8, 9], max_new_tokens=20, seed=3).rounds]
        for each in (drafter, loaded)
    ]
    assert rounds[0] == rounds[1]
    save_drafter(loaded, tmp_path / "again")
    save_drafter(drafter, tmp_path / "ours")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()


@pytest.mark.parametrize(("kind", "changes", "flavour"), CASES)
def test_a_check_finds_them_right(target, exported, kind, changes, flavour):
    checkpoint, out = exported(kind, flavour, **changes)
    checked = check_export(out, target=target, checkpoint=checkpoint)
    assert checked.flavour == flavour
    assert "bit for bit" in checked.lines[-1]
    assert "not given" in check_export(out).lines[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarser_tensors_are_those_of_the_checkpoint_rounded(target, tmp_path, dtype):
    drafter = tiny_drafter("dspark", target)
    save_drafter(drafter, tmp_path / "checkpoint")
    export_drafter(drafter, target, tmp_path / "out", "flat", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    check_export(tmp_path / "out", target=target, checkpoint=tmp_path / "checkpoint")
    loaded = load_drafter(tmp_path / "out", target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float())


def test_dspark_carries_the_targets_embedding_and_head_and_dflash_nothing(target, exported):
    found = load_file(exported("dspark")[1] / "model.safetensors")
    assert torch.equal(found["embed_tokens.weight"], target.embedding)
    assert torch.equal(found["lm_head.weight"], target.head)


def test_dflash_carries_nothing_of_the_target(exported):
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(exported("dflash")[1] / "model.safetensors").keys()


def test_a_tied_head_is_stored_twice(tmp_path):
    tied = tiny_target(dtype=torch.float32, tie_word_embeddings=True)
    export_drafter(tiny_drafter("dspark", tied), tied, tmp_path / "out", "flat")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["embed_tokens.weight"], found["lm_head.weight"])
    check_export(tmp_path / "out", target=tied)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("block_size", 5, "speculative_tokens is 4, block_size 5 and sample_from_anchor true"),
        ("block_size", 6, "neither layout has that"),
        ("sample_from_anchor", False, "one fewer"),
        ("sample_from_anchor", None, "sample_from_anchor is missing; it must be True"),
        ("sliding_window_non_causal", False, "sliding_window_non_causal is False; it must be True"),
        ("sliding_window_non_causal", None, "sliding_window_non_causal is missing"),
        ("aux_hidden_state_layer_ids", [1, 2], r"fc\.weight is \(32, 96\), not \(32, 64\)"),
        ("aux_hidden_state_layer_ids", [4, 5, 6], "0 to 4"),
        ("aux_hidden_state_layer_ids", [1, 2, 3], r"target_layers is \[0, 1, 2\]; the checkpoint's is \[1, 2, 3\]"),
        ("speculators_config.proposal_methods.0.speculative_tokens", 9, "neither layout"),
        ("speculators_config.proposal_methods.0.verifier_accept_k", 2, "proposal_methods is"),
        ("markov_rank", 7, r"markov_w1\.weight is \(40, 6\), not \(40, 7\)"),
        ("markov_head_type", "gated", "vanilla Markov head only"),
        ("markov_head_type", None, "markov_head_type is missing"),
        ("enable_confidence_head", True, "confidence head"),
        ("mask_token_id", 3, "mask_token_id is 3; the checkpoint's is 2"),
        ("mask_token_id", 40, "no row"),
        ("dtype", "bfloat16", r"dtype is 'float32'; it must be 'bfloat16'"),
        ("draft_vocab_size", 39, "missing d2t; missing t2d"),
        ("transformer_layer_config.num_hidden_layers", 1, "names 2 layers"),
        ("transformer_layer_config.rope_theta", 5.0, "5.0 and 10000.0"),
        ("transformer_layer_config.rope_theta", None, "rope_theta is missing; it must be 10000.0"),
        ("transformer_layer_config.layer_types", None, "layer_types is missing"),
        ("transformer_layer_config.tie_word_embeddings", True, "tie_word_embeddings is True"),
        ("transformer_layer_config.max_position_embeddings", None, "max_position_embeddings is missing"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True; it must be False"),
    ],
)
def test_an_inconsistent_configuration_is_refused(target, exported, path, value, reason):
    checkpoint, out = exported()
    values = json.loads((out / "config.json").read_text())
    *parents, last = path.split(".")
    section = values
    for key in parents:
        section = section[int(key) if key.isdigit() else key]
    if value is None:
        del section[last]
    else:
        section[last] = value
    (out / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=reason):
        check_export(out, target=target, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("sample_from_anchor", None, "sample_from_anchor is missing; it must be True"),
        ("target_layer_ids", None, "target_layer_ids is missing"),
        ("num_target_layers", None, "num_target_layers is missing"),
        ("block_size", 5, "num_proposals is 5; the checkpoint's is 4"),
        ("architectures", ["DFlashDraftModel"], "mask_token_id is missing"),
        ("dtype", "float64", "dtype is 'float64'; known"),
    ],
)
def test_an_inconsistent_flat_configuration_is_refused(target, exported, key, value, reason):
    checkpoint, out = exported("dspark", "flat")
    values = json.loads((out / "config.json").read_text())
    values |= {key: value}
    if value is None:
        del values[key]
    (out / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=reason):
        check_export(out, target=target, checkpoint=checkpoint)


def _missing(tensors):
    del tensors["layers.1.mlp.up_proj.weight"]


def _extra(tensors):
    tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)


def _shape(tensors):
    tensors["norm.weight"] = torch.ones(33)


def _nan(tensors):
    tensors["fc.weight"][0, 0] = torch.nan


def _infinity(tensors):
    tensors["markov_head.markov_w2.weight"][3, 1] = torch.inf


def _dtype(tensors):
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()


def _no_head(tensors):
    del tensors["lm_head.weight"]


def _other_head(tensors):
    tensors["lm_head.weight"] += 1


def _other_weights(tensors):
    tensors["norm.weight"] += 0.5


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_missing, r"missing layers\.1\.mlp\.up_proj\.weight"),
        (_extra, r"unexpected layers\.2\.mlp\.up_proj\.weight"),
        (_shape, r"norm\.weight is \(33,\), not \(32,\)"),
        (_nan, r"fc\.weight holds NaN or infinity"),
        (_infinity, r"markov_w2\.weight holds NaN or infinity"),
        (_dtype, r"norm\.weight is torch\.bfloat16, but config\.json says float32"),
        (_no_head, r"missing lm_head\.weight"),
        (_other_head, r"lm_head\.weight is not a copy"),
        (_other_weights, r"norm\.weight is not the checkpoint's"),
    ],
)
@pytest.mark.parametrize("flavour", ["flat", "speculators"])
def test_damaged_tensors_are_refused(target, exported, flavour, damage, reason):
    checkpoint, out = exported("dspark", flavour)
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        check_export(out, target=target, checkpoint=checkpoint)


def test_a_wrong_slot_layout_is_seen_in_the_logits(target, exported):
    """The trap that gives an accepted length of one and no error: every other check would pass."""
    checkpoint, out = exported("dspark", "speculators")
    values = json.loads((out / "config.json").read_text())
    values |= {"sample_from_anchor": False, "block_size": 5}
    (out / "config.json").write_text(json.dumps(values))
    check_export(out, target=target)  # consistent in itself
    wrong, right = (probe_logits(load_drafter(each, target), target) for each in (out, checkpoint))
    assert wrong.shape == right.shape
    assert not torch.allclose(wrong, right, atol=0.1)
    with pytest.raises(CheckpointError, match="slot_layout is 'fill_in'; the checkpoint's is 'next_token'"):
        check_export(out, target=target, checkpoint=checkpoint)


@pytest.mark.parametrize(("kind", "flavour"), [("dflash", "flat"), ("dflash", "speculators"), ("dspark", "flat")])
def test_another_target_of_the_same_shapes_is_refused(exported, target, kind, flavour):
    other = tiny_target(dtype=torch.float32, seed=5)
    with pytest.raises(CheckpointError, match=f"{fingerprint(target)}.*{fingerprint(other)}"):
        check_export(exported(kind, flavour)[1], target=other)


def test_another_targets_copies_are_refused_where_no_fingerprint_is_recorded(exported):
    other = tiny_target(dtype=torch.float32, seed=5)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not a copy"):
        check_export(exported("dspark", target_fingerprint=None)[1], target=other)


def test_an_export_of_an_older_version_records_no_fingerprint_and_passes(target, exported):
    checkpoint, out = exported("dflash", "flat")
    values = json.loads((out / "config.json").read_text())
    del values["target_fingerprint"]
    (out / "config.json").write_text(json.dumps(values))
    check_export(out, target=target, checkpoint=checkpoint)


def test_deepspecs_number_of_anchors_must_be_there_whatever_it_is(target, exported):
    checkpoint, out = exported("dspark", "flat")
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | {"num_anchors": 64}))
    check_export(out, target=target, checkpoint=checkpoint)
    del values["num_anchors"]
    (out / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="num_anchors is missing"):
        check_export(out, target=target, checkpoint=checkpoint)


def test_a_bfloat16_checkpoint_is_compared_in_bfloat16(target, tmp_path):
    drafter = tiny_drafter("dspark", target).to(torch.bfloat16)
    save_drafter(drafter, tmp_path / "checkpoint")
    done = export_drafter(drafter, target, tmp_path / "out", "flat")
    assert done.dtype == "bfloat16"
    check_export(tmp_path / "out", target=target, checkpoint=tmp_path / "checkpoint")


def test_a_checkpoint_of_ours_is_no_export(target, tmp_path):
    save_drafter(tiny_drafter("dflash", target), tmp_path)
    with pytest.raises(CheckpointError, match="a checkpoint of ours, not an export"):
        check_export(tmp_path)


def test_only_an_export_is_ever_replaced(target, tmp_path):
    drafter, out = tiny_drafter("dflash", target), tmp_path / "out"
    export_drafter(drafter, target, out, "flat")
    with pytest.raises(CheckpointError, match="not empty"):
        export_drafter(drafter, target, out, "speculators")
    export_drafter(drafter, target, out, "speculators", force=True)
    assert check_export(out).flavour == "speculators"
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"more than an export \(thesis.tex\)"):
        export_drafter(drafter, target, out, "flat", force=True)
    with pytest.raises(CheckpointError, match="is a file"):
        export_drafter(drafter, target, out / "thesis.tex", "flat", force=True)
    assert (out / "thesis.tex").exists()
    assert check_export(out).flavour == "speculators"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_is_refused_leaves_nothing_behind(target, tmp_path):
    drafter = tiny_drafter("dspark", target, markov_head="rnn")
    with pytest.raises(CheckpointError, match="cannot be exported as speculators: vLLM"):
        export_drafter(drafter, target, tmp_path / "out", "speculators")
    assert not list(tmp_path.iterdir())


def reduced_drafter(kind, model):
    drafter = tiny_drafter(kind, model, draft_vocab_size=9).float()
    drafter.draft_ids = torch.tensor([0, 3, 5, 6, 11, 12, 20, 31, 39])
    return drafter


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_reduced_vocabulary_is_written_as_vllm_reads_it_and_read_back(tmp_path, kind, target):
    model = target
    drafter = reduced_drafter(kind, model)
    export_drafter(drafter, model, tmp_path / "out", "speculators")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (torch.arange(9) + tensors["d2t"]).tolist() == drafter.draft_ids.tolist()
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero().flatten().tolist() == drafter.draft_ids.tolist()
    assert tensors["t2d"].shape == (model.vocab_size,)
    assert torch.equal(tensors["lm_head.weight"], model.head[drafter.draft_ids])
    assert "draft_ids" not in tensors
    if kind == "dspark":
        assert tensors["markov_head.markov_w1.weight"].shape[0] == model.vocab_size
        assert tensors["markov_head.markov_w2.weight"].shape[0] == 9
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["draft_vocab_size"] == 9
    save_drafter(drafter, tmp_path / "own")
    check_export(tmp_path / "out", target=model, checkpoint=tmp_path / "own")
    again = load_drafter(tmp_path / "out", model)
    assert torch.equal(again.draft_ids, drafter.draft_ids)


def test_a_reduced_vocabulary_is_refused_where_no_engine_reads_it(tmp_path, target):
    model = target
    with pytest.raises(CheckpointError, match="SGLang, which reads flat folders, has no reduced draft vocabulary"):
        export_drafter(reduced_drafter("dflash", model), model, tmp_path / "out", "flat")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda t: t + 100, "leads outside of the vocabulary"),
        ("t2d", lambda t: ~t, "t2d marks other tokens than d2t leads to"),
        ("lm_head.weight", lambda t: t + 1, "lm_head.weight is not a copy"),
    ],
)
def test_a_reduced_vocabulary_that_contradicts_itself_is_refused(tmp_path, name, change, message, target):
    model = target
    export_drafter(reduced_drafter("dflash", model), model, tmp_path, "speculators")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, model)
