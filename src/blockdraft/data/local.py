"""The engine that runs here: continuous batching on the target itself."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from blockdraft.data.dialogue import Conversation, GenerationSettings
from blockdraft.data.engine import Engine, EngineError
from blockdraft.targets import BatchedKVCache, Target

PREFILL_TEXTS = 8
"""Prompts read in one pass; shorter ones are padded to the longest of them."""


class LocalEngine(Engine):
    """Samples up to ``batch_size`` responses side by side; a finished one makes room for the next at once."""

    name: ClassVar[str] = "local"
    by_shard: ClassVar[bool] = True

    def __init__(self, target: Target, settings: GenerationSettings, batch_size: int = 64) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.target, self.settings, self.batch_size = target, settings, batch_size

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "dtype": str(self.target.dtype).split(".")[-1]}

    def run(self, dialogues: Sequence[Conversation]) -> Iterator[Conversation]:
        waiting = deque(dialogues)
        slots = BatchedKVCache(self.target, self.batch_size, self.settings.max_length)
        running: list[_Response] = []
        while waiting or running:
            yield from self._admit(waiting, running, slots)
            yield from self._retire(waiting, running, slots)
            if running:
                self._draw(slots.step([response.tokens[-1] for response in running]), running)
                yield from self._retire(waiting, running, slots)

    def _admit(
        self, waiting: deque[Conversation], running: list["_Response"], slots: BatchedKVCache
    ) -> Iterator[Conversation]:
        """Fill the free slots, a few texts per pass; yields dialogues that are done before they began."""
        free = self.batch_size - len(running)
        if running and free < max(1, min(self.batch_size // 16, PREFILL_TEXTS)):
            return
        while waiting and len(running) < self.batch_size:
            admitted: list[_Response] = []
            while waiting and len(admitted) < min(PREFILL_TEXTS, self.batch_size - len(running)):
                dialogue = waiting.popleft()
                if dialogue.done:
                    yield dialogue
                else:
                    admitted.append(_Response(dialogue))
            if not admitted:
                continue
            hidden = slots.add([response.dialogue.prompt_ids for response in admitted])
            self._draw(hidden, admitted)
            running += admitted

    @staticmethod
    def _retire(
        waiting: deque[Conversation], running: list["_Response"], slots: BatchedKVCache
    ) -> Iterator[Conversation]:
        """Take out what is finished; a dialogue with a turn left waits in front of all others."""
        for slot in reversed(range(len(running))):
            response = running[slot]
            if response.finished:
                slots.remove(slot)
                running[slot] = running[-1]
                running.pop()
                response.dialogue.answer(response.tokens)
                if response.dialogue.done:
                    yield response.dialogue
                else:
                    waiting.appendleft(response.dialogue)

    @torch.inference_mode()
    def _draw(self, hidden: Tensor, responses: list["_Response"]) -> None:
        """One token for each, from its own stream of uniform numbers."""
        probs = self.settings.sampling.probs(self.target.logits(hidden))
        uniform = torch.stack([response.uniform[len(response.tokens)] for response in responses]).to(probs.device)
        for response, token in zip(responses, draw(probs, uniform).tolist(), strict=True):
            response.tokens.append(token)


@dataclass
class _Response:
    """A response on its way."""

    dialogue: Conversation
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.dialogue.seed)
        self.uniform = torch.rand(self.dialogue.budget, dtype=torch.float64, generator=generator)

    @property
    def finished(self) -> bool:
        return self.tokens[-1] in self.dialogue.target.eos_ids or len(self.tokens) >= self.dialogue.budget


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token where the distribution function of probs ``[A, V]`` passes uniform ``[A]`` in [0, 1): ``[A]``.

    The vocabulary is cut into chunks: first the chunk, then the token within it,
    so that only chunk sums and one chunk per row are summed up. A token of
    probability zero is never drawn.
    """
    num_rows, vocab_size = probs.shape
    width = max(1, int(vocab_size**0.5))
    padded = torch.nn.functional.pad(probs, (0, -vocab_size % width)).view(num_rows, -1, width)
    ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)  # [A, chunks]
    if not bool(ends[:, -1].isfinite().all()):
        raise EngineError("the target's probabilities are not numbers; load it in a wider precision")
    point = uniform * ends[:, -1]
    chunk = (ends <= point[:, None]).sum(-1)
    before = ends.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0].where(chunk > 0, 0)
    within = padded[torch.arange(num_rows, device=probs.device), chunk]  # [A, width]
    below = (within.double().cumsum(-1) <= (point - before)[:, None]).sum(-1)
    last = width - 1 - (within.flip(-1) > 0).to(torch.uint8).argmax(-1)  # rounding may pass the end of the chunk
    return chunk * width + torch.minimum(below, last)
