"""TextDataset of the target in memory, read from a data folder whose origin and integrity were checked."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from blockdraft.data.dialogue import Completion
from blockdraft.data.store import DataError, check_shards, read_manifest
from blockdraft.targets import Target, fingerprint, template_fingerprint

HELDOUT = 3
"""What this random stream is for, beside those of the batches."""


@dataclass(frozen=True)
class TextDataset:
    """R texts end to end.

    tokens: ``[all]`` prompt and response of each text.
    starts: ``[R + 1]`` where each text begins, and the end.
    prompt_lengths: ``[R]`` tokens before the response.
    identity: a hash of the rows.
    manifest: what the data folder says of itself.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    identity: str
    manifest: dict[str, Any]

    @classmethod
    def of(cls, rows: list[Completion]) -> "TextDataset":
        """From rows in memory."""
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        tokens = np.array([token for row in rows for token in (*row.prompt_ids, *row.response_ids)], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        prompt_lengths = np.array([len(row.prompt_ids) for row in rows], dtype=np.int64)
        digest = hashlib.sha256(tokens.tobytes() + starts.tobytes() + prompt_lengths.tobytes())
        return cls(tokens, starts, prompt_lengths, digest.hexdigest()[:16], {})

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """Tokens of one text."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[R]`` tokens of each text."""
        return np.diff(self.starts)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """``[R]`` tokens of each response."""
        return self.lengths - self.prompt_lengths

    def split(self, num_heldout: int, seed: int = 0) -> tuple["TextDataset", "TextDataset"]:
        """The texts less some, and those; chosen by the seed, in their order."""
        if not 0 <= num_heldout < len(self):
            raise DataError(f"cannot hold out {num_heldout} of {len(self)} texts")
        chosen = np.random.default_rng([seed, HELDOUT]).permutation(len(self))
        return self._take(np.sort(chosen[num_heldout:])), self._take(np.sort(chosen[:num_heldout]))

    def _take(self, indices: NDArray[np.int64]) -> "TextDataset":
        parts = [self[int(index)] for index in indices]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        identity = hashlib.sha256(f"{self.identity}/{indices.tolist()}".encode()).hexdigest()[:16]
        return TextDataset(tokens, starts, self.prompt_lengths[indices], identity, self.manifest)


def open_dataset(folder: str | Path, target: Target | None = None, *, partial: bool = False) -> TextDataset:
    """Read a data folder.

    Args:
        folder: as `regenerate` wrote it.
        target: the model it is for; data of another one, or made under another chat template, is refused.
        partial: whether a folder that is not complete yet will do.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest["complete"] and not partial:
        done, wanted = len(manifest["shards"]), manifest["num_shards"]
        raise DataError(f"{folder} has {done} of {wanted} shards; run the same data regenerate again to complete it")
    if target is not None:
        refuse_other_target(folder, manifest, target)
    check_shards(folder, manifest)
    prompts, responses = [], []
    for name in manifest["shards"]:
        table = pq.read_table(folder / name)
        prompts += [column.values.to_numpy() for column in _pieces(table, "prompt_ids")]
        responses += [column.values.to_numpy() for column in _pieces(table, "response_ids")]
    tokens = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    digest = hashlib.sha256("/".join(entry["sha256"] for entry in manifest["shards"].values()).encode())
    return TextDataset(
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        digest.hexdigest()[:16],
        manifest,
    )


def read_rows(folder: str | Path) -> list[Completion]:
    """The rows of a complete data folder, with their ids."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_shards(folder, manifest)
    return [Completion(**row) for name in manifest["shards"] for row in pq.read_table(folder / name).to_pylist()]


def refuse_other_target(folder: Path, manifest: dict[str, Any], target: Target) -> None:
    """Raise if the data is not this target's."""
    identity = manifest["identity"]
    if identity["target"] != fingerprint(target):
        raise DataError(
            f"{folder} was sampled from {manifest['about'].get('target')} ({identity['target']}), not from "
            f"{target.name} ({fingerprint(target)}). Texts of another model break the identity that BV loss rests on; "
            "regenerate the responses with this target"
        )
    if identity["template"] != template_fingerprint(target):
        raise DataError(f"{folder} was made under another chat template than {target.name} has now; regenerate it")


def _pieces(table: Any, column: str) -> Any:
    return (scalar for chunk in table.column(column).chunks for scalar in chunk)
