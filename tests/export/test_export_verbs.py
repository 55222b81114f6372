"""``blockdraft export`` and ``export-target`` as a user types them."""

import json
import shlex
import sys

import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file

from blockdraft.cli import main
from blockdraft.drafters import load_drafter, save_drafter
from blockdraft.export import export_target
from blockdraft.export.folders import readable_config
from blockdraft.targets import DTYPES, fingerprint, load_target

from runs import make_data, target, train
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
    assert f"vllm serve {target}" in text
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


def test_it_says_what_engines_do_with_it(folders, run):
    """Defaults throw the gain of block verification away; nobody should find that out in production."""
    target = folders / "target"
    save_drafter(tiny_drafter("dflash", load_target(target)), folders / "dflash")
    arguments = ("--format", "flat", "--out", folders / "out", "--target", target, "--force")
    text = run("export", folders / "dflash", *arguments)[1]
    assert '"rejection_sample_method": "block", "draft_sample_method": "probabilistic"' in text
    assert "by default vLLM drafts greedily and verifies token by token" in text
    assert 'the V1 runner of CPU builds accepts "block", ignores it, and drafts greedily' in text
    assert "SGLang 0.5.23: greedy drafts, token verification" in text
    assert "takes the argmax of a DFlash drafter at every temperature" in text
    assert "transformers 5.22: sampled drafts, token verification" in text
    assert "send temperature, top_p and top_k" in text
    text = run("export", folders / "checkpoint", *arguments)[1]
    assert "the V1 runner of CPU builds refuses DSpark" in text
    assert "SGLang 0.5.23: sampled drafts, block verification" in text
    assert "--speculative-use-block-verification" in text
    assert "transformers 5.22 does not serve this folder" in text


def test_all_of_it_as_json(folders, run):
    out, target = folders / "out", folders / "target"
    arguments = ("--format", "speculators", "--out", out, "--target", target, "--verifier", "hub/it's", "--json")
    code, text, _ = run("export", folders / "checkpoint", *arguments)
    values = json.loads(text)
    assert code == 0
    assert (values["export"]["folder"], values["export"]["dtype"]) == (str(out), "float32")
    assert values["export"]["checked"][-1].endswith("bit for bit")
    vllm, sglang, _ = values["engines"]
    assert (vllm["served"], vllm["drafts"], vllm["verification"]) == (True, "sampled", "block")
    words = shlex.split(vllm["command"].replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", "hub/it's"]
    assert json.loads(words[-1])["model"] == str(out)
    assert (sglang["served"], sglang["command"]) == (False, None)
    assert "does not read this format" in sglang["notes"][0]
    code, text, _ = run("export", "--check", out, folders / "checkpoint", "--target", target, "--json")
    assert json.loads(text)["format"] == "speculators"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_written_as_they_are_stored(folders, run, dtype):
    target = load_target(folders / "target")
    save_drafter(tiny_drafter("dspark", target).to(DTYPES[dtype]), folders / "stored")
    arguments = ("--format", "flat", "--target", folders / "target")
    assert run("export", folders / "stored", *arguments, "--out", folders / "out")[0] == 0
    stored, written = (load_file(folders / name / "model.safetensors") for name in ("stored", "out"))
    assert {tensor.dtype for tensor in written.values()} == {DTYPES[dtype]}
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
    assert run("export", folders / "out", *arguments, "--out", folders / "again")[0] == 0
    again = load_file(folders / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in written.items())


def test_a_runs_folder_is_exported_by_its_best_checkpoint(tmp_path, run):
    train(make_data(tmp_path / "data"), tmp_path / "run", "optimizer.max_steps=2", "drafter.kind=dspark")
    target().save(tmp_path / "target")
    arguments = ("--format", "flat", "--out", tmp_path / "out", "--target", tmp_path / "target")
    assert run("export", tmp_path / "run", *arguments)[0] == 0
    code, text, _ = run("export", "--check", tmp_path / "out", tmp_path / "run" / "best", *arguments[-2:])
    assert code == 0
    assert "bit for bit" in text
    (tmp_path / "run" / "run.json").unlink()
    code, _, err = run("export", tmp_path / "run", *arguments, "--force")
    assert code == 2
    assert "has checkpoints but no run.json" in err


def test_a_drafter_of_another_target_is_not_exported(folders, run):
    tiny_target(dtype=torch.float32, seed=4).save(folders / "other")
    arguments = ("--format", "flat", "--out", folders / "out", "--target", folders / "other")
    code, _, err = run("export", folders / "checkpoint", *arguments)
    assert code == 2
    assert "the same shapes but other weights" in err
    assert not (folders / "out").exists()


def test_the_verifier_and_the_precision_are_written(folders, run):
    arguments = ["--format", "speculators", "--out", folders / "out", "--target", folders / "target"]
    assert run("export", folders / "checkpoint", *arguments, "--verifier", "hub/x", "--dtype", "bfloat16")[0] == 0
    values = json.loads((folders / "out" / "config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == "hub/x"
    assert values["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "flat", "--out", "out", "--target", "target"], "say which DRAFTER"),
        (["checkpoint", "--format", "onnx", "--out", "out", "--target", "target"], "'onnx' is not one of flat"),
        (
            ["checkpoint", "--format", "flat", "--target", "target"],
            "DRAFTER to write and where with --out",
        ),
        (["checkpoint", "--format", "flat", "--out", "out"], "does not say which target it is for"),
        (["checkpoint", "--format", "flat", "--out", "target", "--target", "target"], "is not empty"),
        (["nowhere", "--format", "flat", "--out", "out", "--target", "target"], "nowhere: no such folder"),
        (["checkpont", "--format", "flat", "--out", "out", "--target", "target"], "did you mean checkpoint?"),
        (["target", "--format", "flat", "--out", "out", "--target", "target"], "known: DFlashDraftModel"),
        (["checkpoint", "--format", "flat", "--out", "out", "--target", "target", "--dtype", "int8"], "int8"),
        (["--check", "checkpoint"], "a checkpoint of ours"),
        (["--check", "nowhere"], "no config.json"),
        (["--check", "checkpoint", "--out", "out"], "a check writes nothing"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(folders, run, monkeypatch, arguments, message):
    monkeypatch.chdir(folders)
    arguments = ["./target" if each == "target" else each for each in arguments]
    code, out, err = run("export", *arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err + out


def test_a_built_in_target_becomes_an_ordinary_folder(tmp_path, run):
    code, text, _ = run("export-target", "pocket", "--out", tmp_path / "pocket")
    assert code == 0
    assert "of pocket" in text
    pocket, again = load_target("pocket"), load_target(tmp_path / "pocket")
    assert fingerprint(again) == fingerprint(pocket)
    assert (again.mask_token_id, again.eos_ids) == (pocket.mask_token_id, pocket.eos_ids)
    question = [{"role": "user", "content": "What is a river?"}]
    assert again.render(question) == pocket.render(question)
    config, tokenizer = (
        json.loads((tmp_path / "pocket" / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == ["<|im_start|>"]
    assert not {"extra_special_tokens", "backend", "is_local", "local_files_only"} & tokenizer.keys()
    assert again.tokenizer.all_special_tokens == pocket.tokenizer.all_special_tokens
    assert metadata_load(tmp_path / "pocket" / "README.md")["license"] == "apache-2.0"
    code, _, err = run("export-target", "pocket", "--out", tmp_path / "pocket")
    assert code == 2
    assert "not empty" in err
    assert run("export-target", "pocket", "--out", tmp_path / "pocket", "--force", "--dtype", "bfloat16")[0] == 0
    assert fingerprint(load_target(tmp_path / "pocket")) == fingerprint(pocket)


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
    ],
)
def test_rotary_positions_stand_where_transformers_4_looks(rope, older):
    values = {"model_type": "llama", "rope_parameters": rope}
    assert readable_config(values) == values | older
    assert readable_config({"model_type": "gpt2"}) == {"model_type": "gpt2"}


def test_targets_with_scaled_rotary_positions_are_still_read_as_they_were(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    target = tiny_target("llama", dtype=torch.float32, rope_parameters=rope)
    export_target(target, tmp_path / "out")
    again = load_target(tmp_path / "out")
    assert again.config.rope_parameters == target.config.rope_parameters
    tokens = torch.arange(5, 35)[None]
    assert torch.equal(again.model(tokens).logits, target.model(tokens).logits)


@pytest.mark.slow
def test_smollm2s_mask_token_stays_the_one_its_drafters_were_trained_with(tmp_path):
    """It comes from a GGUF file without a mask token; ours is a row of its embedding that chats never use."""
    smollm2 = load_target("smollm2")
    export_target(smollm2, tmp_path / "smollm2")
    again = load_target(tmp_path / "smollm2")
    assert 0 <= again.mask_token_id == smollm2.mask_token_id < smollm2.vocab_size
    assert len(again.tokenizer) == len(smollm2.tokenizer) <= smollm2.vocab_size
    config = json.loads((tmp_path / "smollm2" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_theta"] == 100_000  # transformers 4 would take 10,000
    question = [{"role": "user", "content": "Hi"}]
    assert again.render(question) == smollm2.render(question)
    assert torch.equal(again.head, smollm2.head)
    save_drafter(tiny := tiny_drafter("dflash", smollm2), tmp_path / "drafter")
    assert load_drafter(tmp_path / "drafter", again).config == tiny.config
