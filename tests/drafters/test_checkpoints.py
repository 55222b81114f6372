"""Drafters on disk and on the Hub: found by every name, loaded exactly and in the target's dtype, refused if wrong."""

import json
import socket

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from blockdraft.drafters import SHIPPED, CheckpointError, find_drafter, load_drafter, save_drafter
from blockdraft.drafters.checkpoint import stored_dtype
from blockdraft.targets import fingerprint

from tiny import tiny_drafter, tiny_target

KINDS = ["dflash", "dspark"]


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def folder(target, tmp_path):
    save_drafter(tiny_drafter("dflash", target), tmp_path / "drafter")
    return tmp_path / "drafter"


def change(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class TestLoading:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("head", ["vanilla", "rnn"])
    def test_a_round_trip_is_exact(self, kind, head, tmp_path):
        target = tiny_target()
        changes = {"markov_head": head, "confidence_head": True} if kind == "dspark" else {}
        drafter = tiny_drafter(kind, target, **changes)
        save_drafter(drafter, tmp_path)
        loaded = load_drafter(tmp_path, target)
        assert loaded.config == drafter.config
        assert not loaded.training
        assert all(parameter.requires_grad for parameter in loaded.parameters())
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_its_dtype_is_the_targets_unless_given(self, folder, dtype):
        target = tiny_target(dtype=dtype)
        loaded = load_drafter(folder, target)
        assert {tensor.dtype for tensor in loaded.state_dict().values()} == {dtype}
        assert {tensor.device for tensor in loaded.state_dict().values()} == {target.device}
        exact = load_drafter(folder, target, dtype=torch.float32)
        assert {tensor.dtype for tensor in exact.state_dict().values()} == {torch.float32}
        stored = load_file(folder / "model.safetensors")
        for name, tensor in stored.items():
            assert torch.equal(exact.state_dict()[name], tensor)
            assert torch.equal(loaded.state_dict()[name], tensor.to(dtype))

    def test_it_drafts_as_before(self, folder, target):
        drafter, loaded = tiny_drafter("dflash", target), load_drafter(folder, target)
        features = target.forward(torch.tensor([[7, 8, 9]]), layers=drafter.config.target_layers).features
        proposals = []
        for each in (drafter, loaded):
            cache = each.new_cache(20)
            each.extend(cache, features)
            proposals.append(each.propose(cache, 11, target, 1.0, torch.Generator().manual_seed(0)))
        assert torch.equal(proposals[0].probs, proposals[1].probs)

    def test_it_does_not_depend_on_the_file_any_more(self, folder, target):
        loaded = load_drafter(folder, target)
        before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
        (folder / "model.safetensors").write_bytes(b"")
        assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())

    def test_the_dtype_on_disk_is_read_without_the_weights(self, target, tmp_path):
        for dtype in (torch.float32, torch.bfloat16):
            save_drafter(tiny_drafter("dspark", target).to(dtype), tmp_path)
            assert stored_dtype(tmp_path) is dtype

    def test_tensor_names_are_those_of_the_published_checkpoints(self):
        drafter = tiny_drafter("dspark", tiny_target(), num_layers=1, markov_head="gated", confidence_head=True)
        assert set(drafter.state_dict()) == {
            "fc.weight", "hidden_norm.weight", "norm.weight",
            "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
            *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
            *(f"layers.0.self_attn.{x}_norm.weight" for x in "qk"),
            *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
            "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
            "markov_head.gate_proj.weight", "markov_head.gate_proj.bias",
            "confidence_head.proj.weight", "confidence_head.proj.bias",
        }  # fmt: skip


class TestFinding:
    def test_a_runs_folder_is_its_best_checkpoint_else_its_last(self, target, tmp_path):
        run = tmp_path / "run"
        for seed, name in enumerate(("best", "checkpoint")):
            save_drafter(tiny_drafter("dflash", target, seed=seed), run / name)
        with pytest.raises(CheckpointError, match=r"has checkpoints but no run\.json.* name one of them: .*/run/best"):
            find_drafter(run)
        (run / "run.json").write_text("{}")
        assert find_drafter(run) == find_drafter(f"{run}@best") == run / "best"
        assert find_drafter(f"{run}@last") == run / "checkpoint"
        with pytest.raises(CheckpointError, match=r"run@first: no such folder"):
            find_drafter(f"{run}@first")
        best = load_file(run / "best" / "model.safetensors")
        assert torch.equal(load_drafter(run, target).fc.weight, best["fc.weight"])
        (run / "best" / "config.json").unlink()
        assert find_drafter(run) == find_drafter(f"{run}@best") == run / "checkpoint"
        (run / "checkpoint" / "config.json").unlink()
        for which in ("best", "last"):
            with pytest.raises(CheckpointError, match="has no checkpoint yet"):
                find_drafter(f"{run}@{which}")

    def test_shipped_drafters_have_names(self, folder, target, monkeypatch):
        monkeypatch.setitem(SHIPPED, "tiny-dflash", folder)
        assert load_drafter("tiny-dflash", target).config.kind == "dflash"
        with pytest.raises(CheckpointError, match=r"tiny-dflush: no such folder; did you mean tiny-dflash\?"):
            find_drafter("tiny-dflush")

    def test_an_id_is_fetched_from_the_hub(self, folder, target, tmp_path, monkeypatch):
        asked = []

        def stand_in(repository, *, allow_patterns):
            asked.append((repository, allow_patterns))
            return str(folder)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
        monkeypatch.setattr("blockdraft.drafters.checkpoint.refuse_unreachable_hub", lambda *_: None)
        loaded = load_drafter("someone/a-drafter.v1", target)
        stored = load_file(folder / "model.safetensors")
        assert torch.equal(loaded.fc.weight, stored["fc.weight"])
        (fetched,) = asked
        assert fetched[0] == "someone/a-drafter.v1"
        assert set(fetched[1]) == {"config.json", "model.safetensors.index.json", "*.safetensors"}

    def test_a_hub_that_does_not_answer_is_one_line(self, tmp_path, monkeypatch):
        def stand_in(*_, **__):
            raise LocalEntryNotFoundError("no connection\nand a long explanation")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
        monkeypatch.setattr("blockdraft.drafters.checkpoint.refuse_unreachable_hub", lambda *_: None)
        with pytest.raises(CheckpointError) as caught:
            find_drafter("someone/drafter")
        assert str(caught.value).startswith("someone/drafter: no such folder here, and it cannot be had from the Hub")
        assert str(caught.value).endswith("no connection")

    def test_a_hub_that_is_out_of_reach_is_asked_once(self, tmp_path, monkeypatch):
        hosts = []

        def lookup(host, *_, **__):
            hosts.append(host)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        monkeypatch.setattr("urllib.request.getproxies", dict)
        with pytest.raises(CheckpointError, match=r"someone/drafter: no such folder here, and \S+ cannot be reached"):
            find_drafter("someone/drafter")
        assert len(hosts) == 1

    def test_paths_are_never_asked_of_the_hub(self, folder, monkeypatch):
        def stand_in(*_, **__):
            raise AssertionError("asked the Hub")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
        monkeypatch.chdir(folder.parent)
        for name in ("./runs/x", "runs/x/best", "/nowhere/x", "nowhere", "~/nowhere", "drafter/best", "../x/y"):
            with pytest.raises(CheckpointError, match="no such folder"):
                find_drafter(name)
        with pytest.raises(CheckpointError, match=r"drafte: no such folder; did you mean drafter\?"):
            find_drafter("drafte")
        with pytest.raises(CheckpointError, match=r"config\.json is a file"):
            find_drafter(folder / "config.json")


class TestRefusing:
    def test_a_folder_without_a_drafter(self, target, tmp_path):
        with pytest.raises(CheckpointError, match=r"no config\.json; a drafter's folder holds"):
            load_drafter(tmp_path, target)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"num_layers": 3}, r"missing layers\.2"),
            ({"num_layers": 1}, r"unexpected layers\.1"),
            ({"intermediate_size": 40}, "is .*, not"),
            ({"intermediate_size": 2**22}, "is .*, not"),
            ({"colour": 1}, r"drafter/config\.json: unknown key 'colour'"),
            ({"slot_layout": "sideways"}, r"drafter/config\.json: slot_layout is 'sideways'"),
            ({"vocab_size": 41}, "vocabulary is 41; that of tiny qwen3 is 40"),
            ({"hidden_size": 64}, "width is 64"),
            ({"num_target_layers": 7}, "number of layers is 7"),
        ],
    )
    def test_what_does_not_fit(self, folder, target, values, message):
        change(folder, **values)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(folder, target)

    @pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 100_000, "\udcff"])
    def test_a_configuration_that_is_none(self, folder, target, content):
        (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError, match=r"drafter/config\.json (is damaged|holds no keys)"):
            load_drafter(folder, target)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_weights_that_are_no_numbers(self, folder, target, value):
        tensors = load_file(folder / "model.safetensors")
        tensors["layers.1.mlp.up_proj.weight"][3, 4] = value
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
            load_drafter(folder, target)

    def test_weights_that_do_not_fit_the_dtype_or_have_another_kind(self, folder, target):
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"norm.weight": tensors["norm.weight"] * 1e6}, folder / "model.safetensors")
        load_drafter(folder, target)
        with pytest.raises(CheckpointError, match=r"norm\.weight holds values beyond float16"):
            load_drafter(folder, target, dtype=torch.float16)
        save_file(tensors | {"norm.weight": torch.ones(32, dtype=torch.int8)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"norm\.weight is torch\.int8, not floating-point"):
            load_drafter(folder, target)

    def test_an_index_that_leads_elsewhere(self, folder, target):
        (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
        index = {"weight_map": {"fc.weight": "../model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="not a file of this folder"):
            load_drafter(folder, target)


class TestAnotherTarget:
    """Same shapes, other weights: garbage proposals, and no error from any tensor."""

    def test_is_refused_with_both_fingerprints(self, folder, target):
        other = tiny_target(dtype=torch.float32, seed=5)
        with pytest.raises(CheckpointError) as caught:
            load_drafter(folder, other)
        assert fingerprint(target) in str(caught.value)
        assert fingerprint(other) in str(caught.value)

    def test_is_accepted_where_nothing_was_recorded_or_if_asked_for(self, folder):
        other = tiny_target(dtype=torch.float32, seed=5)
        assert load_drafter(folder, other, same_target=False).config.target_fingerprint != fingerprint(other)
        change(folder, target_fingerprint=None)
        assert load_drafter(folder, other).config.target_fingerprint is None

    def test_the_same_target_in_another_dtype_is_the_same(self, folder):
        for dtype in (torch.bfloat16, torch.float64, torch.float16):
            load_drafter(folder, tiny_target(dtype=dtype))
