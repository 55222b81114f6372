"""Run a study: data, cells side by side, evaluations, one report; every stage resumes where it stopped.

out/study.yaml                     the study
out/data/TARGET/                   texts of each target
out/features/TARGET-.../           their features, shared by all cells that read the same ones, if recipes say so
out/runs/CELL/                     training runs
out/evaluations/TARGET-seedS/      all drafters of one target and seed, on the same prompts
out/report/                        tables over seeds, and one report of the means over seeds
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from blockdraft.data import Manifest, read_manifest
from blockdraft.data.manifest import MANIFEST
from blockdraft.evaluation import read_results
from blockdraft.evaluation.evaluation import OnProgress
from blockdraft.files import atomic_write, exclusive
from blockdraft.runs import Run
from blockdraft.study.changes import STUDY_FILE, differences, refuse_another_study
from blockdraft.study.cost import refuse_too_large
from blockdraft.study.inputs import check_best, check_data, check_dynamics, check_initial, check_tasks
from blockdraft.study.plan import PLACEHOLDER, StudyCell, StudyError, StudyRecipe
from blockdraft.study.processes import Job, leftovers_ended, start
from blockdraft.study.summary import StudySummary, summarize

SECONDS_TO_SAVE = "600"
"""How long torchrun waits for processes that were told to stop; by default 30 seconds, too few for large models."""


class Study:
    """Runs a study in its folder, and resumes it.

    Args:
        recipe: the study.
        out: its folder.
        num_jobs: how many cells and evaluations run at once, each in ``hardware.devices`` processes.
        gpus: as ``CUDA_VISIBLE_DEVICES`` names them; processes that run at once are shared out over them.
        device: where every command computes; None leaves it to the command.
        on_progress: called with a stage, how many of its items are done, how many there are, and 0.
    """

    def __init__(
        self,
        recipe: StudyRecipe,
        out: str | Path,
        *,
        num_jobs: int = 1,
        gpus: Sequence[str] = (),
        device: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.recipe, self.out, self.num_jobs = recipe, Path(out), num_jobs
        self.gpus, self.device = list(gpus), device
        self._device_options = [] if device is None else ["--device", device]
        self.on_progress = on_progress or (lambda _stage, _done, _of, _tokens: None)
        self._lock: int | None = None  # that children hold until they end

    # What there is to do

    def data_folder(self, target: str) -> Path:
        """Return the folder of a target's texts: the one that the study names, or the one that it makes.

        Targets that differ in nothing that decides their texts share those of the first.
        """
        return self.recipe.targets[target].data or self.out / "data" / self._first_with_texts[target]

    @cached_property
    def _first_with_texts(self) -> dict[str, str]:
        """For each target, the first one with the same model and texts."""
        first, found = dict[str, str](), dict[str, str]()
        for name, target in self.recipe.targets.items():
            texts = str(target.data or target.model_dump_json(exclude={"set", "recipe"}))
            found[name] = first.setdefault(f"{self._model(name)} {texts}", name)
        return found

    def run_folder(self, cell: StudyCell) -> Path:
        """Return the folder of a cell's training run."""
        return self.out / "runs" / cell.name

    def evaluation_folder(self, target: str, seed: int) -> Path:
        """Return the folder where all drafters of one target and seed are evaluated together."""
        return self.out / "evaluations" / f"{target}-seed{seed}"

    def manifest(self, target: str) -> Manifest | None:
        """Return the manifest of a target's texts, of which some may be missing; None if there are none."""
        folder = self.data_folder(target)
        return read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None

    def data_jobs(self, *, recheck: bool = False) -> list[Job]:
        """Return the commands that choose prompts and let the targets answer them, where texts are missing.

        recheck: also where none is missing, which the command then checks.
        """
        jobs = []
        for name in dict.fromkeys(self._first_with_texts.values()):
            target, manifest = self.recipe.targets[name], self.manifest(name)
            if target.data is not None or (manifest is not None and manifest.complete and not recheck):
                continue
            prompts = self.out / "data" / f"{name}.prompts.jsonl"
            if not prompts.exists():
                chosen = ["--num", str(target.num_prompts), "--out", str(prompts)]
                jobs.append(Job(f"prompts for {name}", ["data", "prompts", "--from", target.prompts, *chosen]))
            limits = ["--max-new-tokens", str(target.max_new_tokens), "--max-length", str(target.max_length)]
            folders = ["--prompts", str(prompts), "--out", str(self.data_folder(name))]
            limits += ["--num-responses", str(target.num_responses)] if target.num_responses > 1 else []
            jobs.append(Job(f"data for {name}", ["data", "regenerate", *self._model(name), *folders, *limits]))
        return jobs

    def _model(self, target: str) -> list[str]:
        """Return the options that load a target, in the precision that its first cell trains for."""
        section = next(cell for cell in self.recipe.cells if cell.target == target).recipe.target
        dtype = [] if section.dtype is None else ["--dtype", section.dtype]
        return ["--target", section.name, *dtype, *self._device_options]

    def cache_folder(self, cell: StudyCell) -> Path:
        """Return the folder of the cached features that a cell reads: its own choice, or named by what decides them."""
        drafter, recipe = cell.recipe.drafter, cell.recipe
        if recipe.data.cache != PLACEHOLDER:
            assert recipe.data.cache is not None
            return recipe.data.cache
        parts = [self._first_with_texts[cell.target], f"{drafter.num_features or 'default'}-layers"]
        parts += [recipe.target.dtype] if recipe.target.dtype else []
        parts += [f"normalizer-{recipe.make_objective().temperature:g}"] if drafter.vocab_size is not None else []
        return self.out / "features" / "-".join(parts)

    def training_job(self, cell: StudyCell) -> Job:
        """Return the command that trains one cell."""
        fields = cell.assignments(self.data_folder(cell.target), self.cache_folder(cell))
        out = ["--out", str(self.run_folder(cell))]
        arguments = ["train", cell.recipe_name, *fields, *self._device_options, *out]
        on_cpu = not self.gpus or cell.recipe.runtime.device == "cpu"
        return Job(cell.name, arguments, num_processes=self.recipe.hardware.devices, num_threads=1 if on_cpu else None)

    def evaluation_job(self, target: str, seed: int) -> Job:
        """Return the command that evaluates all drafters of one target and seed."""
        evaluation = self.recipe.evaluation
        cells = [cell for cell in self.recipe.cells if (cell.target, cell.seed) == (target, seed)]
        drafters = [f"{cell.drafter_name}={self.run_folder(cell)}@{evaluation.checkpoint}" for cell in cells]
        arguments = ["evaluate", *self._model(target), "--drafter", *drafters]
        arguments += ["--tasks", *evaluation.tasks, "--rules", *evaluation.rules]
        arguments += ["--max-new-tokens", str(evaluation.max_new_tokens), "--seed", str(seed)]
        arguments += ["--dynamics-texts", str(evaluation.dynamics_texts), "--num-traces", str(evaluation.num_traces)]
        baselines = [cell.drafter_name for cell in cells if cell.objective in self._baselines]
        arguments += ["--baseline", *baselines] if baselines else []
        if evaluation.draft_temperatures is not None:
            arguments += ["--draft-temperatures", *map(str, evaluation.draft_temperatures)]
        if not evaluation.argmax_drafts:
            arguments += ["--no-argmax-drafts"]
        if evaluation.num_prompts is not None:
            arguments += ["--num-prompts", str(evaluation.num_prompts)]
        if evaluation.num_decoded is not None:
            arguments += ["--num-decoded", str(evaluation.num_decoded)]
        if evaluation.prompts is not None:
            arguments += ["--prompts", str(evaluation.prompts)]
        arguments += ["--out", str(self.evaluation_folder(target, seed))]
        name, threads = self._evaluation_name(target, seed), None if self.gpus else 1
        return Job(name, arguments, num_processes=self.recipe.hardware.devices, num_threads=threads)

    def steps_done(self, cell: StudyCell) -> tuple[int, int | None]:
        """Return the steps that a cell has taken, and how many it will take; None if that is not known yet."""
        if not Run.is_run(self.run_folder(cell)):
            return 0, None
        run = Run.open(self.run_folder(cell))
        metrics = run.metrics()
        saved = max(run.checkpoints(), default=0)
        return max(saved, metrics[-1]["step"] if metrics else 0), run.info.num_steps

    def is_trained(self, cell: StudyCell) -> bool:
        """Return whether a cell's last checkpoint is the end of its training.

        Once its target and seed are evaluated, the checkpoint may be gone: the study no longer needs it. A run by other
        settings or of other texts is refused: a shipped recipe may have changed since the study was begun, and a data
        folder may have grown.
        """
        if not Run.is_run(self.run_folder(cell)):
            return False
        run = Run.open(self.run_folder(cell))
        differ = differences(run.recipe, cell.recipe)
        if differ:
            raise StudyError(
                f"{run.folder} was trained by another recipe: {', '.join(differ)} differ. Choose another --out, or set "
                "what it was trained with"
            )
        given = self.recipe.targets[cell.target].data
        if given is not None and (given / MANIFEST).exists() and read_manifest(given).texts_identity != run.info.data:
            raise StudyError(
                f"{run.folder} was trained on other texts than {given} holds now, so that its figures would not be "
                "comparable with new ones. Choose another --out, or put the texts back"
            )
        return run.info.num_steps in run.checkpoints() or self._is_evaluated_at_its_end(cell, run)

    def _is_evaluated_at_its_end(self, cell: StudyCell, run: Run) -> bool:
        """Return whether a run reached its end, and its cell's evaluation is complete and was made from that end."""
        which = self.recipe.evaluation.checkpoint
        if run.last_saved_step != run.info.num_steps or not self.is_evaluated(cell.target, cell.seed):
            return False
        drafters = read_results(self.evaluation_folder(cell.target, cell.seed)).drafters
        found = next(each for each in drafters if each.name == cell.drafter_name)
        return found.checkpoint == which and (which == "best" or found.step == run.info.num_steps)

    def _refuse_lost_checkpoints(self) -> None:
        """Refuse what would train or evaluate a cell again whose checkpoints are gone, before anything else runs."""
        for cell in self.recipe.cells:
            folder = self.run_folder(cell)
            if Run.is_run(folder) and not self.is_trained(cell) and Run.open(folder).lost_its_checkpoint:
                evaluation = self.evaluation_folder(cell.target, cell.seed)
                raise StudyError(
                    f"{folder} has lost its last checkpoint, and all drafters of a seed are evaluated together. Put it "
                    f"back, or delete {folder} and {evaluation} to train and evaluate it again"
                )

    def is_evaluated(self, target: str, seed: int) -> bool:
        """Return whether the results of a target and seed are there, with all drafters that the study has now.

        They also have to compare the drafters with the baseline that it has now.
        """
        is_complete = self.drafters_of(target, seed) == self.evaluated_drafters(target, seed)
        return is_complete and self._is_compared(target, seed)

    @property
    def _baselines(self) -> list[str]:
        """Give the objectives that evaluations compare with: CE and the study's baseline, if it names one."""
        asked, objectives = self.recipe.baseline, self.recipe.objectives
        return [] if asked is None else [name for name, o in objectives.items() if name == asked or o.recipe == "ce"]

    def _is_compared(self, target: str, seed: int) -> bool:
        """Return whether the results of a target and seed compare with the study's baselines, which may change."""
        found = {each.baseline for each in read_results(self.evaluation_folder(target, seed)).comparisons}
        wanted = {f"{drafter}-{name}" for drafter in self.recipe.drafters for name in self._baselines}
        return found >= wanted or len(self.recipe.objectives) == 1

    def drafters_of(self, target: str, seed: int) -> set[str]:
        """Return the names of the drafters that are evaluated together."""
        return {cell.drafter_name for cell in self.recipe.cells if (cell.target, cell.seed) == (target, seed)}

    def evaluated_drafters(self, target: str, seed: int) -> set[str]:
        """Return the names of the drafters whose results are there."""
        folder = self.evaluation_folder(target, seed)
        return {each.name for each in read_results(folder).drafters} if (folder / "results.json").exists() else set()

    def evaluations_left(self) -> list[tuple[str, int]]:
        """Return the targets and seeds that are not evaluated, or of which a cell is not trained, seed by seed."""
        pairs = [(target, seed) for seed in self.recipe.seeds for target in self.recipe.targets]
        untrained = {(cell.target, cell.seed) for cell in self.recipe.cells if not self.is_trained(cell)}
        return [pair for pair in pairs if pair in untrained or not self.is_evaluated(*pair)]

    # Doing it

    def run(self) -> StudySummary:
        """Do all that is left, and write the report."""
        self.check(download=True)
        refuse_too_large(self)
        self.out.mkdir(parents=True, exist_ok=True)
        with exclusive(self.out):
            self._remember()
            (self.out / "logs").mkdir(exist_ok=True)
            with leftovers_ended(self.out / "logs" / ".running", self._show_waiting) as self._lock:
                return self._run_all()

    def check(self, *, download: bool) -> None:
        """Refuse what would be found out later: another study's folder, runs of another recipe, what cannot be read.

        download: also check what is given by hand or has to be downloaded; without, the study may be for elsewhere.
        """
        refuse_another_study(self.recipe, self.out)
        check_dynamics(self.recipe)
        check_best(self.recipe)
        check_data(self.recipe, running=download)
        self._refuse_lost_checkpoints()
        check_initial([cell for cell in self.recipe.cells if not self.is_trained(cell)], download=download)
        if self.evaluations_left():  # opens the runs that are there
            check_tasks(self.recipe.evaluation, download=download)

    def _show_waiting(self, done: int) -> None:
        self.on_progress("waiting for commands of a killed study to save and stop", done, 1, 0)

    def _run_all(self) -> StudySummary:
        for number, job in enumerate(jobs := self.data_jobs(recheck=True)):
            self.on_progress("data", number, len(jobs), 0)
            self._run([job], 1)
            self.on_progress("data", number + 1, len(jobs), 0)
        refuse_too_large(self)  # now the texts are known, and so are their features
        jobs = self.jobs_left()
        left = {job.name for job in jobs}

        def report(ended: str) -> None:
            """Summarize what is complete, so that a study that is stopped later has something to show."""
            left.discard(ended)
            if ended in self._evaluations(*self.recipe.seeds):
                self.on_progress(ended, 1, 1, 0)
                complete = self._evaluated_part(left)
                if complete is not None and left:
                    summarize(complete, self.out)

        self._run(jobs, self.num_jobs, self._show_steps(), report)
        return summarize(self.recipe, self.out)

    def _evaluated_part(self, left: Set[str]) -> StudyRecipe | None:
        """Return the part of the study that is evaluated while some jobs are left; None if there is none yet.

        Its targets are those with a seed that is evaluated, its seeds those that are evaluated for all of these.
        """

        def is_done(target: str, seed: int) -> bool:
            return self._evaluation_name(target, seed) not in left

        targets = {n: t for n, t in self.recipe.targets.items() if any(is_done(n, s) for s in self.recipe.seeds)}
        seeds = [seed for seed in self.recipe.seeds if all(is_done(name, seed) for name in targets)]
        return self.recipe.model_copy(update={"targets": targets, "seeds": seeds}) if targets and seeds else None

    def jobs_left(self) -> list[Job]:
        """Return the training jobs and evaluations that are left, seed by seed, with what each waits for."""
        untrained, evaluations = (
            [cell for cell in self.recipe.cells if not self.is_trained(cell)],
            self.evaluations_left(),
        )
        jobs = list[Job]()
        for seed in self.recipe.seeds:
            cells = [cell for cell in untrained if cell.seed == seed]
            jobs += map(self.training_job, cells)
            for target in self.recipe.targets:
                needs = frozenset(cell.name for cell in cells if cell.target == target)
                if (target, seed) in evaluations:
                    jobs.append(replace(self.evaluation_job(target, seed), needs=needs))
        return jobs

    def _evaluations(self, *seeds: int) -> set[str]:
        """Return the names of the evaluations of some seeds."""
        return {self._evaluation_name(target, seed) for target in self.recipe.targets for seed in seeds}

    def _evaluation_name(self, target: str, seed: int) -> str:
        return f"evaluation of {target}, seed {seed}"

    def _remember(self) -> None:
        with atomic_write(self.out / STUDY_FILE) as unfinished:
            unfinished.write_text(self.recipe.to_yaml(), encoding="utf-8")

    def _show_steps(self) -> Callable[[Sequence[str]], None]:
        """Return what shows the steps of all cells, about once a second, and the evaluations that begin."""
        cells, known, shown = self.recipe.cells, dict[str, tuple[int, int | None]](), 0.0
        stage, begun = f"training, steps of {len(cells)} cells", set[str]()

        def show(running: Sequence[str]) -> None:
            nonlocal shown
            for name in sorted(self._evaluations(*self.recipe.seeds) & set(running) - begun):
                begun.add(name)
                self.on_progress(name, 0, 1, 0)
            if time.monotonic() < shown + 1:
                return
            shown = time.monotonic()
            for cell in cells:
                done, of = known.get(cell.name, (0, None))
                if of is None or done < of:
                    known[cell.name] = self.steps_done(cell)
            stated = [known[cell.name][1] or cell.recipe.optimizer.max_steps for cell in cells]
            totals = [of for of in stated if of]
            of = round(sum(totals) / len(totals) * len(cells)) if totals else len(cells)
            done = sum(done for done, _ in known.values())
            self.on_progress(stage, done, max(of, done), 0)

        return show

    def _run(
        self,
        jobs: Sequence[Job],
        num_at_once: int,
        show: Callable[[Sequence[str]], None] = lambda _running: None,
        on_end: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """Run commands, some at once, in their order where what they need allows it.

        If one fails, the others are told to save and stop.
        """
        (self.out / "logs").mkdir(exist_ok=True)
        waiting, running, failed = list(jobs), dict[str, subprocess.Popen[bytes]](), list[str]()
        places, begins = dict[str, list[str]](), dict[str, int]()  # the GPUs of every job; where its log begins
        try:
            while (waiting or running) and not failed:
                unfinished = {job.name for job in waiting} | set(running)
                for job in [each for each in waiting if not each.needs & unfinished]:
                    if len(running) < num_at_once:
                        waiting.remove(job)
                        taken = [gpu for name in running for gpu in places[name]]
                        places[job.name] = sorted(self.gpus, key=taken.count)[: job.num_processes]
                        environment = self._environment(job, num_at_once, places[job.name])
                        with self._log(job.name).open("ab") as log:
                            begins[job.name] = log.tell()
                            running[job.name] = start(job.command, log, environment, self._lock)
                time.sleep(0.2)
                ended = {name: child.returncode for name, child in running.items() if child.poll() is not None}
                for name in ended:
                    del running[name]
                show(list(running))
                for name, code in ended.items():
                    if code:
                        failed.append(name)
                    else:
                        on_end(name)
        finally:
            for child in running.values():
                child.send_signal(signal.SIGTERM)
            for child in running.values():
                child.wait()
        if failed:
            written = self._log(failed[0]).read_bytes()[begins[failed[0]] :].decode(errors="replace")
            lines = written.strip().splitlines() or [""]
            # torchrun has its own last words, after those of the processes
            said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
            raise StudyError(f"{failed[0]} failed: {said.removeprefix('error: ')} (all of it: {self._log(failed[0])})")

    def _environment(self, job: Job, num_at_once: int, gpus: Sequence[str]) -> dict[str, str]:
        """Return the environment of a job: its threads, unless the user has decided that, and its GPUs."""
        threads = job.num_threads or max(1, (os.cpu_count() or 1) // (num_at_once * job.num_processes))
        found = {"OMP_NUM_THREADS": str(threads), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SECONDS_TO_SAVE} | os.environ
        return found | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else found

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name.replace(' ', '-').replace(',', '')}.log"
