"""This module holds the schedule of beta, apart from any trainer."""

from dataclasses import dataclass, fields, replace
from typing import Any

from blockdraft.losses.objective import Objective


@dataclass
class Annealing:
    """Annealing raises beta linearly from ``initial`` to ``final`` over the first ``share`` of training, then keeps it.

    The paper's runs take ``share = 0.5`` (three of six epochs) from 0 to 1.

    ``num_steps`` is the number of optimizer steps of the whole run; ``step`` the
    number already taken. A trainer calls `advance` once per optimizer step and
    trains with ``annealing.apply(objective)``, or asks `beta_at` for any step.
    """

    num_steps: int
    share: float = 0.5
    initial: float = 0.0
    final: float = 1.0
    step: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 0 or not 0 <= self.share <= 1:
            raise ValueError(f"annealing needs num_steps >= 0 and 0 <= share <= 1: {self.num_steps}, {self.share}")
        if not (0 <= self.initial <= 1 and 0 <= self.final <= 1):
            raise ValueError(f"beta must stay in [0, 1]: from {self.initial} to {self.final}")

    def beta_at(self, step: int) -> float:
        """Return beta for the optimizer step of this index, counted from 0."""
        ramp = self.share * self.num_steps
        if step >= ramp:
            return self.final
        return self.initial + (self.final - self.initial) * step / ramp

    @property
    def beta(self) -> float:
        """Give beta for the step about to be taken."""
        return self.beta_at(self.step)

    def advance(self) -> None:
        """Count one optimizer step."""
        self.step += 1

    def apply(self, objective: Objective) -> Objective:
        """Return the objective at the present beta, if it has one.

        Every objective with a field ``beta`` takes it, unless it also has a ``form`` and that is not ``"log"``;
        any other is returned as it is.
        """
        has_beta = any(field.name == "beta" for field in fields(objective))
        if not has_beta or getattr(objective, "form", "log") != "log":
            return objective
        changed: dict[str, Any] = {"beta": self.beta}
        return replace(objective, **changed)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`."""
        self.step = int(state["step"])
