"""The run: equivalent settings share a trajectory, nothing is lost, what is wrong is said."""

import json
import os
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
from blockdraft.targets import Sampling
from blockdraft.training import RecipeError, Trainer, load_recipe, shipped_names
from blockdraft.training.checkpoints import Checkpoints
from blockdraft.training.recipe import merge, parse
from blockdraft.training.schedule import Schedule
from blockdraft.training.trainer import StoppedError, TrainingError

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


def test_a_run_learns_and_leaves_what_a_user_needs(tmp_path, data):
    trainer = train(data, tmp_path, "optimizer.epochs=40", "objective.name=kl")
    found = lines(tmp_path)
    assert found[0]["step"] == 0
    assert found[-1]["step"] == trainer.num_steps == 200
    assert found[-1]["heldout_length_block"] > found[0]["heldout_length_block"] + 0.3
    assert found[-1]["loss"] < found[1]["loss"] - 0.3
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["recipe"]["objective"]["name"] == "kl"
    assert run["versions"]["torch"] == torch.__version__
    assert load_recipe(tmp_path / "recipe.yaml") == trainer.recipe
    drafter = load_drafter(tmp_path / "checkpoint", trainer.target)
    close(drafter.state_dict(), weights(trainer), rtol=0, atol=0)
    best = max(
        (x for x in found if x["step"] in (0, *range(5, 201, 5))), key=lambda x: x.get("heldout_length_block", 0)
    )
    assert (tmp_path / "best").resolve().name == f"{best['step']:08d}"
    assert len(list((tmp_path / "steps").iterdir())) <= 2


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("objective", ["ce", "lk", "bv"])
def test_accumulation_shares_the_trajectory(tmp_path, data, kind, objective):
    options = [f"drafter.kind={kind}", f"objective.name={objective}"]
    whole = train(data, tmp_path / "1", *options)
    parts = train(data, tmp_path / "2", *options, "batch.accumulation=2")
    many = train(data, tmp_path / "7", *options, "batch.accumulation=7")  # more parts than texts: one is empty
    close(weights(parts), weights(whole), rtol=2e-3, atol=2e-4)
    close(weights(many), weights(whole), rtol=2e-3, atol=2e-4)
    assert lines(tmp_path / "2")[-1]["loss"] == pytest.approx(lines(tmp_path / "1")[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("objective", ["ce", "kl", "rkl", "tv", "lk", "bv"])
def test_the_fused_and_the_plain_objective_share_the_trajectory(tmp_path, data, objective):
    options = [f"objective.name={objective}", "drafter.kind=dspark"]
    fused = train(data, tmp_path / "f", *options)
    plain = train(data, tmp_path / "p", *options, "runtime.fused=false")
    close(weights(fused), weights(plain), rtol=2e-3, atol=2e-4)


def test_cached_features_and_checkpointed_activations_share_the_trajectory(tmp_path, data):
    online = train(data, tmp_path / "o")
    cached = train(data, tmp_path / "c", "data.features=cached", f"data.cache={tmp_path / 'cache'}")
    again = train(data, tmp_path / "a", "runtime.checkpoint_activations=true")
    close(weights(cached), weights(online), rtol=2e-3, atol=2e-4)
    close(weights(again), weights(online), rtol=0, atol=0)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, data, stop):
    whole = train(data, tmp_path / "whole", "drafter.kind=dspark")
    first = Trainer(recipe(data, "drafter.kind=dspark"), target(), tmp_path / "parts")

    def ask(progress):
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="saved; the same command goes on"):
        first.run(ask)
    second = Trainer(recipe(data, "drafter.kind=dspark"), target(), tmp_path / "parts")
    assert second.step in (stop, stop + 1)  # the signal is seen after the step that it arrives in
    second.run()
    close(weights(second), weights(whole), rtol=0, atol=0)
    timing = ("steps_per_second", "waiting_for_data")
    plain = [[{k: v for k, v in x.items() if k not in timing} for x in lines(tmp_path / r)] for r in ("whole", "parts")]
    assert plain[0] == plain[1]


def test_killed_at_random_moments_a_run_ends_with_the_weights_of_one_left_alone(tmp_path, data):
    whole = train(data, tmp_path / "whole", "record.save_every=1")
    source = "import runs\nwork = lambda data, run: runs.train(data, run, 'record.save_every=1')"
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
    if (out / "alone").exists():  # begun by one process, ended by two
        train(data, out / "alone", *cases["ddp"])
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_the_trajectory_of_one_replicated_or_sharded(tmp_path, data):
    options = ["drafter.kind=dspark", "objective.name=bv"]
    whole = train(data, tmp_path / "whole", *options)
    begun = Trainer(recipe(data, *options), target(), tmp_path / "alone")

    def ask(progress):
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        begun.run(ask)
    cases = {
        "ddp": [*options, "record.decode_prompts=1"],
        "accumulated": [*options, "batch.accumulation=2"],
        "fsdp": [*options, "runtime.parallel=fsdp"],
        "target": [*options, "runtime.parallel=fsdp", "runtime.shard_target=true"],
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (2, port, data, tmp_path, cases), nprocs=2)
    for name in (*cases, "alone"):
        found = load_file(tmp_path / name / "checkpoint" / "model.safetensors")
        close(found, weights(whole), rtol=2e-3, atol=2e-4)
        ours, theirs = lines(tmp_path / name)[-1], lines(tmp_path / "whole")[-1]
        assert ours["heldout_length_block"] == pytest.approx(theirs["heldout_length_block"], rel=1e-3)


def test_decoding_meanwhile_is_logged_and_changes_no_weight(tmp_path, data):
    without = train(data, tmp_path / "without")
    options = ["record.decode_prompts=2", "record.tensorboard=true"]
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
    with pytest.raises(RecipeError, match=r"record\.decode_prompts is 7, of 6 held-out texts"):
        recipe(data, "record.decode_prompts=7")
    for sharded in ("runtime.parallel=fsdp", "runtime.shard_target=true"):
        with pytest.raises(RecipeError, match=r"needs whole models in one process"):
            train(data, tmp_path, "record.decode_prompts=1", sharded, processes=SimpleNamespace(distributed=True))


STAND_INS = {"qwen3-4b": "qwen3", "qwen3-8b": "qwen3", "smollm2": "llama", "pocket": "qwen3"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_every_shipped_recipe_takes_two_steps_with_a_tiny_target(tmp_path, family):
    model = tiny_target(family, num_layers=10, dtype=torch.float32)
    folder = make_data(tmp_path / "d", model, num=12)
    taken = 0
    for name in shipped_names():
        if STAND_INS[name.rsplit("-", 2)[0]] != family:
            continue
        shipped = load_recipe(name).model_dump(mode="json")
        small = {
            "data": {"path": str(folder), "heldout": 3}, "optimizer": {"max_steps": 2},
            "drafter": {"markov_rank": 4}, "record": {"tensorboard": False, "heldout_blocks": 8},
            "batch": {"num_anchors": 20},
        }  # fmt: skip
        trainer = Trainer(parse(merge(shipped, small), name), model, tmp_path / name)
        trainer.run()
        assert trainer.step == 2
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())
        taken += 1
    assert taken == (36 if family == "qwen3" else 12)


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

    with pytest.raises(TrainingError, match=r"step 5 is not finite.*step 3 is in .*checkpoint.*optimizer\.rate"):
        trainer.run(spoil)


def test_what_a_run_began_with_cannot_change_but_how_it_runs_can(tmp_path, data):
    train(data, tmp_path / "run", "optimizer.max_steps=2")
    with pytest.raises(RecipeError, match=r"holds a run of something else: recipe\.objective, recipe\.seed differ"):
        train(data, tmp_path / "run", "optimizer.max_steps=2", "objective.name=ce", "seed=1")
    train(data, tmp_path / "run", "optimizer.max_steps=2", "batch.accumulation=2", "record.log_every=5")


def test_data_of_another_law_or_target_is_refused(tmp_path, data):
    cool = make_data(tmp_path / "cool", num=12, sampling=Sampling(0.7))
    with pytest.raises(RecipeError, match=r"sampled with .*0\.7.* assumes temperature 1 over the whole"):
        train(cool, tmp_path / "run")
    with pytest.raises(DataError, match="was sampled from"):
        train(data, tmp_path / "run", model=tiny_target(seed=9, dtype=torch.float32))
    with pytest.raises(RecipeError, match=r"set data\.path"):
        Trainer(parse({}, "test"), target(), tmp_path / "run")


def test_beta_rises_as_the_recipe_says_and_the_rate_as_the_schedule(tmp_path, data):
    train(data, tmp_path, "annealing.share=0.4", "annealing.final=0.8", "optimizer.warmup=0.2")
    found = [x for x in lines(tmp_path) if x["step"]]
    assert [x["beta"] for x in found] == pytest.approx([0.0, 0.2, 0.4, 0.6] + [0.8] * 6)
    schedule = Schedule(0.003, 0.2, 10)
    assert [x["rate"] for x in found] == pytest.approx([schedule.rate_at(step) for step in range(10)])
    assert schedule.rate_at(0) == pytest.approx(0.0015)
    assert schedule.rate_at(1) == schedule.rate_at(2) == 0.003
    assert schedule.rate_at(6) == pytest.approx(0.0015)
    assert schedule.rate_at(10) == pytest.approx(0)


def test_epochs_are_kept_if_asked(tmp_path, data):
    train(data, tmp_path, "record.keep_epochs=true", "record.save_every=1")
    assert {"00000005", "00000010"} <= {path.name for path in (tmp_path / "steps").iterdir()}


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
        first.run(ask)
    train(data, tmp_path)
    assert best(tmp_path) == 5


def test_a_kill_between_the_two_links_does_not_lose_the_best(tmp_path, data, monkeypatch):
    scripted(monkeypatch, {0: 1.0, 5: 2.0, 10: 1.5})
    point = Checkpoints._point

    def dying(self, name, folder):
        if name == "best":
            raise KeyboardInterrupt
        point(self, name, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_point", dying)
        with pytest.raises(KeyboardInterrupt):
            train(data, tmp_path)
    train(data, tmp_path)
    assert best(tmp_path) == 5


def test_without_held_out_texts_the_last_is_the_best(tmp_path, data):
    train(data, tmp_path, "data.heldout=0")
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
