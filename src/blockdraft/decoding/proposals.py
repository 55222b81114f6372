"""Choose how many tokens to propose: the number with the most predicted tokens per second on this machine.

A round of b proposals yields on average L(b) tokens, which prediction knows, and takes

    T(b) = draft(b) + verify(b) + rest(b)

seconds, which `measure_costs` finds on this machine: drafting b tokens, a pass of the target over 1 + b, and all else.
The best b is the argmax of L(b) / T(b). A drafter that was trained with B can propose any b up to B; decoding stays
lossless. `best_num_proposals` chooses one number for all texts, `AdaptiveProposals` one for every round of a text.
"""

import hashlib
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from blockdraft.decoding.generation import PromptLike, ProposalPolicy, Round, generate
from blockdraft.decoding.rounds import DecodingError
from blockdraft.drafters import Drafter, Proposal
from blockdraft.errors import BlockdraftError
from blockdraft.files import read_json, write_json
from blockdraft.targets import Target
from blockdraft.verification import Rule, Verdict, expected_retention

TIMED_PHASES = ("draft", "verify", "rest")
TOKENS_PER_TEXT = 8
"""The new tokens of each text that rounds are timed on: enough for a round or more of every length."""


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


class AdaptiveProposals(ProposalPolicy):
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

    @property
    def largest(self) -> int:
        """Give B, the largest number whose costs are known."""
        return self.costs.num_proposals

    def next(self) -> int:
        """Return how many tokens to propose in the next round: at least one."""
        retention = [self.alpha**position for position in range(1, self.costs.num_proposals + 1)]
        return best_num_proposals(self.costs, lengths_of(retention)).num_proposals

    def update(self, proposed: int, accepted: int) -> None:
        """Learn from a round that kept ``accepted`` of its proposals; what follows the first rejection is unknown."""
        self.kept = self.memory * self.kept + accepted
        self.rejected = self.memory * self.rejected + (accepted < proposed)


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PromptLike],
    *,
    rule: Rule = "block",
    temperature: float | None = None,
    draft_temperature: float | None = None,
    seconds: float = 2.0,
    min_rounds: int = 3,
    max_sweeps: int = 60,
    seed: int = 0,
) -> RoundCosts:
    """Time rounds of every number of proposals on short texts of the target, and return the medians.

    All numbers take turns, sweep after sweep, so that whatever slows the machine slows all of them. The first sweep
    warms up and does not count.

    Args:
        target, drafter: the models.
        prompts: what the texts answer, in turn; as long as those that will be decoded, since attention costs grow.
        rule, temperature, draft_temperature: as for `generate`.
        seconds: how long to measure at most once there are ``min_rounds`` rounds of every number.
        min_rounds: of every number of proposals.
        max_sweeps: after which a target that ends its texts too early is an error.
        seed: of the first sweep's texts.
    """
    whole = drafter.config.num_proposals
    drafters = [None, *(drafter.with_proposals(number) for number in range(1, whole + 1))]
    seen: list[list[Round]] = [[] for _ in drafters]
    started = time.perf_counter()
    for sweep in range(max_sweeps):
        for number, each in enumerate(drafters):
            out = generate(
                target, each, prompts[sweep % len(prompts)], rule=rule, temperature=temperature,
                draft_temperature=draft_temperature, max_new_tokens=TOKENS_PER_TEXT, seed=seed + sweep,
            )  # fmt: skip
            if sweep > 0:
                seen[number] += [record for record in out.rounds if len(record.drafted) == number]
        enough = all(len(rounds) >= min_rounds for rounds in seen)
        if enough and time.perf_counter() - started >= seconds:
            break
    if not all(seen):
        raise DecodingError(
            f"{target.name} ends its answers to these prompts too early to time rounds of up to {whole} proposals; "
            "give the number of proposals yourself"
        )
    timed = {phase: tuple(median(each.seconds[phase] for each in rounds) for rounds in seen) for phase in TIMED_PHASES}
    return RoundCosts(**timed)


def measure_lengths(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PromptLike],
    *,
    rule: Rule = "block",
    temperature: float | None = None,
    draft_temperature: float | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> list[float]:
    """Estimate L(b) for b = 1, .. B by decoding answers to some prompts; the verifier's coins add no noise.

    An evaluation predicts the same along many texts (`DrafterAbout.lengths_by_proposals`) and should be preferred.
    """
    whole = drafter.config.num_proposals
    kept: list[Tensor] = []

    def keep(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> None:
        del verdict
        found = expected_retention(rule, target_probs, proposal.probs, proposal.tokens)[0]
        kept.append(torch.nn.functional.pad(found.double().cpu(), (0, whole - len(found))))

    for number, prompt in enumerate(prompts):
        generate(
            target, drafter, prompt, rule=rule, temperature=temperature, draft_temperature=draft_temperature,
            max_new_tokens=max_new_tokens, seed=seed + number, on_verdict=keep,
        )  # fmt: skip
    if not kept:
        raise DecodingError(f"{target.name} ends its answers at once, so there is nothing to draft")
    return lengths_of(torch.stack(kept).mean(0).tolist())


def choose_num_proposals(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PromptLike],
    *,
    rule: Rule = "block",
    temperature: float | None = None,
    draft_temperature: float | None = None,
    lengths: Sequence[float] | None = None,
    costs: RoundCosts | None = None,
) -> ProposalChoice:
    """Choose how many tokens to propose for the largest number of tokens per second on this machine.

    Args:
        target, drafter: the models.
        prompts: like those that will be decoded.
        rule, temperature, draft_temperature: as for `generate`.
        lengths: predicted tokens per round of 1, .. B proposals; estimated on the prompts if not given.
        costs: of the rounds; if not given, those measured earlier on this machine, or measured now and kept.
    """
    settings: dict[str, Any] = {"rule": rule, "temperature": temperature, "draft_temperature": draft_temperature}
    if costs is None:
        costs = round_costs(target, drafter, prompts, **settings)
    if lengths is None:
        lengths = measure_lengths(target, drafter, prompts, **settings)
    return best_num_proposals(costs, lengths)


def round_costs(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PromptLike],
    *,
    rule: Rule = "block",
    temperature: float | None = None,
    draft_temperature: float | None = None,
) -> RoundCosts:
    """Return the costs that were measured earlier for such models on this machine; else measure, and keep them.

    They are kept in ``~/.cache/blockdraft/costs`` (or below ``XDG_CACHE_HOME``); delete the file to measure again.
    """
    file = costs_file(target, drafter, rule)
    with suppress(BlockdraftError, ValueError):  # not there, not whole, or impossible: measured again
        found = TypeAdapter(RoundCosts).validate_python(read_json(file, BlockdraftError))
        if found.num_proposals == drafter.config.num_proposals:
            return found
    costs = measure_costs(
        target, drafter, prompts, rule=rule, temperature=temperature, draft_temperature=draft_temperature
    )
    with suppress(OSError):  # a home that cannot be written to costs a measurement each time, no more
        write_json(asdict(costs), file)
    return costs


def costs_file(target: Target, drafter: Drafter, rule: Rule) -> Path:
    """Return where the costs of such models on this machine are kept: what the name depends on decides them."""
    config = drafter.config.to_dict()
    del config["target_fingerprint"]
    is_gpu = target.device.type == "cuda"
    about = {
        "drafter": config, "target": target.config.to_dict(),
        "dtypes": [str(target.dtype), str(drafter.fc.weight.dtype)],
        "device": torch.cuda.get_device_name(target.device) if is_gpu else platform.processor() or platform.machine(),
        "machine": platform.node(), "threads": torch.get_num_threads(), "torch": torch.__version__, "rule": rule,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "blockdraft" / "costs" / f"{digest}.json"
