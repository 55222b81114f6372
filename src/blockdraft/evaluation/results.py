"""What an evaluation found: the schema of ``results.json``, and reading and writing it.

``docs/guides/evaluation.md`` explains every field to users; names here and there agree.
"""

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from blockdraft.errors import BlockdraftError
from blockdraft.files import atomic_write
from blockdraft.verification import Rule

Model = TypeVar("Model", bound=BaseModel)

Choice = Literal["paper", "best", "one-hot"]
"""How a draft temperature was chosen: the target's own (0 under greedy verification), the one with the largest
predicted length, or 0 under a sampling target, so that every draft distribution is one-hot: the default of engines."""


class EvaluationError(BlockdraftError):
    """Something the user can correct."""


class Strict(BaseModel):
    """Unknown keys are refused; nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Strict):
    """A number with the 95% interval of a bootstrap over prompts."""

    value: float
    low: float
    high: float


class TaskAbout(Strict):
    """Which prompts a task had.

    group: ``math``, ``code`` or ``chat``: the heading it stands under in a table.
    num_turns: user messages, each answered by one generation.
    num_left_out: prompts beside these that the target cannot read and answer.
    """

    name: str
    title: str
    group: str
    source: str
    num_prompts: int
    num_turns: int
    num_left_out: int = 0


class TemperaturePoint(Strict):
    """Acceptance length predicted from target paths at one draft temperature, by rule, mean over the tasks."""

    draft_temperature: float
    acceptance_length: dict[str, float]


class DrafterAbout(Strict):
    """A drafter of the evaluation.

    name: unique in the evaluation; results refer to it.
    label: for tables: the objective in capitals (``CE``, ``BV``, ``BV w/o annealing``), or the name.
    objective: as in the recipe; None if the folder does not tell.
    best_draft_temperature: by rule, where the predicted length is largest.
    temperatures: the grid it was chosen from.
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


class Cell(Strict):
    """One drafter under one rule and draft temperature on one task.

    choice: how the draft temperature was chosen, see `Choice`.
    acceptance_length: tau, tokens per verification call, correction or bonus included, prefill excluded, pooled.
    draft_length: the same without correction and bonus.
    retention: Pr(accepted >= i), i = 1 .. B. conditional: Pr(accepted >= i | accepted >= i - 1), None where never seen.
    whole_block_rate: share of rounds that kept all B proposals.
    predicted_length: acceptance_length predicted from target paths, without decoding.
    speedup: pooled tokens/s over those of autoregressive decoding in the same run, prefill included in both.
    seconds: of all generations, by phase: prefill, draft, verify, rest.
    """

    drafter: str
    rule: Rule
    choice: Choice
    draft_temperature: float
    task: str
    num_generations: int
    num_rounds: int
    num_tokens: int
    acceptance_length: Interval
    draft_length: Interval
    retention: list[float]
    conditional: list[float | None]
    whole_block_rate: float
    predicted_length: Interval
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: Interval
    seconds: dict[str, float]
    baseline_seconds: dict[str, float]


class Average(Strict):
    """Means over the tasks with equal weight, of the cells of one drafter, rule and choice."""

    drafter: str
    rule: Rule
    choice: Choice
    draft_temperature: float
    acceptance_length: Interval
    draft_length: Interval
    whole_block_rate: float
    predicted_length: Interval
    speedup: Interval


class PairedRatio(Strict):
    """Compares two drafters on the same prompts: a mean over the tasks, divided by the same mean of a baseline.

    ratio: average of ``drafter`` over average of ``baseline``; 1 is no difference. Its interval comes from resampled
        prompts that are the same for both, so it is narrower than the two separate intervals suggest.
    what: the field of `Average` that is compared.
    """

    drafter: str
    baseline: str
    rule: Rule
    choice: Choice
    what: Literal["acceptance_length", "predicted_length", "speedup"]
    ratio: Interval


class DynamicsPoint(Strict):
    """A checkpoint measured on fixed blocks of training texts (the paper's figure of training dynamics).

    accuracy: argmax agreement with the stored target tokens.
    draft_length: mean accepted draft tokens of one block-verification draw per block.
    """

    step: int
    epoch: float
    accuracy: float
    draft_length: float


class Dynamics(Strict):
    """Training dynamics of one drafter."""

    drafter: str
    num_texts: int
    num_blocks: int
    points: list[DynamicsPoint]


class Results(Strict):
    """An evaluation.

    settings: temperature, max_new_tokens, seed, num_bootstrap and whatever else was asked for.
    provenance: versions, machine, threads, processes, GPU, start and end.
    comparisons: paired comparisons of drafters with a baseline, if they were made.
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
    comparisons: list[PairedRatio] = []


class TracedToken(Strict):
    """A drafted token as the verifier saw it.

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
    """One verification call.

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


class Trace(Strict):
    """One generation of one drafter, round by round. first_text: the token that the prefill drew."""

    drafter: str
    rule: Rule
    draft_temperature: float
    first_text: str
    rounds: list[TracedRound]


class TracedPrompt(Strict):
    """A prompt and what every drafter did with it."""

    task: str
    id: str
    prompt: str
    traces: list[Trace]


class Traces(Strict):
    """``traces.json``: the block explorer's data."""

    format: Literal["blockdraft.traces/1"] = "blockdraft.traces/1"
    prompts: list[TracedPrompt]


def read_results(folder: str | Path) -> Results:
    """The results in an evaluation's folder."""
    return _read(Path(folder) / "results.json", Results)


def read_traces(folder: str | Path) -> Traces | None:
    """Its traces, if it recorded any."""
    file = Path(folder) / "traces.json"
    return _read(file, Traces) if file.exists() else None


def write_model(model: BaseModel, file: Path) -> None:
    """As JSON, whole or not at all."""
    with atomic_write(file) as unfinished:
        unfinished.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _read(file: Path, kind: type[Model]) -> Model:
    try:
        return kind.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise EvaluationError(f"{file.parent} has no {file.name}; `blockdraft evaluate --out` writes it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EvaluationError(f"{file}: cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EvaluationError(f"{file}: {where}: {first['msg']}") from error
