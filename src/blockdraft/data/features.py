"""What a drafter reads of its target: computed beside the trainer, or once and kept on disk.

A cache ties itself to the fingerprint of the target, its layers and precision,
and to the rows; its files are checksummed and mapped into memory.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockdraft.data.batches import Batch, pack_tokens
from blockdraft.data.manifest import DataError, refuse_other_identity
from blockdraft.data.store import TextDataset, check_files, writing
from blockdraft.files import atomic_write, sha256
from blockdraft.targets import Target, TargetOutput, fingerprint

INDEX = "features.json"
TEXTS_PER_FILE = 256
TOKENS_PER_PASS = 4096
REPAIR = "Delete the folder; the cache is built anew"


class Features(ABC):
    """Hidden states and features of a batch."""

    @abstractmethod
    def __call__(self, batch: Batch) -> TargetOutput:
        """Return hidden states ``[N, T, H]`` and features ``[N, T, K * H]`` of a batch."""


class OnlineFeatures(Features):
    """The target runs for every batch; nothing is kept."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    def __call__(self, batch: Batch) -> TargetOutput:
        return self.target.forward(batch.tokens, layers=self.layers, spans=batch.spans, positions=batch.positions)


class CachedFeatures(Features):
    """Reads what `build_cache` wrote."""

    def __init__(self, folder: str | Path, target: Target, dataset: TextDataset, layers: Sequence[int]) -> None:
        self.folder, self.dataset, self.hidden_size = Path(folder), dataset, target.hidden_size
        index = _read_index(self.folder)
        refuse_other_identity(self.folder, index["identity"], cache_identity(target, dataset, layers))
        wanted = len(_files(dataset))
        if len(index["shards"]) != wanted:
            raise DataError(f"{folder} has {len(index['shards'])} of {wanted} files; build the cache to its end first")
        check_files(self.folder, _checksums(index), REPAIR)
        self.width = (1 + len(layers)) * target.hidden_size
        self.device, self.dtype = target.device, target.dtype
        self._maps = [np.load(self.folder / name, mmap_mode="r") for name in sorted(index["shards"])]

    def __call__(self, batch: Batch) -> TargetOutput:
        values = torch.zeros(*batch.tokens.shape, self.width, dtype=self.dtype)
        for text, span in zip(batch.texts, batch.spans, strict=True):
            file = text // TEXTS_PER_FILE
            begin = int(self.dataset.starts[text] - self.dataset.starts[file * TEXTS_PER_FILE])
            held = np.array(self._maps[file][begin : begin + span.end - span.start])
            values[span.row, span.start : span.end] = torch.from_numpy(held).view(self.dtype)
        values = values.to(self.device)
        return TargetOutput(values[..., : self.hidden_size], values[..., self.hidden_size :])


def cache_identity(target: Target, dataset: TextDataset, layers: Sequence[int]) -> dict[str, Any]:
    """What decides the cached numbers."""
    return {
        "target": fingerprint(target),
        "dtype": str(target.dtype).split(".")[-1],
        "layers": list(layers),
        "data": dataset.identity,
    }


def cache_bytes(num_tokens: int, hidden_size: int, num_layers: int, itemsize: int) -> int:
    """Size of a cache."""
    return num_tokens * (1 + num_layers) * hidden_size * itemsize


def build_cache(
    folder: str | Path,
    target: Target,
    dataset: TextDataset,
    layers: Sequence[int],
    *,
    max_bytes: int,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """Run the target over all texts and keep what drafters read; goes on where it stopped.

    Refused beforehand if it would take more than ``max_bytes``.
    """
    folder = Path(folder)
    refuse_large_cache(target, dataset, layers, max_bytes)
    identity = cache_identity(target, dataset, layers)
    if (folder / INDEX).exists():
        index = _read_index(folder)
        if index["identity"] == identity and len(index["shards"]) == len(_files(dataset)):
            return  # several runs may read one cache at once
    with writing(folder):
        index = {"identity": identity, "shards": {}}
        if (folder / INDEX).exists():
            index = _read_index(folder)
            refuse_other_identity(folder, index["identity"], identity)
            check_files(folder, _checksums(index), REPAIR)
        for number, texts in enumerate(_files(dataset)):
            name = f"features-{number:05d}.npy"
            if name not in index["shards"]:
                values = torch.cat(_run(target, dataset, texts, layers))
                with atomic_write(folder / name) as unfinished, unfinished.open("wb") as file:
                    np.save(file, values.view(_storage(values.dtype)).numpy())
                index["shards"][name] = {"sha256": sha256(folder / name)}
                with atomic_write(folder / INDEX) as unfinished:
                    unfinished.write_text(json.dumps(index, indent=2) + "\n")
            if on_tokens is not None:
                on_tokens(int(dataset.starts[texts.stop] - dataset.starts[texts.start]))


def refuse_large_cache(target: Target, dataset: TextDataset, layers: Sequence[int], max_bytes: int) -> None:
    """Raise if a cache would take more than so many bytes."""
    needed = cache_bytes(len(dataset.tokens), target.hidden_size, len(layers), target.dtype.itemsize)
    if needed > max_bytes:
        raise DataError(
            f"the features of {len(dataset.tokens):,} tokens take {needed / 2**30:.1f} GiB, more than the "
            f"{max_bytes / 2**30:.1f} GiB allowed; train with online features, or allow more"
        )


def _run(target: Target, dataset: TextDataset, texts: range, layers: Sequence[int]) -> list[Tensor]:
    """``[T, (1 + K) * H]`` of each text: the last hidden state, then the features."""
    found = []
    group: list[int] = []
    for text in texts:
        group.append(text)
        if sum(int(dataset.lengths[each]) for each in group) >= TOKENS_PER_PASS or text == texts[-1]:
            packed = [torch.from_numpy(dataset[each].astype(np.int64)) for each in group]
            tokens, positions, spans = pack_tokens(packed)
            out = target.forward(tokens.to(target.device), layers=layers, spans=spans, positions=positions)
            both = out.hidden if out.features is None else torch.cat([out.hidden, out.features], -1)
            found += [both[span.row, span.start : span.end].cpu() for span in spans]
            group = []
    return found


def _files(dataset: TextDataset) -> list[range]:
    return [range(start, min(start + TEXTS_PER_FILE, len(dataset))) for start in range(0, len(dataset), TEXTS_PER_FILE)]


def _checksums(index: dict[str, Any]) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in index["shards"].items()}


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.exists():
        raise DataError(f"{folder} is not a feature cache: it has no {INDEX}")
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        index["identity"], index["shards"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return index


def _storage(dtype: torch.dtype) -> torch.dtype:
    """numpy knows no bfloat16: its bits are kept as integers."""
    return torch.int16 if dtype == torch.bfloat16 else dtype
