"""A target's folder or name that cannot be used: said in one line, by name, and at once."""

import contextlib
import io
import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.targets import UnsupportedTargetError, load_target
from blockdraft.targets.loading import target_shape

from tiny import tiny_target

HEAD = "lm_head.weight"
PROJECTION = "model.layers.3.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets") / "good"
    tiny_target(dtype=torch.float32).save(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "target")


def refusal(name):
    with pytest.raises(UnsupportedTargetError) as caught:
        load_target(name)
    message = str(caught.value)
    assert message.startswith(str(name))
    assert "\n" not in message
    return message


def change(folder, **tensors):
    """Write the weights anew with other tensors; None removes one."""
    found = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", [HEAD, PROJECTION])
def test_a_tensor_that_is_missing_is_not_drawn_by_chance(folder, name, capfd):
    change(folder, **{name: None})
    assert f"its weights lack {name}" in refusal(folder)
    assert capfd.readouterr().err == ""  # and transformers' table of them is not shown beside it


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [HEAD, "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_refused_by_name(folder, name, value):
    tensor = load_file(folder / "model.safetensors")[name].clone()
    tensor[39, 3] = value  # a row that a probe with other tokens would not read
    change(folder, **{name: tensor})
    assert f"{name} holds NaN or infinity" in refusal(folder)


def test_other_shapes_and_broken_files_are_one_line(folder):
    change(folder, **{PROJECTION: torch.zeros(3, 32)})
    assert "its weights cannot be read" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"x" * 99)
    assert "its weights cannot be read" in refusal(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "nor a model that can be read: RecursionError" in refusal(folder)


def test_a_tokenizer_and_a_template_that_fail(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] // 3 }}")
    target = load_target(folder)
    with pytest.raises(UnsupportedTargetError, match="its chat template fails: TypeError"):
        target.render([{"role": "user", "content": "w7"}])
    (folder / "tokenizer.json").write_text("{}")
    assert "its tokenizer cannot be read" in refusal(folder)


def test_a_tokenizer_of_a_larger_model_is_refused_when_it_is_used(folder):
    target = load_target(folder)
    target.tokenizer.add_tokens(["new"])
    with pytest.raises(UnsupportedTargetError, match="gives the token 40, and its embedding has 40 rows"):
        target.encode("w7 new")


@pytest.mark.parametrize(
    ("file", "auto"), [("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")]
)
def test_code_of_a_model_is_not_run_whatever_stdin_says(folder, tmp_path, monkeypatch, file, auto):
    values = json.loads((folder / file).read_text())
    values |= {"auto_map": {auto: "own.Own"}, "model_type" if file == "config.json" else "tokenizer_class": "Own"}
    (folder / file).write_text(json.dumps(values))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    with contextlib.suppress(UnsupportedTargetError):  # a tokenizer of a known kind can do without
        load_target(folder)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def asked(monkeypatch):
    """The hosts whose address was asked for; none is found."""
    hosts = []

    def lookup(host, *_, **__):
        hosts.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    return hosts


@pytest.mark.parametrize(
    ("name", "meant"),
    [("poket", "pocket"), ("Pocket", "pocket"), ("pocket2", "pocket"), ("SmolLM2", "smollm2"), ("smollm-2", "smollm2")],
)
@pytest.mark.parametrize("ask", [load_target, target_shape])
def test_a_misspelt_name_is_answered_without_the_network(asked, ask, name, meant):
    with pytest.raises(UnsupportedTargetError, match=rf"^{name}: no such target or folder; did you mean {meant}\?$"):
        ask(name)
    assert asked == []


def test_a_hub_that_is_out_of_reach_is_asked_once(asked):
    with pytest.raises(UnsupportedTargetError, match=r"someone/model: no such folder here, and \S+ cannot be reached"):
        load_target("someone/model")
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b/c", "-x-", "a..b"])
def test_what_can_be_no_name_at_all(asked, name):
    with pytest.raises(UnsupportedTargetError):
        load_target(name)
    assert asked == []


def test_the_attention_kernel_can_be_named_and_one_of_another_kind_also_decodes(tmp_path):
    tiny_target(dtype=torch.float32).save(tmp_path)
    for name in (None, "eager"):
        target = load_target(tmp_path, attn_implementation=name, device="cpu")
        assert target.model.config._attn_implementation == (name or "sdpa")
    target.model.config._attn_implementation = "flash_attention_2"  # as it is where its package is installed
    target.new_cache(20)
    assert target.decoder is None
    target.model.config._attn_implementation = "eager"
    target._decoder_key = None
    target.new_cache(20)
    assert target.decoder is not None
    with pytest.raises(UnsupportedTargetError, match="flashiest"):
        load_target(tmp_path, attn_implementation="flashiest", device="cpu")
