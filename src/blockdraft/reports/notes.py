"""Say above a report's tables what a reader must know before comparing its rows: sentences, and none without need."""

from collections.abc import Callable, Mapping

from blockdraft.reports.comparison import Comparison, LoadedEvaluation

DECODED = "decoded prompts of each task"
COMPARABLE: dict[str, Callable[[LoadedEvaluation], object]] = {
    "tasks": lambda e: {t.name: t.num_prompts for t in e.results.tasks},
    "temperature": lambda e: e.results.settings.get("temperature"),
    "budget": lambda e: e.results.settings.get("max_new_tokens"),
    "seed": lambda e: e.results.settings.get("seeds", e.results.settings.get("seed")),
    DECODED: lambda e: e.results.settings.get("num_decoded") or "all",
    "proposals": lambda e: e.results.settings.get("num_proposals") or "as trained",
}
TIMED: dict[str, Callable[[LoadedEvaluation], object]] = {
    "dtype": lambda e: e.results.settings.get("dtype"),
    "device": lambda e: e.results.provenance.get("gpu") or e.results.settings.get("device"),
    "machine": lambda e: _machine(e.results.provenance),
    "threads": lambda e: e.results.provenance.get("threads"),
    "processes": lambda e: e.results.provenance.get("num_processes"),
}
"""Speeds depend on these. None says, here and above, that an evaluation does not tell."""

OF_DECODING = {DECODED, *TIMED}
"""These matter only to evaluations that decoded something; `undecoded` says of the others that they did not."""


def notes(comparison: Comparison) -> list[str]:
    """Return all notes on what was evaluated, in the order of the page."""
    return [
        *filter(None, [comparison.over_seeds]), *undecoded(comparison), *speeds(comparison), *differences(comparison)
    ]  # fmt: skip


def undecoded(comparison: Comparison) -> list[str]:
    """Say of which evaluations nothing was decoded, if there are any."""
    found = [e.name for e in comparison.evaluations if not e.is_decoded]
    which = "" if len(found) == len(comparison.evaluations) else f" in {', '.join(found)}"
    said = f"Nothing was decoded{which}: lengths are predicted from the target's own texts, and none was measured."
    return [f"{said} Neither were speed-ups."] if found else []


def speeds(comparison: Comparison) -> list[str]:
    """Say of which evaluations not all drafters were decoded with the same speed settings, if there are any."""
    found = []
    for evaluation in comparison.evaluations:
        ways: dict[str, list[str]] = {}
        for entry in (e for e in comparison.entries if e.evaluation is evaluation):
            settings = " and ".join(map(str, entry.about.speed_settings)) or "settings that are not recorded"
            ways.setdefault(settings, []).append(entry.title)
        if len(ways) > 1:
            listed = "; ".join(f"{', '.join(titles)} by {settings}" for settings, titles in ways.items())
            found.append(
                f"Drafters of {evaluation.name} were timed in several ways ({listed}). Each speed-up is over "
                "autoregressive decoding in the same way."
            )
    return found


def differences(comparison: Comparison) -> list[str]:
    """Say in what evaluations of one target differ, if they do."""
    found = []
    for target in comparison.targets:
        involved = {e.evaluation.name: e.evaluation for e in comparison.of(target)}.values()
        for what, of in (COMPARABLE | TIMED).items():
            told = {e.name: of(e) for e in involved if e.is_decoded or what not in OF_DECODING}
            values = {name: value for name, value in told.items() if value is not None}
            if len(set(map(repr, values.values()))) > 1:
                listed = "; ".join(f"{name}: {value}" for name, value in values.items())
                so = ", so their speeds cannot be compared" if what in TIMED else ""
                found.append(f"Evaluations of {target} differ in {what} ({listed}){so}.")
    return found


def _machine(provenance: Mapping[str, object]) -> str | None:
    """Say what kind of machine measured, as far as an evaluation tells."""
    known = (provenance.get("machine"), provenance.get("num_cpus"))
    return None if None in known else "{}, {} CPUs".format(*known)
