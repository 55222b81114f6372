"""Say in a model card what is known of how a drafter drafts: lengths, and acceptance by position.

There are three sources: an evaluation that has this drafter in it, what is recorded of a drafter that comes with the
package, and the held-out measurement of the run that trained it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockdraft.drafters import Drafter
from blockdraft.evaluation import read_profile, read_results
from blockdraft.evaluation.candidates import Candidate, Measurement, ShippedDrafter
from blockdraft.evaluation.results import AcceptanceRates, EvaluationError, Profile, ProfileEntry, Results
from blockdraft.verification import RULES

UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Evaluated:
    """Holds what an evaluation found of one drafter: its results, and the entries of its acceptance profile."""

    results: Results
    profile: Profile
    entries: list[ProfileEntry]


def evaluated(folder: str | Path, drafter: Drafter) -> Evaluated:
    """Read what an evaluation found of a drafter, which it must have under the same weights and configuration."""
    results, profile = read_results(folder), read_profile(folder)
    own = Candidate("", Path(), drafter).fingerprint
    name = next((each.name for each in results.drafters if each.fingerprint == own), None)
    if name is None:
        there = ", ".join(f"{each.name} ({each.fingerprint})" for each in results.drafters)
        raise EvaluationError(f"{folder} has no drafter with these weights, whose fingerprint is {own}; it has {there}")
    return Evaluated(results, profile, [each for each in profile.entries if each.drafter == name])


def evaluation_in_words(found: Evaluated) -> str:
    """Return lengths by rule, and acceptance by position, of an evaluation."""
    settings = found.results.settings
    tasks = ", ".join(f"{each.num_decoded or each.num_prompts} prompts of {each.title}" for each in found.results.tasks)
    rows = [
        "| rule | draft temperature | tokens per call, macro | tokens per call, micro | calls |",
        "|" + " -- |" * 5,
    ]
    for each in found.entries:
        lengths = " | ".join(f"{rates.acceptance_length:.2f}" for rates in (each.macro, each.micro))
        rows.append(f"| {each.rule} | {_draft_temperature(each)} | {lengths} | {each.num_rounds:,} |")
    averaging = found.profile.averaging
    opening = (
        f"By decoding {tasks}, at the target's temperature {found.profile.temperature:g}, up to "
        f"{settings['max_new_tokens']} tokens an answer. Tokens per verification call count correction and bonus "
        f"tokens, and nothing after an end token. Macro is the {averaging['macro']}; micro is {averaging['micro']}."
    )
    positions = (
        "Acceptance by position i, micro. Marginal is the share of calls that accept at least i drafted tokens; "
        "conditional is the same among the calls that accept i - 1."
    )
    return "\n\n".join([opening, "\n".join(rows), positions, "\n".join(_positions(found.entries))])


def _positions(entries: list[ProfileEntry]) -> list[str]:
    num = max((each.num_proposals for each in entries), default=0)
    rows = ["| rule | draft temperature | |" + "".join(f" {i} |" for i in range(1, num + 1)), "|" + " -- |" * (num + 3)]
    for each in entries:
        rates: AcceptanceRates = each.micro
        marginal = [f" {value:.2f} |" for value in rates.marginal]
        conditional = [f" {'-' if value is None else f'{value:.2f}'} |" for value in rates.conditional]
        start = f"| {each.rule} | {_draft_temperature(each)} |"
        rows += [f"{start} marginal |{''.join(marginal)}", f"{start} conditional |{''.join(conditional)}"]
    return rows


def _draft_temperature(entry: ProfileEntry) -> str:
    return "argmax" if entry.draft_temperature == 0 else f"{entry.draft_temperature:g} ({entry.choice})"


def heldout_in_words(measured: Mapping[str, float], num_proposals: int) -> str:
    """Return what a run measured on held-out texts."""
    rows = [(f"{rule} verification", f"{measured[f'heldout_length_{rule}']:.3f}") for rule in RULES]
    rows.append(("token accuracy", f"{measured['heldout_token_accuracy']:.3f}"))
    lines = [f"| {name} | {value} |" for name, value in rows]
    return (
        f"Expected accepted tokens of a block of {num_proposals}, correction and bonus token not counted, over "
        f"{measured['heldout_num_blocks']:,.0f} blocks of held-out texts of the same data, without decoding:\n\n"
        + "\n".join(["| | |", "| --- | --- |", *lines])
    )


def record_in_words(record: ShippedDrafter) -> str:
    """Return what is recorded of a drafter that comes with the package."""
    found: Measurement | None = record.measured
    if found is None:
        return f"Tokens per verification call: {UNKNOWN}."
    whose = "the weights of the run, before they were rounded" if found.weights == "run" else "these weights"
    tasks = ", ".join(f"{num} prompts of {name}" for name, num in found.tasks.items())
    rows = ["| rule | draft temperature | predicted tokens per call | measured | speed-up |", "|" + " -- |" * 5]
    for each in found.lengths:
        temperature = "argmax" if each.draft_temperature == 0 else f"{each.draft_temperature:g} ({each.choice})"
        lengths = f"{each.predicted_length.shown()} | {each.acceptance_length.shown()}"
        rows.append(f"| {each.rule} | {temperature} | {lengths} | {each.speedup.value:.2f} |")
    return (
        f"With {whose}, at the target's temperature {found.temperature:g}, up to {found.max_new_tokens} tokens an "
        f"answer; means over {tasks}, with 95% intervals over prompts. The speed-up is that of the machine that "
        "measured it.\n\n" + "\n".join(rows)
    )
