"""Keep sampled texts on disk and in memory: Parquet shards in a data folder, and the dataset read from them.

A shard is written beside its place, synced and moved there; only then the manifest, written the same
way, lists it with its checksum. What the manifest does not list does not exist.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from blockdraft.data.conversation import Completion, prompt_id_of
from blockdraft.data.manifest import (
    MANIFEST,
    DataError,
    DataProvenance,
    Identity,
    Manifest,
    ShardRecord,
    read_manifest,
    refuse_other_identity,
    shard_name,
    write_manifest,
)
from blockdraft.errors import first_line
from blockdraft.files import atomic_write, exclusive, remove_unfinished, sha256
from blockdraft.targets import Target

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ]
)

REPAIR = f"put the file back, or delete it and its entry in {MANIFEST} and run data regenerate again to make a new one"

HELDOUT = 3
"""The number of the random stream that chooses held-out texts; batches use others."""


class Store:
    """Writes a data folder, shard by shard."""

    def __init__(self, folder: Path, identity: Identity, about: DataProvenance) -> None:
        """Open a new or an unfinished folder.

        Args:
            folder: where the shards go.
            identity: what decides the rows; a folder begun with another one is refused.
            about: what else the manifest of a new folder says.
        """
        self.folder = folder
        if (folder / MANIFEST).exists():
            self.manifest = read_manifest(folder)
            refuse_other_identity(folder, self.manifest.identity.model_dump(), identity.model_dump())
            check_shards(folder, self.manifest)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.parquet")):
            raise DataError(f"{folder} holds Parquet files but no {MANIFEST}; choose another folder, or empty it")
        self.manifest = Manifest(identity=identity, about=about, num_shards=identity.num_shards, shards={})
        write_manifest(folder, self.manifest)

    def has(self, shard: int) -> bool:
        """Tell whether this shard is written."""
        return shard_name(shard) in self.manifest.shards

    def write(self, shard: int, rows: Sequence[Completion], dropped: Mapping[str, int]) -> None:
        """Write a shard, whole or not at all."""
        table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
        name = shard_name(shard)
        with atomic_write(self.folder / name) as unfinished:
            pq.write_table(table, unfinished, compression="zstd")
            record = ShardRecord(
                sha256=sha256(unfinished),
                rows=len(rows),
                prompt_tokens=sum(len(row.prompt_ids) for row in rows),
                response_tokens=sum(len(row.response_ids) for row in rows),
                finish_reasons=dict(sorted(Counter(row.finish_reason for row in rows).items())),
                dropped=dict(sorted(dropped.items())),
            )
        self.manifest = self.manifest.with_shard(name, record)
        write_manifest(self.folder, self.manifest)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a folder, and remove what killed processes left in it."""
    with exclusive(folder):
        remove_unfinished(folder)
        yield


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Raise if a shard is missing or is not the file that was written."""
    check_files(folder, {name: shard.sha256 for name, shard in manifest.shards.items()}, REPAIR)


def check_files(folder: Path, checksums: Mapping[str, str], repair: str) -> None:
    """Raise if a file is missing or has another checksum, naming every such file and what to do."""
    wrong = []
    for name, checksum in checksums.items():
        path = folder / name
        if not path.exists():
            wrong.append(f"{name} is missing")
        elif sha256(path) != checksum:
            wrong.append(f"{name} is not as it was written (its checksum differs)")
    if wrong:
        raise DataError(f"{folder}: {'; '.join(wrong)}; {repair}")


@dataclass(frozen=True)
class TextDataset:
    """Holds R texts of the target end to end in memory, each a prompt and a response.

    tokens: ``[all]`` prompt and response of each text.
    starts: ``[R + 1]`` where each text begins, and the end of the last one.
    prompt_lengths: ``[R]`` the number of tokens before each response.
    identity: a hash of the rows.
    manifest: the manifest of the data folder; None for rows that were made in memory.
    source: the dataset that these texts were taken from, and ``[R]`` their rows in it; None for a whole one.
    prompt_numbers: ``[R]`` the number of the prompt that each text answers; None if no prompt was answered twice.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    identity: str
    manifest: Manifest | None = None
    source: "tuple[TextDataset, NDArray[np.int64]] | None" = None
    prompt_numbers: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, rows: Sequence[Completion]) -> "TextDataset":
        """Make a dataset of rows in memory."""
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        tokens = np.array([token for row in rows for token in (*row.prompt_ids, *row.response_ids)], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        prompt_lengths = np.array([len(row.prompt_ids) for row in rows], dtype=np.int64)
        digest = hashlib.sha256(tokens.tobytes() + starts.tobytes() + prompt_lengths.tobytes())
        return cls(tokens, starts, prompt_lengths, digest.hexdigest()[:16])

    def __len__(self) -> int:
        """Return R, the number of texts."""
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """Return the tokens of one text."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Give the number of tokens of each text, ``[R]``."""
        return np.diff(self.starts)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Give the number of tokens of each response, ``[R]``."""
        return self.lengths - self.prompt_lengths

    @property
    def first_responses(self) -> NDArray[np.int64]:
        """Give the rows that are the first of their prompt, in order; all, if no prompt was answered twice."""
        if self.prompt_numbers is None:
            return np.arange(len(self))
        return np.sort(np.unique(self.prompt_numbers, return_index=True)[1])

    def split(self, num_heldout: int, seed: int = 0) -> tuple["TextDataset", "TextDataset"]:
        """Return the texts to train on and the held-out ones, chosen by the seed, both in their order.

        Where prompts were answered several times, whole prompts are held out, as many as have this many texts or
        just more: the other answers to a held-out prompt would give its text away.
        """
        if not 0 <= num_heldout < len(self):
            raise DataError(f"cannot hold out {num_heldout} of {len(self)} texts")
        draws = np.random.default_rng([seed, HELDOUT])
        if self.prompt_numbers is None:
            chosen = draws.permutation(len(self))
            return self._take(np.sort(chosen[num_heldout:])), self._take(np.sort(chosen[:num_heldout]))
        counts = np.bincount(self.prompt_numbers)
        order = draws.permutation(len(counts))
        num_prompts = int(np.searchsorted(np.cumsum(counts[order]), num_heldout)) + 1 if num_heldout else 0
        if num_prompts >= len(counts):
            raise DataError(
                f"cannot hold out {num_heldout} of {len(self)} texts: whole prompts are held out, and of the "
                f"{len(counts)} that they answer one must be left to train on; lower data.num_heldout"
            )
        is_held = np.isin(self.prompt_numbers, order[:num_prompts])
        return self._take(np.flatnonzero(~is_held)), self._take(np.flatnonzero(is_held))

    def _take(self, indices: NDArray[np.int64]) -> "TextDataset":
        parts = [self[int(index)] for index in indices]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        identity = hashlib.sha256(f"{self.identity}/{indices.tolist()}".encode()).hexdigest()[:16]
        whole, rows = self.whole
        numbers = None if self.prompt_numbers is None else _numbered(self.prompt_numbers[indices].tolist())
        return TextDataset(
            tokens, starts, self.prompt_lengths[indices], identity, self.manifest, (whole, rows[indices]), numbers
        )

    @property
    def whole(self) -> "tuple[TextDataset, NDArray[np.int64]]":
        """Give the dataset that these texts were taken from, and their rows ``[R]`` in it; itself if it is whole."""
        return self.source or (self, np.arange(len(self)))


def open_dataset(folder: str | Path, target: Target | None = None, *, partial: bool = False) -> TextDataset:
    """Read a data folder into memory, after a check of its origin and of every checksum.

    Args:
        folder: a folder that `regenerate` wrote.
        target: the model that the data is for; data of another one, or under another chat template, is refused.
        partial: accept a folder that is not complete yet.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest.complete and not partial:
        raise DataError(
            f"{folder} has {len(manifest.shards)} of {manifest.num_shards} shards; run the same data regenerate again "
            "to complete it"
        )
    if target is not None:
        manifest.refuse_other_target(folder, target)
    check_shards(folder, manifest)
    prompts, responses = [], []
    ids: list[str] = []
    for name in manifest.shards:
        table = _read_shard(folder, name, manifest)
        ids += table.column("id").to_pylist() if manifest.identity.num_responses > 1 else []
        prompts += [column.values.to_numpy() for column in _pieces(table, "prompt_ids")]
        responses += [column.values.to_numpy() for column in _pieces(table, "response_ids")]
    tokens = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    if target is not None and tokens and max(int(part.max()) for part in tokens) >= target.vocab_size:
        raise DataError(f"{folder} holds token ids beyond the {target.vocab_size} of {target.name}; {REPAIR}")
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    return TextDataset(
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        manifest.texts_identity,
        manifest,
        prompt_numbers=_numbered(map(prompt_id_of, ids)) if ids else None,
    )


def read_completions(folder: str | Path) -> list[Completion]:
    """Read the rows of a data folder one by one, with their ids."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_shards(folder, manifest)
    tables = (_read_shard(folder, name, manifest) for name in manifest.shards)
    return [Completion(**row) for table in tables for row in table.to_pylist()]


def _read_shard(folder: Path, name: str, manifest: Manifest) -> Any:
    try:
        table = pq.read_table(folder / name)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{folder / name} is not a Parquet file: {first_line(error)}; {REPAIR}") from error
    wrong = None
    if table.num_rows != manifest.shards[name].rows:
        wrong = f"{folder / MANIFEST} counts {manifest.shards[name].rows} rows in it, and it has {table.num_rows}"
    elif not table.schema.equals(SCHEMA):
        columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
        wrong = f"its columns are {columns}"
    elif table.num_rows:
        wrong = _wrong_tokens(table, manifest.identity.max_length)
    if wrong is not None:
        raise DataError(f"{folder / name} is damaged: {wrong}; put a good copy back, or regenerate into another folder")
    return table


def _wrong_tokens(table: Any, max_length: int) -> str | None:
    """Return what is wrong with the rows of a shard: nulls, texts without a prompt or response, ids, lengths."""
    if any(column.null_count for column in table.columns):
        return "values are missing"
    prompts, responses = table.column("prompt_ids"), table.column("response_ids")
    lengths = [pc.list_value_length(column).to_numpy() for column in (prompts, responses)]
    if any((each == 0).any() for each in lengths):
        return "a prompt or response is empty"
    if (sum(lengths) > max_length).any():
        return f"a text has more than {max_length} tokens"
    for column in (prompts, responses):
        tokens = pc.list_flatten(column)
        if tokens.null_count or pc.min(tokens).as_py() < 0:
            return "token ids are missing or negative"
    return None


def _numbered(names: Iterable[str | int]) -> NDArray[np.int64]:
    """Return a number for each name, equal for equal names, in the order of their first appearance."""
    numbers: dict[str | int, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _pieces(table: Any, column: str) -> Any:
    return (scalar for chunk in table.column(column).chunks for scalar in chunk)
