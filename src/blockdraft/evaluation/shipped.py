"""Drafters that come with the package: what is known of each beyond its weights, and the file that says it.

drafters/shipped/NAME/config.json         the drafter's configuration, its target's fingerprint in it
drafters/shipped/NAME/model.safetensors   its weights in bfloat16
drafters/shipped/NAME/drafter.json        how it was trained and what was measured of it: `ShippedDrafter`
drafters/shipped/NAME/README.md           the model card, made from all of these

`tools/ship_drafter.py` writes such a folder; `load_drafter` takes its name.
"""

from pathlib import Path
from typing import Literal

from blockdraft.drafters import SHIPPED
from blockdraft.evaluation.results import Choice, Interval, Strict, read_model, write_model
from blockdraft.provenance import Provenance
from blockdraft.recipes import Recipe
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
    choice: Choice
    draft_temperature: float
    predicted_length: Interval
    acceptance_length: Interval
    speedup: Interval


class Measurement(Strict):
    """Holds what an evaluation found of a drafter.

    weights: whether those of the run were evaluated, before they were rounded to bfloat16, or the shipped ones.
    tasks: the number of prompts of each. lengths: a row for each rule and choice.
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

    def length(self, rule: Rule, choice: Choice) -> Interval | None:
        """Return the predicted tokens per call; where no best is listed, the paper's draft temperature is the best."""
        wanted = {(each.rule, each.choice): each.predicted_length for each in self.lengths}
        return wanted.get((rule, choice)) or (wanted.get((rule, "paper")) if choice == "best" else None)


class ShippedDrafter(Strict):
    """Says how a shipped drafter was made: ``drafter.json``.

    label: the objective, and in what it is not the paper's.
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
        return read_model(Path(folder) / RECORD, cls)

    def write(self, folder: Path) -> None:
        """Write ``drafter.json`` into a folder."""
        write_model(self, folder / RECORD)


def shipped_drafters() -> list[ShippedDrafter]:
    """Read what is known of every drafter that comes with the package, in the order of their names."""
    return [ShippedDrafter.read(folder) for _, folder in sorted(SHIPPED.items())]


def shipped_record(folder: str | Path) -> ShippedDrafter | None:
    """Return what is known of the drafter in a shipped folder, and None for any other folder."""
    return ShippedDrafter.read(folder) if (Path(folder) / RECORD).is_file() else None
