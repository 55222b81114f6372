"""TextDataset on disk: Parquet shards and a manifest that says where they come from.

A shard is written beside its place, synced and moved there; only then the
manifest, written the same way, lists it with its checksum. What the manifest
does not list does not exist.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from blockdraft.data.dialogue import Completion
from blockdraft.errors import BlockdraftError
from blockdraft.files import atomic_write, exclusive, remove_unfinished, sha256

MANIFEST = "manifest.json"
FORMAT = 1

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ]
)


class DataError(BlockdraftError):
    """A data folder that cannot be used as it is, with the reason."""


class Store:
    """A data folder being written, shard by shard."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], about: Mapping[str, Any], num_shards: int) -> None:
        """Open a folder, new or unfinished.

        Args:
            folder: where the shards go.
            identity: what decides the rows; a folder begun with another one is refused.
            about: what else the manifest says.
            num_shards: of the whole.
        """
        self.folder = folder
        manifest = folder / MANIFEST
        if manifest.exists():
            self.manifest = read_manifest(folder)
            refuse_other_identity(folder, self.manifest["identity"], identity)
            check_shards(folder, self.manifest)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.parquet")):
            raise DataError(f"{folder} holds Parquet files but no {MANIFEST}; choose another folder, or empty it")
        self.manifest = {
            "format": FORMAT,
            "identity": dict(identity),
            "about": dict(about),
            "num_shards": num_shards,
            "complete": False,
            "shards": {},
        }
        self._save()

    def has(self, shard: int) -> bool:
        """Whether this shard is written."""
        return shard_name(shard) in self.manifest["shards"]

    def write(self, shard: int, rows: Sequence[Completion], dropped: Mapping[str, int]) -> None:
        """Write a shard, whole or not at all."""
        table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
        name = shard_name(shard)
        with atomic_write(self.folder / name) as unfinished:
            pq.write_table(table, unfinished, compression="zstd")
            entry = {
                "sha256": sha256(unfinished),
                "rows": len(rows),
                "prompt_tokens": sum(len(row.prompt_ids) for row in rows),
                "response_tokens": sum(len(row.response_ids) for row in rows),
                "finish_reasons": dict(sorted(Counter(row.finish_reason for row in rows).items())),
                "dropped": dict(sorted(dropped.items())),
            }
        shards = self.manifest["shards"] | {name: entry}
        self.manifest["shards"] = dict(sorted(shards.items()))
        self.manifest["complete"] = len(shards) == self.manifest["num_shards"]
        self._save()

    def _save(self) -> None:
        with atomic_write(self.folder / MANIFEST) as unfinished:
            unfinished.write_text(json.dumps(self.manifest, indent=2) + "\n")


def totals(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Counts over all shards."""
    entries = list(manifest["shards"].values())
    added: dict[str, Any] = {key: sum(e[key] for e in entries) for key in ("rows", "prompt_tokens", "response_tokens")}
    for key in ("finish_reasons", "dropped"):
        added[key] = dict(sorted(sum((Counter(e[key]) for e in entries), Counter[str]()).items()))
    return added


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.parquet"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder} is not a data folder: it has no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise DataError(f"{path} has format {manifest['format']}; this version reads format {FORMAT}")
        manifest["identity"], manifest["shards"], manifest["num_shards"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return manifest


def refuse_other_identity(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise if two identities differ, naming every field that does."""
    differing = [
        f"{key} {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if differing:
        raise DataError(
            f"{folder} was begun with something else: {'; '.join(differing)}. "
            "Use the same, or another folder for the new data"
        )


REPAIR = f"Put the file back, or delete it and its entry in {MANIFEST} and run data regenerate again to make it anew"


def check_shards(folder: Path, manifest: Mapping[str, Any], repair: str = REPAIR) -> None:
    """Raise if a listed file is missing or is not the one that was written, naming every one and what to do."""
    wrong = []
    for name, entry in manifest["shards"].items():
        path = folder / name
        if not path.exists():
            wrong.append(f"{name} is missing")
        elif sha256(path) != entry["sha256"]:
            wrong.append(f"{name} is not as it was written (its checksum differs)")
    if wrong:
        raise DataError(f"{folder}: {'; '.join(wrong)}. {repair}")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a folder."""
    with exclusive(folder):
        remove_unfinished(folder)
        yield
