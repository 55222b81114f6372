"""Turn prompts into texts: every assistant turn is sampled from the target, into a data folder."""

import hashlib
import json
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from pydantic import TypeAdapter

import blockdraft
from blockdraft.data.conversation import (
    Completion,
    Conversation,
    Engine,
    GenerationSettings,
    LocalEngine,
    prompt_id_of,
    response_id,
)
from blockdraft.data.manifest import (
    MANIFEST,
    DataError,
    DataProvenance,
    EngineRecord,
    Identity,
    Manifest,
    read_manifest,
    shard_name,
    write_manifest,
)
from blockdraft.data.prompts import Prompt
from blockdraft.data.store import Store, writing
from blockdraft.files import complete_lines
from blockdraft.targets import Target, fingerprint, template_fingerprint

JOURNAL = "journal.jsonl"

LEAST_KEPT = 0.1
"""Rows per conversation below which nearly nothing was kept, so that the data is not what was asked for."""

USUAL_FAILURES = 0.1
"""The share of failures up to which they are taken to lie in single conversations, and written down at once."""

EARLIEST_VERDICT = 64
"""The number of finished conversations after which either share is meaningful."""

Progress = Callable[[int, int, bool], None]
"""Called with the number of conversations, their response tokens, and whether this very run made them."""


def regenerate(
    prompts: Sequence[Prompt],
    target: Target,
    settings: GenerationSettings,
    folder: str | Path,
    *,
    engine: Engine | None = None,
    num_responses: int = 1,
    shard_size: int = 512,
    on_progress: Progress | None = None,
) -> Manifest:
    """Write the target's own responses to all prompts into a folder, or resume where an earlier run stopped.

    A folder grows: given more prompts, beginning with those that it was made of, or asked for more responses to the
    same prompts, it keeps the shards that are full and samples the rest.

    Args:
        prompts: the conversations; the rows are in their order.
        target: the model to sample from; the data carries its name and fingerprint.
        settings: the distribution to sample from, and the limits.
        folder: a new or an unfinished data folder, or one to add to.
        engine: what does the sampling: the target itself if not given, or a server that serves it.
        num_responses: how many times to answer every prompt, each time with random draws of its own.
        shard_size: the number of conversations per shard.
        on_progress: called with whatever was just finished.

    Returns:
        The manifest of the complete folder.

    Raises:
        DataError: the folder belongs to something else or is damaged, or nearly no conversation could be answered.
        EngineError: the engine cannot continue; what is finished is kept.
    """
    folder = Path(folder)
    if not prompts:
        raise DataError("there are no prompts to answer")
    for name, value in (("shard_size", shard_size), ("num_responses", num_responses)):
        if value < 1:
            raise DataError(f"{name} must be at least 1, got {value}")
    if num_responses > 1 and (settings.sampling.temperature == 0 or settings.sampling.top_k == 1):
        raise DataError("at temperature 0 or with top-k 1 all answers to a prompt are the same; ask for one response")
    asked = repeat_prompts(prompts, num_responses)
    limit = target.context_length
    if limit is not None and settings.max_length > limit:
        raise DataError(
            f"{target.name} reads texts of up to {limit} tokens, and max_length is {settings.max_length}; lower it"
        )
    engine = engine or LocalEngine(target)
    if not _is_complete(folder, len(asked)):
        engine.prepare(target, settings.sampling)  # before anything is written
    identity = Identity(
        target=fingerprint(target),
        template=template_fingerprint(target),
        prompts=_digest(prompts),
        num_prompts=len(prompts),
        num_responses=num_responses,
        shard_size=shard_size,
        engine=EngineRecord(name=engine.name, **(engine.describe() if engine.repeatable else {})),
        **settings.to_dict(),
    )
    about = DataProvenance(
        target=target.name,
        engine=EngineRecord(name=engine.name, **engine.describe()),
        blockdraft=blockdraft.__version__,
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        python=platform.python_version(),
    )
    with writing(folder):
        _grow(folder, prompts, identity)
        run = _Run(asked, target, settings, Store(folder, identity, about), on_progress or _ignore)
        run.complete(engine)
        return run.store.manifest


@dataclass(frozen=True)
class Finished:
    """Holds a conversation that is done: its completions, and why the rest is missing, if it is."""

    index: int
    rows: list[Completion]
    dropped: str | None

    @property
    def num_tokens(self) -> int:
        """Give the number of response tokens."""
        return sum(len(row.response_ids) for row in self.rows)


class _Run:
    """Keeps the state of one `regenerate`: what is done, what is left, and what waits for the rest of its shard."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        target: Target,
        settings: GenerationSettings,
        store: Store,
        on_progress: Progress,
    ) -> None:
        self.prompts, self.target, self.settings = prompts, target, settings
        self.store, self.on_progress = store, on_progress
        size = store.manifest.identity.shard_size
        self.shards = [range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]
        self.journal = Journal(store.folder / JOURNAL)
        self.pending: dict[int, Finished] = {}
        self.failed: list[Finished] = []
        self.num_failed = 0
        self.num_done = sum(len(shard) for number, shard in enumerate(self.shards) if store.has(number))
        self.num_rows = store.manifest.totals.rows

    def complete(self, engine: Engine) -> None:
        """Write all shards that are missing; raise if nearly nothing was kept in the end."""
        groups = [list(shard) for number, shard in enumerate(self.shards) if not self.store.has(number)]
        self.on_progress(self.num_done, 0, False)
        if not engine.repeatable:
            wanted = {index for group in groups for index in group}
            for finished in self.journal.read(len(self.prompts), self.target.vocab_size):
                if finished.index in wanted:
                    wanted.remove(finished.index)
                    self._take(finished, new=False)
            groups = [sorted(wanted)]
        for group in filter(None, groups):
            for conversation in engine.run(self._conversations(group)):
                finished = Finished(conversation.index, conversation.completions, conversation.dropped)
                if conversation.failed:
                    self._hold_back(finished)
                else:
                    if not engine.repeatable:
                        self.journal.append(finished)
                    self._take(finished, new=True)
        self._accept_failed()
        if not self.store.manifest.complete:
            raise RuntimeError(f"the engine {engine.name} left {len(self.prompts) - self.num_done} conversations out")
        self.journal.delete()
        if self.num_rows < LEAST_KEPT * self.num_done:
            raise DataError(
                f"{self.store.folder} is complete, but nearly nothing was kept: {self.num_rows} responses of "
                f"{self.num_done} conversations ({_most_frequent(self.store.manifest.totals.dropped)}). Change the "
                "limits or the prompts, and regenerate into another folder"
            )

    def _conversations(self, indices: Sequence[int]) -> Iterator[Conversation]:
        return (Conversation(self.prompts[index], self.target, self.settings, index=index) for index in indices)

    def _hold_back(self, finished: Finished) -> None:
        """Keep a conversation that the engine failed on until it is clear that the engine does not fail on all."""
        self.failed.append(finished)
        self.num_failed += 1
        num = self.num_done + len(self.failed)
        if num >= EARLIEST_VERDICT and (self.num_failed <= USUAL_FAILURES * num or not self._is_healthy()):
            self._accept_failed()

    def _accept_failed(self) -> None:
        """Count the conversations that the engine failed on as dropped, or raise if they are nearly all."""
        if not self._is_healthy():
            reasons = Counter(each.dropped for each in self.failed if each.dropped is not None)
            raise DataError(
                f"nearly nothing can be kept: the engine failed on {len(self.failed)} of "
                f"{self.num_done + len(self.failed)} conversations ({_most_frequent(reasons)}). These failures were "
                "not written down: once the server is mended, the same command asks again"
            )
        failed, self.failed = self.failed, []
        for finished in failed:
            self._take(finished, new=True)

    def _is_healthy(self) -> bool:
        """Tell whether enough was answered for failures to lie in single conversations."""
        num_rows = self.num_rows + sum(len(each.rows) for each in self.failed)
        return not self.failed or num_rows >= LEAST_KEPT * (self.num_done + len(self.failed))

    def _take(self, finished: Finished, *, new: bool) -> None:
        """Count a conversation; the last one of a shard makes the shard."""
        self.pending[finished.index] = finished
        self.num_done += 1
        self.num_rows += len(finished.rows)
        number = finished.index // len(self.shards[0])
        if all(index in self.pending for index in self.shards[number]):
            group = [self.pending.pop(index) for index in self.shards[number]]
            dropped = Counter(each.dropped for each in group if each.dropped is not None)
            self.store.write(number, [row for each in group for row in each.rows], dropped)
        self.on_progress(1, finished.num_tokens, new)


class Journal:
    """Keeps finished conversations whose shard is not full yet, one line each, appended as they arrive.

    A line that a crash cut short is removed. A line that cannot be what `append` wrote is ignored,
    with a warning, and its conversation is asked again.
    """

    _lines = TypeAdapter(Finished)

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, finished: Finished) -> None:
        """Add a conversation."""
        with self.path.open("ab") as file:
            file.write(self._lines.dump_json(finished) + b"\n")

    def read(self, num_conversations: int, vocab_size: int) -> Iterator[Finished]:
        """Yield the finished ones of this many conversations whose tokens are all in the vocabulary."""
        if not self.path.exists():
            return
        bad = []
        for number, line in enumerate(complete_lines(self.path, truncate=True), 1):
            try:
                finished = self._lines.validate_json(line, strict=True)
            except ValueError:
                bad.append(str(number))
                continue
            tokens = (token for row in finished.rows for token in (*row.prompt_ids, *row.response_ids))
            if 0 <= finished.index < num_conversations and all(0 <= token < vocab_size for token in tokens):
                yield finished
            else:
                bad.append(str(number))
        if bad:
            warnings.warn(
                f"{self.path} is damaged in line {', '.join(bad)}; these conversations are asked again", stacklevel=2
            )

    def delete(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _is_complete(folder: Path, num_conversations: int) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    manifest = read_manifest(folder)
    return manifest.complete and manifest.identity.num_conversations >= num_conversations


def _grow(folder: Path, prompts: Sequence[Prompt], identity: Identity) -> None:
    """Make room for more conversations in a folder, if they begin with its own and all else is the same.

    These are more prompts, each answered once, or more responses to the same prompts. A last shard that was not full
    is made again. Anything else is left as it is, for `Store` to resume or to refuse.
    """
    if not (folder / MANIFEST).exists():
        return
    manifest = read_manifest(folder)
    before = manifest.identity
    changed = {"prompts": identity.prompts, "num_prompts": len(prompts), "num_responses": identity.num_responses}
    is_same = before.model_copy(update=changed) == identity
    begins = before.num_prompts == len(prompts) or (before.num_responses == identity.num_responses == 1)
    if not (is_same and begins) or before.num_conversations >= identity.num_conversations:
        return
    if _digest(prompts[: before.num_prompts]) != before.prompts:
        return
    num_full = before.num_conversations // before.shard_size
    shards = {name: shard for name, shard in manifest.shards.items() if name in map(shard_name, range(num_full))}
    write_manifest(
        folder,
        manifest.model_copy(update={"identity": identity, "num_shards": identity.num_shards, "shards": shards}),
    )


def repeat_prompts(prompts: Sequence[Prompt], num_responses: int) -> list[Prompt]:
    """Return every prompt this many times: all of them, then all again under ids that tell the responses apart."""
    if num_responses == 1:
        return list(prompts)
    taken = next((prompt.id for prompt in prompts if prompt_id_of(f"{prompt.id}#0") != prompt.id), None)
    if taken is not None:
        raise DataError(
            f"the prompt's id {taken!r} ends in @ and a number, which names further responses; rename it, or ask for "
            "one response"
        )
    again = [
        replace(prompt, id=response_id(prompt.id, number)) for number in range(1, num_responses) for prompt in prompts
    ]
    return [*prompts, *again]


def _ignore(_conversations: int, _tokens: int, _new: bool) -> None:
    pass


def _most_frequent(reasons: Mapping[str, int]) -> str:
    found = [f"{reason}: {count}" for reason, count in Counter(reasons).most_common(3)]
    return "; ".join(found) or "no reason given"


def _digest(prompts: Sequence[Prompt]) -> str:
    lines = (json.dumps(asdict(prompt), sort_keys=True) for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
