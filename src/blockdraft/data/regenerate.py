"""Prompts in, paths out: every assistant turn sampled anew from the target."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import blockdraft
from blockdraft.data.dialogue import Completion, Conversation, GenerationSettings
from blockdraft.data.engine import Engine
from blockdraft.data.prompts import Prompt
from blockdraft.data.store import DataError, Store, writing
from blockdraft.files import complete_lines
from blockdraft.targets import Target, fingerprint, template_fingerprint

JOURNAL = "journal.jsonl"

Progress = Callable[[int, int, bool], None]
"""(conversations, response tokens, whether this very run made them)."""


@dataclass(frozen=True)
class Finished:
    """A conversation that is done: its rows, and why the rest is missing, if it is."""

    index: int
    rows: list[Completion]
    dropped: str | None

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return sum(len(row.response_ids) for row in self.rows)


def regenerate(
    prompts: Sequence[Prompt],
    target: Target,
    engine: Engine,
    settings: GenerationSettings,
    folder: str | Path,
    *,
    shard_size: int = 512,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the target's own responses to all prompts into a folder, or go on where an earlier run stopped.

    Args:
        prompts: conversations; their order is that of the rows.
        target: whose tokenizer, template and end tokens are used, and whose name the data carries.
        engine: what samples; the target itself or a server that serves it.
        settings: the law and the limits.
        folder: a new or an unfinished data folder.
        shard_size: conversations per shard.
        on_progress: called with what was just finished.

    Returns:
        The manifest.
    """
    folder = Path(folder)
    if not prompts:
        raise DataError("there are no prompts")
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit is not None and settings.max_length > limit:
        raise DataError(f"{target.name} reads texts of up to {limit} tokens; max_length is {settings.max_length}")
    identity = {
        "target": fingerprint(target),
        "template": template_fingerprint(target),
        "prompts": _digest(prompts),
        "num_prompts": len(prompts),
        "shard_size": shard_size,
        "engine": {"name": engine.name} | (engine.describe() if engine.by_shard else {}),
        **settings.to_dict(),
    }
    about = {
        "target": target.name,
        "engine": {"name": engine.name} | engine.describe(),
        "blockdraft": blockdraft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    shards = [range(start, min(start + shard_size, len(prompts))) for start in range(0, len(prompts), shard_size)]
    with writing(folder):
        store = Store(folder, identity, about, len(shards))
        run = _Run(prompts, target, settings, store, shards, on_progress or _ignore)
        run.complete(engine)
        return store.manifest


class _Run:
    """One call: what is done, what is left, what waits for the rest of its shard."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        target: Target,
        settings: GenerationSettings,
        store: Store,
        shards: list[range],
        on_progress: Progress,
    ) -> None:
        self.prompts, self.target, self.settings = prompts, target, settings
        self.store, self.shards, self.on_progress = store, shards, on_progress
        self.journal = Journal(store.folder / JOURNAL)
        self.pending: dict[int, Finished] = {}

    def complete(self, engine: Engine) -> None:
        left = [shard for shard in range(len(self.shards)) if not self.store.has(shard)]
        groups = [list(self.shards[shard]) for shard in left]
        self.on_progress(len(self.prompts) - sum(map(len, groups)), 0, False)
        if not engine.by_shard:
            wanted = {index for group in groups for index in group}
            for finished in self.journal.read():
                if finished.index in wanted:
                    wanted.remove(finished.index)
                    self._take(finished, new=False)
            groups = [sorted(wanted)]
        for group in groups:
            dialogues = [Conversation(self.prompts[index], index, self.target, self.settings) for index in group]
            for dialogue in engine.run(dialogues):
                finished = Finished(dialogue.index, dialogue.rows, dialogue.dropped)
                if not engine.by_shard:
                    self.journal.append(finished)
                self._take(finished, new=True)
        self.journal.delete()

    def _take(self, finished: Finished, *, new: bool) -> None:
        """Count a conversation; the last one of a shard makes the shard."""
        self.pending[finished.index] = finished
        shard = finished.index // len(self.shards[0])
        if all(index in self.pending for index in self.shards[shard]):
            group = [self.pending.pop(index) for index in self.shards[shard]]
            dropped = Counter(each.dropped for each in group if each.dropped is not None)
            self.store.write(shard, [row for each in group for row in each.rows], dropped)
        self.on_progress(1, finished.num_tokens, new)


class Journal:
    """Finished conversations whose shard is not full yet, one line each; a line cut short is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, finished: Finished) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(asdict(finished)).encode() + b"\n")

    def read(self) -> Iterator[Finished]:
        if not self.path.exists():
            return
        for number, line in enumerate(complete_lines(self.path, truncate=True), 1):
            try:
                values = json.loads(line)
                yield Finished(values["index"], [Completion(**row) for row in values["rows"]], values["dropped"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self.path}, line {number}, is damaged: {error}; delete the line") from error

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def _ignore(_conversations: int, _tokens: int, _new: bool) -> None:
    pass


def _digest(prompts: Sequence[Prompt]) -> str:
    lines = (json.dumps(asdict(prompt), sort_keys=True) for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
