"""The build on a toy scale: resumable bit for bit, an ordinary folder at the end, mistakes named."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.pocket import build as command
from blockdraft.pocket import training
from blockdraft.pocket.corpus import heldout
from blockdraft.pocket.functions import parses
from blockdraft.pocket.quality import answers, exact_answers, perplexity
from blockdraft.pocket.training import Settings, Trainer, new_model

TINY = Settings(
    num_steps=6, num_rows=2, row_length=256, warmup_steps=2,
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
)  # fmt: skip


def metrics(folder):
    """All but the time."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def test_interrupted_equals_uninterrupted_bit_for_bit(tokenizer, tmp_path):
    whole = Trainer(TINY, tokenizer, tmp_path / "whole")
    whole.run()

    broken = Trainer(TINY, tokenizer, tmp_path / "broken")
    for step in range(5):  # steps 4 and 5 are lost: the checkpoint is older
        training.Progress(broken, math.inf).count(broken.take_step(), report=False)
        if step == 2:
            broken.save()
    torch.manual_seed(99)
    resumed = Trainer(TINY, tokenizer, tmp_path / "broken")
    assert resumed.step == 3
    resumed.run(checkpoint_every=2)

    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    ours, theirs = whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[i][key], theirs[i][key]) for i in ours for key in ours[i])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    assert [line["step"] for line in metrics(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]


def test_a_crash_while_saving_leaves_the_old_checkpoint(tokenizer, tmp_path, monkeypatch):
    trainer = Trainer(TINY, tokenizer, tmp_path)
    trainer.save()
    trainer.take_step()

    def crash(_, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        trainer.save()
    assert Trainer(TINY, tokenizer, tmp_path).step == 0


def test_other_settings_are_refused(tokenizer, tmp_path):
    Trainer(TINY, tokenizer, tmp_path).save()
    with pytest.raises(training.SettingsError, match=r"other settings \(num_steps\)"):
        Trainer(replace(TINY, num_steps=7), tokenizer, tmp_path)


def test_a_tiny_model_learns(tokenizer, tmp_path):
    trainer = Trainer(replace(TINY, num_steps=40, peak_rate=1e-2), tokenizer, tmp_path)
    trainer.run()
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert sum(losses[-5:]) / 5 < losses[0] - 2


def test_the_rate_warms_up_and_decays():
    settings = Settings(num_steps=100, warmup_steps=10, peak_rate=1.0, final_share=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    assert command.build(replace(TINY, num_steps=2), folder, num_prompts=6, max_new_tokens=8)
    return folder


def test_the_folder_is_an_ordinary_one(built):
    model = AutoModelForCausalLM.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    stored = load_file(built / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    names = {path.name for path in built.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "quality.json"} <= names


def test_the_quality_report(built):
    quality = json.loads((built / "quality.json").read_text())
    assert set(quality["perplexity"]) == {"math", "code", "chat"}
    assert all(1 < value < 3000 for value in quality["perplexity"].values())
    assert set(quality["math_exact_answers_by_steps"]) <= {"1", "2", "3"}
    assert 0 <= quality["code_that_parses"] <= 1


def test_the_shipped_shape_is_small_enough(tokenizer):
    model = new_model(Settings(), tokenizer)
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) < 0.99 * command.MAX_BYTES


def test_batched_answers_equal_answers_one_by_one(tokenizer):
    model = new_model(TINY, tokenizer).eval()
    samples = heldout("chat", 4)
    together = answers(model, tokenizer, samples, max_new_tokens=6)
    assert together == [answers(model, tokenizer, [each], max_new_tokens=6)[0] for each in samples]


def test_perplexity_of_a_clueless_model_is_about_the_vocabulary(tokenizer):
    model = new_model(TINY, tokenizer).eval()
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    assert perplexity(model, tokenizer, heldout("math", 3)) == pytest.approx(tokenizer.get_vocab_size(), rel=1e-4)


def test_exact_answers_are_counted_by_steps():
    samples = heldout("math", 20)
    right = exact_answers(samples, [each.response for each in samples])
    assert set(right.values()) == {1.0}
    assert set(exact_answers(samples, ["I do not know"] * 20).values()) == {0.0}


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ("```python\ndef f(x):\n    return x\n```", True),
        ("```python\ndef f(x:\n    return x\n```", False),
        ("```python\nx = 1\n```", False),
        ("def f(x):\n    return x", False),
        ("```python\ndef f(x):\n", False),
    ],
)
def test_code_that_parses(response, verdict):
    assert parses(response) is verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: expected a whole number of at least 1, got '0'"),
        (["--steps", "many"], "got 'many'"),
        (["--minutes", "-1"], "argument --minutes: expected a number of minutes above 0, got '-1'"),
        (["--minutes", "nan"], "got 'nan'"),
        (["--threads", "0"], "argument --threads"),
        (["--depth", "3"], "unrecognized arguments: --depth 3"),
    ],
)
def test_bad_arguments_give_one_line_and_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


def test_a_file_in_place_of_the_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path / "file")])
    assert stopped.value.code == 2
    assert "is a file; give a folder" in capsys.readouterr().err


def test_minutes_pause_the_build_and_the_next_call_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "Settings", lambda: TINY)
    monkeypatch.setattr(command, "measure", lambda *_: {"perplexity": {}})
    arguments = ["--out", str(tmp_path), "--steps", "4", "--threads", "1"]
    assert command.main([*arguments, "--minutes", "1e-9"]) == command.PAUSED
    assert "the same command goes on" in capsys.readouterr().err
    assert command.main(arguments) == 0
    assert "perplexity" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path), "--steps", "5", "--threads", "1"])
    assert stopped.value.code == 2
    assert "other settings (num_steps)" in capsys.readouterr().err
