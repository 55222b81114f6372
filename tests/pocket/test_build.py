"""The build on a toy scale: resumable bit for bit, an ordinary folder at the end, mistakes named."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.pocket.build import __main__ as command
from blockdraft.pocket.build import training
from blockdraft.pocket.build.__main__ import SAMPLES, answers, exact_answers, perplexity, prompts_of
from blockdraft.pocket.build.training import PocketTrainer, Settings, SettingsError, Shape, Stage, grow, new_model
from blockdraft.pocket.corpus import heldout
from blockdraft.pocket.corpus.functions import parses

SHAPE = Shape(hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16)
TINY = Settings(stages=(Stage(1, 4), Stage(2, 2)), num_rows=2, row_length=256, warmup_steps=2, shape=SHAPE)


def metrics(folder):
    """All but the time."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize("saved_after", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, 5))])
def test_interrupted_equals_uninterrupted_bit_for_bit(tokenizer, tmp_path, saved_after):
    """Before, at and after the step at which the model grows."""
    whole = PocketTrainer(TINY, tokenizer, tmp_path / "whole")
    whole.run()

    broken = PocketTrainer(TINY, tokenizer, tmp_path / "broken")
    progress = training.BuildProgress(broken, math.inf)
    for step in range(1, 6):  # what comes after the checkpoint is lost
        progress.count(broken.take_step(), report=False)
        if step == saved_after:
            broken.save()
    torch.manual_seed(99)
    resumed = PocketTrainer(TINY, tokenizer, tmp_path / "broken")
    assert resumed.step == saved_after
    resumed.run(checkpoint_every=2)

    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    ours, theirs = whole._moments(), resumed._moments()
    assert ours.keys() == theirs.keys() == dict(whole.model.named_parameters()).keys()
    assert all(torch.equal(ours[name][key], theirs[name][key]) for name in ours for key in ours[name])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    assert [(line["step"], line["num_layers"]) for line in metrics(tmp_path / "whole")] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2),
    ]  # fmt: skip


def test_a_grown_model_is_copies_of_the_shallow_one(tokenizer):
    shallow = new_model(SHAPE, 2, tokenizer, seed=1)
    deep = grow(shallow, 6)
    assert deep.config.num_hidden_layers == len(deep.config.layer_types) == len(deep.model.layers) == 6
    for index, layer in enumerate(deep.model.layers):
        source = shallow.model.layers[index % 2].state_dict()
        assert all(torch.equal(value, source[name]) for name, value in layer.state_dict().items())
    assert torch.equal(deep.model.embed_tokens.weight, shallow.model.embed_tokens.weight)
    assert deep.lm_head.weight is deep.model.embed_tokens.weight
    tokens = torch.arange(12)[None]
    hidden = shallow.model.embed_tokens(tokens)
    turned = shallow.model.rotary_emb(hidden, tokens)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    for index in range(6):
        hidden = shallow.model.layers[index % 2](hidden, attention_mask=causal, position_embeddings=turned)
    expected = shallow.lm_head(shallow.model.norm(hidden))
    torch.testing.assert_close(deep(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_moments_grow_with_the_layers(tokenizer, tmp_path):
    trainer = PocketTrainer(TINY, tokenizer, tmp_path)
    for _ in range(4):
        trainer.take_step()
    before = trainer._moments()
    trainer._grow(2)
    after = trainer._moments()
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert torch.equal(after[name]["momentum"], before["model.layers.0.mlp.up_proj.weight"]["momentum"])
        norm = f"model.layers.{layer}.input_layernorm.weight"
        assert torch.equal(after[norm]["exp_avg"], before["model.layers.0.input_layernorm.weight"]["exp_avg"])
    assert (
        after["model.layers.0.mlp.up_proj.weight"]["momentum"]
        is not after["model.layers.1.mlp.up_proj.weight"]["momentum"]
    )


@pytest.mark.parametrize("stages", [(), (Stage(6, 1), Stage(8, 1)), (Stage(6, 1), Stage(3, 1))])
def test_stages_that_do_not_grow_by_whole_copies_are_refused(stages):
    with pytest.raises(SettingsError, match="must be a multiple of the one before"):
        Settings(stages=stages)


def test_a_crash_while_saving_leaves_the_old_checkpoint(tokenizer, tmp_path, monkeypatch):
    trainer = PocketTrainer(TINY, tokenizer, tmp_path)
    trainer.save()
    trainer.take_step()

    def crash(_, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        trainer.save()
    assert PocketTrainer(TINY, tokenizer, tmp_path).step == 0


def test_other_settings_are_refused(tokenizer, tmp_path):
    PocketTrainer(TINY, tokenizer, tmp_path).save()
    with pytest.raises(SettingsError, match=r"other settings \(num_rows\)"):
        PocketTrainer(replace(TINY, num_rows=7), tokenizer, tmp_path)


def test_a_tiny_model_learns(tokenizer, tmp_path):
    stages = (Stage(1, 20), Stage(2, 20))
    trainer = PocketTrainer(replace(TINY, stages=stages, muon_rate=2e-2, adamw_rate=1e-2), tokenizer, tmp_path)
    trainer.run()
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert sum(losses[-5:]) / 5 < losses[0] - 2


def test_the_rate_warms_up_in_each_stage_and_decays_at_the_end():
    settings = Settings(stages=(Stage(1, 40), Stage(2, 60)), warmup_steps=10, decay_share=0.4)
    shares = [settings.rate_share(step) for step in range(100)]
    assert shares[0] == shares[40] == pytest.approx(0.1)
    assert set(shares[9:40]) == {1.0} == set(shares[49:61])
    assert shares[60:] == sorted(shares[60:], reverse=True)
    assert shares[99] == pytest.approx(1 / 40)
    assert [settings.stage_of(step)[0].num_layers for step in (0, 39, 40, 99)] == [1, 1, 2, 2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    assert command.build(TINY, folder, num_prompts=3, max_new_tokens=4)
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
    assert 0 <= quality["code_that_passes_its_tests"] <= 1
    assert set(quality["chat_right_by_kind"]) == {"definition", "definitions", "comparison", "fact", "unknown"}
    assert list(quality["samples"]) == list(SAMPLES)


def test_the_shipped_shape_is_small_enough(tokenizer):
    settings = Settings()
    model = new_model(settings.shape, settings.stages[-1].num_layers, tokenizer, settings.seed)
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) < 0.99 * command.MAX_BYTES


def test_batched_answers_equal_answers_one_by_one(tokenizer):
    model = new_model(SHAPE, 2, tokenizer, seed=0).eval()
    samples = prompts_of(heldout("chat", 4))
    together = answers(model, tokenizer, samples, max_new_tokens=6)
    assert together == [answers(model, tokenizer, [each], max_new_tokens=6)[0] for each in samples]


def test_perplexity_of_a_clueless_model_is_about_the_vocabulary(tokenizer):
    model = new_model(SHAPE, 2, tokenizer, seed=0).eval()
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
        (["--stages", "6x0"], "argument --stages: expected layers x steps such as 6x2500,24x3000, got '6x0'"),
        (["--stages", "many"], "got 'many'"),
        (["--stages", "6x1,8x1"], "each stage's depth must be a multiple of the one before, got [6, 8]"),
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


def test_minutes_pause_the_build_and_the_next_call_goes_on(tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "Settings", lambda: TINY)
    monkeypatch.setattr(command, "train_tokenizer", lambda **_: tokenizer)  # three take seconds
    monkeypatch.setattr(command, "measure_quality", lambda *_: {"perplexity": {}})
    arguments = ["--out", str(tmp_path), "--stages", "1x2,2x2", "--threads", "1"]
    assert command.main([*arguments, "--minutes", "1e-9"]) == command.PAUSED
    assert "the same command resumes" in capsys.readouterr().err
    assert command.main(arguments) == 0
    assert "perplexity" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path), "--stages", "1x2,2x3", "--threads", "1"])
    assert stopped.value.code == 2
    assert "other settings (stages)" in capsys.readouterr().err
