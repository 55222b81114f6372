"""Put drafters to work, and record what happens: in whole conversations and in single answers.

`converse` answers every turn, as conversations of the training data are held. `trace_answer` decodes one answer and
keeps what the verifier saw, round by round, for the block explorer.
"""

from collections.abc import Callable

from torch import Tensor

from blockdraft.data import Conversation, GenerationSettings, Prompt
from blockdraft.decoding import AdaptiveProposals, Generation, RoundCosts, generate
from blockdraft.decoding.generation import OnVerdict
from blockdraft.drafters import Drafter, Proposal
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.evaluation.results import AnswerTrace, TracedRound, TracedToken
from blockdraft.targets import Sampling, Target
from blockdraft.verification import Verdict
from blockdraft.verification.rules import acceptance_states, probability_ratio

STREAM = "evaluate"
"""The random stream of decoding, which is not that of the target's own texts."""

TokenNumbers = dict[str, float]
TAIL = 8
"""The number of tokens before a piece of text that decide how it is decoded."""
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def converse(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    setup: DecodingSetup,
    *,
    temperature: float,
    max_new_tokens: int,
    max_length: int,
    seed: int,
    costs: RoundCosts | None = None,
    on_verdict: OnVerdict | None = None,
    on_turn: Callable[[Generation], None] | None = None,
) -> list[Generation]:
    """Answer every turn, and return the answers; a turn whose whole budget does not fit ends the conversation.

    Args:
        target, drafter: the models; no drafter is autoregressive decoding.
        prompt: the user's messages.
        setup: the rule and the draft temperature.
        temperature: the target's temperature.
        max_new_tokens: the budget of each answer.
        max_length: the longest prompt and answer together.
        seed: the seed of all draws; each turn has a stream of its own.
        costs: of rounds, if the number of proposals is to follow what the rounds of each answer kept.
        on_verdict: called in each round of each answer, as by `generate`.
        on_turn: called with each answer.
    """
    settings = GenerationSettings(Sampling(temperature), max_new_tokens, max_length, seed, whole_turns=True)
    conversation = Conversation(prompt, target, settings, stream=STREAM)
    answers: list[Generation] = []
    while (request := conversation.request) is not None:
        answer = generate(
            target, drafter, request.prompt_ids, rule=setup.rule,
            temperature=None if setup.rule == "greedy" else temperature, draft_temperature=setup.draft_temperature,
            max_new_tokens=request.max_new_tokens, seed=request.seed, on_verdict=on_verdict,
            num_proposals=None if costs is None else AdaptiveProposals(costs),
        )  # fmt: skip
        if on_turn is not None:
            on_turn(answer)
        answers.append(answer)
        conversation.answer(answer.tokens)
    return answers


def trace_answer(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    setup: DecodingSetup,
    *,
    temperature: float,
    max_new_tokens: int,
    max_length: int,
    seed: int,
) -> AnswerTrace:
    """Decode the first answer to a prompt, and return what the verifier saw."""
    verdicts: list[tuple[list[TokenNumbers], int]] = []
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
    return AnswerTrace(
        drafter=setup.drafter, rule=setup.rule, draft_temperature=setup.draft_temperature,
        first_text=_texts(target, [], generation.tokens[:1])[0], rounds=rounds,
    )  # fmt: skip


def _look(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> tuple[list[TokenNumbers], int]:
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
        finished = not text.endswith(INCOMPLETE_CHARACTER)
        texts.append(text[len(shown) :] if finished else "")
        shown = text if finished else shown
    return texts[len(tail) :]
