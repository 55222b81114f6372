"""Conversations decoded with a drafter, held in the same way as those of the training data."""

from collections.abc import Callable

from blockdraft.data import Conversation, GenerationSettings, Prompt
from blockdraft.decoding import Generation, generate
from blockdraft.decoding.generation import OnVerdict
from blockdraft.drafters import Drafter
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.targets import Sampling, Target

STREAM = "evaluate"
"""The random stream of decoding, which is not that of the target's own texts."""


def converse(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    way: DecodingSetup,
    *,
    temperature: float,
    max_new_tokens: int,
    max_length: int,
    seed: int,
    on_verdict: OnVerdict | None = None,
    on_turn: Callable[[Generation], None] | None = None,
) -> list[Generation]:
    """Answer every turn, and return the answers; a turn whose whole budget does not fit ends the conversation.

    Args:
        target, drafter: the models; no drafter is autoregressive decoding.
        prompt: the user's messages.
        way: the rule and the draft temperature.
        temperature: the target's temperature.
        max_new_tokens: the budget of each answer.
        max_length: the longest prompt and answer together.
        seed: the seed of all draws; each turn has a stream of its own.
        on_verdict: called in each round of each answer, as by `generate`.
        on_turn: called with each answer.
    """
    settings = GenerationSettings(Sampling(temperature), max_new_tokens, max_length, seed, whole_turns=True)
    conversation = Conversation(prompt, target, settings, stream=STREAM)
    answers: list[Generation] = []
    while (request := conversation.request) is not None:
        answer = generate(
            target, drafter, request.prompt_ids, rule=way.rule,
            temperature=None if way.rule == "greedy" else temperature, draft_temperature=way.draft_temperature,
            max_new_tokens=request.max_new_tokens, seed=request.seed, on_verdict=on_verdict,
        )  # fmt: skip
        if on_turn is not None:
            on_turn(answer)
        answers.append(answer)
        conversation.answer(answer.tokens)
    return answers
