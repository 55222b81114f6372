"""Read and write a training run on disk: this is the one reader and the one writer of its folder.

run/run.json                   what the run is: resolved recipe, target, data, sizes, versions
run/recipe.yaml                the recipe alone, to train from again
run/metrics.jsonl              a line for each logged step
run/steps/00000500/            a checkpoint: config.json, model.safetensors, state.pt, checksums.json
run/checkpoint, run/best       links to the last checkpoint and to the best one on held-out texts
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from torch import Tensor

from blockdraft.data import TextDataset, open_dataset
from blockdraft.drafters import Drafter, save_drafter
from blockdraft.drafters.checkpoint import CONFIG, WEIGHTS
from blockdraft.errors import BlockdraftError
from blockdraft.files import (
    UNFINISHED,
    Provenance,
    atomic_folder,
    atomic_write,
    complete_lines,
    explain,
    naming_write_errors,
    parse_json,
    read_json,
    read_model,
    sha256,
    sync,
    write_json,
)
from blockdraft.recipes import Recipe, to_yaml
from blockdraft.targets import Target

LAST, BEST, STATE, CHECKSUMS = "checkpoint", "best", "state.pt", "checksums.json"
STATE_KEYS = ("step", "optimizer", "random", "sampler", "best_step", "best_length")
"""What ``state.pt`` holds."""


class RunError(BlockdraftError):
    """A run's folder cannot be used as it is, and the message says why and what to do."""


class RunTarget(BaseModel):
    """Names the target that a run trains for, with the fingerprint of its weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    fingerprint: str


class _LoggedStep(BaseModel):
    """Holds a line of ``metrics.jsonl``: whatever was measured, by name, at one step.

    What was measured on held-out texts is a number, or one for each position of a block.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, float | str | list[float] | None]

    step: NonNegativeInt
    heldout_length_block: float | None = None

    @model_validator(mode="after")
    def _measured(self) -> "_LoggedStep":
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name.startswith("heldout_") and isinstance(value, str):
                raise ValueError(f"{name} is text")
        return self


class RunInfo(BaseModel):
    """Holds ``run.json``: everything that decides the weights, and what made them.

    data: identity of the training texts. drafter: the drafter's configuration, as in a checkpoint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["blockdraft.run/2"] = "blockdraft.run/2"
    recipe: Recipe
    target: RunTarget
    data: str
    num_steps: PositiveInt
    steps_per_epoch: PositiveInt
    drafter: dict[str, Any]
    provenance: Provenance

    def differences(self, other: "RunInfo") -> list[str]:
        """Return the names of what differs between two runs; where and how a run computes does not count."""
        ours, theirs = (each.recipe.resolved().model_dump(mode="json") for each in (self, other))
        for recipe in (ours, theirs):
            del recipe["runtime"], recipe["logging"], recipe["batch"]["gradient_accumulation_steps"]
            for place in ("path", "cache", "cache_gib"):  # where texts and features lie, and how large they may be
                del recipe["data"][place]
        found = [f"recipe.{key}" for key in ours if ours[key] != theirs.get(key)]
        return found + [key for key in ("target", "data") if getattr(self, key) != getattr(other, key)]


class Run:
    """Reads a run's folder; the trainer also writes through it."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self.folder, self.info = folder, info

    # Opening

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Open a run's folder; `RunError` if it is none, or damaged."""
        folder = Path(folder)
        file = folder / "run.json"
        if not cls.is_run(folder):
            raise RunError(
                f"{folder} is not a training run: it has no run.json; name a folder that `blockdraft train` wrote"
            )
        return cls(folder, read_model(file, RunInfo, RunError, "was it written by another version?"))

    @classmethod
    def is_run(cls, folder: str | Path) -> bool:
        """Return whether a folder holds a run, be it damaged: something is called ``run.json``."""
        return os.path.lexists(Path(folder) / "run.json")

    @classmethod
    def of_checkpoint(cls, checkpoint: str | Path) -> "tuple[Run, int] | None":
        """Return the run that a checkpoint (``run/steps/00000500``, or a link to it) belongs to, and its step."""
        folder = Path(checkpoint).resolve()
        run = folder.parent.parent
        if folder.parent.name != "steps" or not folder.name.isdigit() or not cls.is_run(run):
            return None
        return cls.open(run), int(folder.name)

    @classmethod
    def create(cls, folder: Path, info: RunInfo) -> "Run":
        """Write down what a new run is."""
        with atomic_write(folder / "recipe.yaml") as unfinished:
            unfinished.write_text(to_yaml(info.recipe), encoding="utf-8")
        write_json(info.model_dump(mode="json"), folder / "run.json")
        return cls(folder, info)

    # Reading

    @property
    def recipe(self) -> Recipe:
        """Give the resolved recipe."""
        return self.info.recipe

    @property
    def metrics_file(self) -> Path:
        """Give the file of logged steps."""
        return self.folder / "metrics.jsonl"

    def metrics(self) -> list[dict[str, Any]]:
        """Return the logged steps, in order; a line that a crash cut short is left out."""
        return [values for _, values in self._logged()]

    def _logged(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Return the lines of ``metrics.jsonl``, and what they say."""
        if not self.metrics_file.exists():
            return []
        found = []
        for number, line in enumerate(complete_lines(self.metrics_file), 1):
            try:
                found.append((line, _LOGGED.validate_python(parse_json(line)).model_dump()))
            except ValueError as error:
                raise RunError(
                    f"{self.metrics_file}, line {number}, is damaged: {explain(error)}; delete the line"
                ) from error
        return found

    def heldout_metrics(self, step: int) -> dict[str, Any] | None:
        """Return what was measured on held-out texts at one step, or None."""
        for line in self.metrics():
            if line["step"] == step and line["heldout_length_block"] is not None:
                return {name: value for name, value in line.items() if name.startswith("heldout_")}
        return None

    def splits(self, target: Target | None = None) -> tuple[TextDataset, TextDataset]:
        """Return the texts that were trained on, and those that were held out."""
        data = self.recipe.data
        if data.path is None or not data.path.exists():
            raise RunError(f"{self.folder}: its data folder {data.path} is gone; put it back under this name")
        dataset = open_dataset(data.path, target)
        if dataset.identity != self.info.data:
            raise RunError(f"{data.path} holds other texts than {self.folder} was trained on")
        return dataset.split(data.num_heldout, self.recipe.seed)

    # Checkpoints

    def checkpoint(self, which: Literal["last", "best"] = "best") -> Path:
        """Return the folder of the last or best checkpoint; without held-out texts the last one is the best."""
        for name in (BEST, LAST) if which == "best" else (LAST,):
            if (self.folder / name).exists():
                return self.folder / name
        raise RunError(f"{self.folder} has no checkpoint yet; train it first, with the same command")

    def checkpoints(self) -> dict[int, Path]:
        """Return the folders of all checkpoints by step; stray files are none of our business."""
        steps = self.folder / "steps"
        folders = steps.iterdir() if steps.is_dir() else ()
        found = {int(path.name): path for path in folders if path.name.isdigit() and path.is_dir()}
        return dict(sorted(found.items()))

    @property
    def last_saved_step(self) -> int | None:
        """Give the step of the last checkpoint that was written, be it still there or not; None before the first."""
        link = self.folder / LAST
        name = link.readlink().name if link.is_symlink() else ""
        return int(name) if name.isdigit() else None

    @property
    def lost_its_checkpoint(self) -> bool:
        """Tell whether a last checkpoint was written and is gone."""
        return self.last_saved_step is not None and not (self.folder / LAST).exists()

    def epoch_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints at the end of each epoch, as far as they were kept, by step."""
        each, last = self.info.steps_per_epoch, self.info.num_steps
        return {step: path for step, path in self.checkpoints().items() if step % each == 0 or step == last}

    def save_checkpoint(
        self,
        step: int,
        drafter: Drafter,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        best_step: int,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """Write a checkpoint and point to it; older ones that nothing points to are removed.

        Args:
            step: optimizer steps taken.
            drafter: for its configuration.
            tensors: the drafter's weights, whole and on the CPU.
            state: all else that resuming needs.
            best_step: the step of the best checkpoint so far, this one or an earlier one.
            keep: steps whose checkpoints stay.
        """
        folder = self._step_folder(step)
        with atomic_folder(folder) as unfinished:
            save_drafter(drafter, unfinished, tensors)
            with naming_write_errors(folder / STATE):
                torch.save(state | {"step": step}, unfinished / STATE)
            sums = {path.name: sha256(path) for path in sorted(unfinished.iterdir())}
            (unfinished / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")
        self._link(LAST, folder)
        self._link_best(best_step)
        wanted = {(self.folder / name).resolve() for name in (LAST, BEST)}
        for number, path in self.checkpoints().items():
            if path.resolve() not in wanted and number not in keep:
                shutil.rmtree(path)
        for path in (self.folder / "steps").glob(f"*{UNFINISHED}"):
            shutil.rmtree(path)

    def load_state(self) -> "tuple[Path, dict[str, Any]] | None":
        """Return the last checkpoint's folder and training state, its checksums verified; None in a new run."""
        link, steps, saved = self.folder / LAST, self.folder / "steps", self.checkpoints()
        if saved and not link.is_symlink():
            self._link(LAST, saved[max(saved)])  # a kill came between the first checkpoint and its link
        if not link.exists():
            if link.is_symlink() or (steps.is_dir() and not any(steps.iterdir())):
                raise RunError(
                    f"{self.folder} has lost its last checkpoint; put it back, or train again with another --out. "
                    "Nothing was changed"
                )
            return None
        folder = link.resolve()
        verify_checksums(folder)
        try:
            state: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
        except Exception as error:  # whatever unpickling raises: the checksums held, so the file was written so
            raise RunError(f"{folder / STATE} cannot be read: {str(error).splitlines()[:1]}") from error
        missing = [name for name in STATE_KEYS if name not in state] if isinstance(state, dict) else list(STATE_KEYS)
        if missing:
            raise RunError(f"{folder / STATE} is not the state of a run: it lacks {', '.join(missing)}")
        self._link_best(state["best_step"])  # a kill may have come between the two links
        return folder, state

    def truncate_metrics(self, step: int) -> None:
        """Forget what was logged after a checkpoint that training resumes from."""
        if not self.metrics_file.exists():
            return
        kept = [line for line, values in self._logged() if values["step"] <= step]
        content = b"".join(line + b"\n" for line in kept)
        if content != self.metrics_file.read_bytes():
            with atomic_write(self.metrics_file) as unfinished:
                unfinished.write_bytes(content)

    def _step_folder(self, step: int) -> Path:
        return self.folder / "steps" / f"{step:08d}"

    def _link_best(self, step: int) -> None:
        folder = self._step_folder(step)
        if folder.exists() and (self.folder / BEST).resolve() != folder.resolve():
            self._link(BEST, folder)

    def _link(self, name: str, folder: Path) -> None:
        new = self.folder / f".{name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(folder, self.folder))
        new.replace(self.folder / name)
        sync(self.folder)


_LOGGED = TypeAdapter(_LoggedStep)
_CHECKSUMS = TypeAdapter(dict[str, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]])


def verify_checksums(checkpoint: Path) -> None:
    """Raise if a file of a checkpoint is missing or is not the one that was written."""
    file = checkpoint / CHECKSUMS
    advice = "put a good copy back, or train again with another --out"
    try:
        sums = _CHECKSUMS.validate_python(read_json(file, RunError, advice))
    except ValidationError as error:
        raise RunError(f"{file} is damaged: {explain(error)}; {advice}") from error
    unsafe = [name for name in sums if Path(name).name != name]
    lacking = [name for name in (CONFIG, WEIGHTS, STATE) if name not in sums]
    if unsafe or lacking:
        what = f"it names {unsafe[0]!r}" if unsafe else f"it has no checksum of {', '.join(lacking)}"
        raise RunError(f"{file} is damaged: {what}; {advice}")
    wrong = [
        f"{name} is missing" if not (checkpoint / name).is_file() else f"{name} is damaged: its checksum differs"
        for name, expected in sums.items()
        if not (checkpoint / name).is_file() or sha256(checkpoint / name) != expected
    ]
    if wrong:
        raise RunError(f"{checkpoint}: {'; '.join(wrong)}. Put the file back, or train again with another --out")
