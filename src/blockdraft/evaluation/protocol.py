"""How to measure."""

from dataclasses import dataclass
from typing import Literal

from blockdraft.evaluation.conversation import DecodingSetup
from blockdraft.evaluation.results import EvaluationError
from blockdraft.verification import RULES, Rule

GRID = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
Law = Literal["sampled", "greedy"]


@dataclass(frozen=True)
class Protocol:
    """How to measure; the defaults are the paper's.

    temperature: of the target, for token and block verification.
    draft_temperatures: the grid that the best one is sought on; empty for none.
    num_traces: prompts per task for the block explorer.
    dynamics_texts, dynamics_blocks: training texts and blocks of each for the figure of training dynamics; 0 for none.
    """

    rules: tuple[Rule, ...] = ("greedy", "token", "block")
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    draft_temperatures: tuple[float, ...] = GRID
    num_bootstrap: int = 1000
    num_traces: int = 2
    dynamics_texts: int = 512
    dynamics_blocks: int = 8

    def __post_init__(self) -> None:
        if not self.rules:
            raise EvaluationError("name at least one verification rule")
        if self.temperature <= 0:
            raise EvaluationError("the temperature of sampling must be above 0; greedy decoding is the rule greedy")
        if any(each <= 0 for each in self.draft_temperatures):
            raise EvaluationError("draft temperatures must be above 0")

    @property
    def sampled_rules(self) -> tuple[Rule, ...]:
        """Those that verify samples."""
        return tuple(rule for rule in self.rules if rule != "greedy")

    @property
    def grid(self) -> tuple[float, ...]:
        """The grid with the target's own temperature in it, which is the paper's draft temperature."""
        return tuple(sorted({*self.draft_temperatures, self.temperature}))

    def law(self, rule: Rule) -> Law:
        """Which texts of the target a rule writes."""
        return "greedy" if rule == "greedy" else "sampled"

    def temperature_of(self, law: Law) -> float:
        """Of the target."""
        return 0.0 if law == "greedy" else self.temperature

    @property
    def laws(self) -> list[Law]:
        """All that the rules need."""
        return sorted({self.law(rule) for rule in self.rules})

    def baseline(self, rule: Rule) -> DecodingSetup:
        """Autoregressive decoding of the texts that a rule writes."""
        return (
            DecodingSetup(None, "greedy", 0.0) if rule == "greedy" else DecodingSetup(None, "block", self.temperature)
        )

    def paper(self, drafter: str, rule: Rule) -> DecodingSetup:
        """A drafter at the target's own temperature."""
        return DecodingSetup(drafter, rule, 0.0 if rule == "greedy" else self.temperature)


def as_rules(names: list[str]) -> tuple[Rule, ...]:
    """Checked names of verification rules, in the order of the tables."""
    for name in names:
        if name not in RULES:
            raise EvaluationError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
    return tuple(rule for rule in RULES if rule in names)
