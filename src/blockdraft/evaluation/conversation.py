"""One prompt, all its turns, each on top of the answers given so far."""

import hashlib
from collections.abc import Callable

from blockdraft.data import Prompt
from blockdraft.decoding import Generation, generate
from blockdraft.decoding.generation import OnVerdict
from blockdraft.drafters import Drafter
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.targets import Message, Target


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
    """Answer every turn; one whose budget would end beyond ``max_length`` tokens ends the conversation before it."""
    messages: list[Message] = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    answers: list[Generation] = []
    for turn, text in enumerate(prompt.turns):
        messages.append({"role": "user", "content": text})
        ids = target.render(messages)
        if len(ids) + max_new_tokens > max_length:
            break
        answer = generate(
            target, drafter, ids, rule=way.rule, temperature=temperature, draft_temperature=way.draft_temperature,
            max_new_tokens=max_new_tokens, seed=seed_of(seed, prompt.id, turn), on_verdict=on_verdict,
        )  # fmt: skip
        if on_turn is not None:
            on_turn(answer)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text or ""})
    return answers


def seed_of(seed: int, prompt: str, turn: int) -> int:
    """Of one generation: a function of the run's seed, the prompt and the turn alone."""
    digest = hashlib.sha256(f"evaluate/{seed}/{prompt}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
