"""Hold a conversation with the target: turns, chat template, budgets and seeds, one response after another.

Training data and evaluation both hold conversations in this way, so there is one rule for what fits:
a turn is asked only if its rendered prompt leaves room for a response within ``max_length`` tokens.
"""

import hashlib
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError

from blockdraft.data.manifest import DataError
from blockdraft.data.prompts import Prompt
from blockdraft.targets import Message, Sampling, Target

FinishReason = Literal["stop", "length"]

CUT_OFF, TOO_LONG = "cut off before its last turn", "prompt too long"
"""Why a conversation ends before its last turn."""


@dataclass(frozen=True)
class GenerationSettings:
    """Holds everything that decides the sampled texts, apart from the target and the prompts.

    sampling: the distribution to sample from. BV loss assumes the default: temperature 1, whole vocabulary.
    max_new_tokens: the longest response of one turn.
    max_length: the longest prompt and response together.
    seed: the seed of every draw.
    whole_turns: ask a turn only if its whole budget fits, and continue even after a response that the budget cut
        off; decoding is measured in this way, so that every turn counts. Otherwise a turn may have less room, and a
        response that was cut off ends the conversation, because no user could have replied to half an answer.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 2048
    max_length: int = 3072
    seed: int = 42
    whole_turns: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.max_length < 2:
            raise DataError(
                f"max_new_tokens must be at least 1 and max_length at least 2, got {self.max_new_tokens} and "
                f"{self.max_length}"
            )
        if not math.isfinite(self.sampling.temperature):
            raise DataError(f"temperature must be a finite number, got {self.sampling.temperature}")

    def to_dict(self) -> dict[str, Any]:
        """Return flat plain values; ``whole_turns`` is left out where it is false."""
        values = asdict(self)
        if not self.whole_turns:
            del values["whole_turns"]
        sampling: dict[str, Any] = values.pop("sampling")
        return sampling | values


@dataclass(frozen=True)
class Completion:
    """Holds one assistant turn: a response sampled from the target, and what it responds to.

    id: the conversation's id and the number of the turn, as in ``name#0``; in the second response to a prompt
        ``name@1#0``.
    prompt_ids: all tokens before the response, as the target read them.
    response_ids: the sampled tokens, an end token included.
    finish_reason: ``"stop"`` if the last token is an end token, ``"length"`` if the budget cut the response off.
    """

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: FinishReason


def response_id(prompt: str, number: int) -> str:
    """Return the id of the conversation that answers a prompt once more, counted from 1."""
    return f"{prompt}@{number}"


def prompt_id_of(completion_id: str) -> str:
    """Return the id of the prompt that a completion answers, from the completion's own id."""
    return re.sub(r"(@\d+)?#\d+$", "", completion_id)


@dataclass(frozen=True)
class Request:
    """Holds everything an engine needs to sample one response; nothing else may influence it.

    target: the model to sample from, with its tokenizer.
    messages: the conversation so far.
    prompt_ids: the same, rendered by the chat template into token ids.
    sampling: the distribution to sample from.
    max_new_tokens: the longest response allowed.
    seed: the seed of this response's draws.
    """

    target: Target
    messages: tuple[Message, ...]
    prompt_ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int

    @property
    def eos_ids(self) -> frozenset[int]:
        """Give the tokens that end a response."""
        return self.target.eos_ids

    def is_finished(self, response_ids: list[int]) -> bool:
        """Tell whether a response is complete: it ends with an end token, or its budget is used up."""
        return bool(response_ids) and (response_ids[-1] in self.eos_ids or len(response_ids) >= self.max_new_tokens)


class Conversation:
    """Hands out one request at a time, until every turn is answered or the conversation has to end.

    Call `answer` with the response to `request`, until `request` is None. A conversation that ends early
    keeps the completions it has, and `dropped` says why the others are missing. `failed` is true if the
    engine was the reason, so that asking again may help.
    """

    def __init__(
        self, prompt: Prompt, target: Target, settings: GenerationSettings, *, index: int = 0, stream: str = ""
    ) -> None:
        """Begin a conversation.

        Args:
            prompt: the user's messages.
            target: the model that answers them.
            settings: how the responses are sampled, and how long they may be.
            index: the place of the prompt among all prompts, for the caller's own use.
            stream: the name of the random stream; another name gives other draws from the same seed.
        """
        self.prompt, self.target, self.settings, self.index, self.stream = prompt, target, settings, index, stream
        self.completions: list[Completion] = []
        self.dropped: str | None = None
        self.failed = False
        self.request: Request | None = None
        self._messages: list[Message] = []
        if prompt.system is not None:
            self._messages.append({"role": "system", "content": prompt.system})
        self._ask()

    @property
    def done(self) -> bool:
        """Tell whether there is nothing left to ask."""
        return self.request is None

    @property
    def num_tokens(self) -> int:
        """Give the number of response tokens so far."""
        return sum(len(each.response_ids) for each in self.completions)

    def answer(self, response_ids: list[int]) -> None:
        """Take the response to the turn that was asked, and prepare the next turn."""
        if self.request is None:
            raise RuntimeError(f"conversation {self.prompt.id!r} asks for nothing")
        if not response_ids or any(type(token) is not int for token in response_ids):  # a bool is an int, too
            raise ValueError(f"a response is a list of token ids and not empty, got {response_ids!r:.60}")
        ended = response_ids[-1] in self.target.eos_ids
        name = f"{self.prompt.id}#{len(self.completions)}"
        reason: FinishReason = "stop" if ended else "length"
        self.completions.append(Completion(name, self.request.prompt_ids, response_ids, reason))
        self.request = None
        if len(self.completions) == len(self.prompt.turns):
            return
        if not ended and not self.settings.whole_turns:
            self.drop(CUT_OFF)
            return
        self._messages.append({"role": "assistant", "content": self.target.decode(response_ids)})
        self._ask()

    def drop(self, reason: str) -> None:
        """End the conversation here, for a reason that lies in the conversation itself."""
        self.request, self.dropped = None, reason

    def fail(self, reason: str) -> None:
        """End the conversation here, because the engine could not answer it."""
        self.drop(reason)
        self.failed = True

    def _ask(self) -> None:
        self._messages.append({"role": "user", "content": self.prompt.turns[len(self.completions)]})
        settings = self.settings
        try:
            prompt_ids = self.target.render(self._messages)
        except TemplateError as error:
            self.drop(f"refused by the chat template: {(str(error).splitlines() or ['no reason given'])[0]}")
            return
        budget = min(settings.max_new_tokens, settings.max_length - len(prompt_ids))
        if budget < (settings.max_new_tokens if settings.whole_turns else 1):
            self.drop(TOO_LONG)
            return
        self.request = Request(self.target, tuple(self._messages), prompt_ids, settings.sampling, budget, self._seed())

    def _seed(self) -> int:
        """Return the seed of the next response: a function of stream, seed, conversation and turn alone."""
        name = "/".join(
            [*filter(None, [self.stream]), f"{self.settings.seed}/{self.prompt.id}/{len(self.completions)}"]
        )
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
