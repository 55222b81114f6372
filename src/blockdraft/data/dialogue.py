"""A conversation being regenerated: one assistant turn after another, each on top of the target's own history."""

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError

from blockdraft.data.prompts import Prompt
from blockdraft.targets import Message, Sampling, Target

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationSettings:
    """What decides the paths, apart from target and prompts.

    sampling: the law drawn from. BV loss assumes the default: temperature 1, whole vocabulary.
    max_new_tokens: of one assistant turn.
    max_length: of prompt and response together.
    seed: of every draw.
    whole_turns: a turn is asked only if its whole budget fits, and the next one also after a response that the budget
        cut: as decoding is measured, where every turn counts. Otherwise a turn may have less room, and a response
        that was cut ends the conversation: training texts should be conversations that could have been.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 2048
    max_length: int = 3072
    seed: int = 42
    whole_turns: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.max_length < 2:
            raise ValueError("max_new_tokens must be at least 1 and max_length at least 2")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, flat; ``whole_turns`` only where it holds."""
        values = asdict(self)
        if not self.whole_turns:
            del values["whole_turns"]
        sampling: dict[str, Any] = values.pop("sampling")
        return sampling | values


@dataclass(frozen=True)
class Completion:
    """One assistant turn: a path sampled from the target.

    id: of the conversation, and the number of the turn: ``name#0``.
    prompt_ids: all tokens before the response, as the target read them.
    response_ids: the tokens it sampled, an end token included.
    finish_reason: ``"stop"`` if the last one is an end token, ``"length"`` if the budget ended it.
    """

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: FinishReason


class Conversation:
    """Asks an engine for one response at a time, until every turn is answered or the conversation cannot go on.

    A conversation that cannot go on keeps the rows it has; `dropped` names why the rest is missing.
    """

    def __init__(self, prompt: Prompt, index: int, target: Target, settings: GenerationSettings) -> None:
        self.prompt, self.index, self.target, self.settings = prompt, index, target, settings
        self.rows: list[Completion] = []
        self.dropped: str | None = None
        self.messages: list[Message] = []
        self.prompt_ids: list[int] = []
        if prompt.system is not None:
            self.messages.append({"role": "system", "content": prompt.system})
        self._ask()

    @property
    def done(self) -> bool:
        """True when there is nothing left to ask for."""
        return self.dropped is not None or len(self.rows) == len(self.prompt.turns)

    @property
    def budget(self) -> int:
        """Tokens that the next response may have."""
        return min(self.settings.max_new_tokens, self.settings.max_length - len(self.prompt_ids))

    @property
    def seed(self) -> int:
        """Of the next response's draws: a function of the run's seed, the conversation and the turn alone."""
        name = f"{self.settings.seed}/{self.prompt.id}/{len(self.rows)}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(row.response_ids) for row in self.rows)

    def answer(self, response_ids: list[int]) -> None:
        """Take the response to the turn that was asked."""
        ended = response_ids[-1] in self.target.eos_ids
        reason: FinishReason = "stop" if ended else "length"
        self.rows.append(Completion(f"{self.prompt.id}#{len(self.rows)}", self.prompt_ids, response_ids, reason))
        if self.done:
            return
        if not ended and not self.settings.whole_turns:
            self.drop("cut off before its last turn")
            return
        self.messages.append({"role": "assistant", "content": self.target.decode(response_ids)})
        self._ask()

    def drop(self, reason: str) -> None:
        """End the conversation here."""
        self.dropped = reason

    def _ask(self) -> None:
        self.messages.append({"role": "user", "content": self.prompt.turns[len(self.rows)]})
        try:
            self.prompt_ids = self.target.render(self.messages)
        except TemplateError as error:
            self.drop(f"refused by the chat template: {str(error).splitlines()[0]}")
            return
        if self.budget < (self.settings.max_new_tokens if self.settings.whole_turns else 1):
            self.drop("prompt too long")
