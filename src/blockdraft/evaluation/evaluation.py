"""Run an evaluation in its folder: texts of the target, predictions from them, decoding, results.

out/plan.json              what this evaluation is; another one is refused, but drafters and draft temperatures may be
                           added
out/texts/KIND/NNN         the target's own responses, greedy and sampled, in data folders of up to 128 prompts
out/predictions/*.json     expected rounds on them, by drafter (its fingerprint) and data folder
out/proposals.json         how many tokens each drafter proposes, if that is chosen for speed
out/records/*.jsonl        one line per prompt and way of decoding
out/dynamics/*.json        what was measured of the checkpoint of an epoch, by drafter and step
out/results.json, out/profile.json, out/traces.json

Every stage resumes where it stopped. Data folders, prompts and checkpoints are shared out over the processes; the
first process puts the results together.
"""

import contextlib
import datetime
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockdraft.data import (
    Conversation,
    GenerationSettings,
    Prompt,
    TextDataset,
    read_completions,
    read_manifest,
    regenerate,
)
from blockdraft.data.manifest import MANIFEST
from blockdraft.decoding import best_num_proposals, measure_costs
from blockdraft.distributed import Distributed
from blockdraft.evaluation.candidates import Candidate
from blockdraft.evaluation.drafting import converse, trace_answer
from blockdraft.evaluation.dynamics import training_dynamics
from blockdraft.evaluation.metrics import (
    Assembly,
    DecodedPrompt,
    GenerationRecord,
    RecordFiles,
    Records,
    about_drafter,
    profile,
)
from blockdraft.evaluation.prediction import PredictionFile, Predictions, PredictionSettings, Predictor
from blockdraft.evaluation.protocol import PLAN, DecodingSetup, EvaluationPlan, ProposalFile, Protocol, TextKind
from blockdraft.evaluation.results import (
    Dynamics,
    EvaluationError,
    Results,
    SpeedSettings,
    TaskAbout,
    TracedPrompt,
    Traces,
    best_temperature,
    read_evaluation_file,
    read_results,
    write_model,
)
from blockdraft.evaluation.tasks import Task
from blockdraft.files import Provenance, exclusive
from blockdraft.targets import Sampling, Target, fingerprint

PROMPTS_PER_FOLDER = 128
WARM_UP_TOKENS = 16

OnProgress = Callable[[str, int, int, int], None]
"""(stage, done, of, tokens made now)."""


class Evaluation:
    """Measures drafters of one target on tasks, in a folder."""

    def __init__(
        self,
        target: Target,
        candidates: Sequence[Candidate],
        tasks: Sequence[Task],
        protocol: Protocol,
        out: str | Path,
        distributed: Distributed | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if not candidates:
            raise EvaluationError("there is no drafter to evaluate")
        names = [each.name for each in candidates]
        unknown = [name for name in protocol.baselines if name not in names]
        if unknown:
            raise EvaluationError(f"the baseline {unknown[0]!r} is none of the drafters: {', '.join(names)}")
        num = protocol.num_proposals
        self.candidates = [each.with_proposals(num) if isinstance(num, int) else each for each in candidates]
        self.target, self.protocol, self.out = target, protocol, Path(out)
        # the longest prompt and answer together, in every way alike: the last block may reach beyond the answer
        longest = max(each.drafter.config.num_proposals for each in self.candidates)
        self.max_length = (target.context_length or 2**15) - 1 - longest
        self.left_out: dict[str, Counter[str]] = {}
        self.tasks = [self._what_fits(_with_unique_ids(task)) for task in tasks]
        self.distributed = distributed or Distributed(str(target.device))
        self.on_progress = on_progress or (lambda _stage, _done, _of, _tokens: None)
        self.prompts = [(task, prompt) for task in self.tasks for prompt in task.prompts]
        self.decoded = [(task, prompt) for task in self.tasks for prompt in protocol.decoded(task.prompts)]
        self.records = RecordFiles(self.out / "records", self.distributed.rank)

    def run(self) -> Results:
        """Run all stages, and return the results, which the first process also writes."""
        started = _now()
        if not self.distributed.is_main:
            return self._stages(started)
        for name, reasons in self.left_out.items():
            said = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
            print(f"{name}: {reasons.total()} prompts are left out ({said})", file=sys.stderr)
        self.out.mkdir(parents=True, exist_ok=True)
        with exclusive(self.out):
            self._keep_plan()
            return self._stages(started)

    def _stages(self, started: str) -> Results:
        self.distributed.barrier()
        self._write_texts()
        self.distributed.barrier()
        self._write_predictions()
        self.distributed.barrier()
        if self.protocol.num_proposals in ("auto", "adaptive"):
            self._choose_proposals()
            self._write_predictions()
            self.distributed.barrier()
        predictions = {each.name: Predictions(self._prediction_files(each), self.protocol) for each in self.candidates}
        points = {name: each.temperatures(self.tasks) for name, each in predictions.items()}
        rules = self.protocol.sampled_rules
        setups = self._setups({n: {r: best_temperature(p, r) for r in rules} for n, p in points.items()})
        num_decoded = sum(self.distributed.all_gather(self._decode(setups)))
        dynamics, obstacles = self._dynamics()
        records = Records(self.records.read(), self.protocol)
        found = Assembly(self.tasks, self.candidates, self.protocol).assemble(setups, records, predictions)
        results = Results(
            target=self.target.name, target_fingerprint=fingerprint(self.target), settings=self._settings(),
            provenance=self._provenance(started, num_decoded),
            tasks=[self._about(task) for task in self.tasks],
            drafters=[
                about_drafter(
                    each, predictions[each.name], self.tasks, self.protocol, found.speed_settings[each.name]
                )
                for each in self.candidates
            ],
            cells=found.cells, averages=found.averages, comparisons=found.comparisons,
            dynamics=dynamics, dynamics_obstacles=obstacles,
        )  # fmt: skip
        if self.distributed.is_main:
            write_model(self._traces(), self.out / "traces.json")
            write_model(profile(results), self.out / "profile.json")
            write_model(results, self.out / "results.json")
        self.distributed.barrier()
        return results

    # What this evaluation is

    def _keep_plan(self) -> None:
        """Write the plan, which may add drafters and draft temperatures to the one that is there, and no more."""
        protocol = self.protocol
        plan = EvaluationPlan(
            target=fingerprint(self.target), drafters={each.name: each.fingerprint for each in self.candidates},
            tasks={task.name: task.prompts for task in self.tasks}, rules=list(protocol.rules),
            temperature=protocol.temperature, max_new_tokens=protocol.max_new_tokens, seed=protocol.seed,
            draft_temperatures=list(protocol.grid), one_hot=protocol.one_hot,
            num_proposals=protocol.num_proposals, num_decoded=protocol.num_decoded,
        )  # fmt: skip
        plan.refuse_another(self.out)
        self._refuse_longer_blocks()
        write_model(plan, self.out / PLAN, indent=None)

    def _refuse_longer_blocks(self) -> None:
        """Raise if a drafter that is added proposes so many tokens that the texts would have to be shorter."""
        for _, folder, _ in self._folders():
            if (folder / MANIFEST).exists() and read_manifest(folder).identity.max_length != self.max_length:
                longest = max(self.candidates, key=lambda each: each.drafter.config.num_proposals)
                raise EvaluationError(
                    f"{longest.name} proposes more tokens at a time than the drafters that {self.out} was begun with, "
                    "so less room is left for answers. Choose another --out, or give --num-proposals"
                )

    def _provenance(self, started: str, num_decoded: int) -> dict[str, Any]:
        """Say where and when answers were last decoded: now, or before if none was left."""
        if not num_decoded and (self.out / "results.json").exists():
            with contextlib.suppress(EvaluationError):  # a damaged file is written anew
                return read_results(self.out).provenance
        device, processes = self.target.device, self.distributed.world_size
        return Provenance.here().model_dump() | {
            "machine": platform.machine(), "num_cpus": os.cpu_count(), "threads": torch.get_num_threads(),
            "num_processes": processes, "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "started": started, "finished": _now(),
        }  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        dtype, device = str(self.target.dtype).split(".")[-1], self.target.device.type
        return self.protocol.settings() | {"batch_size": 1, "dtype": dtype, "device": device}

    def _speed_settings(self) -> SpeedSettings:
        device, dtype = self.target.device, str(self.target.dtype).split(".")[-1]
        return SpeedSettings(
            num_processes=self.distributed.world_size, threads=torch.get_num_threads(), device=device.type, dtype=dtype,
            processor=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        )  # fmt: skip

    def _about(self, task: Task) -> TaskAbout:
        decoded = len(self.protocol.decoded(task.prompts))
        return task.about().model_copy(update={} if decoded == len(task.prompts) else {"num_decoded": decoded})

    # What the target can read

    def _what_fits(self, task: Task) -> Task:
        """Return the task without the prompts whose first answer has no room."""
        asked = [Conversation(prompt, self.target, self._sampling_settings("sampled")) for prompt in task.prompts]
        kept = [each.prompt for each in asked if each.dropped is None]
        if not kept:
            raise EvaluationError(
                f"{task.name}: no prompt can be answered with {self.protocol.max_new_tokens} new tokens, prompt and "
                f"answer within {self.max_length}: {asked[0].dropped}"
            )
        if len(kept) < len(asked):
            self.left_out[task.name] = Counter(each.dropped for each in asked if each.dropped is not None)
        return replace(task, prompts=kept, num_left_out=len(task.prompts) - len(kept))

    # Texts of the target

    def _sampling_settings(self, kind: TextKind) -> GenerationSettings:
        protocol = self.protocol
        sampling = Sampling(protocol.temperature_of(kind))
        return GenerationSettings(sampling, protocol.max_new_tokens, self.max_length, protocol.seed, whole_turns=True)

    def _folders(self) -> list[tuple[TextKind, Path, list[Prompt]]]:
        """Return all data folders, with the kind of texts and the prompts of each."""
        prompts = [prompt for _, prompt in self.prompts]
        starts = range(0, len(prompts), PROMPTS_PER_FOLDER)
        return [
            (kind, self.out / "texts" / kind / f"{number:03d}", prompts[start : start + PROMPTS_PER_FOLDER])
            for kind in self.protocol.text_kinds
            for number, start in enumerate(starts)
        ]

    def _write_texts(self) -> None:
        """Sample the target's own responses, by continuous batching."""
        own = self._folders()[self.distributed.rank :: self.distributed.world_size]
        of, done = sum(len(prompts) for _, _, prompts in own), 0

        def count(conversations: int, tokens: int, new: bool) -> None:
            nonlocal done
            done += conversations
            self.on_progress("texts of the target", done, of, tokens if new else 0)

        for kind, folder, prompts in own:
            settings = self._sampling_settings(kind)
            regenerate(prompts, self.target, settings, folder, shard_size=len(prompts), on_progress=count)

    # Predictions

    def _prediction_files(self, candidate: Candidate) -> list[Path]:
        return [self._prediction_file(candidate, folder) for _, folder, _ in self._folders()]

    def _prediction_file(self, candidate: Candidate, folder: Path) -> Path:
        return self.out / "predictions" / f"{candidate.fingerprint}-{folder.parent.name}-{folder.name}.json"

    def _write_predictions(self) -> None:
        """Score every drafter on the texts; what was scored before, on the same texts, is kept.

        Sampled texts take several times as long as greedy ones, so that each process gets some of either.
        """
        protocol = self.protocol
        every = [(*folder, candidate) for folder in self._folders() for candidate in self.candidates]
        own = every[self.distributed.rank :: self.distributed.world_size]
        done, of = 0, sum(len(prompts) for _, _, prompts, _ in own)
        for kind, folder, prompts, candidate in own:
            self.on_progress("predictions", done, of, 0)
            rows, temperature = read_completions(folder), protocol.temperature_of(kind)
            settings = PredictionSettings(
                drafter=candidate.fingerprint, texts=TextDataset.of(rows).identity, temperature=temperature,
                max_new_tokens=protocol.max_new_tokens, seed=protocol.seed,
                draft_temperatures={
                    rule: list(protocol.predicted_temperatures(rule))
                    for rule in protocol.rules
                    if protocol.texts_of(rule) == kind
                },
            )  # fmt: skip
            file = self._prediction_file(candidate, folder)
            if not PredictionFile.is_made(file, settings):
                predictor = Predictor(
                    self.target, candidate.drafter, temperature, protocol.max_new_tokens, protocol.seed
                )
                made = PredictionFile.make(settings, rows, predictor, partial(self._show_predictions, done, of))
                write_model(made, file, indent=None)
            done += len(prompts)
        self.on_progress("predictions", of, of, 0)

    def _show_predictions(self, before: int, of: int, count: int) -> None:
        self.on_progress("predictions", before + count, of, 0)

    # Number of proposals

    def _choose_proposals(self) -> None:
        """Measure what rounds cost, and make every drafter propose as many tokens as are fastest under the last rule.

        Adaptive proposals need the costs alone.

        The first process measures the costs of rounds and writes the choice down, so that an evaluation that resumes,
        and every other process, goes by the same one.
        """
        file, protocol = self.out / "proposals.json", self.protocol
        chosen = read_evaluation_file(file, ProposalFile).drafters if file.exists() else {}
        missing = [each for each in self.candidates if each.name not in chosen]
        if self.distributed.is_main and missing:
            rule = protocol.rules[-1]
            sampled = None if rule == "greedy" else protocol.temperature
            prompts = [task.prompts[0].opening for task in self.tasks]
            for number, each in enumerate(missing):
                self.on_progress("cost of rounds", number, len(missing), 0)
                lengths = Predictions(self._prediction_files(each), protocol).lengths_by_proposals(self.tasks)[rule]
                costs = measure_costs(self.target, each.drafter, prompts, rule=rule, temperature=sampled)
                chosen[each.name] = best_num_proposals(costs, lengths)
            self.on_progress("cost of rounds", len(missing), len(missing), 0)
            write_model(ProposalFile(rule=rule, drafters=chosen), file)
        self.distributed.barrier()
        found = read_evaluation_file(file, ProposalFile).drafters
        self.candidates = [replace(each, proposal_choice=found[each.name]) for each in self.candidates]
        if protocol.num_proposals == "auto":
            self.candidates = [each.with_proposals(found[each.name].num_proposals) for each in self.candidates]

    # Decoding

    def _setups(self, best: dict[str, dict[str, float]]) -> list[DecodingSetup]:
        """Return all ways to decode, the autoregressive ones first."""
        protocol = self.protocol
        baselines = list(dict.fromkeys(protocol.baseline(rule) for rule in protocol.rules))
        return baselines + [s for each in self.candidates for s in protocol.setups(each.name, best[each.name])]

    def _decode(self, setups: list[DecodingSetup]) -> int:
        """Decode each prompt in every way, one after the other, so that what slows the machine slows all of them.

        Where a drafter is left to decode with other speed settings than autoregressive decoding had, that is decoded
        again beside it. Returns how many answers were left to decode.
        """
        records, here = Records(self.records.read(), self.protocol), self._speed_settings()
        mine = self.decoded[self.distributed.rank :: self.distributed.world_size]
        count, added, warm = 0, 0, ""
        for number, (task, prompt) in enumerate(mine):
            turn, missing = number % len(setups), records.missing(prompt.id, setups, here)
            for setup in setups[turn:] + setups[:turn]:
                tokens = 0
                if setup in missing:
                    if task.name != warm:
                        warm = task.name
                        for each in setups:
                            self._converse(prompt, each, WARM_UP_TOKENS)
                    turns = self._converse(prompt, setup, self.protocol.max_new_tokens)
                    record = DecodedPrompt(
                        prompt=prompt.id, drafter=setup.drafter, rule=setup.rule,
                        draft_temperature=setup.draft_temperature, turns=turns, speed_settings=here,
                    )  # fmt: skip
                    self.records.append(record)
                    tokens, added = sum(len(each.tokens) for each in turns), added + 1
                count += 1
                self.on_progress("decoding", count, len(mine) * len(setups), tokens)
        return added

    def _converse(self, prompt: Prompt, setup: DecodingSetup, max_new_tokens: int) -> list[GenerationRecord]:
        candidate = next((each for each in self.candidates if each.name == setup.drafter), None)
        drafter, choice = (None, None) if candidate is None else (candidate.drafter, candidate.proposal_choice)
        answers = converse(
            self.target, drafter, prompt, setup, temperature=self.protocol.temperature, max_new_tokens=max_new_tokens,
            max_length=self.max_length, seed=self.protocol.seed,
            costs=choice.costs if choice is not None and self.protocol.num_proposals == "adaptive" else None,
        )  # fmt: skip
        return [GenerationRecord.of(answer) for answer in answers]

    # Diagnostics

    def _dynamics(self) -> tuple[list[Dynamics], dict[str, str]]:
        """Measure the epochs of every run; return, and report, what stands in the way of any."""
        found, obstacles = training_dynamics(
            self.candidates, self.target, self.protocol, self.out / "dynamics", self.distributed,
            lambda done, of: self.on_progress("training dynamics", done, of, 0),
        )  # fmt: skip
        for name, reason in obstacles.items() if self.distributed.is_main else ():
            print(f"no training dynamics of {name}: {reason}", file=sys.stderr)
        return found, obstacles

    def _traces(self) -> Traces:
        """Trace a few prompts of each task with every drafter, under the rules that sample."""
        protocol, traced = self.protocol, []
        chosen = [(task, prompt) for task in self.tasks for prompt in task.prompts[: protocol.num_traces]]
        ways = [(each, rule) for each in self.candidates for rule in protocol.sampled_rules]
        for number, (task, prompt) in enumerate(chosen if ways else []):
            self.on_progress("traces", number, len(chosen), 0)
            traces = [
                trace_answer(
                    self.target, candidate.drafter, prompt, protocol.paper(candidate.name, rule),
                    temperature=protocol.temperature, max_new_tokens=protocol.max_new_tokens,
                    max_length=self.max_length, seed=protocol.seed,
                )
                for candidate, rule in ways
            ]  # fmt: skip
            traced.append(TracedPrompt(task=task.name, id=prompt.id, prompt=prompt.turns[0], traces=traces))
        if traced:
            self.on_progress("traces", len(traced), len(traced), 0)
        return Traces(prompts=traced)


def _with_unique_ids(task: Task) -> Task:
    """Put the task's name before the ids, which are unique within a task only."""
    return replace(task, prompts=[replace(prompt, id=f"{task.name}/{prompt.id}") for prompt in task.prompts])


def _cpu_name() -> str:
    """Return the name of the CPU, which Linux tells in a file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
