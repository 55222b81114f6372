"""What the page's block explorer needs of the traces, as plain and short JSON."""

from collections.abc import Callable
from typing import Any

from blockdraft.evaluation.results import TracedRound, TracedToken
from blockdraft.reports.inks import Style
from blockdraft.reports.merging import Comparison, Entry


def explorer(comparison: Comparison, look: Callable[[Entry], Style]) -> list[dict[str, Any]]:
    """Prompts with the rounds of every drafter and rule."""
    titles = {t: {task.name: task.title for task in comparison.tasks(t)} for t in comparison.targets}
    return [
        {
            "target": text.target,
            "task": titles[text.target].get(text.task, text.task),
            "id": text.id,
            "prompt": text.prompt,
            "traces": [
                {
                    "drafter": entry.title,
                    "ink": look(entry).ink,
                    "size": entry.about.num_proposals,
                    "rule": trace.rule,
                    "temperature": trace.draft_temperature,
                    "first": trace.first_text,
                    "rounds": [_round(r) for r in trace.rounds],
                }
                for entry, trace in text.traces
            ],
        }
        for text in comparison.texts
    ]


def _round(record: TracedRound) -> dict[str, Any]:
    return {
        "tokens": [_token(token) for token in record.drafted],
        "kept": record.accepted,
        "tokenKept": record.token_accepted,
        "next": record.next_text,
    }


def _token(token: TracedToken) -> list[Any]:
    """Text; p, q, alpha, threshold, coin, rounded; whether the coin succeeds, which rounding must not change."""
    numbers = (token.p, token.q, token.alpha, token.threshold, token.coin)
    return [token.text, *(float(f"{n:.6g}") for n in numbers), int(token.coin < token.threshold)]
