"""Plans: what `study --plan` prints of cells, costs and commands, and what it assumes."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest

from blockdraft.evaluation.tasks import count_prompts
from blockdraft.files import DiskSpaceError, size_in_words
from blockdraft.study import Study, StudyError, load_study
from blockdraft.study.cost import (
    answers_to_decode,
    cell_costs,
    features_to_write,
    refuse_too_large,
    responses_to_sample,
)

from commands import blockdraft
from tiny import tiny_model, tiny_tokenizer
from tiny_study import TINY


def plan(*arguments, cwd="."):
    ended = blockdraft("study", *arguments, "--plan", cwd=cwd)
    assert ended.code == 0, ended.err
    return ended.out


def test_the_plan_of_the_paper_has_28_cells_with_hours_and_memory_and_a_command_for_each(tmp_path):
    text = plan("paper", cwd=tmp_path)
    rows = re.findall(r"^(qwen3-\S+)-seed42 +18,750 +0 +(\d+\.\d) +(\d+\.\d\d) +(\d+\.\d\d)$", text, re.MULTILINE)
    assert len(rows) == len({name for name, *_ in rows}) == 28
    assert all(30 < float(memory) < 70 and 4 < float(hours) < 9 for _, memory, _, hours in rows)
    disk = sum(float(size) for _, _, size, _ in rows) / 1024  # seven checkpoints of a cell: six epochs, and the best
    assert f"{disk:.1f} TiB of checkpoints to write to disk" in text
    said = re.search(
        r"28 cells, 0 done, ([\d.]+) hours of training left on 8 devices each, at 20% of 989 TFLOP/s", text
    )
    assert float(said[1]) == pytest.approx(sum(float(hours) for *_, hours in rows), abs=0.3)
    assert "200,000 responses to sample, 22.2 hours on one device, at an assumed 2,500 tokens/s" in text
    assert "each counts as one text of 1,000 tokens (a text is an assistant turn)" in text
    assert "at an assumed 50 tokens/s" in text
    commands = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    for verb, num in (("train", 28), ("evaluate", 2)):
        beginning = f"torchrun --standalone --nproc-per-node 8 -m blockdraft {verb} "
        assert sum(line.startswith(beginning) for line in commands) == num
    assert not list(tmp_path.iterdir())


def test_a_cell_by_one_process_has_a_plain_command():
    text = plan("paper", "--devices", "1")
    assert "on 1 device each" in text
    assert "torchrun" not in text
    assert text.count("\n  blockdraft train ") == 28


def test_slurm_has_a_line_for_each_cell(tmp_path):
    lines = plan("paper", "--slurm", cwd=tmp_path).splitlines()
    assert len(lines) == 28
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "sbatch"
        assert words[2:5] == ["--gpus-per-node=8", "--cpus-per-task=32", "--wrap"]
        assert words[5].startswith("torchrun --standalone --nproc-per-node 8 -m blockdraft train qwen3-")
    cached = plan("pocket-short", "--slurm", "seeds=[42]", "drafters=[dflash]", cwd=tmp_path).splitlines()
    assert cached[0].startswith("sbatch --job-name=pocket-dflash-ce-seed42 ")
    assert not any("--dependency" in line for line in cached)  # the cells build their features together
    on_cpus = plan("pocket-short", "--slurm", "--device", "cpu", cwd=tmp_path)
    assert "sbatch" in on_cpus
    assert "--gpus-per-node" not in on_cpus
    ended = blockdraft("study", "paper", "--slurm", cwd=tmp_path)
    assert ended.code == 2
    assert "--plan" in ended.err


def test_sampling_and_decoding_are_counted(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)
    rates = ["hardware.sampling_rate=100", "hardware.decoding_rate=10", "hardware.tokens_per_text=90"]
    study = Study(load_study(tmp_path / "s.yaml", ["seeds=[1,2]", *rates]), tmp_path / "out")
    sampled = responses_to_sample(study)
    assert (sampled.num, sampled.hours) == (24, pytest.approx(24 * 24 / 100 / 3600))  # no longer than max_new_tokens
    texts, decoded = 2, 1 + 2 * 2 * 3  # of the target, sampled; alone, and two drafters under two rules in three ways
    found = answers_to_decode(study)
    assert found.num == 2 * (texts + decoded)
    assert found.hours == pytest.approx(2 * 12 * (texts / 100 + decoded / 10) / 3600)
    assert [cost.num_steps for cost in cell_costs(study)] == [3] * 4
    assert count_prompts(["benchmarks"]) == [512, 500, 30, 164, 257, 256, 80]
    assert count_prompts(["aime25", "pocket"], 40) == [30, 40, 40, 40]


def test_the_plan_of_a_study_under_way_is_about_what_is_left(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml", ["seeds=[1,2]"]), tmp_path / "out")
    whole, sampled, decoded = cell_costs(study), responses_to_sample(study), answers_to_decode(study)
    shards = {"shard-00000.parquet": None}
    some = SimpleNamespace(complete=False, shards=shards, num_shards=4, identity=SimpleNamespace(num_conversations=24))
    monkeypatch.setattr(Study, "manifest", lambda *_: some)
    assert responses_to_sample(study).num == 18
    assert responses_to_sample(study).hours == pytest.approx(sampled.hours * 18 / 24)
    assert [job.name for job in study.data_jobs()] == ["prompts for pocket", "data for pocket"]
    totals = SimpleNamespace(texts_and_length=(24, 1000.0))
    every = SimpleNamespace(complete=True, shards=shards, num_shards=1, identity=some.identity, totals=totals)
    monkeypatch.setattr(Study, "manifest", lambda *_: every)
    assert responses_to_sample(study).num == 0
    assert study.data_jobs() == []
    assert len(study.data_jobs(recheck=True)) == 2
    steps = {"pocket-dflash-ce-seed1": 3, "pocket-dflash-bv-seed1": 3, "pocket-dflash-ce-seed2": 1}
    monkeypatch.setattr(
        Study, "steps_done", lambda _, cell: (steps.get(cell.name, 0), 3 if cell.name in steps else None)
    )
    monkeypatch.setattr(Study, "is_trained", lambda _, cell: steps.get(cell.name) == 3)
    monkeypatch.setattr(Study, "evaluated_drafters", lambda _, _target, seed: {"dflash-ce"} if seed == 1 else set())
    left = [cost.hours / before.hours for cost, before in zip(cell_costs(study), whole, strict=True)]
    assert left == pytest.approx([0, 0, 2 / 3, 1])
    assert answers_to_decode(study).num == decoded.num // 2 + 2 * 3  # seed 1 lacks a drafter: two rules, three ways
    text = plan("s.yaml", "seeds=[1,2]", cwd=tmp_path)
    assert "4 cells, 2 done, " in text
    assert "to sample" not in text
    verbs = re.findall(r"^  blockdraft (\w+) .*/([\w-]+)$", text, re.MULTILINE)
    assert verbs == [
        ("evaluate", "pocket-seed1"), ("train", "pocket-dflash-ce-seed2"), ("train", "pocket-dflash-bv-seed2"),
        ("evaluate", "pocket-seed2"),
    ]  # fmt: skip
    monkeypatch.setattr(Study, "is_trained", lambda *_: True)
    monkeypatch.setattr(Study, "is_evaluated", lambda *_: True)
    text = plan("s.yaml", "seeds=[1,2]", cwd=tmp_path)
    assert "4 cells, 4 done, " in text
    assert "nothing is left to run" in text
    assert "answers" not in text


def test_the_plan_counts_checkpoints_and_features_and_a_study_without_room_for_them_is_refused(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path / "out")
    costs, features = cell_costs(study), features_to_write(study)
    assert [cost.checkpoint_bytes for cost in costs] == [cost.unwritten_bytes for cost in costs]
    assert len({cost.checkpoint_bytes for cost in costs}) == 1
    assert list(features) == [tmp_path / "out" / "features" / "pocket-3-layers"]  # which both cells read
    assert features_to_write(study, of_known_texts=True) == {}
    text = plan("s.yaml", cwd=tmp_path)
    sizes = [size_in_words(sum(cost.unwritten_bytes for cost in costs)), size_in_words(sum(features.values()))]
    assert f"{sizes[0]} of checkpoints and {sizes[1]} of cached features to write to disk" in text

    every = ["set=[drafter.num_layers=1, batch.num_texts=8, logging.keep_epoch_checkpoints=true]"]
    kept = cell_costs(Study(load_study(tmp_path / "s.yaml", every), tmp_path / "out"))
    assert kept[0].checkpoint_bytes == costs[0].checkpoint_bytes // 2 * 7  # six epochs, and the best

    def free(num_bytes):
        monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=num_bytes))

    needed = sum(cost.unwritten_bytes for cost in costs)
    free(needed)
    refuse_too_large(study)
    free(needed - 1)
    with pytest.raises(DiskSpaceError, match="the study's checkpoints and features need about"):
        study.run()
    assert not (tmp_path / "out").exists()
    totals = SimpleNamespace(texts_and_length=(24, 1000.0))
    texts = SimpleNamespace(complete=True, totals=totals)
    monkeypatch.setattr(Study, "manifest", lambda *_: texts)
    features = features_to_write(study, of_known_texts=True)
    free(needed + sum(features.values()))
    refuse_too_large(study)
    free(needed + sum(features.values()) - 1)
    with pytest.raises(DiskSpaceError):
        refuse_too_large(study)
    (folder,) = features
    folder.mkdir(parents=True)
    (folder / "features-0.npy").write_bytes(bytes(1000))
    refuse_too_large(study)
    monkeypatch.setattr(Study, "is_trained", lambda *_: True)
    free(0)
    refuse_too_large(study)


def test_the_papers_draft_temperature_alone_is_decoded_if_the_grid_has_no_other(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml", ["evaluation.draft_temperatures=[1]"]), tmp_path / "out")
    assert answers_to_decode(study).num == 2 + 1 + 2 * 2 * 2  # without a best one: the paper's, and argmax drafts
    words = study.evaluation_job("pocket", 1).arguments
    assert words[words.index("--draft-temperatures") + 1] == "1.0"
    assert (
        "--draft-temperatures" not in Study(load_study("pocket-short"), tmp_path).evaluation_job("pocket", 42).arguments
    )
    with pytest.raises(StudyError, match=r"evaluation\.draft_temperatures"):
        load_study(tmp_path / "s.yaml", ["evaluation.draft_temperatures=[0]"])


def test_null_removes_targets_and_objectives():
    study = load_study("paper", ["targets.qwen3-8b=null", "objectives.kl=null", "objectives={tv: null}"])
    assert (list(study.targets), list(study.objectives)) == (["qwen3-4b"], ["ce", "rkl", "lk", "bv-no-annealing", "bv"])
    assert len(study.cells) == 2 * 5
    with pytest.raises(StudyError, match=r"objectives\.lkk=null: the study has no 'lkk' .* did you mean 'lk'\?"):
        load_study("paper", ["objectives.lkk=null"])
    with pytest.raises(StudyError, match=r"no 'llama' to remove; there are: qwen3-4b, qwen3-8b"):
        load_study("paper", ["targets.llama=null"])
    with pytest.raises(StudyError, match="names are letters"):
        load_study("pocket-short", ["targets.pocket=null"])
    with pytest.raises(StudyError, match="the baseline 'ce' is not one of the objectives"):
        load_study("paper", ["baseline=ce", "objectives.ce=null"])


def test_a_null_in_the_file_itself_is_a_mistake(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY.replace("{recipe: ce}", "null"))
    for assignments in ([], ["objectives.lk={recipe: lk}"]):
        with pytest.raises(StudyError, match=r"objectives\.ce: "):
            load_study(tmp_path / "s.yaml", assignments)


def test_a_study_is_shown_as_a_file_that_describes_it(tmp_path):
    ended = blockdraft("study", "paper", "objectives.kl=null", "--devices", "2", "--show", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    (tmp_path / "shown.yaml").write_text(ended.out)
    assert load_study(tmp_path / "shown.yaml") == load_study("paper", ["objectives.kl=null", "hardware.devices=2"])
    assert [file.name for file in tmp_path.iterdir()] == ["shown.yaml"]
    ended = blockdraft("study", "paper", "--show", "--plan", cwd=tmp_path)
    assert ended.code == 2
    assert "give one of the two" in ended.err


def test_argmax_drafts_may_be_left_out(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path / "out")
    assert "--no-argmax-drafts" not in study.evaluation_job("pocket", 1).arguments
    study = Study(load_study(tmp_path / "s.yaml", ["evaluation.argmax_drafts=false"]), tmp_path / "out")
    assert "--no-argmax-drafts" in study.evaluation_job("pocket", 1).arguments
    assert answers_to_decode(study).num == 2 + 1 + 2 * 2 * 2  # the paper's draft temperature, and the best one


def test_targets_that_differ_only_in_training_share_their_texts_and_features(tmp_path):
    recipe = load_study("pocket-budgets")
    study = Study(recipe, tmp_path)
    assert {study.data_folder(target) for target in recipe.targets} == {tmp_path / "data" / "steps-500"}
    assert [job.name for job in study.data_jobs()] == ["prompts for steps-500", "data for steps-500"]
    assert {study.cache_folder(cell) for cell in recipe.cells} == {tmp_path / "features" / "steps-500-3-layers"}
    assert responses_to_sample(study).num == 6000
    given = load_study("pocket-budgets", [f"targets.{target}.data=texts" for target in recipe.targets])
    assert {Study(given, tmp_path).cache_folder(cell).name for cell in given.cells} == {"steps-500-3-layers"}
    assert Study(given, tmp_path).data_jobs() == []
    other = load_study("pocket-responses")
    assert len({Study(other, tmp_path).data_folder(target) for target in other.targets}) == 3
    changed = load_study("pocket-budgets", ["targets.steps-1000.set=[target.dtype=bfloat16]"])
    assert len({Study(changed, tmp_path).data_folder(target) for target in changed.targets}) == 2


def test_budgets_compare_the_papers_schedule_with_a_slower_one_and_ce():
    schedules = {}
    for cell in load_study("pocket-budgets").cells:
        found = cell.recipe.resolved()
        assert found.logging.keep_epoch_checkpoints  # for the figure of training dynamics
        assert cell.target == f"steps-{found.optimizer.max_steps}"
        schedule = found.annealing and (found.annealing.ratio, found.annealing.initial, found.annealing.final)
        schedules.setdefault(cell.objective, []).append((found.optimizer.max_steps, schedule))
    steps = (500, 1000, 2000, 4000)
    assert schedules == {
        "ce": [(each, None) for each in steps],
        "bv-paper": [(each, (0.5, 0.0, 1.0)) for each in steps],
        "bv": [(each, (1.0, 0.0, 1.0)) for each in steps],
        "bv-half": [(each, (1.0, 0.0, 0.5)) for each in steps],
    }


def test_a_target_of_ones_own_is_set_by_name(tmp_path):
    folder = tmp_path / "mine"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "s.yaml").write_text(
        "name: mine\n"
        "targets:\n"
        "  mine: {recipe: qwen3-4b, prompts: pocket, num_prompts: 64, set: [target.name=./mine, target.shape=null]}\n"
        "drafters: [dflash]\n"
        "objectives: {ce: {recipe: ce}, bv: {recipe: bv}}\n"
        "set: [drafter.num_layers=1, optimizer.max_steps=5]\n"
        "hardware: {devices: 1, tflops: 0.1, efficiency: 0.4, tokens_per_text: 50}\n"
    )
    text = plan("s.yaml", cwd=tmp_path)
    assert "2 cells" in text
    assert "on 1 device each, at 40% of 0.1 TFLOP/s" in text
    assert "blockdraft data regenerate --target ./mine " in text
    assert "blockdraft train qwen3-4b-dflash-bv " in text
    assert "target.name=./mine target.shape=null" in text
    assert "blockdraft evaluate --target ./mine " in text


def test_regeneration_takes_the_papers_lengths_unless_told_otherwise(tmp_path):
    tiny_model(max_position_embeddings=4096).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "turns": ["w7 w8"]}\n')
    words = ("--target", "target", "--prompts", "prompts.jsonl", "--out", "data", "--device", "cpu")
    ended = blockdraft("data", "regenerate", *words, cwd=tmp_path)
    assert ended.code == 0, ended.err
    settings = json.loads((tmp_path / "data" / "manifest.json").read_text())["identity"]
    assert (settings["max_new_tokens"], settings["max_length"]) == (2048, 3072)
