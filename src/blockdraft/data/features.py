"""Compute what a drafter reads of its target, beside the trainer, or once to be kept on disk.

A cache ties itself to the fingerprint of the target, its layers and precision. Its files are named after the texts that
they cover, so a data folder that grew keeps the features it has; they are checksummed and mapped into memory. It covers
whole data folders, so that runs with other held-out texts share it. Processes that need one build it together.
For a drafter over fewer tokens it also holds the target's normalizer: log Z and argmax of the whole vocabulary at
every position, so that training runs both heads over the drafter's tokens alone.
"""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, StringConstraints

from blockdraft.data.batches import Batch, pack_tokens
from blockdraft.data.manifest import Checksum, DataError, refuse_other_identity
from blockdraft.data.store import TextDataset, check_files
from blockdraft.files import (
    UNFINISHED,
    atomic_write,
    claim,
    exclusive,
    read_model,
    refuse_full_disk,
    remove_unfinished,
    sha256,
    write_json,
)
from blockdraft.targets import Normalizer, Span, Target, TargetOutput, fingerprint

INDEX = "features.json"
FileName = Annotated[str, StringConstraints(pattern=r"^(features|normalizer)-[0-9a-f]{16}\.npy$")]
TEXTS_PER_FILE = 256
TOKENS_PER_PASS = 4096
READERS = 4
"""Threads that read a batch's texts from a cache."""
SECONDS_BETWEEN_LOOKS = 0.5
"""How long a process with nothing left to make waits before it looks again."""
SECONDS_FOR_THE_INDEX = 600.0
"""How long to wait for the index, which is locked only while it is updated; on a busy network disk that may take."""

REPAIR = "delete the folder to have the cache built again"


class Features(ABC):
    """Gives the target's hidden states and features of a batch."""

    @abstractmethod
    def __call__(self, batch: Batch) -> TargetOutput:
        """Return hidden states ``[N, T, H]`` and features ``[N, T, K * H]`` of a batch."""

    def load(self, batch: Batch) -> Batch:
        """Return the batch with what can be read for it before its step, on the CPU; any thread may call it."""
        return batch


class OnlineFeatures(Features):
    """Runs the target for every batch; nothing is kept.

    normalizer_temperature: also compute the target's normalizer at this temperature, for drafters over fewer tokens.
        It takes a product with the whole head, so it is computed where blocks read it and is zero elsewhere.
    """

    def __init__(self, target: Target, layers: Sequence[int], normalizer_temperature: float | None = None) -> None:
        self.target, self.layers, self.normalizer_temperature = target, tuple(layers), normalizer_temperature

    def __call__(self, batch: Batch) -> TargetOutput:
        output = self.target.forward(batch.tokens, layers=self.layers, spans=batch.spans, positions=batch.positions)
        if self.normalizer_temperature is None:
            return output
        found = self.target.normalizer(batch.read_by_blocks(output.hidden), self.normalizer_temperature)
        spread = Normalizer(*(batch.spread_to_positions(values) for values in (found.log_z, found.argmax)))
        return replace(output, normalizer=spread)


class CacheIndex(BaseModel):
    """Holds ``features.json``: what decides the cached numbers, and the checksums of the files that are there."""

    model_config = ConfigDict(extra="forbid")

    identity: dict[str, Any]
    files: dict[FileName, Checksum] = {}

    @classmethod
    def read(cls, folder: Path) -> "CacheIndex":
        """Read the index of a cache's folder."""
        path = folder / INDEX
        if not os.path.lexists(path):
            raise DataError(
                f"{folder} is not a feature cache: it has no {INDEX}; training with data.features=cached makes one"
            )
        return read_model(path, cls, DataError, REPAIR)


class CachedFeatures(Features):
    """Reads what `build_cache` wrote."""

    def __init__(
        self,
        folder: str | Path,
        target: Target,
        dataset: TextDataset,
        layers: Sequence[int],
        normalizer_temperature: float | None = None,
    ) -> None:
        self.folder, self.hidden_size = Path(folder), target.hidden_size
        self.dataset, self._rows = dataset.whole
        index = CacheIndex.read(self.folder)
        identity = cache_identity(target, layers, normalizer_temperature)
        refuse_other_identity(self.folder, _comparable_identity(index.identity, identity), identity)
        names = _file_names(self.dataset, normalizer_temperature)
        there = {name: index.files[name] for name in names if name in index.files}
        if len(there) < len(set(names)):
            raise DataError(
                f"{folder} has {len(there)} of {len(set(names))} files of these texts; build the cache to its end first"
            )
        check_files(self.folder, there, REPAIR)
        self.width = (1 + len(layers)) * target.hidden_size
        self.device, self.dtype = target.device, target.dtype
        self._readers = ThreadPoolExecutor(READERS, "features")
        stored = _storage(self.dtype)
        self._features = self._mapped([n for n in names if n.startswith("features")], (self.width,), stored)
        self._normalizers = self._mapped([n for n in names if n.startswith("normalizer")], (2,), torch.float64)

    def __call__(self, batch: Batch) -> TargetOutput:
        read = batch if batch.loaded else self.load(batch)
        values, *pairs = (tensor.to(self.device, non_blocking=True) for tensor in read.loaded)
        normalizer = None
        if pairs:
            log_z, argmax = pairs[0].unbind(-1)
            normalizer = Normalizer(log_z.to(_normalizer_dtype(self.dtype)), argmax.long())
        return TargetOutput(values[..., : self.hidden_size], values[..., self.hidden_size :], normalizer)

    def load(self, batch: Batch) -> Batch:
        """Read the batch's texts from their files, several at once."""
        shape, pin = tuple(batch.tokens.shape), self.device.type == "cuda"
        values = torch.zeros(*shape, self.width, dtype=self.dtype, pin_memory=pin)
        pairs = torch.zeros(*shape, 2, dtype=torch.float64, pin_memory=pin) if self._normalizers else None

        def read(text: int, span: Span) -> None:
            at, length = (span.row, slice(span.start, span.end)), span.end - span.start
            values[at] = torch.from_numpy(self._held(self._features, text, length)).view(self.dtype)
            if pairs is not None:
                pairs[at] = torch.from_numpy(self._held(self._normalizers, text, length))

        for _ in self._readers.map(read, batch.texts, batch.spans):
            pass
        return replace(batch, loaded=(values,) if pairs is None else (values, pairs))

    def _mapped(self, names: Sequence[str], row: tuple[int, ...], dtype: torch.dtype) -> list[NDArray[Any]]:
        """Map the files into memory; one row a token, of these sizes and this number format, or it is an error."""
        maps: list[NDArray[Any]] = []
        if not names:
            return maps  # a drafter over the whole vocabulary needs no normalizers
        for name, texts in zip(names, _groups(self.dataset), strict=True):
            wanted = (_num_tokens(self.dataset, texts), *row)
            try:
                found = np.load(self.folder / name, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise DataError(f"{self.folder / name} is not an array: {error}; {REPAIR}") from error
            if found.shape != wanted or found.dtype != np.dtype(str(dtype).split(".")[-1]):
                raise DataError(
                    f"{self.folder / name} holds {found.dtype} of shape {found.shape}, not "
                    f"{str(dtype).split('.')[-1]} of shape {wanted}; {REPAIR}"
                )
            maps.append(found)
        return maps

    def _held(self, maps: list[NDArray[Any]], text: int, length: int) -> NDArray[Any]:
        row = int(self._rows[text])
        file = row // TEXTS_PER_FILE
        begin = int(self.dataset.starts[row] - self.dataset.starts[file * TEXTS_PER_FILE])
        return np.array(maps[file][begin : begin + length])


def cache_identity(
    target: Target, layers: Sequence[int], normalizer_temperature: float | None = None
) -> dict[str, Any]:
    """Return what decides the cached numbers, besides the texts."""
    identity = {
        "target": fingerprint(target),
        "dtype": str(target.dtype).split(".")[-1],
        "layers": list(layers),
    }
    return identity if normalizer_temperature is None else identity | {"normalizer": normalizer_temperature}


def _comparable_identity(there: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a cache's identity without its normalizers, which a drafter over the whole vocabulary does not need."""
    return there if "normalizer" in wanted else {key: value for key, value in there.items() if key != "normalizer"}


def cache_bytes(num_tokens: int, hidden_size: int, num_layers: int, itemsize: int) -> int:
    """Return the size of a cache's features; a normalizer adds 16 bytes a token."""
    return num_tokens * (1 + num_layers) * hidden_size * itemsize


def build_cache(
    folder: str | Path,
    target: Target,
    dataset: TextDataset,
    layers: Sequence[int],
    *,
    max_bytes: int,
    normalizer_temperature: float | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """Run the target over all texts and keep what drafters read; resumes where it stopped, and grows with the texts.

    Any number of processes may build one cache: each makes files that no other process is making, and all return when
    all files are there. If one of them dies, the others make its files.

    Of a dataset that was split, the whole is kept. It is refused at the start if it would take more than ``max_bytes``,
    together with what the folder holds of other texts. A cache that was begun without normalizers gets them if they
    are needed.

    on_tokens: called with the tokens of files that have come to be there, whoever made them.
    """
    folder, (dataset, _rows) = Path(folder), dataset.whole
    refuse_large_cache(target, dataset, layers, max_bytes)
    identity = cache_identity(target, layers, normalizer_temperature)
    names = set(_file_names(dataset, normalizer_temperature))
    if (folder / INDEX).exists():
        index = CacheIndex.read(folder)
        if _comparable_identity(index.identity, identity) == identity and names <= set(index.files):
            return
    refuse_large_cache(target, dataset, layers, max_bytes, folder)
    refuse_full_disk(folder, _bytes_to_write(folder, target, dataset, layers), "the target's features")
    with _updating(folder, identity) as index:
        there = {name: checksum for name, checksum in index.files.items() if name in names}
    check_files(folder, there, REPAIR)
    _remove_leftovers(folder)
    unseen = {texts: _names(dataset, texts, normalizer_temperature) for texts in _groups(dataset)}
    while unseen:
        files = set(CacheIndex.read(folder).files)
        missing = {texts: wanted for texts, wanted in unseen.items() if not files.issuperset(wanted)}
        if on_tokens is not None and len(missing) < len(unseen):
            on_tokens(sum(_num_tokens(dataset, texts) for texts in unseen.keys() - missing.keys()))
        if missing and not any(_try_to_make(folder, identity, target, dataset, texts, layers) for texts in missing):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        unseen = missing


def _try_to_make(
    folder: Path, identity: dict[str, Any], target: Target, dataset: TextDataset, texts: range, layers: Sequence[int]
) -> bool:
    """Make what is missing of some texts' files; return False, and make nothing, if another process is making them."""
    with claim(_lock(folder, _digest(dataset, texts))) as is_mine:
        if is_mine:
            _make(folder, identity, target, dataset, texts, layers)
        return is_mine


@contextmanager
def _updating(folder: Path, identity: dict[str, Any]) -> Iterator[CacheIndex]:
    """Let one process at a time change the index of a cache of this identity, which may gain a normalizer."""
    with exclusive(folder, seconds=SECONDS_FOR_THE_INDEX):
        remove_unfinished(folder, INDEX)
        index = CacheIndex(identity=identity)
        if (folder / INDEX).exists():
            index = CacheIndex.read(folder)
            if "normalizer" not in index.identity and "normalizer" in identity:
                index.identity["normalizer"] = identity["normalizer"]
            refuse_other_identity(folder, _comparable_identity(index.identity, identity), identity)
        yield index
        write_json(index.model_dump(), folder / INDEX)


def _lock(folder: Path, digest: str) -> Path:
    """Return the file that a process locks while it makes the files of some texts."""
    return folder / "locks" / digest


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written, also of other texts, unless somebody is writing it now."""
    for unfinished in folder.glob(f"*.npy.*{UNFINISHED}"):
        with claim(_lock(folder, unfinished.name.split(".")[0].split("-")[-1])) as is_mine:
            if is_mine:
                unfinished.unlink(missing_ok=True)


def _make(
    folder: Path, identity: dict[str, Any], target: Target, dataset: TextDataset, texts: range, layers: Sequence[int]
) -> None:
    """Make those of the files of some texts that are not there; the caller holds their lock.

    They have normalizers if the cache has come to have some, whether this run needs them or not.
    """
    index = CacheIndex.read(folder)  # another process may have held the lock a moment before
    temperature = index.identity.get("normalizer")
    missing = [name for name in _names(dataset, texts, temperature) if name not in index.files]
    if not missing:
        return
    rows, widths = _num_tokens(dataset, texts), ((1 + len(layers)) * target.hidden_size, 2)
    formats = (np.dtype(str(_storage(target.dtype)).split(".")[-1]), np.dtype(np.float64))
    with ExitStack() as files:
        arrays = dict[str, NDArray[Any]]()
        for name, width, number_format in zip(_names(dataset, texts, temperature), widths, formats, strict=False):
            if name in missing:
                remove_unfinished(folder, name)
                unfinished = files.enter_context(atomic_write(folder / name))
                arrays[name] = open_memmap(unfinished, mode="w+", dtype=number_format, shape=(rows, width))
        at = 0
        for found in _run(target, dataset, texts, layers, temperature):
            for name, values in zip(_names(dataset, texts, temperature), found, strict=True):
                if name in missing:
                    arrays[name][at : at + len(values)] = values
            at += len(found[0])
        arrays.clear()  # nothing is mapped any more when the files take their places
    checksums = {name: sha256(folder / name) for name in missing}
    with _updating(folder, identity) as index:
        index.files |= checksums


def _bytes_to_write(folder: Path, target: Target, dataset: TextDataset, layers: Sequence[int]) -> int:
    """Return what is left to write of a cache, of which an earlier attempt may have written a part."""
    needed = cache_bytes(len(dataset.tokens), target.hidden_size, len(layers), target.dtype.itemsize)
    names = set(_file_names(dataset))
    return max(0, needed - sum(size for name, size in _sizes(folder).items() if name in names))


def refuse_large_cache(
    target: Target, dataset: TextDataset, layers: Sequence[int], max_bytes: int, folder: Path | None = None
) -> None:
    """Raise if a cache of the whole dataset, and what a folder holds of other texts, would exceed ``max_bytes``."""
    dataset, _rows = dataset.whole
    needed = cache_bytes(len(dataset.tokens), target.hidden_size, len(layers), target.dtype.itemsize)
    names = set(_file_names(dataset))
    others = 0 if folder is None else sum(size for name, size in _sizes(folder).items() if name not in names)
    if needed + others > max_bytes:
        beside = f" beside {others / 2**30:.1f} GiB of other texts in {folder}" if others else ""
        raise DataError(
            f"the features of {len(dataset.tokens):,} tokens take {needed / 2**30:.1f} GiB{beside}, more than the "
            f"{max_bytes / 2**30:.1f} GiB allowed; train with online features, "
            f"{'name another folder, ' if others else ''}or allow more with data.cache_gib"
        )


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file of features in a folder."""
    return {file.name: file.stat().st_size for file in folder.glob("features-*.npy") if file.is_file()}


def _run(
    target: Target, dataset: TextDataset, texts: range, layers: Sequence[int], normalizer_temperature: float | None
) -> Iterator[list[NDArray[Any]]]:
    """Yield rows of some texts, pass by pass: ``[t, (1 + K) * H]`` hidden states then features, ``[t, 2]`` normalizers.

    The latter, log Z and argmax, are left out without a temperature.
    """
    group: list[int] = []
    for text in texts:
        group.append(text)
        if sum(int(dataset.lengths[each]) for each in group) >= TOKENS_PER_PASS or text == texts[-1]:
            packed = [torch.from_numpy(dataset[each].astype(np.int64)) for each in group]
            tokens, positions, spans = pack_tokens(packed)
            out = target.forward(tokens.to(target.device), layers=layers, spans=spans, positions=positions)
            values = (out.hidden if out.features is None else torch.cat([out.hidden, out.features], -1))[0].cpu()
            found = [values.view(_storage(values.dtype)).numpy()]
            if normalizer_temperature is not None:
                of = target.normalizer(out.hidden[0], normalizer_temperature)
                found.append(torch.stack([of.log_z.double(), of.argmax.double()], -1).cpu().numpy())
            yield found
            group = []


def _groups(dataset: TextDataset) -> list[range]:
    """Return the texts of each file."""
    return [range(start, min(start + TEXTS_PER_FILE, len(dataset))) for start in range(0, len(dataset), TEXTS_PER_FILE)]


def _num_tokens(dataset: TextDataset, texts: range) -> int:
    """Return the number of tokens of some texts, which is the number of rows of their files."""
    return int(dataset.starts[texts.stop] - dataset.starts[texts.start])


def _names(dataset: TextDataset, texts: range, normalizer_temperature: float | None) -> list[str]:
    """Return the names of the files of some texts: features, then normalizers if there are any."""
    kinds = ["features"] if normalizer_temperature is None else ["features", "normalizer"]
    return [f"{kind}-{_digest(dataset, texts)}.npy" for kind in kinds]


def _file_names(dataset: TextDataset, normalizer_temperature: float | None = None) -> list[str]:
    """Return the names of all files of a dataset, first those of features."""
    of_groups = [_names(dataset, texts, normalizer_temperature) for texts in _groups(dataset)]
    return [name for kind in zip(*of_groups, strict=True) for name in kind]


def _digest(dataset: TextDataset, texts: range) -> str:
    """Return the name of some texts in a cache: a hash of their lengths and tokens."""
    bounds = dataset.starts[texts.start : texts.stop + 1]
    tokens = dataset.tokens[bounds[0] : bounds[-1]]
    return hashlib.sha256(np.diff(bounds).tobytes() + tokens.tobytes()).hexdigest()[:16]


def _normalizer_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _storage(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that numpy keeps the bits as: it knows no bfloat16."""
    return torch.int16 if dtype == torch.bfloat16 else dtype
