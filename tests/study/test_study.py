"""Studies: shipped ones are valid, cells are what the paper has, and a stopped study ends with the same report."""

import csv
import json
import re
import shutil

import pytest
import yaml

from blockdraft.cli.study import _visible_gpus
from blockdraft.data import DataError
from blockdraft.evaluation import read_results
from blockdraft.recipes import RecipeError
from blockdraft.study import Study, StudyError, load_study, shipped_studies
from blockdraft.study import run as run_module
from blockdraft.study.processes import Job

from commands import blockdraft
from tiny_study import TINY


def test_every_shipped_study_is_valid_and_the_papers_has_its_28_cells():
    of_pocket = ["ablations", "anchors", "budgets", "objectives", "responses", "short"]
    assert shipped_studies() == ["paper", "pocket", *(f"pocket-{each}" for each in of_pocket), "smollm2"]
    for name in shipped_studies():
        assert load_study(name).cells
    paper = load_study("paper")
    assert len(paper.cells) == len({cell.name for cell in paper.cells}) == 28
    for cell in paper.cells:
        assert cell.recipe.logging.keep_epoch_checkpoints
        assert cell.recipe.drafter.kind == cell.drafter
        annealing = cell.recipe.resolved().annealing
        if cell.objective == "bv":
            assert (annealing.ratio, annealing.initial, annealing.final) == (0.5, 0.0, 1.0)
        else:
            assert annealing is None
        batch, optimizer = cell.recipe.batch, cell.recipe.optimizer
        assert (batch.num_texts, batch.num_anchors, batch.max_anchors_per_text, batch.anchors) == (
            32, 16_384, 512, "uniform"
        )  # fmt: skip
        assert (optimizer.name, optimizer.learning_rate, optimizer.warmup_ratio) == ("adamw", 6e-4, 0.04)
        assert (optimizer.weight_decay, optimizer.betas, optimizer.max_grad_norm) == (0.01, (0.9, 0.999), 1.0)
        assert (optimizer.num_train_epochs, optimizer.max_steps, cell.recipe.seed) == (6, None, 42)
        drafter = cell.recipe.drafter
        assert (drafter.num_layers, drafter.num_proposals, drafter.initial) == (5, 15, "scratch")
        assert cell.recipe.data.num_heldout == 256
    for target in paper.targets.values():
        assert (target.prompts, target.num_prompts, target.num_responses) == ("open-perfectblend", 100_000, 1)
        assert (target.max_new_tokens, target.max_length) == (2048, 3072)
    evaluation = paper.evaluation
    assert (evaluation.tasks, evaluation.rules) == (["benchmarks"], ["greedy", "token", "block"])
    assert (evaluation.num_prompts, evaluation.num_decoded) == (None, None)
    assert (evaluation.max_new_tokens, evaluation.checkpoint, evaluation.dynamics_texts) == (256, "last", 512)
    assert len(load_study("pocket").cells) == 2 * 15 * 3


@pytest.mark.parametrize("name", ["pocket", "pocket-objectives", "pocket-budgets"])
def test_how_far_beta_rises_and_over_how_long_vary_one_at_a_time(name):
    schedules = {cell.objective: cell.recipe.resolved().annealing for cell in load_study(name).cells}
    found = {each: (schedules[each].ratio, schedules[each].final) for each in ("bv-paper", "bv", "bv-half")}
    assert found == {"bv-paper": (0.5, 1.0), "bv": (1.0, 1.0), "bv-half": (1.0, 0.5)}


def test_mistakes_are_said_before_anything_runs(tmp_path):
    with pytest.raises(StudyError, match="did you mean 'pocket-short'"):
        load_study("pocket-shot")
    file = tmp_path / "s.yaml"
    file.write_text(TINY.replace("recipe: ce", "recipe: cee"))
    with pytest.raises(StudyError, match="'pocket-dflash-cee', which is not shipped"):
        load_study(file)
    file.write_text(TINY.replace("annealing.final=1.0", "annealing.finl=1.0"))
    with pytest.raises(RecipeError, match="did you mean 'final'"):
        load_study(file)
    file.write_text(TINY.replace("seeds: [1]", "sed: [1]"))
    with pytest.raises(StudyError, match=r"s\.yaml: unknown field 'sed', did you mean 'seeds'\?"):
        load_study(file)
    with pytest.raises(StudyError, match=r"unknown field 'targets\.pocket\.recpe', did you mean 'recipe'\?"):
        load_study("pocket-short", ["targets.pocket.recpe=pocket"])
    file.write_text("name: s\ntargets: {pocket: {recipe: pocket}}\n")
    with pytest.raises(StudyError, match=r"s\.yaml: objectives is missing"):
        load_study(file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"targets": {"..": {"recipe": "pocket"}}}, "has a dot in it"),
        ({"targets": {"-a": {"recipe": "pocket"}}}, "the first a letter or a digit"),
        ({"objectives": {"b v": {"recipe": "bv"}}}, "the first a letter or a digit"),
        ({"objectives": {"bv.": {"recipe": "bv"}}}, "'bv.' has a dot in it, where KEY.PATH=VALUE .* would end"),
        ({"targets": {"qwen2.5": {"recipe": "pocket"}}}, "'qwen2.5' has a dot in it, where KEY.PATH=VALUE"),
        ({"objectives": {"b" * 94: {"recipe": "bv"}}}, "names have at most 93 bytes"),
        ({"objectives": {"post": {"recipe": "bv-post"}}}, "pocket-dflash-post-seed1 trains a drafter further; name it"),
        ({"seeds": [1, 1]}, "two cells are called"),
        ({"drafters": ["dflash", "dflash"]}, "two cells are called"),
        ({"evaluation": {"tasks": []}}, "evaluation.tasks"),
        ({"baseline": "ce2"}, "s.yaml: the baseline 'ce2' is not one of the objectives"),
        ({"evaluation": {"rules": ["block", "block"]}}, "block appears twice"),
    ],
)
def test_cells_that_would_share_a_folder_or_lead_out_of_it_are_refused(tmp_path, change, reason):
    values = yaml.safe_load(TINY)
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(values | change))
    with pytest.raises(StudyError, match=reason):
        load_study(file)


def test_data_that_are_not_there_are_said_before_anything_runs(tmp_path):
    values = yaml.safe_load(TINY)
    for target in values["targets"].values():
        target["data"] = str(tmp_path / "nowhere")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match="nowhere"):
        Study(load_study(tmp_path / "s.yaml"), tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_the_plan_assumes_what_the_study_says_unless_told_otherwise():
    def hours(*arguments):
        ended = blockdraft("study", *arguments, "--plan")
        assert ended.code == 0, ended.err
        return float(re.search(r"done, ([\d.,]+) hours", ended.out).group(1).replace(",", "")), ended.out

    slow, text = hours("pocket-short")
    assert "on 1 device each, at 40% of 0.1 TFLOP/s" in text
    fast, text = hours("pocket-short", "--tflops", "0.2", "--efficiency", "0.8")
    assert "on 1 device each, at 80% of 0.2 TFLOP/s" in text
    assert 0 < fast == pytest.approx(slow / 4, abs=0.06)


def test_seeds_are_trained_evaluated_and_reported_one_after_the_other(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml", ["seeds=[1,2]"]), tmp_path / "out")
    done = []

    def run_in_order(_self, jobs, _num_at_once, _show=None, on_end=lambda _name: None):
        for job in jobs:
            done.append(job.name)
            on_end(job.name)

    monkeypatch.setattr(Study, "_run", run_in_order)
    monkeypatch.setattr(run_module, "summarize", lambda recipe, _out: done.append(f"report of {recipe.seeds}") or 1)
    study.run()
    assert done == [
        "prompts for pocket", "data for pocket",
        "pocket-dflash-ce-seed1", "pocket-dflash-bv-seed1", "evaluation of pocket, seed 1", "report of [1]",
        "pocket-dflash-ce-seed2", "pocket-dflash-bv-seed2", "evaluation of pocket, seed 2", "report of [1, 2]",
    ]  # fmt: skip


def test_evaluations_wait_for_their_cells_and_cells_for_nothing(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)
    cells = [f"pocket-dflash-{objective}-seed{seed}" for seed in (1, 2) for objective in ("ce", "bv")]
    for features in ("cached", "online"):
        recipe = load_study(tmp_path / "s.yaml", ["seeds=[1,2]", f"set=[data.features={features}]"])
        assert {job.name: job.needs for job in Study(recipe, tmp_path / "out").jobs_left()} == {
            **{name: set() for name in cells},
            "evaluation of pocket, seed 1": set(cells[:2]), "evaluation of pocket, seed 2": set(cells[2:]),
        }  # fmt: skip


def test_seeds_that_end_out_of_order_are_reported_as_they_are_complete(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml", ["seeds=[1,2]"]), tmp_path / "out")
    reports = []

    def run_backwards(_self, jobs, _num_at_once, _show=None, on_end=lambda _name: None):
        for job in reversed(jobs):
            on_end(job.name)

    monkeypatch.setattr(Study, "_run", run_backwards)
    monkeypatch.setattr(run_module, "summarize", lambda recipe, _out: reports.append(recipe.seeds))
    study.run()
    assert [list(seeds) for seeds in (reports[0], reports[-1])] == [[2], [1, 2]]


def test_a_target_that_is_complete_is_reported_while_another_is_trained(tmp_path, monkeypatch):
    values = yaml.safe_load(TINY)
    values |= {"targets": {"one": {"recipe": "pocket"}, "two": {"recipe": "pocket"}}, "seeds": [1, 2]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(values))
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path / "out")
    reports = []

    def run_in_order(_self, jobs, _num_at_once, _show=None, on_end=lambda _name: None):
        for job in jobs:
            on_end(job.name)

    monkeypatch.setattr(Study, "_run", run_in_order)
    monkeypatch.setattr(run_module, "summarize", lambda recipe, _: reports.append(([*recipe.targets], recipe.seeds)))
    study.run()
    both = ["one", "two"]
    assert reports == [(["one"], [1]), (both, [1]), (both, [1]), (both, [1, 2])]


@pytest.mark.parametrize(
    ("num_at_once", "order"),
    [
        (1, ["+train", "-train", "+evaluate", "-evaluate", "+next", "-next"]),
        (2, ["+train", "+next", "-train", "+evaluate", "-next", "-evaluate"]),
    ],
)
def test_jobs_run_side_by_side_where_what_they_need_allows_it(tmp_path, monkeypatch, num_at_once, order):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path)
    monkeypatch.setattr(Job, "command", property(lambda job: ["sh", "-c", *job.arguments]))

    def waiting(marks):
        return "".join(f"until grep -qe {mark} marks 2>/dev/null; do sleep 0.05; done; " for mark in marks)

    def job(name, needs=(), waits_for=(), begins_after=()):
        begin, end = f"{waiting(begins_after)}echo +{name} >> marks", f"{waiting(waits_for)}echo -{name} >> marks"
        return Job(name, [f"cd {tmp_path}; {begin}; {end}"], frozenset(needs))

    beside = num_at_once > 1  # then each waits for the other's mark, and the order is certain
    jobs = [
        job("train", waits_for=["+next"] if beside else []),
        job("evaluate", ["train"], waits_for=["-next"] if beside else []),
        job("next", waits_for=["+evaluate"] if beside else [], begins_after=["+train"] if beside else []),
    ]
    ended, running = [], []
    study._run(jobs, num_at_once, running.append, ended.append)
    assert (tmp_path / "marks").read_text().split() == order
    assert sorted(ended) == ["evaluate", "next", "train"]
    assert max(map(len, running)) <= num_at_once
    with pytest.raises(StudyError, match="wrong failed: no such thing"):
        study._run([Job("wrong", ["echo no such thing; exit 3"]), job("never", ["wrong"])], num_at_once)
    assert "never" not in (tmp_path / "marks").read_text()


def test_if_a_job_fails_those_beside_it_are_stopped(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path)
    monkeypatch.setattr(Job, "command", property(lambda job: ["sh", "-c", *job.arguments]))
    endless = f"trap 'touch {tmp_path}/stopped; exit 143' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    fails = f"until [ -e {tmp_path}/begun ]; do sleep 0.05; done; echo error: broken; exit 3"
    with pytest.raises(StudyError, match="wrong failed: broken"):
        study._run([Job("endless", [endless]), Job("wrong", [fails])], 2)
    assert (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("asked", "count", "gpus"),
    [
        (None, 2, ["0", "1"]), ("", 2, ["0", "1"]), ("3, 5", 2, ["3", "5"]), ("GPU-8f", 1, ["GPU-8f"]),
        ("-1", 0, []), ("NoDevFiles", 0, []), (None, 0, []),
    ],
)  # fmt: skip
def test_gpus_are_those_that_can_be_seen(monkeypatch, asked, count, gpus):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert _visible_gpus() == gpus


def test_jobs_at_once_have_a_gpu_each_and_every_command_its_device(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(TINY)
    study = Study(load_study(tmp_path / "s.yaml"), tmp_path, gpus=["3", "5"], device="cuda")
    data = next(job.arguments for job in study.data_jobs() if "regenerate" in job.arguments)
    assert "--num-responses" not in data
    several = load_study(tmp_path / "s.yaml", ["targets.pocket.num_responses=3"])
    data = next(job.arguments for job in Study(several, tmp_path).data_jobs() if "regenerate" in job.arguments)
    assert data[-2:] == ["--num-responses", "3"]
    told = [job.arguments[0] for job in [*study.data_jobs(), *study.jobs_left()] if "--device" in job.arguments]
    assert told == ["data", "train", "train", "evaluate"]
    monkeypatch.setattr(Job, "command", property(lambda job: ["sh", "-c", *job.arguments]))

    def job(name, other):
        script = f"cd {tmp_path}; echo $CUDA_VISIBLE_DEVICES > {name}; until [ -e {other} ]; do sleep 0.05; done"
        return Job(name, [script])

    study._run([job("one", "two"), job("two", "one"), job("three", "one")], 2)
    assert {(tmp_path / name).read_text().strip() for name in ("one", "two")} == {"3", "5"}
    assert (tmp_path / "three").read_text().strip() in {"3", "5"}


def test_cells_share_a_feature_cache_if_they_read_the_same_features(tmp_path):
    (tmp_path / "s.yaml").write_text(TINY)

    def caches(*changes):
        recipe = load_study(tmp_path / "s.yaml", list(changes))
        return {Study(recipe, "out").cache_folder(cell) for cell in recipe.cells}

    assert len(caches("seeds=[1,2]", "drafters=[dflash,dspark]")) == 1
    assert len(caches("objectives.bv.set=[drafter.num_features=2]")) == 2
    assert len(caches("objectives.bv.set=[drafter.vocab_size=512]")) == 2
    assert caches("set=[drafter.vocab_size=512,objective.options.temperature=0.5]") != caches(
        "set=[drafter.vocab_size=512]"
    )


class StopError(Exception):
    pass


@pytest.mark.slow
def test_a_study_that_was_stopped_ends_with_the_report_of_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # more threads round otherwise: a study sets one for all
    (tmp_path / "s.yaml").write_text(TINY)
    study = load_study("s.yaml")
    whole = Study(study, "whole", num_jobs=2).run()

    def stop_in(wanted):
        def stop(stage, done, _of, _tokens):
            if stage.startswith(wanted) and done >= (wanted == "training"):
                raise StopError

        return stop

    for stage in ("training", "evaluation"):  # the second while it runs
        with pytest.raises(StopError):
            Study(study, "parts", num_jobs=1, on_progress=stop_in(stage)).run()
    parts = Study(study, "parts").run()
    for name in ("predicted-length", "acceptance-length", "predicted-length-over-ce"):
        files = [tmp_path / each / "report" / "tables" / f"study-{name}.csv" for each in ("whole", "parts")]
        rows = [list(csv.DictReader(file.read_text().splitlines())) for file in files]
        assert rows[0] == rows[1]
        assert rows[0]
    for run in (tmp_path / "whole" / "runs").iterdir():  # evaluated: the study no longer needs the checkpoints
        shutil.rmtree(run / "steps")
    assert Study(study, "whole").jobs_left() == []
    assert len(Study(load_study("s.yaml", ["seeds=[1,2]"]), "whole").jobs_left()) == 3  # two cells and an evaluation
    for change in ("objectives.lk={recipe: lk}", "baseline=bv"):  # evaluates all drafters of the seed again
        with pytest.raises(StudyError, match=r"whole/runs/\S+-ce-seed1 has lost its last checkpoint, .* Put it back"):
            Study(load_study("s.yaml", [change]), "whole").run()
    assert Study(study, "whole").run().wins == whole.wins  # nothing of what was refused is remembered
    for name, value in (("step", 2), ("checkpoint", "best"), ("checkpoint", None)):  # of another checkpoint of the run
        file = Study(study, "whole").evaluation_folder("pocket", 1) / "results.json"
        before = file.read_text()
        changed = json.loads(before)
        changed["drafters"][0][name] = value
        file.write_text(json.dumps(changed))
        assert [Study(study, "whole").is_trained(cell) for cell in study.cells] == [False, True]
        file.write_text(before)
    link = tmp_path / "whole" / "runs" / study.cells[0].name / "checkpoint"
    link.unlink()
    link.symlink_to("steps/00000002")  # stopped before its end
    assert not Study(study, "whole").is_trained(study.cells[0])
    assert whole.wins == parts.wins
    assert whole.wins["bv"].predicted.of == whole.wins["bv"].measured.of == 2  # one task, two rules
    assert json.loads((tmp_path / "whole" / "report" / "wins.json").read_text())
    assert parts.page.exists()
    plan = Study(study, "parts")
    assert all(plan.is_trained(cell) for cell in study.cells)
    assert [plan.steps_done(cell) for cell in study.cells] == [(3, 3), (3, 3)]
    more = load_study("s.yaml", ["objectives.lk={recipe: lk}"])  # an objective that is added, after all was evaluated
    assert set(Study(more, "parts").run().wins) == {"bv", "lk"}
    assert Study(more, "parts").jobs_left() == Study(more, "parts").data_jobs() == []
    planned = blockdraft("study", "s.yaml", "objectives.lk={recipe: lk}", "--plan", "--out", "parts")
    assert "3 cells, 3 done, 0.0 hours" in planned.out, planned.err
    assert planned.out.endswith("nothing is left to run\n")
    other = Study(load_study("s.yaml", ["objectives.lk={recipe: lk}", "baseline=bv"]), "parts").run()
    assert other.baseline == "bv"
    folder = Study(more, "parts").evaluation_folder(more.cells[0].target, more.cells[0].seed)
    compared = {(each.drafter, each.baseline) for each in read_results(folder).comparisons}
    assert compared == {(f"dflash-{a}", f"dflash-{b}") for b in ("ce", "bv") for a in ("ce", "bv", "lk") if a != b}
    assert set(other.wins) == {"ce", "lk"}
    written = {file.name for file in (tmp_path / "parts" / "report" / "tables").glob("study-*-over-*.md")}
    quantities = ("predicted-length", "acceptance-length", "speedup")
    assert written == {f"study-{quantity}-over-bv.md" for quantity in quantities}
    assert other.wins["ce"].predicted.wins + whole.wins["bv"].predicted.wins == 2  # no ties in two comparisons
    changed = load_study("s.yaml", ["objectives.bv.set=[annealing.final=0.5]"])  # as if a shipped recipe had changed
    with pytest.raises(StudyError, match=r"bv-seed1 was trained by another recipe: annealing differ"):
        Study(changed, "parts").is_trained(changed.cells[1])
    changed = load_study("s.yaml", ["objectives.bv.set=[batch.num_texts=8]"])
    with pytest.raises(StudyError, match=r"bv-seed1 was trained by another recipe: batch differ"):
        Study(changed, "parts").is_trained(changed.cells[1])
    changed = load_study("s.yaml", ["objectives.bv.set=[drafter.num_proposals=3]"])
    with pytest.raises(StudyError, match=r"bv-seed1 was trained by another recipe: drafter differ"):
        Study(changed, "parts").is_trained(changed.cells[1])
    target = study.cells[1].target
    shutil.copytree(plan.data_folder(target), tmp_path / "given")
    given = load_study("s.yaml", [f"targets.{target}.data=given"])
    assert Study(given, "parts").is_trained(given.cells[1])
    manifest = (tmp_path / "given" / "manifest.json").read_text()
    checksum = next(iter(json.loads(manifest)["shards"].values()))["sha256"]
    (tmp_path / "given" / "manifest.json").write_text(manifest.replace(checksum, "0" * 64))  # as if they had grown
    with pytest.raises(StudyError, match=r"bv-seed1 was trained on other texts than given holds now"):
        Study(given, "parts").is_trained(given.cells[1])
    free = ["batch.gradient_accumulation_steps=2", "runtime.gradient_checkpointing=true"]
    split = load_study("s.yaml", [f"objectives.lk={{recipe: lk, set: [{','.join(free)}]}}", "hardware.devices=2"])
    assert Study(split, "parts").run().wins.keys() == {"bv", "lk"}  # how a step is computed may change
    for change in ("evaluation.num_prompts=1", "objectives.bv.set=[]", "objectives={ce: {recipe: ce}}", "seeds=[2]"):
        field = change.partition("=")[0].partition(".")[0]
        with pytest.raises(StudyError, match=rf"holds another study: .*\b{field}\b.* differ"):
            Study(load_study("s.yaml", [change]), "parts").run()
