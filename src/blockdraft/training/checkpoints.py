"""A run's checkpoints: each a folder that appears whole, with links to the last and the best.

run/steps/00000500/{config.json, model.safetensors, state.pt}
run/checkpoint -> the last one
run/best -> the one with the longest accepted prefixes on held-out paths
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from blockdraft.drafters import Drafter, save_drafter
from blockdraft.files import atomic_write, sync

LAST, BEST, STATE = "checkpoint", "best", "state.pt"


class Checkpoints:
    """Of one run; used by the process that writes."""

    def __init__(self, run: Path, *, keep: frozenset[int] = frozenset()) -> None:
        self.run, self.keep = run, keep

    def save(
        self, step: int, drafter: Drafter, tensors: dict[str, Any], state: dict[str, Any], *, best_step: int
    ) -> None:
        """Write a checkpoint and point to it; older ones that nothing points to are removed.

        Args:
            step: optimizer steps taken.
            drafter: for its configuration.
            tensors: the drafter's weights, whole and on the CPU.
            state: all else that resuming needs.
            best_step: the step of the best checkpoint so far, this one or an earlier one.
        """
        folder = self.run / "steps" / f"{step:08d}"
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        save_drafter(drafter, unfinished, tensors)
        torch.save(state | {"step": step}, unfinished / STATE)
        for path in (unfinished / STATE, unfinished):
            sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.replace(folder)
        sync(folder.parent)
        self._point(LAST, folder)
        self._point_to_best(best_step)
        self._remove_old()

    def load(self) -> dict[str, Any] | None:
        """The state of the last checkpoint, with its folder; None in a new run."""
        link = self.run / LAST
        if not link.exists():
            return None
        state: dict[str, Any] = torch.load(link / STATE, weights_only=True)
        self._point_to_best(state["best_step"])  # a kill may have come between the two links
        return state | {"folder": link.resolve()}

    def _point_to_best(self, step: int) -> None:
        folder = self.run / "steps" / f"{step:08d}"
        if folder.exists() and (self.run / BEST).resolve() != folder.resolve():
            self._point(BEST, folder)

    def _point(self, name: str, folder: Path) -> None:
        new = self.run / f".{name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(folder, self.run))
        new.replace(self.run / name)
        sync(self.run)

    def _remove_old(self) -> None:
        wanted = {(self.run / name).resolve() for name in (LAST, BEST)}
        for folder in (self.run / "steps").iterdir():
            unfinished = folder.name.endswith(".unfinished")
            if unfinished or (folder.resolve() not in wanted and int(folder.name) not in self.keep):
                shutil.rmtree(folder)


def truncate_metrics(path: Path, step: int) -> None:
    """Forget what was logged after a checkpoint that training resumes from."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            break  # cut short by a crash
    content = "".join(kept)
    if content != path.read_text():
        with atomic_write(path) as unfinished:
            unfinished.write_text(content)
