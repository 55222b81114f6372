"""Measure what rounds of decoding cost and yield on this machine, by the number of proposals, and remember it."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from blockdraft.decoding.generation import PromptLike, Round, generate
from blockdraft.decoding.proposals import ProposalChoice, RoundCosts, best_num_proposals, lengths_of
from blockdraft.decoding.rounds import DecodingError
from blockdraft.drafters import Drafter, Proposal
from blockdraft.errors import BlockdraftError
from blockdraft.files import read_json, write_json
from blockdraft.targets import Target
from blockdraft.verification import Rule, Verdict, expected_retention

TIMED_PHASES = ("draft", "verify", "rest")
TOKENS_PER_TEXT = 8
"""The new tokens of each text that rounds are timed on: enough for a round or more of every length."""
_COSTS = TypeAdapter(RoundCosts)


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
        found = _COSTS.validate_python(read_json(file, BlockdraftError))
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
