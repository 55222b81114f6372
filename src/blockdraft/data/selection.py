"""Choose prompts: where they come from, and which of them are kept and held out.

They come from files, Hugging Face data sets and pocket's generator. The same seed chooses the same ones, without
repetition. A text's place in the order is a hash of the seed and the text itself. So the choice does not depend on the
order of the input, and a smaller choice is the beginning of a larger one.
"""

import hashlib
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    """Names a data set on the Hugging Face hub that has a short name here."""

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


SAME_TEXT, SAME_ID = "same text as another", "same id as another"
SAME_OPENING, NOT_ASKED_FOR = "opens like a held-out prompt", "more than asked for"

PATIENCE = 10_000
"""The generator counts as exhausted after this many conversations without a new one."""


@dataclass(frozen=True)
class Limits:
    """Sets the sizes that a prompt may have, both ends included, in characters of all messages and in user messages."""

    min_chars: int = 1
    max_chars: int | None = None
    min_turns: int = 1
    max_turns: int | None = None

    def __post_init__(self) -> None:
        for unit, low, high in (
            ("chars", self.min_chars, self.max_chars),
            ("turns", self.min_turns, self.max_turns),
        ):
            if high is not None and low > high:
                raise PromptError(f"--min-{unit} {low} is more than --max-{unit} {high}: no prompt can be both")

    def broken_by(self, prompt: Prompt) -> str | None:
        """Return the reason to drop this prompt, or None."""
        if prompt.num_chars < self.min_chars:
            return f"under {self.min_chars} characters"
        if self.max_chars is not None and prompt.num_chars > self.max_chars:
            return f"over {self.max_chars} characters"
        if len(prompt.turns) < self.min_turns:
            return f"under {self.min_turns} turns"
        if self.max_turns is not None and len(prompt.turns) > self.max_turns:
            return f"over {self.max_turns} turns"
        return None


@dataclass(frozen=True)
class Summary:
    """Tells what became of every row: ``num_read`` is the sum of all the others.

    dropped: the number of rows by reason, the most frequent first.
    """

    num_read: int
    num_kept: int
    num_heldout: int
    dropped: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"read": self.num_read, "kept": self.num_kept, "heldout": self.num_heldout, "dropped": self.dropped}


@dataclass(frozen=True)
class Selection:
    """Holds the prompts to train on, the prompts held out, and an account of the rest."""

    kept: list[Prompt]
    heldout: list[Prompt]
    summary: Summary


def text_key(*turns: str) -> str:
    """Return the text that makes two prompts the same: case and white space do not count."""
    # no line break is left within a turn, so that one can stand between them
    return "\n".join(" ".join(turn.casefold().split()) for turn in turns)


def select(
    rows: Iterable[Prompt | Dropped],
    *,
    num: int | None = None,
    heldout: int = 0,
    seed: int = 0,
    limits: Limits | None = None,
) -> Selection:
    """Choose from all rows: apply the limits, remove repetitions, hold some out, keep ``num`` of the rest.

    The held-out prompts depend on the seed and the rows but not on ``num``. No kept prompt has the
    text of one of them, nor its first message. Fewer than ``num`` may be left; if none is, a `PromptError`
    is raised.
    """
    account = _Account()
    pool = _different(_within(rows, limits or Limits(), account), account)
    held = sorted(pool, key=lambda key: _place(seed, "heldout", key))[:heldout]
    openings = {text_key(pool[key].turns[0]) for key in held}
    rest = [key for key, prompt in pool.items() if text_key(prompt.turns[0]) not in openings]
    chosen = sorted(rest, key=lambda key: _place(seed, "kept", key))[:num]
    account.dropped[SAME_OPENING] += len(pool) - len(held) - len(rest)
    account.dropped[NOT_ASKED_FOR] += len(rest) - len(chosen)
    return account.closed([pool[key] for key in chosen], [pool[key] for key in held])


def select_generated(
    generated: Iterable[Prompt], *, num: int, heldout: int = 0, limits: Limits | None = None
) -> Selection:
    """Choose from a generator that never ends: the first different prompts are held out, the next ``num`` kept.

    As with `select`, a smaller choice is the beginning of a larger one. If the generator
    has nothing new to say any more, a `PromptError` is raised.
    """
    limits = limits or Limits()
    account = _Account()
    held: list[Prompt] = []
    kept: list[Prompt] = []
    seen: set[str] = set()
    openings: set[str] = set()
    fruitless = 0
    for prompt in generated:
        account.num_read += 1
        key, opening = text_key(*prompt.turns), text_key(prompt.turns[0])
        reason = limits.broken_by(prompt) or (SAME_TEXT if key in seen else None)
        if reason is None and len(held) == heldout and opening in openings:
            reason = SAME_OPENING
        if reason is not None:
            account.dropped[reason] += 1
            fruitless += 1
            if fruitless == PATIENCE:
                raise PromptError(
                    f"the generator yields nothing new: {len(held) + len(kept)} of {heldout + num} prompts, then "
                    f"{PATIENCE} in a row dropped ({account.reasons()}); ask for fewer, or loosen the limits"
                )
            continue
        fruitless = 0
        seen.add(key)
        if len(held) < heldout:
            held.append(prompt)
            openings.add(opening)
        else:
            kept.append(prompt)
        if len(kept) == num:
            break
    return account.closed(kept, held)


class _Account:
    """Counts rows while they are read and dropped."""

    def __init__(self) -> None:
        self.num_read = 0
        self.dropped: Counter[str] = Counter()

    def closed(self, kept: list[Prompt], heldout: list[Prompt]) -> Selection:
        if not kept:
            held = f", {len(heldout)} held out" if heldout else ""
            raise PromptError(f"no prompt is left to keep of {self.num_read} rows{held} ({self.reasons()})")
        by_count = sorted((-count, reason) for reason, count in self.dropped.items() if count)
        dropped = {reason: -count for count, reason in by_count}
        return Selection(kept, heldout, Summary(self.num_read, len(kept), len(heldout), dropped))

    def reasons(self) -> str:
        """Name the three most frequent reasons."""
        found = [f"{reason}: {count}" for reason, count in self.dropped.most_common(3) if count]
        return "; ".join(found) or "none dropped"


def _within(rows: Iterable[Prompt | Dropped], limits: Limits, account: _Account) -> Iterator[Prompt]:
    """Yield the prompts that keep to the limits."""
    for row in rows:
        account.num_read += 1
        if isinstance(row, Dropped):
            account.dropped[row.reason] += 1
        elif reason := limits.broken_by(row):
            account.dropped[reason] += 1
        else:
            yield row


def _different(prompts: Iterable[Prompt], account: _Account) -> dict[str, Prompt]:
    """Return one prompt per text and per id, by text; which one does not depend on their order."""
    by_text: dict[str, Prompt] = {}
    for prompt in prompts:
        key = text_key(*prompt.turns)
        if key in by_text:
            account.dropped[SAME_TEXT] += 1
        by_text[key] = min(prompt, by_text.get(key, prompt), key=_rank)
    by_id: dict[str, str] = {}
    for key in sorted(by_text):
        by_id.setdefault(by_text[key].id, key)
    account.dropped[SAME_ID] += len(by_text) - len(by_id)
    return {key: by_text[key] for key in by_id.values()}


def _rank(prompt: Prompt) -> tuple[object, ...]:
    return prompt.turns, prompt.system or "", prompt.source or "", prompt.id


def _place(seed: int, purpose: str, key: str) -> bytes:
    return hashlib.sha256(f"{purpose}/{seed}/{key}".encode()).digest()
