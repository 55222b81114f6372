"""Engines sample responses. The local one runs the target in this process, by continuous batching."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from blockdraft.data.conversation import Conversation, Request
from blockdraft.errors import BlockdraftError
from blockdraft.targets import BatchedKVCache, Sampling, Target

PREFILL_TEXTS = 8
"""Prompts read in one pass; shorter ones are padded to the longest of them."""


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
