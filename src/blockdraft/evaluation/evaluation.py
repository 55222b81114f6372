"""An evaluation in its folder: target paths, predictions from them, decoding, results.

out/plan.json            what this evaluation is; another one is refused
out/paths/LAW/NNN        the target's own responses, in data folders of up to 128 prompts
out/predictions/*.json   expected rounds on them, by drafter and data folder
out/records/*.jsonl      one line per prompt and way of decoding
out/results.json, out/traces.json

Every stage goes on where it stopped. Data folders and prompts are shared out over the processes; the first process
puts the results together.
"""

import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import blockdraft
from blockdraft.data import Conversation, DataError, GenerationSettings, Prompt, read_completions, regenerate
from blockdraft.distributed import Distributed
from blockdraft.evaluation.about import Candidate
from blockdraft.evaluation.assembly import Assembly, about
from blockdraft.evaluation.conversation import DecodingSetup, converse
from blockdraft.evaluation.dynamics import training_dynamics
from blockdraft.evaluation.expected import Expected, best_of, write_expected
from blockdraft.evaluation.metrics import Record
from blockdraft.evaluation.prediction import Predictor
from blockdraft.evaluation.protocol import Law, Protocol
from blockdraft.evaluation.results import Dynamics, EvaluationError, Results, TracedPrompt, Traces, write_model
from blockdraft.evaluation.tasks import Task
from blockdraft.evaluation.tracing import trace
from blockdraft.files import atomic_write, complete_lines, exclusive
from blockdraft.runs import RunError
from blockdraft.targets import Sampling, Target, fingerprint, weights_fingerprint

PROMPTS_PER_FOLDER = 128
WARM_UP_TOKENS = 16

OnProgress = Callable[[str, int, int, int], None]
"""(stage, done, of, tokens made now)."""


class Evaluation:
    """Drafters of one target on tasks."""

    def __init__(
        self,
        target: Target,
        candidates: Sequence[Candidate],
        tasks: Sequence[Task],
        protocol: Protocol,
        out: str | Path,
        processes: Distributed | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if not candidates:
            raise EvaluationError("there is no drafter to evaluate")
        self.target, self.candidates, self.protocol, self.out = target, candidates, protocol, Path(out)
        self.tasks = [self._what_fits(_with_unique_ids(task)) for task in tasks]
        self.processes = processes or Distributed(str(target.device))
        self.on_progress = on_progress or (lambda _stage, _done, _of, _tokens: None)
        self.prompts = [(task, prompt) for task in self.tasks for prompt in task.prompts]

    def run(self) -> Results:
        """All stages; the results, which the first process also writes."""
        started = _now()
        if not self.processes.is_main:
            return self._stages(started)
        self.out.mkdir(parents=True, exist_ok=True)
        with exclusive(self.out):
            self._refuse_another()
            return self._stages(started)

    def _stages(self, started: str) -> Results:
        self.processes.barrier()
        self._write_paths()
        self._write_predictions()
        self.processes.barrier()
        expected = {each.name: Expected(self._prediction_files(each), self.protocol) for each in self.candidates}
        points = {name: each.temperatures(self.tasks) for name, each in expected.items()}
        ways = self._ways({name: {r: best_of(p, r) for r in self.protocol.sampled_rules} for name, p in points.items()})
        self._decode(ways)
        self.processes.barrier()
        records = {(line["prompt"], line["way"]): [Record(**t) for t in line["turns"]] for line in self._lines()}
        cells, averages = Assembly(self.tasks, self.candidates, self.protocol).assemble(ways, records, expected)
        results = Results(
            target=self.target.name, target_fingerprint=fingerprint(self.target), settings=self._settings(),
            provenance=_provenance(self.target, self.processes, started), tasks=[task.about() for task in self.tasks],
            drafters=[about(each, points[each.name], self.protocol) for each in self.candidates], cells=cells,
            averages=averages, dynamics=self._dynamics() if self.processes.is_main else [],
        )  # fmt: skip
        if self.processes.is_main:
            write_model(self._traces(), self.out / "traces.json")
            write_model(results, self.out / "results.json")
        self.processes.barrier()
        return results

    # What this evaluation is

    def _refuse_another(self) -> None:
        protocol = self.protocol
        identity = {
            "target": fingerprint(self.target),
            "drafters": {each.name: weights_fingerprint(each.drafter) for each in self.candidates},
            "tasks": {task.name: [prompt.to_dict() for prompt in task.prompts] for task in self.tasks},
            "rules": list(protocol.rules), "temperature": protocol.temperature,
            "max_new_tokens": protocol.max_new_tokens, "seed": protocol.seed, "draft_temperatures": list(protocol.grid),
        }  # fmt: skip
        file = self.out / "plan.json"
        if file.exists():
            there = json.loads(file.read_text(encoding="utf-8"))
            wrong = [key for key in identity if identity[key] != there.get(key)]
            if wrong:
                raise EvaluationError(
                    f"{self.out} holds another evaluation: {', '.join(wrong)} differ. Choose another --out"
                )
        else:
            with atomic_write(file) as unfinished:
                unfinished.write_text(json.dumps(identity, ensure_ascii=False), encoding="utf-8")

    def _settings(self) -> dict[str, Any]:
        protocol = self.protocol
        return {
            "rules": list(protocol.rules), "temperature": protocol.temperature,
            "max_new_tokens": protocol.max_new_tokens, "seed": protocol.seed, "num_bootstrap": protocol.num_bootstrap,
            "draft_temperatures": list(protocol.grid), "batch_size": 1, "dtype": str(self.target.dtype).split(".")[-1],
            "device": self.target.device.type,
        }  # fmt: skip

    # What the target can read

    @property
    def max_length(self) -> int:
        """Of prompt and answer together, for every way alike: the last block may reach beyond the answer."""
        limit = self.target.context_length or 2**15
        return limit - 1 - max(each.drafter.config.num_proposals for each in self.candidates)

    def _what_fits(self, task: Task) -> Task:
        """The task without prompts whose first answer has no room."""
        asked = [Conversation(prompt, self.target, self._sampling_settings("sampled")) for prompt in task.prompts]
        kept = [each.prompt for each in asked if each.dropped is None]
        if not kept:
            raise EvaluationError(
                f"{task.name}: no prompt can be answered with {self.protocol.max_new_tokens} new tokens, prompt and "
                f"answer within {self.max_length}: {asked[0].dropped}"
            )
        return replace(task, prompts=kept, num_left_out=len(task.prompts) - len(kept))

    # TextDataset of the target

    def _sampling_settings(self, law: Law) -> GenerationSettings:
        protocol = self.protocol
        sampling = Sampling(protocol.temperature_of(law))
        return GenerationSettings(sampling, protocol.max_new_tokens, self.max_length, protocol.seed, whole_turns=True)

    def _folders(self, law: Law) -> list[tuple[Path, list[Prompt]]]:
        """Data folders and the prompts of each."""
        prompts = [prompt for _, prompt in self.prompts]
        starts = range(0, len(prompts), PROMPTS_PER_FOLDER)
        return [
            (self.out / "paths" / law / f"{number:03d}", prompts[start : start + PROMPTS_PER_FOLDER])
            for number, start in enumerate(starts)
        ]

    def _write_paths(self) -> None:
        """The target's own responses, by continuous batching."""
        work = [(law, *each) for law in self.protocol.laws for each in self._folders(law)]
        work = work[self.processes.rank :: self.processes.world_size]
        of, done = sum(len(prompts) for _, _, prompts in work), 0

        def count(conversations: int, tokens: int, new: bool) -> None:
            nonlocal done
            done += conversations
            self.on_progress("target paths", done, of, tokens if new else 0)

        for law, folder, prompts in work:
            settings = self._sampling_settings(law)
            regenerate(prompts, self.target, settings, folder, shard_size=len(prompts), on_progress=count)

    # Predictions

    def _prediction_files(self, candidate: Candidate) -> list[Path]:
        folders = [folder for law in self.protocol.laws for folder, _ in self._folders(law)]
        return [self._prediction_file(candidate, folder) for folder in folders]

    def _prediction_file(self, candidate: Candidate, folder: Path) -> Path:
        return self.out / "predictions" / f"{candidate.name}-{folder.parent.name}-{folder.name}.json"

    def _write_predictions(self) -> None:
        """Each process reads the data folders that it wrote."""
        protocol = self.protocol
        folders = [(law, folder) for law in protocol.laws for folder, _ in self._folders(law)]
        mine = folders[self.processes.rank :: self.processes.world_size]
        work = [(candidate, law, folder) for candidate in self.candidates for law, folder in mine]
        for done, (candidate, law, folder) in enumerate(work):
            self.on_progress("predictions", done, len(work), 0)
            file = self._prediction_file(candidate, folder)
            if not file.exists():
                predictor = Predictor(
                    self.target, candidate.drafter, protocol.temperature_of(law), protocol.max_new_tokens, protocol.seed
                )
                rules = [rule for rule in protocol.rules if protocol.law(rule) == law]
                write_expected(file, read_completions(folder), predictor, rules, protocol.grid)
        self.on_progress("predictions", len(work), len(work), 0)

    # Decoding

    def _ways(self, best: dict[str, dict[str, float]]) -> list[DecodingSetup]:
        """Autoregressive ones first; then each drafter at the paper's draft temperature and at its best."""
        protocol = self.protocol
        ways = list(dict.fromkeys(protocol.baseline(rule) for rule in protocol.rules))
        for candidate in self.candidates:
            for rule in protocol.rules:
                paper = protocol.paper(candidate.name, rule)
                ways.append(paper)
                if rule != "greedy" and best[candidate.name][rule] != paper.draft_temperature:
                    ways.append(replace(paper, draft_temperature=best[candidate.name][rule], choice="best"))
        return ways

    def _decode(self, ways: list[DecodingSetup]) -> None:
        """Each prompt in every way, one after the other, so that what slows the machine slows all of them."""
        done = {(line["prompt"], line["way"]) for line in self._lines()}
        mine = self.prompts[self.processes.rank :: self.processes.world_size]
        file = self.out / "records" / f"{self.processes.rank}.jsonl"
        file.parent.mkdir(exist_ok=True)
        count, warm = 0, ""
        with file.open("ab") as stream:
            for number, (task, prompt) in enumerate(mine):
                turn = number % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    tokens = 0
                    if (prompt.id, way.key) not in done:
                        if task.name != warm:
                            warm = task.name
                            for each in ways:
                                self._converse(prompt, each, WARM_UP_TOKENS)
                        records = self._converse(prompt, way, self.protocol.max_new_tokens)
                        line = {"prompt": prompt.id, "way": way.key, "turns": [each.to_dict() for each in records]}
                        stream.write(json.dumps(line).encode() + b"\n")
                        stream.flush()
                        tokens = sum(len(each.tokens) for each in records)
                    count += 1
                    self.on_progress("decoding", count, len(mine) * len(ways), tokens)

    def _converse(self, prompt: Prompt, way: DecodingSetup, max_new_tokens: int) -> list[Record]:
        drafter = next((each.drafter for each in self.candidates if each.name == way.drafter), None)
        answers = converse(
            self.target, drafter, prompt, way, temperature=self.protocol.temperature, max_new_tokens=max_new_tokens,
            max_length=self.max_length, seed=self.protocol.seed,
        )  # fmt: skip
        return [Record.of(answer) for answer in answers]

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The records of all processes; a line that was cut short is dropped from its file by its owner."""
        for file in sorted((self.out / "records").glob("*.jsonl")):
            yield from map(json.loads, complete_lines(file, truncate=file.stem == str(self.processes.rank)))

    # Diagnostics

    def _dynamics(self) -> list[Dynamics]:
        """Of every run that kept its epochs and whose data is there; what stands against one is said, and no more."""
        found = []
        for candidate in self.candidates:
            run = candidate.run
            if not self.protocol.dynamics_texts or run is None or not run.recipe.logging.keep_epoch_checkpoints:
                continue
            self.on_progress(f"dynamics, {candidate.name}", 0, 1, 0)
            try:
                measured = training_dynamics(
                    candidate.name, run, self.target, num_texts=self.protocol.dynamics_texts,
                    blocks_per_text=self.protocol.dynamics_blocks, seed=self.protocol.seed,
                )  # fmt: skip
                found.append(measured)
            except (DataError, RunError, EvaluationError) as error:
                print(f"no training dynamics of {candidate.name}: {error}", file=sys.stderr)
            self.on_progress(f"dynamics, {candidate.name}", 1, 1, 0)
        return found

    def _traces(self) -> Traces:
        """A few prompts of each task, every drafter, under the rules that sample."""
        protocol, prompts = self.protocol, []
        for task in self.tasks:
            for prompt in task.prompts[: protocol.num_traces]:
                traces = [
                    trace(
                        self.target, candidate.drafter, prompt, protocol.paper(candidate.name, rule),
                        temperature=protocol.temperature, max_new_tokens=protocol.max_new_tokens,
                        max_length=self.max_length, seed=protocol.seed,
                    )
                    for candidate in self.candidates
                    for rule in protocol.sampled_rules
                ]  # fmt: skip
                if traces:
                    prompts.append(TracedPrompt(task=task.name, id=prompt.id, prompt=prompt.turns[0], traces=traces))
        return Traces(prompts=prompts)


def _with_unique_ids(task: Task) -> Task:
    """Ids are unique within a task only; the task's name makes them so everywhere."""
    return replace(task, prompts=[replace(prompt, id=f"{task.name}/{prompt.id}") for prompt in task.prompts])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _provenance(target: Target, processes: Distributed, started: str) -> dict[str, Any]:
    return {
        "blockdraft": blockdraft.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "machine": platform.machine(), "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(), "num_processes": processes.world_size,
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "started": started, "finished": _now(),
    }  # fmt: skip
