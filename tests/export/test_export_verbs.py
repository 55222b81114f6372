"""``blockdraft export`` and ``export-target`` as a user types them."""

import json
import sys

import pytest
import torch

from blockdraft.cli import main
from blockdraft.drafters import load_drafter, save_drafter
from blockdraft.export import export_target
from blockdraft.targets import fingerprint, load_target

from tiny import tiny_drafter, tiny_target


@pytest.fixture
def folders(tmp_path):
    target = tiny_target(dtype=torch.float32)
    target.save(tmp_path / "target")
    save_drafter(tiny_drafter("dspark", target), tmp_path / "checkpoint")
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit code, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["blockdraft", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("flavour", ["flat", "speculators"])
def test_export_and_check(folders, run, flavour):
    checkpoint, out, target = (folders / name for name in ("checkpoint", "out", "target"))
    code, text, _ = run("export", checkpoint, "--format", flavour, "--out", out, "--target", target)
    assert code == 0
    assert f"out: {flavour}, " in text
    assert "checked" in text
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    code, text, _ = run("export", "--check", out)
    assert code == 0
    assert "logits were compared" in text
    code, text, _ = run("export", "--check", out, checkpoint, "--target", target)
    assert code == 0
    assert "bit for bit" in text
    code, text, _ = run("generate", "--target", target, "--drafter", out, "--max-new-tokens", 8, "w7 w8")
    assert code == 0
    assert "per verification" in text


def test_an_export_is_exported_again_into_the_other_format(folders, run):
    target = folders / "target"
    first = ("export", folders / "checkpoint", "--format", "flat", "--out", folders / "flat", "--target", target)
    assert run(*first)[0] == 0
    again = ("export", folders / "flat", "--format", "speculators", "--out", folders / "other", "--target", target)
    assert run(*again)[0] == 0
    assert run("export", "--check", folders / "other", folders / "checkpoint", "--target", target)[0] == 0


def test_the_verifier_and_the_precision_are_written(folders, run):
    arguments = ["--format", "speculators", "--out", folders / "out", "--target", folders / "target"]
    assert run("export", folders / "checkpoint", *arguments, "--verifier", "hub/x", "--dtype", "bfloat16")[0] == 0
    values = json.loads((folders / "out" / "config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == "hub/x"
    assert values["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "flat", "--out", "out", "--target", "target"], "say which CHECKPOINT"),
        (["checkpoint", "--format", "onnx", "--out", "out", "--target", "target"], "'onnx' is not one of flat"),
        (["checkpoint", "--format", "flat", "--target", "target"], "say which CHECKPOINT and --out"),
        (["checkpoint", "--format", "flat", "--out", "out"], "does not tell its target"),
        (["checkpoint", "--format", "flat", "--out", "target", "--target", "target"], "is not empty"),
        (["nowhere", "--format", "flat", "--out", "out", "--target", "target"], "no config.json"),
        (["checkpoint", "--format", "flat", "--out", "out", "--target", "target", "--dtype", "int8"], "int8"),
        (["--check", "checkpoint"], "a checkpoint of ours"),
        (["--check", "nowhere"], "no config.json"),
        (["--check", "checkpoint", "--out", "out"], "nothing is written by a check"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(folders, run, monkeypatch, arguments, message):
    monkeypatch.chdir(folders)
    arguments = ["./target" if each == "target" else each for each in arguments]
    code, out, err = run("export", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


def test_an_embedded_target_becomes_an_ordinary_folder(tmp_path, run):
    code, text, _ = run("export-target", "pocket", "--out", tmp_path / "pocket")
    assert code == 0
    assert "of pocket" in text
    pocket, again = load_target("pocket"), load_target(tmp_path / "pocket")
    assert fingerprint(again) == fingerprint(pocket)
    assert (again.mask_token_id, again.eos_ids) == (pocket.mask_token_id, pocket.eos_ids)
    question = [{"role": "user", "content": "What is a river?"}]
    assert again.render(question) == pocket.render(question)
    config = json.loads((tmp_path / "pocket" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    code, _, err = run("export-target", "pocket", "--out", tmp_path / "pocket")
    assert code == 2
    assert "not empty" in err
    assert run("export-target", "pocket", "--out", tmp_path / "pocket", "--force", "--dtype", "bfloat16")[0] == 0
    assert fingerprint(load_target(tmp_path / "pocket")) == fingerprint(pocket)


def test_smollm2s_mask_token_stays_the_one_its_drafters_were_trained_with(tmp_path):
    """It comes from a GGUF file without a mask token; ours is a row of its embedding that chats never use."""
    smollm2 = load_target("smollm2")
    export_target(smollm2, tmp_path / "smollm2")
    again = load_target(tmp_path / "smollm2")
    assert 0 <= again.mask_token_id == smollm2.mask_token_id < smollm2.vocab_size
    assert len(again.tokenizer) == len(smollm2.tokenizer) <= smollm2.vocab_size
    assert "quantization_config" not in json.loads((tmp_path / "smollm2" / "config.json").read_text())
    question = [{"role": "user", "content": "Hi"}]
    assert again.render(question) == smollm2.render(question)
    assert torch.equal(again.head, smollm2.head)
    save_drafter(tiny := tiny_drafter("dflash", smollm2), tmp_path / "drafter")
    assert load_drafter(tmp_path / "drafter", again).config == tiny.config
