"""Choose how many tokens to propose: the number with the most predicted tokens per second on this machine.

A round of b proposals yields on average L(b) tokens, which prediction knows, and takes

    T(b) = draft(b) + verify(b) + rest(b)

seconds, which `blockdraft.decoding.costs` measures: drafting b tokens, a pass of the target over 1 + b, and all else.
The best b is the argmax of L(b) / T(b). A drafter that was trained with B can propose any b up to B; decoding stays
lossless. `best_num_proposals` chooses one number for all texts, `AdaptiveProposals` one for every round of a text.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCosts:
    """Holds the seconds of a round by phase, for 0, 1, .. B proposals; with none, the target decodes alone."""

    draft: tuple[float, ...]
    verify: tuple[float, ...]
    rest: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.draft) == len(self.verify) == len(self.rest) > 1:
            raise ValueError("costs need the same numbers of proposals in every phase, 0 and at least one more")
        if not all(math.isfinite(each) and each >= 0 for each in (*self.draft, *self.verify, *self.rest)):
            raise ValueError("costs are finite numbers of seconds, and none is negative")
        if not all(each > 0 for each in self.seconds):
            raise ValueError("a round cannot take no time at all")

    @property
    def num_proposals(self) -> int:
        """Give B, the largest number of proposals that was timed."""
        return len(self.draft) - 1

    @property
    def seconds(self) -> tuple[float, ...]:
        """Give T(b), the seconds of whole rounds."""
        return tuple(map(sum, zip(self.draft, self.verify, self.rest, strict=True)))


@dataclass(frozen=True)
class ProposalChoice:
    """Holds the best number of proposals, and what speaks for it.

    lengths: L(b), predicted tokens per round of b = 1, .. B proposals. costs: T(b), measured.
    """

    num_proposals: int
    lengths: tuple[float, ...]
    costs: RoundCosts

    @property
    def tokens_per_second(self) -> tuple[float, ...]:
        """Give the predicted speed with 0, 1, .. B proposals, prefill not counted."""
        return tokens_per_second(self.costs, self.lengths)

    @property
    def speedup(self) -> float:
        """Give the predicted speed over that of the target alone."""
        return self.tokens_per_second[self.num_proposals] / self.tokens_per_second[0]


def lengths_of(retention: Sequence[float]) -> list[float]:
    """Return L(b) = 1 + sum_{i<=b} Pr(accepted >= i) for b = 1, .. B, from the probabilities of keeping i tokens."""
    return list(itertools.accumulate(retention, initial=1.0))[1:]


def tokens_per_second(costs: RoundCosts, lengths: Sequence[float]) -> tuple[float, ...]:
    """Return L(b) / T(b) for b = 0, .. B, where L(0) = 1."""
    if len(lengths) != costs.num_proposals:
        raise ValueError(f"{len(lengths)} lengths do not belong to costs of up to {costs.num_proposals} proposals")
    return tuple(length / took for length, took in zip((1.0, *lengths), costs.seconds, strict=True))


def best_num_proposals(costs: RoundCosts, lengths: Sequence[float]) -> ProposalChoice:
    """Choose the number of proposals, at least one, with the largest predicted speed; of equal ones the smallest."""
    speeds = tokens_per_second(costs, lengths)
    best = max(range(1, len(speeds)), key=lambda number: (speeds[number], -number))
    return ProposalChoice(best, tuple(lengths), costs)


class AdaptiveProposals:
    """Chooses the number of proposals of every round of a text by what the rounds before it kept.

    If a drafted token is kept with probability alpha whenever those before it were, a round of b proposals yields
    L(b) = 1 + alpha + .. + alpha^b tokens. alpha is estimated along the text, and the next round proposes the argmax of
    L(b) / T(b). Decoding stays lossless, since the number depends on committed tokens alone and on nothing of the
    block that it decides about.
    """

    def __init__(self, costs: RoundCosts, *, alpha: float = 0.75, prior: float = 8.0, memory: float = 0.9) -> None:
        """Begin a text.

        Args:
            costs: T(b), measured.
            alpha: the probability to begin with.
            prior: how many drafted tokens that beginning is worth.
            memory: the weight of a round beside the one after it.
        """
        self.costs, self.memory = costs, memory
        self.kept, self.rejected = alpha * prior, (1 - alpha) * prior

    @property
    def alpha(self) -> float:
        """Give the estimated probability that a drafted token is kept if those before it were."""
        return self.kept / (self.kept + self.rejected)

    def next(self) -> int:
        """Return how many tokens to propose in the next round: at least one."""
        retention = [self.alpha**position for position in range(1, self.costs.num_proposals + 1)]
        return best_num_proposals(self.costs, lengths_of(retention)).num_proposals

    def update(self, proposed: int, accepted: int) -> None:
        """Learn from a round that kept ``accepted`` of its proposals; what follows the first rejection is unknown."""
        self.kept = self.memory * self.kept + accepted
        self.rejected = self.memory * self.rejected + (accepted < proposed)
