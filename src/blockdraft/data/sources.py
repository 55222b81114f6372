"""Where prompts come from: files, Hugging Face data sets, and pocket's generator."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from blockdraft.data.prompts import KEYS, LAYOUTS, Dropped, Prompt, PromptError, parse_rows, to_prompt
from blockdraft.errors import first_line
from blockdraft.targets.loading import refuse_unreachable_hub

POCKET_SOURCE = "pocket"


@dataclass(frozen=True)
class Preset:
    """A data set on the Hugging Face hub that has a short name here."""

    id: str
    split: str = "train"


PRESETS = {"open-perfectblend": Preset("mlabonne/open-perfectblend")}


def read_source(name: str, *, split: str | None = None) -> Iterator[Prompt | Dropped]:
    """Yield the rows of a preset, a file, a folder that ``datasets`` can load, or a Hugging Face data set.

    Only data sets have a ``split``; if none is given, it is ``train``.
    """
    if name in PRESETS:
        preset = PRESETS[name]
        return read_dataset(preset.id, split or preset.split)
    path = Path(name)
    if path.is_dir():
        return read_dataset(name, split or "train")
    if path.exists():
        if split is not None:
            raise PromptError(f"{name} is a file and has no splits; leave out --split")
        return read_file(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith((".json", ".jsonl", ".gz")):
        raise PromptError(f"{name}: no such file or folder")
    near = get_close_matches(name, [POCKET_SOURCE, *PRESETS], n=1, cutoff=0.8)
    if near:
        raise PromptError(f"{name}: no such file, folder or preset; did you mean {near[0]}?")
    return read_dataset(name, split or "train")


def read_file(path: Path) -> Iterator[Prompt | Dropped]:
    """Yield the rows of a JSON-lines file or JSON array; a row without an id is named after the file and its number."""
    stem = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".jsonl")
    for index, (_, row) in enumerate(parse_rows(path)):
        yield to_prompt(row, f"{stem}-{index}")


def read_dataset(name: str, split: str) -> Iterator[Prompt | Dropped]:
    """Yield the rows of a data set; a row without an id is named after the data set, the split and its number."""
    table = load_dataset(name, split)
    columns = [column for column in table.column_names if column in KEYS]
    if not set(columns) & set(LAYOUTS):
        raise PromptError(
            f"{name}: no column {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]} to take conversations from; "
            f"it has {', '.join(table.column_names)}"
        )
    stem = f"{Path(name).resolve().name}-{split}"
    for index, row in enumerate(table.select_columns(columns)):
        yield to_prompt(row, f"{stem}-{index}")


def pocket_prompts(seed: int, family: str | None = None) -> Iterator[Prompt]:
    """Yield prompts of pocket's training corpus without end, of one family or of all in pocket's own mixture.

    The same seed gives the same prompts. None of pocket's held-out prompts is among them. Texts may repeat.
    """
    from blockdraft import pocket

    if family is not None and family not in pocket.FAMILIES:
        raise PromptError(f"unknown family {family!r} of pocket's corpus; known: {', '.join(pocket.FAMILIES)}")
    for each in pocket.prompts(seed, family):
        yield Prompt(each.id, each.turns, source=f"pocket/{each.family}")


def _was_loaded(name: str, datasets: Any) -> bool:
    """Tell whether ``datasets`` may have a data set in its cache, which needs no network."""
    return name.replace("/", "___").lower() in {
        path.name.lower() for path in Path(datasets.config.HF_DATASETS_CACHE).glob("*")
    }


def load_dataset(name: str, split: str, config: str | None = None, files: Sequence[str] = ()) -> Any:
    """Load a ``datasets.Dataset`` by its id on the hub or from a local folder.

    ``files`` names the JSON lines of a data set that is defined by a script, which ``datasets`` no longer runs.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise PromptError(
            f"{name}: reading a data set needs the package datasets: pip install 'blockdraft[datasets]'"
        ) from error
    root = name if Path(name).is_dir() else f"hf://datasets/{name}"
    if not Path(name).is_dir() and not _was_loaded(name, datasets):
        refuse_unreachable_hub(name, PromptError)
    try:
        if files:
            return datasets.load_dataset("json", data_files=[f"{root}/{file}" for file in files], split="train")
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub raises whatever its many layers raise
        raise PromptError(f"{name}, split {split}: cannot be loaded as a data set: {first_line(error)}") from error
