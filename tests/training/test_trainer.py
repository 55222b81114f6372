"""The run: equivalent settings share a trajectory, nothing is lost, what is wrong is said."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file

from blockdraft.data import DataError
from blockdraft.drafters import load_drafter
from blockdraft.files import FolderInUseError, exclusive
from blockdraft.recipes import RecipeError, load_recipe, merge, parse, shipped_names
from blockdraft.recipes.schema import OptimizerSection
from blockdraft.runs import Run, RunError
from blockdraft.targets import Sampling
from blockdraft.training import StoppedError, Trainer, TrainingError
from blockdraft.training.step import learning_rate_at

from killing import killed
from runs import make_data, recipe, target, train, weights
from tiny import tiny_target

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "d")


def close(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_steps(run, other):
    """Losses and gradient norms agree: AdamW hides a factor that was lost, and weights alone would not show it."""
    steps = [[line for line in lines(each) if line["step"]] for each in (run, other)]
    assert steps[0]
    for ours, theirs in zip(*steps, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3), (ours["step"], name)


@pytest.mark.slow
def test_a_run_learns_and_leaves_what_a_user_needs(tmp_path, data):
    trainer = train(data, tmp_path, "optimizer.num_train_epochs=40", "objective.name=kl")
    found = lines(tmp_path)
    assert found[0]["step"] == 0
    assert found[-1]["step"] == trainer.num_steps == 200
    assert found[-1]["heldout_length_block"] > found[0]["heldout_length_block"] + 0.3
    assert found[-1]["loss"] < found[1]["loss"] - 0.3
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["recipe"]["objective"]["name"] == "kl"
    assert run["provenance"]["torch"] == torch.__version__
    assert load_recipe(tmp_path / "recipe.yaml") == trainer.recipe
    drafter = load_drafter(tmp_path / "checkpoint", trainer.target)
    close(drafter.state_dict(), weights(trainer), rtol=0, atol=0)
    best = max(
        (x for x in found if x["step"] in (0, *range(5, 201, 5))), key=lambda x: x.get("heldout_length_block", 0)
    )
    assert (tmp_path / "best").resolve().name == f"{best['step']:08d}"
    assert len(list((tmp_path / "steps").iterdir())) <= 2


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
@pytest.mark.parametrize(
    "objective", [pytest.param("ce", marks=pytest.mark.slow), pytest.param("lk", marks=pytest.mark.slow), "bv"]
)
def test_accumulation_shares_the_trajectory(tmp_path, data, kind, objective):
    options = [f"drafter.kind={kind}", f"objective.name={objective}"]
    whole = train(data, tmp_path / "1", *options)
    parts = train(data, tmp_path / "2", *options, "batch.gradient_accumulation_steps=2")
    seven = "batch.gradient_accumulation_steps=7"  # more parts than texts: one is empty
    many = train(data, tmp_path / "7", *options, seven)
    close(weights(parts), weights(whole), rtol=2e-3, atol=2e-4)
    close(weights(many), weights(whole), rtol=2e-3, atol=2e-4)
    for other in ("2", "7"):
        same_steps(tmp_path / other, tmp_path / "1")


@pytest.mark.parametrize(
    "objective", ["ce", *(pytest.param(each, marks=pytest.mark.slow) for each in ("kl", "rkl", "tv", "lk")), "bv"]
)
def test_the_fused_and_the_plain_objective_share_the_trajectory(tmp_path, data, objective):
    options = [f"objective.name={objective}", "drafter.kind=dspark"]
    fused = train(data, tmp_path / "f", *options)
    plain = train(data, tmp_path / "p", *options, "runtime.fused=false")
    close(weights(fused), weights(plain), rtol=2e-3, atol=2e-4)
    same_steps(tmp_path / "f", tmp_path / "p")


@pytest.mark.slow
def test_the_rounds_objective_trains_along_runs_of_anchors(tmp_path, data):
    options = ["objective.name=rounds", "batch.run_length=5", "optimizer.num_train_epochs=30"]
    fused = train(data, tmp_path / "f", *options)
    found = lines(tmp_path / "f")
    assert found[-1]["heldout_length_block"] > found[0]["heldout_length_block"] + 0.3
    short = ["objective.name=rounds", "batch.run_length=5"]
    plain = train(data, tmp_path / "p", *short, "runtime.fused=false")
    parts = train(data, tmp_path / "a", *short, "batch.gradient_accumulation_steps=2")
    again = train(data, tmp_path / "g", *short)
    for other in (plain, parts):
        close(weights(other), weights(again), rtol=2e-3, atol=2e-4)
    assert fused.num_steps == 150


def test_cached_features_and_checkpointed_activations_share_the_trajectory(tmp_path, data):
    online = train(data, tmp_path / "o")
    cached = train(data, tmp_path / "c", "data.features=cached", f"data.cache={tmp_path / 'cache'}")
    again = train(data, tmp_path / "a", "runtime.gradient_checkpointing=true")
    close(weights(cached), weights(online), rtol=2e-3, atol=2e-4)
    close(weights(again), weights(online), rtol=0, atol=0)


def test_bfloat16_training_stays_near_float32(tmp_path, data):
    """As autocast does it on a GPU, with weights in float32; the log says how fast it went."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        made = train(data, tmp_path / precision, f"runtime.precision={precision}", "runtime.peak_tflops=2")
        assert {weight.dtype for weight in made.drafter.parameters()} == {torch.float32}
        steps = [line for line in lines(tmp_path / precision) if line["step"]]
        losses[precision] = [line["loss"] for line in steps]
        for line in steps:
            assert line["blocks_per_second"] == pytest.approx(line["num_blocks"] * line["steps_per_second"], rel=0.01)
            assert line["flop_utilization"] == pytest.approx(made.flops * line["steps_per_second"] / 2e12, rel=0.01)
            assert 0 <= line["waiting_for_data"] < 1
            assert line["peak_memory_gib"] > 0.05
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)


RESUMED = ([], ["batch.anchors=rounds", "optimizer.name=muon"], ["batch.anchors=mixed"])


@pytest.fixture(scope="module", params=RESUMED, ids=["plain", "rounds-muon", "mixed"])
def uninterrupted(request, tmp_path_factory, data):
    """The options of a run, its folder and the run."""
    torch.set_num_threads(1)  # as in every test: more threads add up in another order
    options, folder = ["drafter.kind=dspark", *request.param], tmp_path_factory.mktemp("whole")
    return options, folder, train(data, folder, *options)


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, data, stop, uninterrupted):
    options, folder, whole = uninterrupted
    first = Trainer(recipe(data, *options), target(), tmp_path / "parts")

    def ask(progress):
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="saved; the same command resumes"):
        first.train(ask)
    second = Trainer(recipe(data, *options), target(), tmp_path / "parts")
    assert second.step in (stop, stop + 1)  # the signal is seen after the step that it arrives in
    second.train()
    close(weights(second), weights(whole), rtol=0, atol=0)
    timing = ("steps_per_second", "blocks_per_second", "waiting_for_data", "peak_memory_gib")
    plain = [[{k: v for k, v in x.items() if k not in timing} for x in lines(r)] for r in (folder, tmp_path / "parts")]
    assert plain[0] == plain[1]


def test_killed_at_random_moments_a_run_ends_with_the_weights_of_one_left_alone(tmp_path, data):
    whole = train(data, tmp_path / "whole", "logging.save_steps=1")
    source = "import runs\nwork = lambda data, run: runs.train(data, run, 'logging.save_steps=1')"
    ended = []
    for end in killed(source, data, tmp_path / "parts", kills=10, within=0.8, seed=3):
        ended.append(end)
        link = tmp_path / "parts" / "checkpoint"
        if link.exists():
            load_drafter(link, whole.target)  # whatever happened, the last checkpoint is whole
    assert ended[-1] == 0
    assert signal.SIGKILL in ended[:-1]
    close(load_file(tmp_path / "parts" / "checkpoint" / "model.safetensors"), weights(whole), rtol=0, atol=0)


def _process(rank, num, port, data, out, cases):
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for name, options in cases.items():
        train(data, out / name, *options)
    for name, case in {"alone": "ddp", "walking-alone": "walking"}.items():  # begun by one process, ended by two
        if (out / name).exists():
            train(data, out / name, *cases[case])
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_the_trajectory_of_one_replicated_or_sharded(tmp_path, data):
    options = ["drafter.kind=dspark", "objective.name=bv"]
    whole = train(data, tmp_path / "whole", *options)
    walking = ["batch.anchors=rounds", "optimizer.name=muon"]

    def ask(progress):
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    for name, more in {"alone": [], "walking-alone": walking}.items():
        with pytest.raises(StoppedError):
            Trainer(recipe(data, *options, *more), target(), tmp_path / name).train(ask)
    walked = train(data, tmp_path / "walked", *options, *walking)
    cases = {
        "ddp": [*options, "logging.decode_prompts=1"],
        "accumulated": [*options, "batch.gradient_accumulation_steps=2"],
        "fsdp": [*options, "runtime.parallel=fsdp"],
        "target": [*options, "runtime.parallel=fsdp", "runtime.shard_target=true"],
        "cached": [*options, "data.features=cached", f"data.cache={tmp_path / 'cache'}"],
        "walking": [*options, *walking],
        "walking-fsdp": [*options, *walking, "runtime.parallel=fsdp"],
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (2, port, data, tmp_path, cases), nprocs=2)
    for name in (*cases, "alone", "walking-alone"):
        found = load_file(tmp_path / name / "checkpoint" / "model.safetensors")
        alike, other = (walked, "walked") if name.startswith("walking") else (whole, "whole")
        close(found, weights(alike), rtol=2e-3, atol=2e-4)
        ours, theirs = lines(tmp_path / name)[-1], lines(tmp_path / other)[-1]
        assert ours["heldout_length_block"] == pytest.approx(theirs["heldout_length_block"], rel=1e-3)
        same_steps(tmp_path / name, tmp_path / other)


@pytest.mark.slow
def test_decoding_meanwhile_is_logged_and_changes_no_weight(tmp_path, data):
    without = train(data, tmp_path / "without")
    options = ["logging.decode_prompts=2", "logging.tensorboard=true"]
    decoding = train(data, tmp_path / "with", *options)
    close(weights(decoding), weights(without), rtol=0, atol=0)
    train(data, tmp_path / "again", *options)
    first, second = ([x for x in lines(tmp_path / run) if "decoded_text" in x] for run in ("with", "again"))
    assert [x["step"] for x in first] == [0, 5, 10]
    kept = ("decoded_length_block", "decoded_text")
    assert [[x[key] for key in kept] for x in first] == [[x[key] for key in kept] for x in second]
    assert all(1 <= x["decoded_length_block"] <= 5 for x in first)
    assert all(x["decoded_text"].strip() for x in first)
    assert len(list((tmp_path / "with" / "tensorboard").iterdir())) == 1


def test_decoding_needs_held_out_prompts_and_whole_models(tmp_path, data):
    with pytest.raises(RecipeError, match=r"logging\.decode_prompts is 7, of 6 held-out texts"):
        recipe(data, "logging.decode_prompts=7")
    for sharded in ("runtime.parallel=fsdp", "runtime.shard_target=true"):
        with pytest.raises(RecipeError, match=r"needs whole models in one process"):
            train(
                data,
                tmp_path,
                "logging.decode_prompts=1",
                sharded,
                distributed=SimpleNamespace(is_distributed=True, device=torch.device("cpu"), rank=0, world_size=1),
            )


STAND_INS = {"qwen3-4b": "qwen3", "qwen3-8b": "qwen3", "smollm2": "llama", "pocket": "qwen3"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_every_shipped_recipe_takes_two_steps_with_a_tiny_target(tmp_path, family):
    model = tiny_target(family, num_layers=10, dtype=torch.float32)
    folder = make_data(tmp_path / "d", model, num=12)
    taken = 0
    of_family = [name for name, each in STAND_INS.items() if each == family]
    for name in shipped_names():
        if next(each for each in STAND_INS if name.startswith(each)) not in of_family:
            continue
        shipped = load_recipe(name).model_dump(mode="json")
        small = {
            "data": {"path": str(folder), "num_heldout": 3}, "optimizer": {"max_steps": 2},
            "drafter": {"markov_rank": 4}, "logging": {"tensorboard": False, "heldout_blocks": 8},
            "batch": {"num_anchors": 20, "num_texts": 4},
        }  # fmt: skip
        if shipped["drafter"]["initial"] == "required":
            small["drafter"]["initial"] = "scratch"
        trainer = Trainer(parse(merge(shipped, small), name), model, tmp_path / name)
        trainer.train()
        assert trainer.step == 2
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())
        taken += 1
    assert taken == (90 if family == "qwen3" else 30)


def test_weights_may_begin_as_the_targets_last_layers(data):
    model = target()
    trainer = Trainer(recipe(data, "drafter.initial=target"), model, data.parent / "unused")
    theirs = model.model.model.layers[-1].mlp.up_proj.weight
    torch.testing.assert_close(trainer.drafter.layers[-1].mlp.up_proj.weight.detach(), theirs)
    torch.testing.assert_close(trainer.drafter.norm.weight.detach(), model.model.model.norm.weight)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_is_left(tmp_path, data):
    trainer = Trainer(recipe(data), target(), tmp_path)

    def spoil(progress):
        if progress.step == 4:
            with torch.no_grad():
                trainer.drafter.fc.weight.fill_(torch.nan)

    with pytest.raises(
        TrainingError, match=r"step 5 is not finite.*step 3 is in .*checkpoint.*optimizer\.learning_rate"
    ):
        trainer.train(spoil)


def test_what_a_run_began_with_cannot_change_but_how_it_runs_can(tmp_path, data):
    train(data, tmp_path / "run", "optimizer.max_steps=2")
    with pytest.raises(
        RecipeError, match=r"holds a run of something else: recipe\.objective, recipe\.annealing, recipe\.seed differ"
    ):
        train(data, tmp_path / "run", "optimizer.max_steps=2", "objective.name=ce", "seed=1")
    train(
        data,
        tmp_path / "run",
        "optimizer.max_steps=2",
        "batch.gradient_accumulation_steps=2",
        "logging.logging_steps=5",
        "data.cache_gib=1",
    )


def test_data_sampled_otherwise_or_of_another_target_is_refused(tmp_path, data):
    cool = make_data(tmp_path / "cool", num=12, sampling=Sampling(0.7))
    with pytest.raises(RecipeError, match=r"sampled with .*0\.7.* assumes temperature 1 over the whole"):
        train(cool, tmp_path / "run")
    with pytest.raises(DataError, match="was sampled from"):
        train(data, tmp_path / "run", model=tiny_target(seed=9, dtype=torch.float32))
    with pytest.raises(RecipeError, match=r"set data\.path"):
        Trainer(parse({}, "test"), target(), tmp_path / "run")


def test_beta_rises_as_the_recipe_says_and_the_rate_as_the_schedule(tmp_path, data):
    train(data, tmp_path, "annealing.ratio=0.4", "annealing.final=0.8", "optimizer.warmup_ratio=0.2")
    found = [x for x in lines(tmp_path) if x["step"]]
    assert [x["beta"] for x in found] == pytest.approx([0.0, 0.2, 0.4, 0.6] + [0.8] * 6)
    options = OptimizerSection(learning_rate=0.003, warmup_ratio=0.2)
    rates = [learning_rate_at(step, 10, options) for step in range(11)]
    assert [x["learning_rate"] for x in found] == pytest.approx(rates[:10])
    assert rates[0] == pytest.approx(0.0015)
    assert rates[1] == rates[2] == 0.003
    assert rates[6] == pytest.approx(0.0015)
    assert rates[10] == pytest.approx(0)


def test_epochs_are_kept_if_asked(tmp_path, data):
    train(data, tmp_path, "logging.keep_epoch_checkpoints=true", "logging.save_steps=1")
    assert {"00000005", "00000010"} <= {path.name for path in (tmp_path / "steps").iterdir()}


def test_max_steps_overrides_the_epochs(tmp_path, data):
    options = ("optimizer.num_train_epochs=1", "optimizer.max_steps=7", "logging.keep_epoch_checkpoints=true")
    trainer = train(data, tmp_path, *options)
    assert trainer.step == trainer.num_steps == 7
    assert lines(tmp_path)[-1]["epoch"] == pytest.approx(7 / 5)
    assert list(Run.open(tmp_path).epoch_checkpoints()) == [5, 7]


def scripted(monkeypatch, lengths):
    """Held-out lengths as told, by step."""
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"heldout_length_block": lengths[self.step]})


def best(run):
    return int((run / "best").resolve().name)


def test_the_best_checkpoint_is_one_that_was_measured(tmp_path, data, monkeypatch):
    scripted(monkeypatch, {0: 1.0, 5: 2.0, 10: 1.5})
    train(data, tmp_path)
    assert best(tmp_path) == 5
    assert (tmp_path / "checkpoint").resolve().name == "00000010"


def test_a_measurement_on_resuming_does_not_count_for_later_weights(tmp_path, data, monkeypatch):
    scripted(monkeypatch, {0: 1.0, 5: 2.0, 7: 3.0, 8: 3.0, 10: 1.5})
    first = Trainer(recipe(data), target(), tmp_path)

    def ask(progress):
        if progress.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        first.train(ask)
    train(data, tmp_path)
    assert best(tmp_path) == 5


def test_a_kill_between_the_two_links_does_not_lose_the_best(tmp_path, data, monkeypatch):
    scripted(monkeypatch, {0: 1.0, 5: 2.0, 10: 1.5})
    link = Run._link

    def dying(self, name, folder):
        if name == "best":
            raise KeyboardInterrupt
        link(self, name, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_link", dying)
        with pytest.raises(KeyboardInterrupt):
            train(data, tmp_path)
    train(data, tmp_path)
    assert best(tmp_path) == 5


def test_without_held_out_texts_the_last_is_the_best(tmp_path, data):
    train(data, tmp_path, "data.num_heldout=0")
    assert best(tmp_path) == int((tmp_path / "checkpoint").resolve().name)


def test_only_one_trainer_works_in_a_folder(tmp_path, data):
    train(data, tmp_path, "optimizer.max_steps=5")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6}\n')  # logged by the one that is at work
    before = lines(tmp_path)
    with exclusive(tmp_path), pytest.raises(FolderInUseError, match="another process is writing"):
        train(data, tmp_path, "optimizer.max_steps=5")
    assert lines(tmp_path) == before


def test_there_is_a_best_checkpoint_even_if_training_makes_it_worse(tmp_path, data, monkeypatch):
    scripted(monkeypatch, {0: 9.0, 5: 2.0, 10: 1.5})
    train(data, tmp_path)
    assert best(tmp_path) == 5


def test_a_run_is_read_in_one_place(tmp_path, data):
    trainer = train(data, tmp_path, "logging.keep_epoch_checkpoints=true")
    run = Run.open(tmp_path)
    assert run.recipe == trainer.recipe
    assert run.recipe.objective.options["ramp_floor"] == 1e-6  # resolved: nothing is left to defaults elsewhere
    assert list(run.epoch_checkpoints()) == [5, 10]
    assert run.checkpoint("last").resolve().name == "00000010"
    assert run.heldout_metrics(10)["heldout_length_block"] == lines(tmp_path)[-1]["heldout_length_block"]
    assert run.heldout_metrics(9) is None  # a step that was logged, and not measured
    training, heldout = run.splits(target())
    assert len(heldout) == 6
    assert training.identity == trainer.sampler.dataset.identity
    assert Run.of_checkpoint(tmp_path / "checkpoint")[1] == 10
    assert Run.of_checkpoint(tmp_path) is None
    with pytest.raises(RunError, match="is not a training run"):
        Run.open(tmp_path / "steps")


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt", "config.json"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, data, file):
    train(data, tmp_path, "optimizer.max_steps=3")
    path = tmp_path / "checkpoint" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=rf"{file} is damaged"):
        train(data, tmp_path, "optimizer.max_steps=3")


def test_a_lost_checkpoint_is_said_and_erases_nothing(tmp_path, data):
    train(data, tmp_path, "optimizer.max_steps=3")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree((tmp_path / "checkpoint").resolve())
    with pytest.raises(RunError, match="has lost its last checkpoint"):
        train(data, tmp_path, "optimizer.max_steps=3")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_same_data_by_another_path_is_the_same_data(tmp_path, data):
    train(data, tmp_path / "run", "optimizer.max_steps=3")
    shutil.copytree(data, tmp_path / "copy")
    again = Trainer(recipe(tmp_path / "copy", "optimizer.max_steps=3"), target(), tmp_path / "run")
    assert again.step == 3
