"""Turn generations into numbers: pooled per task, averaged over tasks, with intervals by bootstrap over prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from blockdraft.decoding import Generation
from blockdraft.evaluation.candidates import Candidate
from blockdraft.evaluation.prediction import Numbers, Predictions
from blockdraft.evaluation.protocol import DecodingSetup, Protocol
from blockdraft.evaluation.results import (
    AcceptanceRates,
    Average,
    Cell,
    DrafterAbout,
    EvaluationError,
    HeldOutPoint,
    Interval,
    PairedRatio,
    Profile,
    ProfileEntry,
    Quantity,
    Results,
    SpeedSettings,
    Strict,
    TemperatureChoice,
    best_temperature,
)
from blockdraft.evaluation.tasks import Task
from blockdraft.files import complete_lines, explain, parse_json
from blockdraft.verification import RULES, Rule

PHASES = ("prefill", "draft", "verify", "rest")
COMPARED_LENGTHS: tuple[Quantity, ...] = ("predicted_length", "acceptance_length")
COMPARED_QUANTITIES: tuple[Quantity, ...] = (*COMPARED_LENGTHS, "speedup")


class GenerationRecord(Strict):
    """Keeps what counts of one generation.

    tokens: the new ones, cropped to the budget.
    accepted: drafted tokens kept, by round; added: tokens that the round added, correction or bonus included,
        before cropping. The prefill's token is in neither.
    seconds: by phase.
    """

    tokens: list[int]
    accepted: list[int]
    added: list[int]
    seconds: dict[str, float]

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationRecord":
        if len(self.accepted) != len(self.added) or set(self.seconds) != set(PHASES):
            raise ValueError(f"every round needs accepted and added, and seconds the phases {', '.join(PHASES)}")
        return self

    @classmethod
    def of(cls, generation: Generation) -> "GenerationRecord":
        """Take what counts from a generation."""
        rounds = generation.rounds
        seconds = {"prefill": generation.prefill_seconds}
        seconds |= {phase: sum(each.seconds[phase] for each in rounds) for phase in PHASES[1:]}
        return cls(
            tokens=generation.tokens, accepted=[each.accepted for each in rounds],
            added=[len(each.tokens) for each in rounds], seconds=seconds,
        )  # fmt: skip


class DecodedPrompt(Strict):
    """Holds all turns of a prompt, decoded in one way: a line of ``records/*.jsonl``.

    drafter: None is autoregressive. speed_settings: None if an earlier version of blockdraft decoded it.
    """

    prompt: str
    drafter: str | None
    rule: Rule
    draft_temperature: float
    turns: list[GenerationRecord]
    speed_settings: SpeedSettings | None = None

    @property
    def key(self) -> tuple[str | None, Rule, float]:
        """Give the way of decoding, as `DecodingSetup.key` gives it."""
        return self.drafter, self.rule, self.draft_temperature


class RecordFiles:
    """Reads and writes ``records/``: each process appends a line for every prompt and way of decoding to its file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.own = folder, folder / f"{rank}.jsonl"

    def append(self, record: DecodedPrompt) -> None:
        """Write one line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.own.open("ab") as stream:
            stream.write(record.model_dump_json().encode() + b"\n")

    def read(self) -> Iterator[DecodedPrompt]:
        """Yield the lines of all processes; one that a kill cut short is dropped from its file by its owner."""
        for file in sorted(self.folder.glob("*.jsonl")):
            for number, line in enumerate(complete_lines(file, truncate=file == self.own), 1):
                try:
                    yield DecodedPrompt.model_validate(parse_json(line))
                except ValueError as error:
                    raise EvaluationError(
                        f"{file}, line {number}, is damaged: {explain(error)}; delete the line and run the "
                        "same command again"
                    ) from error


class Records:
    """Pairs the answers of drafters with autoregressive ones that were decoded with the same speed settings.

    Only those can be compared. An answer of a drafter that has none beside it counts for nothing: whatever decoded it
    was stopped before, and went on with other settings.
    """

    def __init__(self, lines: Iterable[DecodedPrompt], protocol: Protocol) -> None:
        self.protocol = protocol
        self._lines = {(line.prompt, line.key, line.speed_settings): line for line in lines}
        self._settings: dict[tuple[str, tuple[str | None, Rule, float]], list[SpeedSettings | None]] = {}
        for prompt, key, settings in self._lines:
            self._settings.setdefault((prompt, key), []).append(settings)

    def pair(self, prompt: str, setup: DecodingSetup) -> tuple[DecodedPrompt, DecodedPrompt] | None:
        """Return a prompt's answers in one way and the autoregressive ones; None if either has to be decoded."""
        baseline = self.protocol.baseline(setup.rule).key
        for settings in self._settings.get((prompt, setup.key), []):
            beside = self._lines.get((prompt, baseline, settings))
            if beside is not None:
                return self._lines[prompt, setup.key, settings], beside
        return None

    def missing(self, prompt: str, setups: Sequence[DecodingSetup], here: SpeedSettings) -> list[DecodingSetup]:
        """Return the ways in which a prompt has to be decoded with the speed settings that this process has."""
        alone = [setup for setup in setups if setup.drafter is not None and self.pair(prompt, setup) is None]
        needed = {setup.key for setup in alone} | {self.protocol.baseline(setup.rule).key for setup in alone}
        return [each for each in setups if each.key in needed and (prompt, each.key, here) not in self._lines]


@dataclass(frozen=True)
class Sums:
    """Holds sums over the generations of one prompt, from which every pooled ratio is made.

    retained: ``[B]`` rounds that kept at least i.
    """

    rounds: int
    added: int
    accepted: int
    tokens: int
    seconds: dict[str, float]
    retained: NDArray[np.int64]

    @classmethod
    def of(cls, records: Sequence[GenerationRecord], num_proposals: int) -> "Sums":
        """Add up the generations of one prompt."""
        accepted = np.array([k for record in records for k in record.accepted], dtype=np.int64)
        reach = np.arange(1, num_proposals + 1)
        return cls(
            rounds=len(accepted),
            added=sum(sum(record.added) for record in records),
            accepted=int(accepted.sum()),
            tokens=sum(len(record.tokens) for record in records),
            seconds={phase: sum(record.seconds[phase] for record in records) for phase in PHASES},
            retained=(accepted[:, None] >= reach).sum(0),
        )

    @property
    def total_seconds(self) -> float:
        """Give the time of all phases, prefill included."""
        return sum(self.seconds.values())


class Bootstrap:
    """Resamples the prompts of a task in the same way for every quantity, so that ratios of them stay paired."""

    def __init__(self, num_prompts: int, num_samples: int, seed: int, stream: int) -> None:
        rng = np.random.default_rng([seed, stream])
        drawn = rng.integers(num_prompts, size=(num_samples, num_prompts))
        self.weights = np.ones((1 + num_samples, num_prompts))  # the first one is no resample
        for sample, indices in enumerate(drawn, 1):
            self.weights[sample] = np.bincount(indices, minlength=num_prompts)

    def ratio(self, numerator: Sequence[float], denominator: Sequence[float]) -> Numbers:
        """Return the pooled ratio of the whole (first) and of every resample."""
        above, below = (self.weights @ np.asarray(each, dtype=np.float64) for each in (numerator, denominator))
        return divide(above, below)


def divide(above: Numbers, below: Numbers) -> Numbers:
    """Return the quotients, 0 where the divisor is not positive."""
    quotient: Numbers = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return quotient


def with_bootstrap_interval(samples: Numbers) -> Interval:
    """Return the first of the samples, with the interval of the others."""
    low, high = np.quantile(samples[1:], [0.025, 0.975]) if len(samples) > 1 else (samples[0], samples[0])
    return Interval(value=float(samples[0]), low=float(low), high=float(high))


def mean_over_tasks(samples: Sequence[Numbers]) -> Interval:
    """Return the mean with an interval; tasks have equal weight, and their resamples are independent."""
    return with_bootstrap_interval(np.mean(samples, 0))


def paired_ratio(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> Interval:
    """Return the ratio of two means over the same tasks, whose resampled prompts are the same for both."""
    return with_bootstrap_interval(divide(np.mean(ours, 0), np.mean(theirs, 0)))


def conditional(retention: Sequence[float]) -> list[float | None]:
    """Return Pr(accepted >= i | accepted >= i - 1); None where the condition was never met."""
    before = [1.0, *retention[:-1]]
    return [kept / base if base > 0 else None for kept, base in zip(retention, before, strict=True)]


def column(sums: Sequence[Sums], value: Callable[[Sums], float]) -> list[float]:
    """Return one number of every prompt."""
    return [value(each) for each in sums]


class Assembly:
    """Puts records and predictions together: cells, averages over the tasks, comparisons of drafters."""

    def __init__(self, tasks: Sequence[Task], candidates: Sequence[Candidate], protocol: Protocol) -> None:
        self.tasks, self.candidates, self.protocol = tasks, candidates, protocol
        self.num_proposals = {each.name: each.drafter.config.num_proposals for each in candidates}
        self._bootstraps: dict[tuple[int, int], Bootstrap] = {}
        self.cells: list[Cell] = []
        self.averages: list[Average] = []
        self.comparisons: list[PairedRatio] = []
        self.speed_settings: dict[str, list[SpeedSettings]] = {each.name: [] for each in candidates}

    def assemble(
        self, setups: Sequence[DecodingSetup], records: Records, predictions: Mapping[str, Predictions]
    ) -> "Assembly":
        """Compute everything, and return itself."""
        cells: dict[DecodingSetup, list[Cell]] = {setup: [] for setup in setups if setup.drafter is not None}
        samples: dict[DecodingSetup, list[dict[str, Numbers]]] = {setup: [] for setup in cells}
        for number, task in enumerate(self.tasks):
            for setup in cells:
                assert setup.drafter is not None
                drawn, cell = self._cell(task, setup, records, number, predictions[setup.drafter])
                cells[setup].append(cell)
                samples[setup].append(drawn)
                self.cells.append(cell)
        self.averages = [_average(cells[setup], samples[setup]) for setup in cells]
        self.comparisons = list(self._compare(samples))
        return self

    def _cell(
        self, task: Task, setup: DecodingSetup, records: Records, number: int, predictions: Predictions
    ) -> tuple[dict[str, Numbers], Cell]:
        assert setup.drafter is not None
        ids = [prompt.id for prompt in self.protocol.decoded(task.prompts)]
        predicted = predictions.of(task, setup.rule, setup.draft_temperature)
        drawn = {"predicted_length": self._bootstrap(len(task.prompts), number).ratio(*predicted)}
        if not ids:
            return drawn, Cell(
                drafter=setup.drafter, rule=setup.rule, choice=setup.choice, draft_temperature=setup.draft_temperature,
                task=task.name, num_generations=0, num_rounds=0, num_tokens=0,
                predicted_length=with_bootstrap_interval(drawn["predicted_length"]),
            )  # fmt: skip
        resampled = self._bootstrap(len(ids), number)
        pairs = [pair for each in ids if (pair := records.pair(each, setup)) is not None]
        assert len(pairs) == len(ids)
        for settings in (line.speed_settings for line, _ in pairs):
            if settings is not None and settings not in self.speed_settings[setup.drafter]:
                self.speed_settings[setup.drafter].append(settings)
        sums = [Sums.of(line.turns, self.num_proposals[setup.drafter]) for line, _ in pairs]
        base = [Sums.of(line.turns, 0) for _, line in pairs]
        rounds = column(sums, lambda s: s.rounds)
        rate = resampled.ratio(column(sums, lambda s: s.tokens), column(sums, lambda s: s.total_seconds))
        base_rate = resampled.ratio(column(base, lambda s: s.tokens), column(base, lambda s: s.total_seconds))
        drawn |= {
            "acceptance_length": resampled.ratio(column(sums, lambda s: s.added), rounds),
            "draft_length": resampled.ratio(column(sums, lambda s: s.accepted), rounds),
            "speedup": divide(rate, base_rate),
        }
        num_rounds = sum(each.rounds for each in sums)
        retention = (np.sum([each.retained for each in sums], 0) / max(1, num_rounds)).tolist()
        seconds, base_seconds = (
            {phase: sum(each.seconds[phase] for each in group) for phase in group[0].seconds} for group in (sums, base)
        )
        return drawn, Cell(
            drafter=setup.drafter, rule=setup.rule, choice=setup.choice, draft_temperature=setup.draft_temperature,
            task=task.name, num_generations=sum(len(line.turns) for line, _ in pairs), num_rounds=num_rounds,
            num_tokens=sum(each.tokens for each in sums), retention=retention, conditional=conditional(retention),
            whole_block_rate=retention[-1], tokens_per_second=float(rate[0]),
            baseline_tokens_per_second=float(base_rate[0]), seconds=seconds, baseline_seconds=base_seconds,
            **{name: with_bootstrap_interval(each) for name, each in drawn.items()},
        )  # fmt: skip

    def _bootstrap(self, num_prompts: int, task: int) -> Bootstrap:
        """Return the resamples of a task with this number of prompts, always the same ones."""
        if (num_prompts, task) not in self._bootstraps:
            drawn = Bootstrap(num_prompts, self.protocol.num_bootstrap, self.protocol.seed, task)
            self._bootstraps[num_prompts, task] = drawn
        return self._bootstraps[num_prompts, task]

    def _compare(self, samples: Mapping[DecodingSetup, list[dict[str, Numbers]]]) -> Iterator[PairedRatio]:
        """Compare every drafter with its baselines; where no best is listed, the paper's is the best.

        A task without a round of either drafter is not compared.
        """
        drawn = {(setup.drafter, setup.rule, setup.choice): each for setup, each in samples.items()}
        choices: tuple[TemperatureChoice, ...] = ("paper", "best", "one-hot")
        pairs = [
            (candidate.name, baseline.name)
            for candidate in self.candidates
            for baseline in baselines_of(candidate, self.candidates, self.protocol.baselines)
        ]
        for pair, rule, choice in product(pairs, self.protocol.rules, choices):
            found = [drawn.get((name, rule, choice)) for name in pair]
            if not any(found):
                continue  # not measured, or the paper's setup is the best for both
            ours, theirs = (each or drawn[name, rule, "paper"] for each, name in zip(found, pair, strict=True))
            compared = partial(PairedRatio, drafter=pair[0], baseline=pair[1], rule=rule, choice=choice)
            for quantity in (each for each in COMPARED_QUANTITIES if each in ours[0]):
                ratio = paired_ratio([each[quantity] for each in ours], [each[quantity] for each in theirs])
                yield compared(quantity=quantity, ratio=ratio)
                for task, new, old in zip(self.tasks, ours, theirs, strict=True):
                    if quantity in COMPARED_LENGTHS and new[quantity][0] > 0 and old[quantity][0] > 0:
                        one = paired_ratio([new[quantity]], [old[quantity]])
                        yield compared(quantity=quantity, ratio=one, task=task.name)


def baselines_of(candidate: Candidate, candidates: Sequence[Candidate], asked: Sequence[str] = ()) -> list[Candidate]:
    """Return what a drafter is compared with, itself excepted.

    These are the ``asked`` ones of its kind (DFlash or DSpark), or all that are asked for if none is of its kind. If
    none is asked for, it is the first of its kind that was trained with CE, else the first; if one of those was
    trained on the same budget (data, batches, optimizer and seed), it goes before all others.
    """
    alike = [each for each in candidates if each.drafter.config.kind == candidate.drafter.config.kind]
    if asked:
        named = [each for each in candidates if each.name in asked]
        found = [each for each in named if each in alike] or named
    else:
        with_ce = [each for each in alike if each.objective == "ce"]
        found = [next((each for each in with_ce if each.budget == candidate.budget), (with_ce or alike)[0])]
    return [each for each in found if each is not candidate]


def _average(cells: Sequence[Cell], drawn: Sequence[dict[str, Numbers]]) -> Average:
    first, whole = cells[0], [cell.whole_block_rate for cell in cells if cell.whole_block_rate is not None]
    return Average(
        drafter=first.drafter, rule=first.rule, choice=first.choice, draft_temperature=first.draft_temperature,
        whole_block_rate=float(np.mean(whole)) if whole else None,
        **{name: mean_over_tasks([each[name] for each in drawn]) for name in drawn[0]},
    )  # fmt: skip


def about_drafter(
    candidate: Candidate,
    predictions: Predictions,
    tasks: Sequence[Task],
    protocol: Protocol,
    speed_settings: Sequence[SpeedSettings] = (),
) -> DrafterAbout:
    """Describe a drafter for the results."""
    config = candidate.drafter.config
    points = predictions.temperatures(tasks)
    return DrafterAbout(
        name=candidate.name, label=candidate.label, path=str(candidate.path), kind=config.kind,
        objective=candidate.objective, num_proposals=config.num_proposals, num_layers=config.num_layers,
        num_parameters=sum(parameter.numel() for parameter in candidate.drafter.parameters()), step=candidate.step,
        best_draft_temperature={rule: best_temperature(points, rule) for rule in protocol.sampled_rules},
        temperatures=points, checkpoint=candidate.checkpoint, num_steps=candidate.num_steps,
        unfinished=candidate.unfinished, learning_curve=learning_curve(candidate),
        fingerprint=candidate.fingerprint,
        recipe=None if candidate.recipe is None else candidate.recipe.model_dump(mode="json"),
        trained_proposals=candidate.trained_proposals or config.num_proposals,
        lengths_by_proposals=predictions.lengths_by_proposals(tasks), proposal_choice=candidate.proposal_choice,
        data=candidate.data,
        speed_settings=list(speed_settings),
    )  # fmt: skip


def learning_curve(candidate: Candidate) -> list[HeldOutPoint]:
    """Return what a drafter's run measured on its held-out texts, from the start up to the drafter's own step.

    Not every step is logged. Those that end an epoch take the texts that are left, and are averaged apart.
    """
    if candidate.run is None or candidate.step is None:
        return []
    per_epoch, lines = candidate.run.info.steps_per_epoch, candidate.run.metrics()
    logged = [(line["step"] % per_epoch == 0, line["num_blocks"]) for line in lines if "num_blocks" in line]
    last, others = ([blocks for is_last, blocks in logged if is_last is wanted] for wanted in (True, False))
    per_step, per_last_step = (float(np.mean(blocks)) if blocks else 0.0 for blocks in (others or last, last or others))
    return [
        HeldOutPoint(
            step=line["step"],
            num_blocks=round(
                (line["step"] - line["step"] // per_epoch) * per_step + line["step"] // per_epoch * per_last_step
            ),
            accuracy=line["heldout_token_accuracy"],
            draft_length={rule: line[f"heldout_length_{rule}"] for rule in RULES},
        )
        for line in lines
        if line["step"] <= candidate.step and line.get("heldout_length_block") is not None
    ]  # fmt: skip


def profile(results: Results) -> Profile:
    """Make the acceptance profile of an evaluation, from the cells of its results that were decoded."""
    abouts = {each.name: each for each in results.drafters}
    entries = []
    for average in (each for each in results.averages if each.acceptance_length is not None):
        key = (average.drafter, average.rule, average.choice)
        cells = [cell for cell in results.cells if (cell.drafter, cell.rule, cell.choice) == key]
        rounds = [cell.num_rounds for cell in cells]
        drafter = abouts[average.drafter]
        entries.append(
            ProfileEntry(
                drafter=drafter.name, label=drafter.label, kind=drafter.kind, rule=average.rule, choice=average.choice,
                draft_temperature=average.draft_temperature, num_proposals=drafter.num_proposals,
                num_tasks=len(cells), num_rounds=sum(rounds), micro=_rates(cells, rounds),
                macro=_rates(cells, [1] * len(cells)),
            )
        )  # fmt: skip
    return Profile(
        target=results.target, target_fingerprint=results.target_fingerprint,
        temperature=results.settings["temperature"], entries=entries,
    )  # fmt: skip


def _rates(cells: Sequence[Cell], weights: Sequence[int]) -> AcceptanceRates:
    """Average the rates of cells with these weights."""
    if not sum(weights):
        weights = [1] * len(cells)
    marginal = np.average([cell.retention for cell in cells], 0, weights).tolist()
    lengths = [cell.acceptance_length.value for cell in cells if cell.acceptance_length is not None]
    return AcceptanceRates(
        marginal=marginal, conditional=conditional(marginal), draft_length=float(sum(marginal)),
        acceptance_length=float(np.average(lengths, weights=weights)),
    )  # fmt: skip
