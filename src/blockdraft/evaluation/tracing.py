"""What the verifier saw, round by round: the data of the block explorer."""

from torch import Tensor

from blockdraft.data import Prompt
from blockdraft.decoding import Generation
from blockdraft.drafters import Drafter, Proposal
from blockdraft.evaluation.conversation import converse
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.evaluation.results import Trace, TracedRound, TracedToken
from blockdraft.targets import Target
from blockdraft.verification import Verdict
from blockdraft.verification.rules import acceptance_states, probability_ratio

Numbers = dict[str, float]
TAIL = 8
"""The number of tokens before a piece of text that decide how it is decoded."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def trace(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    setup: DecodingSetup,
    *,
    temperature: float,
    max_new_tokens: int,
    max_length: int,
    seed: int,
) -> Trace:
    """Decode the first answer to a prompt, and return what the verifier saw."""
    verdicts: list[tuple[list[Numbers], int]] = []
    done: list[Generation] = []

    def keep(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> None:
        verdicts.append(_look(proposal, target_probs, verdict))

    converse(
        target, drafter, Prompt(prompt.id, prompt.turns[:1], prompt.system, prompt.source), setup,
        temperature=temperature, max_new_tokens=max_new_tokens, max_length=max_length, seed=seed, on_verdict=keep,
        on_turn=done.append,
    )  # fmt: skip
    generation = done[0]
    rounds, written = [], generation.tokens[:1]
    for record, (numbers, token_accepted) in zip(generation.rounds, verdicts, strict=True):
        columns = zip(record.drafted, _texts(target, written, record.drafted), numbers, strict=True)
        kept = [*written, *record.drafted[: record.accepted]]
        following = None if record.next_token is None else _texts(target, kept, [record.next_token])[0]
        traced = TracedRound(
            anchor=_texts(target, written[:-1], written[-1:])[0],
            drafted=[TracedToken(id=token, text=text, **each) for token, text, each in columns],
            accepted=record.accepted, token_accepted=token_accepted, next_id=record.next_token, next_text=following,
        )  # fmt: skip
        rounds.append(traced)
        written = [*written, *record.tokens]
    assert setup.drafter is not None
    return Trace(
        drafter=setup.drafter, rule=setup.rule, draft_temperature=setup.draft_temperature,
        first_text=_texts(target, [], generation.tokens[:1])[0], rounds=rounds,
    )  # fmt: skip


def _look(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> tuple[list[Numbers], int]:
    """Return the numbers of the drafted tokens, and how many of them token verification would have kept."""
    p, q, tokens = target_probs[:, :-1].float(), proposal.probs.float(), proposal.tokens
    ratio = probability_ratio(p, q, tokens)
    states = acceptance_states(ratio)[0, 1:]
    at = tokens.unsqueeze(-1)
    columns = {
        "p": p.gather(-1, at)[0, :, 0], "q": q.gather(-1, at)[0, :, 0], "alpha": states,
        "threshold": verdict.thresholds[0], "coin": verdict.coins[0], "token_threshold": ratio.clamp(max=1)[0],
    }  # fmt: skip
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    kept = (verdict.coins[0] < ratio[0].clamp(max=1)).long().cumprod(0).sum()
    return [dict(zip(columns, row, strict=True)) for row in rows], int(kept)


def _texts(target: Target, before: list[int], tokens: list[int]) -> list[str]:
    """Return what each token adds to the text; pieces of a character add nothing until its last one is there."""
    tail = before[-TAIL:]
    shown, texts = "", []
    for length in range(1, len(tail) + len(tokens) + 1):
        text = target.decode([*tail, *tokens][:length], skip_special_tokens=False)
        finished = not text.endswith(UNFINISHED)
        texts.append(text[len(shown) :] if finished else "")
        shown = text if finished else shown
    return texts[len(tail) :]
