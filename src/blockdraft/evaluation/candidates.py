"""Tell which drafter is which: its folder, its name, its run, and a label that says how it was trained.

A drafter that comes with the package has a record of all that:

drafters/shipped/NAME/config.json         the drafter's configuration, its target's fingerprint in it
drafters/shipped/NAME/model.safetensors   its weights in bfloat16
drafters/shipped/NAME/drafter.json        how it was trained and what was measured of it: `ShippedDrafter`
drafters/shipped/NAME/README.md           the model card, made from all of these

`tools/ship_drafter.py` writes such a folder; `load_drafter` takes its name.
"""

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from blockdraft.decoding import ProposalChoice
from blockdraft.drafters import SHIPPED, Drafter, load_drafter
from blockdraft.errors import BlockdraftError
from blockdraft.evaluation.protocol import AUTOREGRESSIVE
from blockdraft.evaluation.results import (
    CheckpointName,
    EvaluationError,
    Interval,
    Strict,
    TemperatureChoice,
    read_evaluation_file,
    training_budget,
    write_model,
)
from blockdraft.files import Provenance
from blockdraft.losses import objective
from blockdraft.recipes import Recipe, is_annealed
from blockdraft.recipes.schema import AnnealingSection
from blockdraft.runs import Run
from blockdraft.targets import Target, weights_fingerprint
from blockdraft.verification import Rule

RECORD = "drafter.json"


class TrainingTexts(Strict):
    """Says what a drafter was trained on. identity: of the data folder, as a run records it."""

    identity: str
    num_texts: int | None = None
    num_response_tokens: int | None = None
    temperature: float | None = None


class MeasuredLengths(Strict):
    """Holds means over the tasks, under one rule and choice of the draft temperature; see `Average`."""

    rule: Rule
    choice: TemperatureChoice
    draft_temperature: float
    predicted_length: Interval
    acceptance_length: Interval | None = None
    speedup: Interval | None = None


class Measurement(Strict):
    """Holds what an evaluation found of a drafter.

    weights: whether those of the run were evaluated, before they were rounded to bfloat16, or the shipped ones.
    tasks: the number of prompts of each. num_decoded: how many of them measured lengths and speed-ups are of.
    num_processes, num_threads: that decoded, each process with as many threads; None, as for num_decoded, if that is
        not recorded, or was not always the same.
    lengths: a row for each rule and choice.
    lengths_by_proposals: by rule, the predicted tokens per call if only the first 1, 2, .. B proposals are made.
    """

    weights: Literal["run", "shipped"]
    tasks: dict[str, int]
    temperature: float
    max_new_tokens: int
    seed: int
    lengths: list[MeasuredLengths]
    lengths_by_proposals: dict[Rule, list[float]]
    provenance: Provenance
    num_decoded: dict[str, int] | None = None
    num_processes: int | None = None
    num_threads: int | None = None

    def length(self, rule: Rule, choice: TemperatureChoice) -> Interval | None:
        """Return the predicted tokens per call; where no best is listed, the paper's draft temperature is the best."""
        wanted = {(each.rule, each.choice): each.predicted_length for each in self.lengths}
        return wanted.get((rule, choice)) or (wanted.get((rule, "paper")) if choice == "best" else None)


class ShippedDrafter(Strict):
    """Says how a shipped drafter was made: ``drafter.json``.

    label: the objective, in what it is not the paper's, and how the drafter that it began from was trained.
    recipe: resolved; of paths only the last part is kept. commands: what made the drafter, from prompts to weights.
    step, num_steps: of the checkpoint, and of its whole run.
    provenance: the versions that trained it. num_bytes: of the weights.
    """

    format: Literal["blockdraft.shipped/1"] = "blockdraft.shipped/1"
    name: str
    target: str
    target_fingerprint: str
    label: str
    recipe: Recipe
    commands: list[str]
    step: int
    num_steps: int
    data: TrainingTexts
    provenance: Provenance
    num_parameters: int
    num_bytes: int
    fingerprint: str
    measured: Measurement | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "ShippedDrafter":
        """Read ``drafter.json`` of a shipped folder."""
        return read_evaluation_file(Path(folder) / RECORD, cls)

    def write(self, folder: Path) -> None:
        """Write ``drafter.json`` into a folder."""
        write_model(self, folder / RECORD)


def shipped_drafters() -> list[ShippedDrafter]:
    """Read what is known of every drafter that comes with the package, in the order of their names."""
    return [ShippedDrafter.read(folder) for _, folder in sorted(SHIPPED.items())]


def shipped_record(folder: str | Path) -> ShippedDrafter | None:
    """Return what is known of the drafter in a shipped folder, and None for any other folder."""
    return ShippedDrafter.read(folder) if (Path(folder) / RECORD).is_file() else None


THEN = ", then "
"""Stands between the stages of a label: see `label_of`."""

PAPER_SCHEDULE = AnnealingSection(ratio=0.5, initial=0.0, final=1.0)
"""beta from 0 to 1 over the first half of training: with this schedule, and only with it, BV is called BV."""

TITLES = {
    "dpace": "D-PACE",
    "dspark": "DSpark loss",
    "lk-hybrid": "LK hybrid",
    "rounds": "Rounds",
    "token-bv": "Token BV",
}
"""Objectives whose title is not their name in capitals."""

FORBIDDEN = '<>:"/\\|?*'
"""Characters that some file system does not take in a file's name."""
MAX_NAME = 100


@dataclass(frozen=True)
class Candidate:
    """Describes a drafter that is to be evaluated.

    path: the folder that it was loaded from.
    run: the training run that it lies in, if it does. step: the checkpoint's. checkpoint: whether it is the run's
        best or last one. shipped: what is known of a drafter that comes with the package.
    trained_proposals: the number of proposals that it was trained with, if it is made to propose fewer.
    proposal_choice: how that number was chosen, if it was chosen for speed.
    """

    name: str
    path: Path
    drafter: Drafter
    run: Run | None = None
    step: int | None = None
    checkpoint: CheckpointName | None = None
    shipped: ShippedDrafter | None = None
    trained_proposals: int | None = None
    proposal_choice: ProposalChoice | None = None

    @property
    def recipe(self) -> Recipe | None:
        """Give the recipe that it was trained by, if the folder tells."""
        if self.run is not None:
            return self.run.recipe
        return None if self.shipped is None else self.shipped.recipe

    @property
    def objective(self) -> str | None:
        """Give the objective's name, as in the recipe."""
        return None if self.recipe is None else self.recipe.objective.name

    @property
    def data(self) -> str | None:
        """Give the identity of the texts that it was trained on, if the folder tells."""
        if self.run is not None:
            return self.run.info.data
        return None if self.shipped is None else self.shipped.data.identity

    @property
    def num_steps(self) -> int | None:
        """Give the number of steps of its whole run, if the folder tells."""
        if self.run is not None:
            return self.run.info.num_steps
        return None if self.shipped is None else self.shipped.num_steps

    @property
    def unfinished(self) -> bool:
        """Tell whether its training was cut short.

        The run has not taken all of its steps yet, or this checkpoint is from before its end and is not its best one.
        """
        if self.run is None:
            return False
        taken = self.run.last_saved_step if self.checkpoint == "best" else self.step
        return taken is not None and taken < self.run.info.num_steps

    @property
    def budget(self) -> dict[str, Any] | None:
        """Say how long and on what it was trained, see `training_budget`; None if nobody knows."""
        return None if self.recipe is None else training_budget(self.recipe.model_dump(mode="json"), self.data)

    @property
    def label(self) -> str:
        """Say what tables call it: how it was trained, or its name if the folder does not tell."""
        if self.run is None and self.shipped is not None:
            return self.shipped.label  # written where the drafter that it began from was at hand
        return self.name if self.recipe is None else label_of(self.recipe)

    def with_proposals(self, num_proposals: int) -> "Candidate":
        """Return the same drafter, limited to this number of proposals."""
        whole = self.drafter.config.num_proposals
        if num_proposals == whole:
            return self
        fewer = self.drafter.with_proposals(num_proposals)
        return dataclasses.replace(self, drafter=fewer, trained_proposals=self.trained_proposals or whole)

    @cached_property
    def fingerprint(self) -> str:
        """Give sixteen hexadecimal digits over its weights and configuration."""
        config = json.dumps(self.drafter.config.to_dict(), sort_keys=True)
        return hashlib.sha256(f"{weights_fingerprint(self.drafter)} {config}".encode()).hexdigest()[:16]


def load_candidates(drafters: list[str], target: Target, *, checkpoint: CheckpointName = "best") -> list[Candidate]:
    """Load drafters to be evaluated.

    Args:
        drafters: ``PATH`` or ``NAME=PATH``. A path is a drafter's folder, a run's, or the name of a drafter that comes
            with the package; ``RUN@best`` and ``RUN@last`` say which checkpoint of a run is meant.
        target: the model that they draft for.
        checkpoint: which one is taken of a run's folder that does not say.
    """
    found: list[Candidate] = []
    for given in drafters:
        name, path = _split(given)
        candidate = _load(path, name, target, checkpoint)
        _check_name(candidate.name)
        if any(other.name == candidate.name for other in found):
            raise EvaluationError(f"two drafters are called {candidate.name!r}; name one: --drafter NAME=PATH")
        found.append(candidate)
    return found


def as_checkpoint(name: str) -> CheckpointName:
    """Check the name of a run's checkpoint."""
    known: CheckpointName
    for known in ("best", "last"):
        if name == known:
            return known
    raise EvaluationError(f"a run has a best and a last checkpoint, not {name!r}; write RUN@best or RUN@last")


def label_of(recipe: Recipe) -> str:
    """Return what tables call a drafter: its objective, in what that differs from the paper's, and what came before.

    ``BV`` alone is the paper's: log form, integrated scores, beta from 0 to 1 over the first half of training, and the
    floors that the paper has for this kind of drafter. Any other recipe says what is different: ``BV sampled``,
    ``BV w/o annealing``, ``BV (beta to 0.5)``, ``CE (eta 4)``.

    A drafter that began as another one says how that was trained, if the other one's folder tells: ``D-PACE, then
    BV (beta from 0.5)``; what was only trained further in the same way says it once. Otherwise it is
    ``BV (beta from 0.5), post-trained``.
    """
    stages, passed = [_objective_label(recipe)], {"required"}
    while (initial := recipe.drafter.initial) not in ("scratch", "target"):
        before = None if initial in passed else _recipe_in(initial)
        passed.add(initial)  # folders are written anew, so that two runs may name each other
        if before is None:
            stages[0] += ", post-trained"
            break
        if isinstance(before, ShippedDrafter):
            stages[:0] = before.label.split(THEN)
            break
        stages.insert(0, _objective_label(before))
        recipe = before
    return THEN.join(stage for stage, _ in itertools.groupby(stages))


def _recipe_in(initial: str) -> "Recipe | ShippedDrafter | None":
    """Return how the drafter that another one begins from was trained; None if its folder does not tell."""
    try:
        folder = SHIPPED[initial] if initial in SHIPPED else _at(initial)[0]
        if Run.is_run(folder):
            return Run.open(folder).recipe
        found = Run.of_checkpoint(folder) if folder.exists() else None
        return shipped_record(folder) if found is None else found[0].recipe
    except BlockdraftError:
        return None  # a label is no place to refuse a folder that nothing is loaded from


def _objective_label(recipe: Recipe) -> str:
    """Return the objective, and in what it differs from the paper's."""
    made = recipe.make_objective()
    paper = objective(recipe.objective.name, drafter=recipe.drafter.kind)
    words, notes = [TITLES.get(made.name, made.name.upper())], []
    for field in dataclasses.fields(made):
        value, usual = getattr(made, field.name), getattr(paper, field.name)
        if value == usual or field.name == "beta":
            continue
        if field.name in ("form", "estimator"):
            words.append(str(value))
        else:
            notes.append(_note(field.name.replace("_", " "), value))
    if is_annealed(made):
        schedule = recipe.annealing
        if schedule is None or schedule.ratio == 0 or schedule.initial == schedule.final:
            beta = getattr(made, "beta", None) if schedule is None else schedule.final
            words.append("w/o annealing")
            if beta != PAPER_SCHEDULE.final:
                notes.insert(0, _note("beta", beta))
        elif schedule != PAPER_SCHEDULE:
            notes.insert(0, _ramp(schedule))
    return " ".join([*words, *([f"({', '.join(notes)})"] if notes else [])])


def _note(name: str, value: Any) -> str:
    if value is None or value is False:
        return f"no {name}"
    if value is True:
        return name
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"


def _ramp(schedule: AnnealingSection) -> str:
    """Say in what a schedule of beta differs from the paper's."""
    text = "beta"
    if schedule.initial != PAPER_SCHEDULE.initial:
        text += f" from {schedule.initial:g}"
    if schedule.final != PAPER_SCHEDULE.final:
        text += f" to {schedule.final:g}"
    if schedule.ratio != PAPER_SCHEDULE.ratio:
        text += f" over {100 * schedule.ratio:.3g}%"
    return text


def _check_name(name: str) -> None:
    """Refuse a name that results or files could not carry."""
    if name == AUTOREGRESSIVE:
        raise EvaluationError(f"{AUTOREGRESSIVE!r} is what decoding without a drafter is called; choose another name")
    wrong = [each for each in name if each in FORBIDDEN or not each.isprintable()]
    if wrong:
        reason = f"{wrong[0]!r} is in it"
    elif not 0 < len(name.encode()) <= MAX_NAME:
        reason = f"it has {len(name.encode())} bytes, not 1 to {MAX_NAME}"
    elif name != name.strip(" .") or name.startswith("-"):
        reason = "it begins or ends with a space, a dot or a hyphen"
    else:
        return
    raise EvaluationError(
        f"{name!r} cannot name a drafter: {reason}. Files and reports carry the name, so it must be a plain file name; "
        "choose another: --drafter NAME=PATH"
    )


def _split(given: str) -> tuple[str | None, str]:
    """Split ``NAME=PATH``; a path that is there and has such a sign in it is meant itself."""
    folder = given.rpartition("@")[0] or given
    name, equals, path = given.partition("=")
    return (None, given) if not equals or Path(given).exists() or Path(folder).exists() else (name, path)


def _load(given: str, name: str | None, target: Target, default: CheckpointName) -> Candidate:
    if given in SHIPPED:
        record = shipped_record(SHIPPED[given])
        step = None if record is None else record.step
        return Candidate(name or given, Path(given), load_drafter(given, target), step=step, shipped=record)
    path, which = _at(given)
    if Run.is_run(path):
        path = Run.open(path).checkpoint(which or default)
    elif which is not None:
        raise EvaluationError(
            f"{given}: {path} is not a training run, so it has no {which} checkpoint; leave out @{which}"
        )
    drafter = load_drafter(path, target).to(target.device, target.dtype).eval()
    found = Run.of_checkpoint(path)
    if found is None:
        return Candidate(path.absolute().name if name is None else name, path, drafter)
    run, step = found
    return Candidate(run.folder.name if name is None else name, path, drafter, run, step, _which(run, path))


def _at(given: str) -> tuple[Path, CheckpointName | None]:
    """Split ``RUN@last`` into the folder and the checkpoint; a folder that has such a name is meant itself."""
    folder, at, which = given.rpartition("@")
    if not at or "/" in which or Path(given).exists():
        return Path(given), None
    return Path(folder), as_checkpoint(which)


def _which(run: Run, path: Path) -> CheckpointName | None:
    """Return whether a checkpoint is its run's best or last; one that is both is called as it was asked for."""
    links: dict[CheckpointName, Path] = {"best": run.folder / "best", "last": run.folder / "checkpoint"}
    order = sorted(links, key=lambda each: links[each].name != path.name)
    return next((each for each in order if links[each].resolve() == path.resolve()), None)
