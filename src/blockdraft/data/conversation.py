"""Hold conversations with the target: turns, chat template, budgets and seeds, and the engines that answer them.

Training data and evaluation both hold conversations in this way, so there is one rule for what fits:
a turn is asked only if its rendered prompt leaves room for a response within ``max_length`` tokens.

Engines sample the responses. The local one runs the target in this process, by continuous batching.
"""

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor

from blockdraft.data.manifest import DataError
from blockdraft.data.prompts import Prompt
from blockdraft.errors import BlockdraftError
from blockdraft.targets import BatchedKVCache, Message, Sampling, Target

FinishReason = Literal["stop", "length"]

CUT_OFF, TOO_LONG = "cut off before its last turn", "prompt too long"
"""Why a conversation ends before its last turn."""

PREFILL_TEXTS = 8
"""Prompts read in one pass; shorter ones are padded to the longest of them."""


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


class EngineError(BlockdraftError):
    """An engine cannot continue; the message says why, and what to do."""


class Engine(ABC):
    """Answers conversations. Their requests alone say what to sample, and from which target.

    name: the engine's name in the manifest.
    repeatable: whether the same conversations together always give the same tokens. The arithmetic of a batch
        rounds by what runs side by side, so a repeatable engine is given a whole shard at a time, and an
        interrupted shard is begun again. Any other engine is given all conversations that are left, and each one
        that it finishes is kept at once.
    """

    name: ClassVar[str]
    repeatable: ClassVar[bool]

    @abstractmethod
    def prepare(self, target: Target, sampling: Sampling) -> None:
        """Check that this target can be sampled from in this way; raise `EngineError` if not."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what the manifest says about the engine, once it is prepared."""

    @abstractmethod
    def run(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """Answer every turn of all conversations, and yield each one when it is done, in any order."""


class LocalEngine(Engine):
    """Samples up to ``batch_size`` responses side by side; a finished one makes room for the next at once."""

    name: ClassVar[str] = "local"
    repeatable: ClassVar[bool] = True

    def __init__(self, target: Target, batch_size: int = 64) -> None:
        if batch_size < 1:
            raise EngineError(f"batch_size must be at least 1, got {batch_size}")
        self.target, self.batch_size = target, batch_size

    def prepare(self, target: Target, sampling: Sampling) -> None:
        del sampling  # any distribution will do
        if target is not self.target:
            raise EngineError(
                f"this engine samples from {self.target.name}, but the conversations are for {target.name}; "
                "give the engine the very target that the conversations have"
            )

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "dtype": str(self.target.dtype).split(".")[-1]}

    def run(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        waiting = deque(conversations)
        for conversation in waiting:
            self.prepare(conversation.target, conversation.settings.sampling)
        capacity = max((conversation.settings.max_length for conversation in waiting), default=0)
        cache = BatchedKVCache(self.target, self.batch_size, capacity)
        running: list[_Response] = []
        while waiting or running:
            yield from self._admit(waiting, running, cache)
            yield from self._retire(waiting, running, cache)
            if running:
                self._draw(cache.step([response.tokens[-1] for response in running]), running)
                yield from self._retire(waiting, running, cache)

    def _admit(
        self, waiting: deque[Conversation], running: list["_Response"], cache: BatchedKVCache
    ) -> Iterator[Conversation]:
        """Fill the free slots, a few texts per pass; yield conversations that are done before they began."""
        free = self.batch_size - len(running)
        if running and free < max(1, min(self.batch_size // 16, PREFILL_TEXTS)):
            return
        while waiting and len(running) < self.batch_size:
            admitted: list[_Response] = []
            while waiting and len(admitted) < min(PREFILL_TEXTS, self.batch_size - len(running)):
                conversation = waiting.popleft()
                if conversation.request is None:
                    yield conversation
                else:
                    admitted.append(_Response(conversation, conversation.request))
            if not admitted:
                continue
            self._draw(cache.add([response.request.prompt_ids for response in admitted]), admitted)
            running += admitted

    @staticmethod
    def _retire(
        waiting: deque[Conversation], running: list["_Response"], cache: BatchedKVCache
    ) -> Iterator[Conversation]:
        """Take out the finished responses; a conversation with a turn left waits in front of all others."""
        for slot in reversed(range(len(running))):
            response = running[slot]
            if response.request.is_finished(response.tokens):
                cache.remove(slot)
                running[slot] = running[-1]
                running.pop()
                response.conversation.answer(response.tokens)
                if response.conversation.done:
                    yield response.conversation
                else:
                    waiting.appendleft(response.conversation)

    @torch.inference_mode()
    def _draw(self, hidden: Tensor, responses: Sequence["_Response"]) -> None:
        """Append one token to each response, drawn with the next number of its own uniform stream."""
        logits = self.target.logits(hidden)
        probs = _probs(logits, [response.request.sampling for response in responses])
        uniform = torch.stack([response.uniform[len(response.tokens)] for response in responses])
        if probs.is_cuda:
            uniform = uniform.pin_memory()
        tokens, are_numbers = _find(probs, uniform.to(probs.device, non_blocking=True))
        # the greedy token of logits that are not numbers would look like any other
        is_damaged = ~(logits.amax(-1).isfinite() & are_numbers).all()
        *found, damaged = torch.cat([tokens, is_damaged[None].long()]).tolist()  # the only wait for the device
        if damaged:
            raise EngineError(
                f"{self.target.name} computes logits that are not numbers; its weights are damaged, or its precision "
                "is too narrow: try --dtype float32"
            )
        for response, token in zip(responses, found, strict=True):
            response.tokens.append(token)


@dataclass
class _Response:
    """Holds a response on its way, and the uniform numbers ``[max_new_tokens]`` that its tokens are drawn with."""

    conversation: Conversation
    request: Request
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.request.seed)
        self.uniform = torch.rand(self.request.max_new_tokens, dtype=torch.float64, generator=generator)


def _probs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the probabilities ``[A, V]`` under which each row of the logits is to be sampled."""
    if len(set(samplings)) == 1:
        return samplings[0].probs(logits)
    return torch.stack([sampling.probs(row) for sampling, row in zip(samplings, logits, strict=True)])


def tokens_at(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens ``[A]`` where the distribution functions of probs ``[A, V]`` pass uniform ``[A]`` in [0, 1).

    The vocabulary is cut into chunks: first the chunk is found, then the token within it,
    so that only chunk sums and one chunk per row are summed up. A token of
    probability zero is never drawn.
    """
    tokens, are_numbers = _find(probs, uniform)
    if not bool(are_numbers.all()):
        raise EngineError("the target's probabilities are not numbers; load it in a wider precision (--dtype float32)")
    return tokens


def _find(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens ``[A]`` of `tokens_at`, and whether each row is made of numbers, ``[A]``; on the device."""
    num_rows, vocab_size = probs.shape
    width = max(1, int(vocab_size**0.5))
    padded = torch.nn.functional.pad(probs, (0, -vocab_size % width)).view(num_rows, -1, width)
    ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)  # [A, chunks]
    point = uniform * ends[:, -1]
    chunk = (ends <= point[:, None]).sum(-1).clamp(max=ends.shape[1] - 1)  # what is not a number must not lead outside
    before = ends.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0].where(chunk > 0, 0)
    within = padded[torch.arange(num_rows, device=probs.device), chunk]  # [A, width]
    below = (within.double().cumsum(-1) <= (point - before)[:, None]).sum(-1)
    last = width - 1 - (within.flip(-1) > 0).to(torch.uint8).argmax(-1)  # rounding may pass the end of the chunk
    return chunk * width + torch.minimum(below, last), ends[:, -1].isfinite()
