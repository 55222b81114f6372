"""Say how to measure, in which ways to decode, and what an evaluation's folder is for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from blockdraft.data import Prompt
from blockdraft.decoding import ProposalChoice
from blockdraft.evaluation.results import EvaluationError, Strict, TemperatureChoice, read_evaluation_file
from blockdraft.verification import RULES, Rule

PLAN = "plan.json"
AUTOREGRESSIVE = "autoregressive"
"""What decoding without a drafter is called."""

GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
ONE_HOT = 0.0
"""The draft temperature at which a drafter proposes its argmax, and q is one-hot."""

AskedProposals = int | Literal["auto", "adaptive"] | None
"""A number of proposals; the best one for speed, for all texts or round by round; or what it was trained with."""

TextKind = Literal["greedy", "sampled"]
"""The two kinds of texts that a target writes: at temperature 0, and at the temperature of sampling."""


@dataclass(frozen=True)
class DecodingSetup:
    """Names a way to decode: a drafter (None is autoregressive), a rule, a draft temperature.

    choice: how the draft temperature was chosen, see `TemperatureChoice`.
    """

    drafter: str | None
    rule: Rule
    draft_temperature: float
    choice: TemperatureChoice = "paper"

    @property
    def key(self) -> tuple[str | None, Rule, float]:
        """Say what decides the tokens; how the temperature was chosen does not."""
        return self.drafter, self.rule, self.draft_temperature


@dataclass(frozen=True)
class Protocol:
    """Says how to measure; the defaults are the paper's, and argmax drafts beside them.

    temperature: of the target, for token and block verification.
    draft_temperatures: the grid that the best one is sought on; empty for none.
    one_hot: whether the sampled rules are also measured with argmax drafts, as engines draft by default.
    num_proposals: tokens that every drafter proposes, at most those it was trained with; None for all of them, and
        ``"auto"`` for the number with the most predicted tokens per second on this machine, for each drafter;
        ``"adaptive"`` for a number that follows what the rounds of a text kept. Predicted lengths are then those of
        whole blocks.
    num_decoded: prompts of each task that are also decoded, spread over the task; None for all, 0 for predicted lengths
        alone. Predicted lengths, which cost far less, always use all prompts.
    baselines: names of the drafters that others are compared with; none for those trained with CE.
    num_traces: prompts per task for the block explorer.
    dynamics_texts, dynamics_blocks: training texts, and full blocks of each, for the figure of training dynamics;
        no texts for no figure.
    """

    rules: tuple[Rule, ...] = ("greedy", "token", "block")
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    draft_temperatures: tuple[float, ...] = GRID
    one_hot: bool = True
    num_proposals: AskedProposals = None
    num_decoded: int | None = None
    num_bootstrap: int = 1000
    baselines: tuple[str, ...] = ()
    num_traces: int = 2
    dynamics_texts: int = 512
    dynamics_blocks: int = 8

    def __post_init__(self) -> None:
        if not self.rules:
            raise EvaluationError("name at least one verification rule")
        if not 0 < self.temperature < math.inf:
            raise EvaluationError(
                f"the temperature of sampling must be above 0 and finite, got {self.temperature:g}; greedy decoding is "
                "the rule greedy"
            )
        for each in self.draft_temperatures:
            if not 0 < each < math.inf:
                raise EvaluationError(
                    f"draft temperatures must be above 0 and finite, got {each:g}; argmax drafts are "
                    "measured anyway, unless they are left out"
                )
        if self.num_decoded is not None and self.num_decoded < 0:
            raise EvaluationError(f"the number of prompts to decode cannot be negative, got {self.num_decoded}")
        if self.dynamics_texts and self.dynamics_blocks < 1:
            raise EvaluationError("training dynamics need at least one block of each text")

    @property
    def sampled_rules(self) -> tuple[Rule, ...]:
        """Give the rules that verify samples."""
        return tuple(rule for rule in self.rules if rule != "greedy")

    @property
    def grid(self) -> tuple[float, ...]:
        """Give the grid with the target's own temperature in it, which is the paper's draft temperature."""
        return tuple(sorted({*self.draft_temperatures, self.temperature}))

    def decoded(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts of a task that are decoded: all, or ``num_decoded`` at even distances."""
        num = len(prompts) if self.num_decoded is None else min(self.num_decoded, len(prompts))
        return [prompts[number * len(prompts) // num] for number in range(num)]

    def settings(self) -> dict[str, Any]:
        """Return what results say of the protocol."""
        return {
            "rules": list(self.rules), "temperature": self.temperature, "max_new_tokens": self.max_new_tokens,
            "seed": self.seed, "num_bootstrap": self.num_bootstrap, "draft_temperatures": list(self.grid),
            "one_hot": self.one_hot, "num_proposals": self.num_proposals, "num_decoded": self.num_decoded,
        }  # fmt: skip

    # Texts of the target

    def texts_of(self, rule: Rule) -> TextKind:
        """Return which texts of the target a rule writes."""
        return "greedy" if rule == "greedy" else "sampled"

    def temperature_of(self, kind: TextKind) -> float:
        """Return the target's temperature for one kind of texts."""
        return 0.0 if kind == "greedy" else self.temperature

    @property
    def text_kinds(self) -> list[TextKind]:
        """Give all kinds of texts that the rules need."""
        return sorted({self.texts_of(rule) for rule in self.rules})

    def predicted_temperatures(self, rule: Rule) -> tuple[float, ...]:
        """Return the draft temperatures that lengths are predicted for: the paper's first, then all others."""
        if rule == "greedy":
            return (ONE_HOT,)
        others = [each for each in self.grid if each != self.temperature]
        return (self.temperature, *others, *((ONE_HOT,) if self.one_hot else ()))

    # Ways to decode

    def baseline(self, rule: Rule) -> DecodingSetup:
        """Return autoregressive decoding of the texts that a rule writes."""
        if rule == "greedy":
            return DecodingSetup(None, "greedy", 0.0)
        return DecodingSetup(None, "block", self.temperature)

    def paper(self, drafter: str, rule: Rule) -> DecodingSetup:
        """Return the paper's setup: draft at the target's own temperature."""
        return DecodingSetup(drafter, rule, 0.0 if rule == "greedy" else self.temperature)

    def setups(self, drafter: str, best: dict[str, float]) -> list[DecodingSetup]:
        """Return all setups of a drafter: rule by rule the paper's, the best if it is another one, argmax drafts.

        best: by sampled rule, the draft temperature with the largest predicted length.
        """
        found = []
        for rule in self.rules:
            paper = self.paper(drafter, rule)
            found.append(paper)
            if rule == "greedy":
                continue
            if best[rule] != paper.draft_temperature:
                found.append(replace(paper, draft_temperature=best[rule], choice="best"))
            if self.one_hot:
                found.append(replace(paper, draft_temperature=ONE_HOT, choice="one-hot"))
        return found


class EvaluationPlan(Strict):
    """States everything that decides what an evaluation measures: ``plan.json``.

    A folder holds one plan, to which drafters and draft temperatures may be added, 0 (argmax drafts) among them.

    target, drafters: fingerprints of the weights, the drafters' by name.
    draft_temperatures: the grid, the target's own temperature in it.
    """

    format: Literal["blockdraft.plan/1"] = "blockdraft.plan/1"
    target: str
    drafters: dict[str, str]
    tasks: dict[str, list[Prompt]]
    rules: list[Rule]
    temperature: float
    max_new_tokens: int
    seed: int
    draft_temperatures: list[float]
    one_hot: bool
    num_proposals: AskedProposals = None
    num_decoded: int | None = None

    def differences(self, other: "EvaluationPlan") -> list[str]:
        """Return what differs, by name; what the other plan adds that may be added is no difference."""
        grown = {
            "drafters": other.drafters | self.drafters,
            "draft_temperatures": sorted({*self.draft_temperatures, *other.draft_temperatures}),
            "one_hot": self.one_hot or other.one_hot,
        }
        mine = self.model_copy(update=grown)
        found = [name for name in type(self).model_fields if getattr(mine, name) != getattr(other, name)]
        return ["argmax drafts" if name == "one_hot" else name for name in found]

    def refuse_another(self, folder: Path) -> None:
        """Raise if a folder holds another evaluation, or parts of one without a plan."""
        file = folder / PLAN
        if file.exists():
            wrong = read_evaluation_file(file, EvaluationPlan).differences(self)
            if wrong:
                raise EvaluationError(
                    f"{folder} holds another evaluation: {', '.join(wrong)} differ. Choose another --out; only "
                    "drafters and draft temperatures may be added"
                )
            return
        parts = [name for name in ("texts", "predictions", "records", "results.json") if (folder / name).exists()]
        if parts:
            raise EvaluationError(
                f"{folder} has {', '.join(parts)} but no {PLAN}, so nobody knows what they were made from. "
                "Choose another --out"
            )


class ProposalFile(Strict):
    """Holds how many tokens each drafter proposes, and why: ``proposals.json``. rule: the one it was chosen for."""

    format: Literal["blockdraft.proposals/1"] = "blockdraft.proposals/1"
    rule: Rule
    drafters: dict[str, ProposalChoice]


def as_rules(names: list[str]) -> tuple[Rule, ...]:
    """Check names of verification rules, and return them in the order of the tables."""
    for name in names:
        if name not in RULES:
            raise EvaluationError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
    return tuple(rule for rule in RULES if rule in names)
