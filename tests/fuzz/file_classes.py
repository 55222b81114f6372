"""Classes of damaged files: which files there are, which verbs read them, and what can be wrong with each."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuzz import damage
from fuzz.bench import EVALUATE, REGENERATE, SAMPLING
from fuzz.running import Case, Expect


@dataclass(frozen=True)
class Reader:
    """A command that reads a file, and the artefacts that it needs. leaves: what it may leave, as documented."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    leaves: tuple[str, ...] = ()

    def case(self, name: str, prepare: Callable[[], None], expect: Expect, says: str = "") -> Case:
        """Make a case of this command and some damage."""
        return Case(f"{self.name}: {name}", self.arguments, prepare, expect, self.needs, says, self.leaves)


def _generate(*more: str) -> tuple[str, ...]:
    return "generate", "w7 w8", "--max-new-tokens", "3", *more


GENERATE = Reader("generate", _generate("--target", "target"), ("target",))
SHARDS = Reader("generate", _generate("--target", "shards"), ("shards",))
DRAFT = Reader("generate", _generate("--target", "target", "--drafter", "run"), ("target", "run"))
FLAT = Reader("generate", _generate("--target", "target", "--drafter", "flat"), ("target", "flat"))
DSPARK = Reader("generate", _generate("--target", "target", "--drafter", "dspark"), ("target", "dspark"))
SPECULATORS = Reader("generate", _generate("--target", "target", "--drafter", "speculators"), ("target", "speculators"))
SHARDED = Reader(
    "generate", _generate("--target", "target", "--drafter", "sharded-drafter"), ("target", "sharded-drafter")
)
CHECK = Reader("check", ("export", "dspark", "--check", "speculators", "--target", "target"),
               ("target", "speculators", "dspark"))  # fmt: skip
CHECK_FLAT = Reader("check", ("export", "--check", "flat"), ("flat",))
EXPORT = Reader(
    "export", ("export", "run", "--format", "flat", "--out", "new", "--target", "target"), ("target", "run")
)
EXPORT_TARGET = Reader("export-target", ("export-target", "target", "--out", "new"), ("target",))
INSPECT = Reader("inspect", ("data", "inspect", "data", "--samples", "1", "--tokens", "60"), ("target", "data"))
ESTIMATE = Reader("estimate", ("estimate", "recipe.yaml"), ("target", "data", "recipe.yaml"))
TRAIN = Reader("train", ("train", "recipe.yaml", "--out", "new"), ("target", "data", "recipe.yaml"), ("new",))
RESUME = Reader("train", ("train", "recipe.yaml", "--out", "begun-run"), ("target", "data", "recipe.yaml", "begun-run"))
CACHED = Reader(
    "train", ("train", "cached.yaml", "--out", "new"), ("target", "data", "cached.yaml", "features"), ("new",)
)
DRY_RUN = Reader("train", ("train", "recipe.yaml", "--dry-run"), ("target", "data", "recipe.yaml"))
DATA = Reader(
    "regenerate", (*REGENERATE, *SAMPLING, "--out", "data"), ("target", "prompts.jsonl", "data"), ("data/.lock",)
)
EVALUATION = Reader(
    "evaluate", (*EVALUATE, "--drafter", "bv=run", "--out", "begun-evaluation"),
    ("target", "prompts.jsonl", "run", "data", "begun-evaluation"), ("begun-evaluation",),
)  # fmt: skip
NEW_EVALUATION = Reader(
    "evaluate", (*EVALUATE, "--drafter", "bv=run", "--out", "new"), ("target", "prompts.jsonl", "run"), ("new",)
)
CATEGORIES = Reader(
    "evaluate", ("evaluate", "--target", "target", "--tasks", "categories.jsonl", "--drafter", "bv=run", "--out", "new",
                 "--max-new-tokens", "4"), ("target", "categories.jsonl", "run"), ("new",),
)  # fmt: skip
REPORT = Reader("report", ("report", "evaluation", "--out", "new"), ("evaluation",))
PROMPTS = Reader("prompts", ("data", "prompts", "--from", "prompts.jsonl", "--out", "new.jsonl"), ("prompts.jsonl",))
CHATS = Reader("prompts", ("data", "prompts", "--from", "chats.jsonl", "--out", "new.jsonl"), ("chats.jsonl",))
ANSWER = Reader("regenerate", (*REGENERATE, *SAMPLING, "--out", "new"), ("target", "prompts.jsonl"), ("new",))
SHOW = Reader("show", ("recipes", "show", "recipe.yaml"), ("recipe.yaml",))
VALIDATE = Reader("validate", ("recipes", "validate", "recipe.yaml"), ("recipe.yaml",))
DRAFTERS = ("run", "flat", "dspark", "speculators")


def _doctor(drafter: str, *more: str) -> Reader:
    words = ("doctor", drafter, "--target", "target", "--texts", "2", "--max-new-tokens", "4", "--strict", *more)
    return Reader("doctor", words, ("target", drafter))


# what is measured on an untrained drafter is always wrong, and would hide that nothing else was found
DOCTOR, DOCTOR_FLAT, DOCTOR_DSPARK, DOCTOR_SPECULATORS = (_doctor(each, "--no-measure") for each in DRAFTERS)
MEASURE, MEASURE_FLAT, MEASURE_DSPARK, MEASURE_SPECULATORS = map(_doctor, DRAFTERS)
DOCTOR_DATA = Reader("doctor", (*DOCTOR.arguments, "--data", "data"), (*DOCTOR.needs, "data"))
STUDY = Reader(
    "study", ("study", "study.yaml", "--jobs", "1", "--out", "study"), ("study.yaml", "study"),
    ("study/.lock", "study/logs"),
)  # fmt: skip
FURTHER = Reader(
    "train", ("train", "recipe.yaml", "drafter.initial=flat", "--out", "new"),
    ("target", "data", "recipe.yaml", "flat"), ("new",),
)  # fmt: skip
PLAN = Reader("study", ("study", "study.yaml", "--plan", "--out", "study"), ("study.yaml", "study"))

RUN, BEGUN = "run/steps/00000004", "begun-run/steps/00000002"
PREDICTION = "begun-evaluation/predictions"


@dataclass(frozen=True)
class File:
    """A file that we read.

    strict: whether anything that is not as we wrote it must be refused; if not, its readers may find a use for it.
    optional: whether things work without it.
    """

    path: str
    readers: tuple[Reader, ...]
    strict: bool = True
    optional: bool = False


def files() -> list[File]:
    """Return every file that some verb reads; the working directory holds the good artefacts."""
    texts = "begun-evaluation/texts/greedy/000"
    return [
        File("target/config.json", (GENERATE, ESTIMATE, INSPECT)),
        File("target/generation_config.json", (GENERATE, EXPORT_TARGET), strict=False, optional=True),
        File("target/tokenizer.json", (GENERATE, INSPECT, EXPORT_TARGET)),
        File("target/tokenizer_config.json", (GENERATE, EXPORT_TARGET), strict=False, optional=True),
        File("target/chat_template.jinja", (GENERATE, NEW_EVALUATION, ANSWER), strict=False, optional=True),
        File("target/model.safetensors", (GENERATE, TRAIN, EXPORT_TARGET)),
        File("shards/model.safetensors.index.json", (SHARDS,)),
        File("shards/model-00001-of-00001.safetensors", (SHARDS,)),
        File(f"{RUN}/config.json", (DRAFT, EXPORT, NEW_EVALUATION, DOCTOR)),
        File(f"{RUN}/model.safetensors", (DRAFT, EXPORT, NEW_EVALUATION, DOCTOR)),
        File("run/run.json", (EXPORT, NEW_EVALUATION)),
        File("run/metrics.jsonl", (EXPORT,), strict=False, optional=True),
        File("begun-run/run.json", (RESUME,)),
        File("begun-run/metrics.jsonl", (RESUME,), strict=False, optional=True),
        File(f"{BEGUN}/config.json", (RESUME,)),
        File(f"{BEGUN}/model.safetensors", (RESUME,)),
        File(f"{BEGUN}/state.pt", (RESUME,)),
        File(f"{BEGUN}/checksums.json", (RESUME,)),
        File("data/manifest.json", (INSPECT, ESTIMATE, TRAIN, DATA, DOCTOR_DATA)),
        File("data/shard-00000.parquet", (INSPECT, TRAIN, DATA, DOCTOR_DATA)),
        File("features/features.json", (CACHED,), optional=True),  # without it the cache is built again
        File(str(cached_features()), (CACHED,)),
        File("begun-evaluation/plan.json", (EVALUATION,)),
        File(f"{texts}/manifest.json", (EVALUATION,)),
        File(f"{texts}/shard-00000.parquet", (EVALUATION,)),
        File(str(min(Path(PREDICTION).iterdir())), (EVALUATION,), optional=True),
        File("begun-evaluation/records/0.jsonl", (EVALUATION,), strict=False, optional=True),
        File("evaluation/results.json", (REPORT,)),
        File("evaluation/traces.json", (REPORT,), optional=True),
        File("flat/config.json", (CHECK_FLAT, FLAT, DOCTOR_FLAT, FURTHER)),
        File("flat/model.safetensors", (CHECK_FLAT, FLAT, DOCTOR_FLAT, FURTHER)),
        File("dspark/config.json", (DSPARK, DOCTOR_DSPARK)),
        File("dspark/model.safetensors", (DSPARK, DOCTOR_DSPARK)),
        File("speculators/config.json", (CHECK, SPECULATORS, DOCTOR_SPECULATORS)),
        File("speculators/model.safetensors", (CHECK, SPECULATORS, DOCTOR_SPECULATORS)),
        File("sharded-drafter/model.safetensors.index.json", (SHARDED,)),
        File("prompts.jsonl", (ANSWER, NEW_EVALUATION, PROMPTS)),
        File("chats.jsonl", (CHATS,)),
        File("categories.jsonl", (CATEGORIES,)),
        File("recipe.yaml", (SHOW, VALIDATE, ESTIMATE, DRY_RUN), strict=False),
        File("study.yaml", (PLAN,), strict=False),
        File("study/data/pocket/manifest.json", (PLAN,), optional=True),
        File("study/runs/pocket-dflash-ce-seed1/run.json", (PLAN,), optional=True),
        File("study/runs/pocket-dflash-ce-seed1/metrics.jsonl", (PLAN,), strict=False, optional=True),
    ]


def few(scale: int) -> int:
    """Return how many cases a single file or option gets."""
    return 1 if scale == 1 else 2 * scale


def cut_or_overwritten(dice: random.Random, scale: int) -> Iterator[Case]:
    """Every file: empty, cut, NUL bytes, HTML, not UTF-8, nested without end, single bits."""
    for file in dice.sample(files(), 24) if scale == 1 else files():
        found = list(damage.of_bytes(file.path, dice, flips=scale))
        for name, do in dice.sample(found, min(len(found), few(scale))):
            lines = file.path.endswith((".jsonl", ".yaml", ".jinja"))
            sure = file.strict and not name.startswith("flip") and not (lines and name.startswith("cut"))
            if file.path.startswith("begun-evaluation/texts") and name in ("empty", "spaces"):
                sure = False
            expect = Expect.REFUSED if sure else Expect.EITHER
            yield dice.choice(file.readers).case(f"{file.path} {name}", do, expect)


def of_another_kind(dice: random.Random, scale: int) -> Iterator[Case]:
    """Every file: missing, a folder, a dead link, a link to itself, a pipe that nobody writes to, a device."""
    for file in dice.sample(files(), 24) if scale == 1 else files():
        found = list(damage.of_kind(file.path))
        for name, do in dice.sample(found, min(len(found), few(scale))):
            sure = file.strict and not (file.optional and (name == "missing" or "nowhere" in name))
            lines = file.path in ("prompts.jsonl", "chats.jsonl", "categories.jsonl")
            if name == "a pipe" and lines:
                continue  # a pipe is a way to give prompts, and waiting for its writer is right
            if "texts/" in file.path or file.path == "begun-evaluation/plan.json":
                sure = False
            yield dice.choice(file.readers).case(
                f"{file.path} is {name}", do, Expect.REFUSED if sure else Expect.EITHER
            )


OWN_JSON = (
    (f"{RUN}/config.json", DRAFT), (f"{RUN}/config.json", EXPORT), ("dspark/config.json", DSPARK),
    ("run/run.json", EXPORT), ("begun-run/run.json", RESUME), (f"{BEGUN}/checksums.json", RESUME),
    ("data/manifest.json", INSPECT), ("data/manifest.json", TRAIN), ("data/manifest.json", ESTIMATE),
    ("data/manifest.json", DATA), ("features/features.json", CACHED), ("begun-evaluation/plan.json", EVALUATION),
    (f"{RUN}/config.json", MEASURE), ("dspark/config.json", MEASURE_DSPARK), ("data/manifest.json", DOCTOR_DATA),
    (PREDICTION, EVALUATION), ("evaluation/results.json", REPORT), ("evaluation/traces.json", REPORT),
)  # fmt: skip


def own_json(dice: random.Random, scale: int) -> Iterator[Case]:
    """Our JSON (configurations, runs, manifests, plans, predictions, results): keys and values that cannot be."""
    for path, reader in OWN_JSON:
        path = str(min(Path(path).iterdir())) if Path(path).is_dir() else path
        num = 1 if scale == 1 else 4 * scale
        for name, do in damage.of_json(path, dice, num):
            yield reader.case(f"{path}: {name}", do, Expect.EITHER)


def others_json(dice: random.Random, scale: int) -> Iterator[Case]:
    """Others' JSON (models, tokenizers, engines' formats): keys and values that cannot be."""
    for path, reader in (
        ("target/config.json", GENERATE), ("target/config.json", ESTIMATE), ("target/generation_config.json", GENERATE),
        ("target/tokenizer.json", GENERATE), ("target/tokenizer_config.json", GENERATE),
        ("target/tokenizer_config.json", EXPORT_TARGET), ("shards/model.safetensors.index.json", SHARDS),
        ("flat/config.json", CHECK_FLAT), ("flat/config.json", FLAT), ("speculators/config.json", CHECK),
        ("speculators/config.json", SPECULATORS), ("flat/config.json", MEASURE_FLAT),
        ("speculators/config.json", MEASURE_SPECULATORS), ("flat/config.json", FURTHER),
        ("sharded-drafter/model.safetensors.index.json", SHARDED),
    ):  # fmt: skip
        for name, do in damage.of_json(path, dice, 1 if scale == 1 else 4 * scale):
            yield reader.case(f"{path}: {name}", do, Expect.EITHER)


def lines(dice: random.Random, scale: int) -> Iterator[Case]:
    """JSON lines (prompts, metrics, records): a line of garbage, or a value that cannot be."""
    for path, reader in (
        ("prompts.jsonl", ANSWER), ("prompts.jsonl", PROMPTS), ("prompts.jsonl", NEW_EVALUATION), ("chats.jsonl",
        CHATS),
        ("categories.jsonl", CATEGORIES), ("begun-run/metrics.jsonl", RESUME), ("run/metrics.jsonl", EXPORT),
        ("study/runs/pocket-dflash-ce-seed1/metrics.jsonl", PLAN), ("begun-evaluation/records/0.jsonl", EVALUATION),
    ):  # fmt: skip
        for name, do in damage.of_lines(path, dice, 1 if scale == 1 else 4 * scale):
            yield reader.case(f"{path}: {name}", do, Expect.EITHER)


def tensors(dice: random.Random, scale: int) -> Iterator[Case]:
    """Weights: tensors that are missing, renamed, of another shape or kind, NaN, infinite; headers that lie."""
    for path, readers in (
        ("target/model.safetensors", (GENERATE, TRAIN)), (f"{RUN}/model.safetensors", (DRAFT, EXPORT)),
        ("flat/model.safetensors", (CHECK_FLAT, FLAT, FURTHER)),
        ("speculators/model.safetensors", (CHECK, SPECULATORS)), ("dspark/model.safetensors", (DSPARK,)),
        ("flat/model.safetensors", (DOCTOR_FLAT,)), ("speculators/model.safetensors", (DOCTOR_SPECULATORS,)),
        ("dspark/model.safetensors", (DOCTOR_DSPARK,)), (f"{RUN}/model.safetensors", (DOCTOR,)),
    ):  # fmt: skip
        for _ in range(1 if scale == 1 else scale - 1):
            found = list(damage.of_tensors(path, dice))
            for name, do in dice.sample(found, 3 if scale == 1 else len(found)):
                whole = name.endswith("is integers") and path.startswith("target")
                expect = Expect.EITHER if whole else Expect.REFUSED  # a model may be stored in any number format
                yield dice.choice(readers).case(f"{path}: {name}", do, expect)


def consistent_lies(dice: random.Random, scale: int) -> Iterator[Case]:
    """Shards and caches whose checksums are right and whose contents cannot be."""
    chosen = list(PARQUET)
    for name in dice.sample(chosen, 4) if scale == 1 else chosen:
        for reader in (dice.choice((INSPECT, TRAIN)),) if scale == 1 else (INSPECT, TRAIN, DRY_RUN):
            yield reader.case(f"shard: {name}", lambda at=name: _rewrite_shard(PARQUET[at]), Expect.REFUSED)
    arrays = {
        "of another shape": lambda a: a[:, :3], "of fewer rows": lambda a: a[:5], "of text": lambda _: np.array(["x"]),
        "of objects": lambda _: np.array([{}], dtype=object), "of no dimension": lambda _: np.array(1.0),
        "of another number format": lambda a: a.astype(np.float64),
    }  # fmt: skip
    for name in dice.sample(list(arrays), 2) if scale == 1 else arrays:
        yield CACHED.case(f"cache: {name}", lambda at=name: _rewrite_cache(arrays[at]), Expect.REFUSED)


def _ids(rows: list[list[int]]) -> pa.Array:
    return pa.array(rows, pa.list_(pa.int32()))


PARQUET: dict[str, Callable[[pa.Table], pa.Table]] = {
    "no column response_ids": lambda t: t.drop_columns(["response_ids"]),
    "one column more": lambda t: t.append_column("x", pa.array([1] * t.num_rows)),
    "ids as text": lambda t: t.set_column(1, "prompt_ids", pa.array(["3 4"] * t.num_rows)),
    "ids as floats": lambda t: t.set_column(1, "prompt_ids", pa.array([[3.5]] * t.num_rows)),
    "ids that are null": lambda t: t.set_column(2, "response_ids", _ids([None] * t.num_rows)),
    "a null among ids": lambda t: t.set_column(2, "response_ids", _ids([[7, None]] * t.num_rows)),
    "ids beyond the vocabulary": lambda t: t.set_column(2, "response_ids", _ids([[7, 40]] * t.num_rows)),
    "negative ids": lambda t: t.set_column(2, "response_ids", _ids([[-1, 7]] * t.num_rows)),
    "empty responses": lambda t: t.set_column(2, "response_ids", _ids([[]] * t.num_rows)),
    "empty prompts": lambda t: t.set_column(1, "prompt_ids", _ids([[]] * t.num_rows)),
    "texts beyond the context": lambda t: t.set_column(2, "response_ids", _ids([[7] * 600] * t.num_rows)),
    "fewer rows": lambda t: t.slice(0, 2),
}


def _rewrite_shard(change: Callable[[pa.Table], pa.Table]) -> None:
    file, manifest = Path("data/shard-00000.parquet"), Path("data/manifest.json")
    pq.write_table(change(pq.read_table(file)), file)
    values = json.loads(manifest.read_text())
    values["shards"][file.name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(values))


def cached_features() -> Path:
    """Return the first file of the bench's feature cache."""
    return min(Path("features").glob("features-*.npy"))


def _rewrite_cache(change: Callable[[np.ndarray], np.ndarray]) -> None:
    file, index = cached_features(), Path("features/features.json")
    np.save(file, change(np.load(file)), allow_pickle=True)
    values = json.loads(index.read_text())
    values["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    index.write_text(json.dumps(values))


YAML = {
    "a list": "- 1\n- 2\n", "a number": "42\n", "a text": "hello\n", "a tab": "target:\n\tname: target\n",
    "a key twice": "seed: 1\nseed: 2\n", "a section twice": "data: {path: data}\ndata: {path: data}\n",
    "a date": "seed: 2024-01-01\n", "a date for a name": "target: {name: 2024-01-01}\n",
    "a time that is none": "seed: 2024-99-99 99:99:99\n", "a recursive anchor": "a: &a\n  b: *a\n",
    "a recursive section": "target: &a\n  name: *a\n", "a recursive list": "objective: &a [*a]\n",
    "an unknown anchor": "seed: *nothing\n", "a Python object": "seed: !!python/object/apply:os.system ['true']\n",
    "an unknown tag": "seed: !mine 3\n", "binary": "seed: !!binary aGVsbG8=\n", "bad binary": "seed: !!binary x\n",
    "a set": "seed: !!set {a, b}\n", "a key that is a list": "? [a, b]\n: 1\n",
    "a key that is an object": "? {a: b}\n: 1\n",
    "a key that is null": "null: 1\n", "a number as a key": "1: 2\n", "two documents": "seed: 1\n---\nseed: 2\n",
    "an unclosed quote": "seed: '1\n", "an unclosed list": "seed: [1\n", "control characters": "seed: \x07\n",
    "no section but null": "target: null\n", "a section of text": "target: pocket\n",
    "a section of numbers": "data: 7\n",
    "an unknown section": "trainer: {}\n", "an unknown field": "optimizer: {rate: 1}\n",
    "a merge of nothing": "<<: 3\n",
    "many aliases": "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
        f"{key}: &{key} [{','.join([f'*{above}'] * 9)}]\n" for above, key in zip("abcde", "bcdef", strict=True)
    ),
    "an integer without end": "seed: " + "9" * 5000 + "\n", "sexagesimal": "seed: 1:99:99\n",
    "half of a character": 'target: {name: "\\ud800"}\n', "half of a key": '"\\U0000dfff": 1\n',
    "nesting": "seed: " + "[" * 3000,
}  # fmt: skip


def yaml_files(dice: random.Random, scale: int) -> Iterator[Case]:
    """Recipes and studies: dates, anchors that contain themselves, tags, keys that stand twice, strange keys."""
    for name in dice.sample(list(YAML), 8) if scale == 1 else YAML:
        for path, readers in (("recipe.yaml", (SHOW, VALIDATE, ESTIMATE, DRY_RUN)), ("study.yaml", (PLAN,))):
            for reader in (dice.choice(readers),) if scale < 3 else readers:
                content = YAML[name]
                yield reader.case(f"{path}: {name}", lambda at=path, c=content: _put(at, c), Expect.REFUSED)


def _put(path: str, content: str) -> None:
    Path(path).write_text(content, encoding="utf-8")
