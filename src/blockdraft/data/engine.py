"""What samples responses: the target in this process, or a server."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from blockdraft.data.dialogue import Conversation
from blockdraft.errors import BlockdraftError


class EngineError(BlockdraftError):
    """An engine that cannot go on, with the reason."""


class Engine(ABC):
    """Answers dialogues.

    name: as in the manifest.
    by_shard: whether the same dialogues together always give the same tokens. Batched arithmetic
        rounds by what runs side by side, so such an engine is given a whole shard at a time, and an
        interrupted shard is begun anew. Other engines are given all that is left, and what they
        finish is kept one by one.
    """

    name: ClassVar[str]
    by_shard: ClassVar[bool]

    @abstractmethod
    def run(self, dialogues: Sequence[Conversation]) -> Iterator[Conversation]:
        """Answer every turn of all of them, and hand over each when it is done, in any order."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the manifest says of it."""
