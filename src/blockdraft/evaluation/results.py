"""Hold what an evaluation found: the schemas and files ``results.json``, ``profile.json`` and ``traces.json``.

``docs/guides/evaluation.md`` explains every field to users; names here and there agree.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from blockdraft.decoding import ProposalChoice
from blockdraft.errors import BlockdraftError
from blockdraft.files import Model, atomic_write, read_model
from blockdraft.verification import Rule

TemperatureChoice = Literal["paper", "best", "one-hot"]
"""How a draft temperature was chosen: the target's own (0 under greedy verification), the one with the largest
predicted length, or 0 below a sampling target: argmax drafts, whose q is one-hot, as engines draft by default."""

CheckpointName = Literal["best", "last"]
Quantity = Literal["acceptance_length", "predicted_length", "speedup"]


class EvaluationError(BlockdraftError):
    """An evaluation cannot be made or read as it was asked for, and the message says why and what to do."""


class Strict(BaseModel):
    """Refuses unknown keys, and stays as it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Strict):
    """Holds a number with its 95% interval: of a bootstrap over prompts, or of a mean over seeds."""

    value: float
    low: float
    high: float

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Give the interval; None if it has no width, since a single prompt of each task says nothing about spread."""
        return (self.low, self.high) if self.low < self.high else None

    def shown(self, unit: str = "") -> str:
        """Return the value with its interval, if it has one: ``4.95 [4.80, 5.10]``."""
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if self.bounds else ""
        return f"{self.value:.2f}{unit}{interval}"


class TaskAbout(Strict):
    """Says which prompts a task had.

    name: unique in the evaluation; for one category of a file, ``file/category``.
    group: ``math``, ``code`` or ``chat``, or a file's name: the heading it stands under in a table.
    num_turns: user messages, each answered by one generation.
    num_left_out: prompts beside these that the target has no room to read and answer.
    num_decoded: prompts that were also decoded; None for all. Predicted lengths use all prompts.
    """

    name: str
    title: str
    group: str
    source: str
    num_prompts: int
    num_turns: int
    num_left_out: int = 0
    num_decoded: int | None = None

    @property
    def decoded_prompts(self) -> int:
        """Give the number of prompts that were decoded."""
        return self.num_prompts if self.num_decoded is None else self.num_decoded


class TemperaturePoint(Strict):
    """Holds the acceptance length predicted at one draft temperature, by rule, as the mean over the tasks.

    deviation: standard deviation over seeds; empty for a single one.
    """

    draft_temperature: float
    acceptance_length: dict[str, float]
    deviation: dict[str, float] = {}


def best_temperature(points: Sequence[TemperaturePoint], rule: str) -> float:
    """Return the draft temperature of the longest predicted length; of equal ones the highest."""
    return max(points, key=lambda p: (p.acceptance_length[rule], p.draft_temperature)).draft_temperature


class HeldOutPoint(Strict):
    """Holds what a training run measured on its held-out texts after one of its steps.

    num_blocks: how many blocks the run had trained on, as far as the steps that were logged tell.
    accuracy: argmax agreement with the stored target tokens.
    draft_length: by rule, the expected accepted draft tokens of a block.
    deviation: standard deviation of these over seeds; empty for a single one.
    """

    step: int
    num_blocks: int
    accuracy: float
    draft_length: dict[Rule, float]
    deviation: dict[Rule, float] = {}


class SpeedSettings(Strict):
    """Says what a measured speed depends on beside what was decoded. processor: the name of the GPU, or of the CPU."""

    num_processes: int
    threads: int
    device: str
    dtype: str
    processor: str

    def __str__(self) -> str:
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        each = " each" if self.num_processes > 1 else ""
        return f"{processes} with {threads}{each}, in {self.dtype} on {self.processor}"


class DrafterAbout(Strict):
    """Describes a drafter of the evaluation.

    name: unique in the evaluation; results refer to it.
    label: for tables: the objective, in what it is not the paper's (``BV w/o annealing``) and how the drafter that it
        began from was trained (``CE, then BV``); else the name.
    objective: as in the recipe; None if the folder does not tell.
    best_draft_temperature: by rule, where the predicted length is largest.
    temperatures: the grid it was chosen from.
    num_proposals: how many tokens it was made to propose; trained_proposals: how many it was trained to propose.
    proposal_choice: if the number was chosen for speed: the costs and predicted lengths that it was chosen by.
    lengths_by_proposals: by rule, the predicted tokens per call if blocks are cut to 1, 2, .. num_proposals tokens,
        at the paper's draft temperature, as means over the tasks.
    step: the checkpoint's. num_steps: of its whole run, if the folder tells.
    checkpoint: which one of its run this is; None for any other checkpoint, and for a folder outside a run.
    unfinished: whether training was cut short, see `Candidate.unfinished`.
    learning_curve: what its run measured up to this checkpoint; empty outside a run, and without held-out texts.
    fingerprint: of its weights and configuration.
    data: identity of the texts that it was trained on; None if the folder does not tell.
    speed_settings: what its answers were decoded with, and autoregressive ones beside them; empty if not recorded.
    """

    name: str
    label: str
    path: str
    kind: Literal["dflash", "dspark"]
    objective: str | None
    num_proposals: int
    num_layers: int
    num_parameters: int
    step: int | None
    best_draft_temperature: dict[str, float]
    temperatures: list[TemperaturePoint]
    recipe: dict[str, Any] | None
    checkpoint: CheckpointName | None = None
    num_steps: int | None = None
    unfinished: bool = False
    learning_curve: list[HeldOutPoint] = []
    fingerprint: str | None = None
    trained_proposals: int | None = None
    lengths_by_proposals: dict[Rule, list[float]] = {}
    proposal_choice: ProposalChoice | None = None
    data: str | None = None
    speed_settings: list[SpeedSettings] = []

    @property
    def progress(self) -> str | None:
        """Give the checkpoint's step, of those of its run if they are known: ``264 of 20,000``; None if it has none."""
        if self.step is None:
            return None
        return f"{self.step:,}" if self.num_steps is None else f"{self.step:,} of {self.num_steps:,}"

    @property
    def full_label(self) -> str:
        """Give the label, and how far training had come if it was cut short: ``BV at step 264 of 20,000``."""
        return f"{self.label} at step {self.progress}" if self.unfinished else self.label

    def edge_of_grid(self, rule: str) -> Literal["lowest", "highest"] | None:
        """Tell whether the best draft temperature is at an end of its grid, so that one beyond may be better."""
        tried = [point.draft_temperature for point in self.temperatures]
        best = self.best_draft_temperature.get(rule)
        if len(tried) < 2 or best not in (min(tried), max(tried)):
            return None
        return "lowest" if best == min(tried) else "highest"


def training_budget(recipe: Mapping[str, Any], data: str | None) -> dict[str, Any]:
    """Return what decides how long and on what a drafter was trained, whatever the objective, by section of its recipe.

    Where texts lie, and what only decides how a step is computed, makes no difference.

    Args:
        recipe: as plain values.
        data: identity of the texts; None takes the folder that the recipe names.
    """
    texts, batch = (recipe.get(section) or {} for section in ("data", "batch"))
    return {
        "data": (data or texts.get("path"), texts.get("num_heldout")),
        "batch": {name: value for name, value in batch.items() if name != "gradient_accumulation_steps"},
        "optimizer": recipe.get("optimizer"),
        "seed": recipe.get("seed"),
    }


class Cell(Strict):
    """Holds what was measured of one drafter under one rule and draft temperature on one task.

    If no prompt of the task was decoded, the predicted length is all that was measured: counts are 0, and the other
    fields None or empty.

    choice: how the draft temperature was chosen, see `TemperatureChoice`.
    acceptance_length: tau, tokens per verification call, correction or bonus included, prefill excluded, pooled.
    draft_length: the same without correction and bonus.
    retention: Pr(accepted >= i), i = 1 .. B. conditional: Pr(accepted >= i | accepted >= i - 1), None where never seen.
    whole_block_rate: share of rounds that kept all B proposals.
    predicted_length: acceptance_length predicted from the target's own texts, without decoding.
    speedup: pooled tokens/s over those of autoregressive decoding in the same run, prefill included in both.
    seconds: of all generations, by phase: prefill, draft, verify, rest.
    """

    drafter: str
    rule: Rule
    choice: TemperatureChoice
    draft_temperature: float
    task: str
    num_generations: int
    num_rounds: int
    num_tokens: int
    acceptance_length: Interval | None = None
    draft_length: Interval | None = None
    retention: list[float] = []
    conditional: list[float | None] = []
    whole_block_rate: float | None = None
    predicted_length: Interval
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    speedup: Interval | None = None
    seconds: dict[str, float] = {}
    baseline_seconds: dict[str, float] = {}


class Average(Strict):
    """Holds means over the tasks with equal weight, of the cells of one drafter, rule and choice.

    Only the predicted length is there if nothing was decoded.
    """

    drafter: str
    rule: Rule
    choice: TemperatureChoice
    draft_temperature: float
    acceptance_length: Interval | None = None
    draft_length: Interval | None = None
    whole_block_rate: float | None = None
    predicted_length: Interval
    speedup: Interval | None = None


class PairedRatio(Strict):
    """Compares two drafters on the same prompts: a mean over the tasks, divided by the same mean of a baseline.

    quantity: the field of `Average`, or of `Cell`, that is compared.
    ratio: that of ``drafter`` over that of ``baseline``; 1 is no difference. Its interval comes from resampled
        prompts that are the same for both, so it is narrower than the two separate intervals suggest.
    task: the one whose cells are compared; None for the averages.
    """

    drafter: str
    baseline: str
    rule: Rule
    choice: TemperatureChoice
    quantity: Quantity
    ratio: Interval
    task: str | None = None


class DynamicsPoint(Strict):
    """Holds a checkpoint measured on fixed blocks of training texts (the paper's figure of training dynamics).

    accuracy: argmax agreement with the stored target tokens.
    draft_length: mean accepted draft tokens of one block-verification draw per block.
    accuracy_deviation, draft_length_deviation: standard deviations over seeds; None for a single one.
    """

    step: int
    epoch: float
    accuracy: float
    draft_length: float
    accuracy_deviation: float | None = None
    draft_length_deviation: float | None = None


class Dynamics(Strict):
    """Holds the training dynamics of one drafter: every epoch's checkpoint on the same full blocks."""

    drafter: str
    num_texts: int
    num_blocks: int
    points: list[DynamicsPoint]


class Results(Strict):
    """Holds one evaluation: ``results.json``.

    settings: temperature, max_new_tokens, seed, num_bootstrap and whatever else was asked for.
    provenance: versions, machine, threads, processes, GPU, start and end of the last run that decoded anything.
    comparisons: every drafter with the baselines that were asked for, or with the one of its kind: the first one
        trained with CE, else the first one. Means over the tasks are compared, and lengths also task by task.
    dynamics_obstacles: by drafter, why its training dynamics were not measured although they were asked for.
    """

    format: Literal["blockdraft.evaluation/1"] = "blockdraft.evaluation/1"
    target: str
    target_fingerprint: str
    settings: dict[str, Any]
    provenance: dict[str, Any]
    tasks: list[TaskAbout]
    drafters: list[DrafterAbout]
    cells: list[Cell]
    averages: list[Average]
    dynamics: list[Dynamics]
    dynamics_obstacles: dict[str, str] = {}
    comparisons: list[PairedRatio] = []

    def ratio(
        self,
        drafter: str,
        baseline: str,
        rule: Rule,
        choice: TemperatureChoice,
        quantity: Quantity,
        task: str | None = None,
    ) -> Interval | None:
        """Return one drafter's mean over another's, if the two were compared prompt by prompt, either way round.

        task: compares on this one alone, which only lengths are.
        """
        for found in self.comparisons:
            if (found.rule, found.choice, found.quantity, found.task) != (rule, choice, quantity, task):
                continue
            ratio = found.ratio
            if (found.drafter, found.baseline) == (drafter, baseline):
                return ratio
            if (found.baseline, found.drafter) == (drafter, baseline) and ratio.low > 0:
                return Interval(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low)
        return None


class AcceptanceRates(Strict):
    """Holds acceptance by position i = 1 .. B, and the lengths that belong to it.

    marginal: Pr(accepted >= i).
    conditional: Pr(accepted >= i | accepted >= i - 1) = marginal_i / marginal_{i-1}, None where that was never met.
    draft_length: the sum of ``marginal``. acceptance_length: the same with correction and bonus tokens.
    """

    marginal: list[float]
    conditional: list[float | None]
    draft_length: float
    acceptance_length: float


class ProfileEntry(Strict):
    """Holds the rates of one drafter under one rule and choice of draft temperature.

    micro: pooled; every verification call weighs the same.
    macro: the mean over the tasks, as in `Average` and the paper's tables; ``conditional`` is made from the mean
        ``marginal``.
    """

    drafter: str
    label: str
    kind: Literal["dflash", "dspark"]
    rule: Rule
    choice: TemperatureChoice
    draft_temperature: float
    num_proposals: int
    num_tasks: int
    num_rounds: int
    micro: AcceptanceRates
    macro: AcceptanceRates


class Profile(Strict):
    """Holds acceptance by position, small enough for model cards and for engines to replay: ``profile.json``.

    averaging: what ``micro`` and ``macro`` mean, for readers of the file alone.
    """

    format: Literal["blockdraft.profile/1"] = "blockdraft.profile/1"
    target: str
    target_fingerprint: str
    temperature: float
    averaging: dict[str, str] = {
        "micro": "pooled over all verification calls of all tasks",
        "macro": "mean over the tasks, each task pooled over its calls",
    }
    entries: list[ProfileEntry]


class TracedToken(Strict):
    """Holds a drafted token as the verifier saw it.

    p, q: its probability under target and drafter. alpha: block verification's running state a_i after it.
    threshold, coin: h_i of the rule that decided, and the uniform number thrown against it; a success if below.
    token_threshold: min(1, p/q), what token verification would have thrown the same coin against.
    """

    id: int
    text: str
    p: float
    q: float
    alpha: float
    threshold: float
    coin: float
    token_threshold: float


class TracedRound(Strict):
    """Holds one verification call.

    anchor: text of the last committed token, from which the block was drafted.
    accepted: how many drafted tokens were kept; token_accepted: how many token verification would have kept on the
        same block with the same coins.
    next_token: id and text of the correction or bonus; None if the text ended inside the block.
    """

    anchor: str
    drafted: list[TracedToken]
    accepted: int
    token_accepted: int
    next_id: int | None
    next_text: str | None


class AnswerTrace(Strict):
    """Holds one generation of one drafter, round by round. first_text: the token that the prefill drew."""

    drafter: str
    rule: Rule
    draft_temperature: float
    first_text: str
    rounds: list[TracedRound]


class TracedPrompt(Strict):
    """Holds a prompt and what every drafter did with it."""

    task: str
    id: str
    prompt: str
    traces: list[AnswerTrace]


class Traces(Strict):
    """Holds the data of the block explorer: ``traces.json``."""

    format: Literal["blockdraft.traces/1"] = "blockdraft.traces/1"
    prompts: list[TracedPrompt]


def read_results(folder: str | Path) -> Results:
    """Read the results in an evaluation's folder."""
    return read_evaluation_file(Path(folder) / "results.json", Results)


def read_profile(folder: str | Path) -> Profile:
    """Read the acceptance profile in an evaluation's folder."""
    return read_evaluation_file(Path(folder) / "profile.json", Profile)


def read_traces(folder: str | Path) -> Traces | None:
    """Read the traces in an evaluation's folder; None if there are none."""
    file = Path(folder) / "traces.json"
    return read_evaluation_file(file, Traces) if file.exists() else None


def write_model(model: BaseModel, file: Path, *, indent: int | None = 1) -> None:
    """Write a model as JSON, whole or not at all."""
    with atomic_write(file) as unfinished:
        unfinished.write_text(model.model_dump_json(indent=indent) + "\n", encoding="utf-8")


def read_evaluation_file(file: Path, kind: type[Model]) -> Model:
    """Read a model from JSON; `EvaluationError` names the file and what is wrong with it."""
    if not os.path.lexists(file):
        raise EvaluationError(f"{file.parent} has no {file.name}; `blockdraft evaluate --out` writes it")
    return read_model(file, kind, EvaluationError, "it was changed, or is of another version")
