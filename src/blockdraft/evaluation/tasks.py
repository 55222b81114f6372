"""Load the prompts of an evaluation: the paper's seven benchmarks, pocket's own three, or any files.

A file whose rows have a category, as those of SPEED-Bench and Spec-Bench do, is one task per category. The benchmarks
of the paper come from a folder of JSON lines (``gsm8k.jsonl`` and so on, rows with ``id`` and ``turns``, the
wrappers already in the text) or from the Hugging Face hub, where the wrappers are put around the bare questions here.
"""

import difflib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from blockdraft.data import Prompt, read_prompts
from blockdraft.data.prompts import parse_rows
from blockdraft.data.selection import load_dataset
from blockdraft.evaluation.results import EvaluationError, TaskAbout
from blockdraft.files import explain
from blockdraft.pocket import FAMILIES, Family, heldout


@dataclass(frozen=True)
class Task:
    """Holds prompts under a name. group: the heading of its table: math, code or chat, or a file's name.

    num_left_out: prompts that the target has no room to read and answer.
    """

    name: str
    title: str
    group: str
    source: str
    prompts: list[Prompt]
    num_left_out: int = 0

    def about(self) -> TaskAbout:
        """Describe the task for the results."""
        turns = sum(len(prompt.turns) for prompt in self.prompts)
        return TaskAbout(
            name=self.name, title=self.title, group=self.group, source=self.source, num_prompts=len(self.prompts),
            num_turns=turns, num_left_out=self.num_left_out,
        )  # fmt: skip


def reason(question: str) -> str:
    """Put the paper's words around a mathematical question."""
    return f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def code(stub: str) -> str:
    """Put the paper's words around the stub of a function."""
    return f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{stub}\n```"


def contest(statement: str, starter: str) -> str:
    """Put LiveCodeBench's words around one of its problems."""
    how = "Use the following code structure" if starter else "Write your code in the following format"
    return (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{statement}\n\n### Format: {how}:\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)"
    )


@dataclass(frozen=True)
class Benchmark:
    """Says where a benchmark is on the hub, how a row becomes user messages, and how many the paper takes.

    files: JSON lines to read where the data set is a script: LiveCodeBench, whose release v6 is six of them.
    """

    title: str
    group: str
    num_prompts: int
    dataset: str
    config: str | None
    split: str
    turns: Callable[[dict[str, Any]], list[str]]
    files: tuple[str, ...] = ()


BENCHMARKS = {
    "gsm8k": Benchmark("GSM8K", "math", 512, "openai/gsm8k", "main", "test", lambda r: [reason(r["question"])]),
    "math500": Benchmark(
        "MATH-500", "math", 500, "HuggingFaceH4/MATH-500", None, "test", lambda r: [reason(r["problem"])]
    ),
    "aime25": Benchmark("AIME25", "math", 30, "math-ai/aime25", None, "test", lambda r: [reason(r["problem"])]),
    "humaneval": Benchmark(
        "HumanEval", "code", 164, "openai/openai_humaneval", None, "test", lambda r: [code(r["prompt"])]
    ),
    "mbpp": Benchmark(
        "MBPP", "code", 257, "google-research-datasets/mbpp", "sanitized", "test", lambda r: [r["prompt"]]
    ),
    "livecodebench": Benchmark(
        "LCB", "code", 256, "livecodebench/code_generation_lite", None, "test",
        lambda r: [contest(r["question_content"], r["starter_code"])],
        files=("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
    ),
    "mt-bench": Benchmark(
        "MT-Bench", "chat", 80, "HuggingFaceH4/mt_bench_prompts", None, "train", lambda r: r["prompt"]
    ),
}  # fmt: skip
"""The paper's seven, in the order of its tables."""

POCKET_TASKS = {f"pocket-{family}": family for family in FAMILIES}
"""pocket's held-out prompts, built in."""
POCKET_PROMPTS = 64

WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How the placeholders begin that SPEED-Bench is distributed with."""


def task_names() -> list[str]:
    """Return all known names; any other one is a file of prompts."""
    return [*BENCHMARKS, *POCKET_TASKS]


def load_tasks(
    names: Sequence[str] | None = None,
    *,
    folder: str | Path | None = None,
    num_prompts: int | None = None,
    seed: int = 0,
) -> list[Task]:
    """Load tasks by name.

    Args:
        names: of benchmarks, of pocket's tasks, or paths of JSON-lines files; ``benchmarks`` stands for the seven
            and ``pocket`` for the three. pocket's own if not given. A file with categories is a task for each.
        folder: with ``NAME.jsonl`` for the benchmarks; the Hugging Face hub if not given.
        num_prompts: of each task, fewer than the paper takes; chosen by the seed.
        seed: of the choice.
    """
    wanted: list[str] = []
    for name in names or ["pocket"]:
        wanted += {"benchmarks": list(BENCHMARKS), "pocket": list(POCKET_TASKS)}.get(name, [name])
    repeated = {name for name in wanted if wanted.count(name) > 1}
    if repeated:
        raise EvaluationError(f"the task {sorted(repeated)[0]!r} is named twice")
    tasks = [task for name in wanted for task in _load(name, folder, num_prompts, seed)]
    alike = [a.name for a, b in itertools.combinations(tasks, 2) if a.name == b.name]
    if alike:
        raise EvaluationError(f"two files are called {alike[0]!r}: results would not tell them apart; rename one")
    return tasks


def count_prompts(names: Sequence[str], num_prompts: int | None = None) -> list[int]:
    """Return how many prompts each task will have, without downloading any; a benchmark may turn out to have fewer."""
    known = {name: each.num_prompts for name, each in BENCHMARKS.items()}
    counts = list[int]()
    for name in names:
        if name in ("benchmarks", *BENCHMARKS):
            wanted = list(BENCHMARKS) if name == "benchmarks" else [name]
            counts += [min(num_prompts or known[each], known[each]) for each in wanted]
        else:
            counts += [len(task.prompts) for task in load_tasks([name], num_prompts=num_prompts)]
    return counts


def choose(prompts: Sequence[Prompt], num: int, seed: int) -> list[Prompt]:
    """Choose ``num`` of the prompts and keep their order; a smaller choice is part of a larger one."""
    ranks = list(range(len(prompts)))
    random.Random(seed).shuffle(ranks)
    return [prompts[index] for index in sorted(ranks[:num])]


def _load(name: str, folder: str | Path | None, num_prompts: int | None, seed: int) -> list[Task]:
    if name in POCKET_TASKS:
        family = POCKET_TASKS[name]
        assert family in get_args(Family)
        examples = heldout(family, num_prompts or POCKET_PROMPTS)
        prompts = [Prompt(example.id, (example.prompt,)) for example in examples]
        return [Task(name, family.capitalize(), family, "pocket", prompts)]
    if name in BENCHMARKS:
        benchmark = BENCHMARKS[name]
        if folder is not None:
            source = f"{name}.jsonl"
            prompts = read_prompts(Path(folder) / source)
        else:
            source = benchmark.dataset
            prompts = _from_hub(name, benchmark)
        num = min(num_prompts or benchmark.num_prompts, benchmark.num_prompts)
        return [Task(name, benchmark.title, benchmark.group, source, choose(prompts, num, seed))]
    file = Path(name)
    if not file.is_file():
        near = difflib.get_close_matches(name, task_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(task_names())}, or a file of prompts"
        raise EvaluationError(f"unknown task {name!r}; {hint}")
    by_category = read_categories(file)
    if by_category is None:
        prompts = read_prompts(file)
        return [Task(file.stem, file.stem, "other", file.name, choose(prompts, num_prompts or len(prompts), seed))]
    return [
        Task(f"{file.stem}/{category}", category, file.stem, file.name, choose(each, num_prompts or len(each), seed))
        for category, each in by_category.items()
    ]


class CategoryRow(BaseModel):
    """Reads a row of SPEED-Bench or Spec-Bench; other keys, such as ``reference`` and ``source``, are ignored."""

    question_id: str | int | None = None
    id: str | int | None = None
    category: str
    turns: tuple[str, ...]
    system: str | None = None


def read_categories(file: Path) -> dict[str, list[Prompt]] | None:
    """Read a file whose rows have ``turns`` and a ``category``; None if the rows have no categories.

    ``question_id`` or ``id`` names a row, the row's number if there is neither.
    """
    rows = list(parse_rows(file))
    if not any(isinstance(row, dict) and "category" in row for _, row in rows):
        return None
    found: dict[str, list[Prompt]] = {}
    ids: set[str] = set()
    for number, (where, values) in enumerate(rows):
        try:
            row = CategoryRow.model_validate(values)
            name = next((each for each in (row.question_id, row.id) if each is not None), number)
            prompt = Prompt(str(name), row.turns, row.system)
            if not row.category.strip():
                raise ValueError("category is empty")
            if prompt.id in ids:
                raise ValueError(f"the id {prompt.id!r} is taken by an earlier row; ids must differ")
        except ValidationError as error:
            raise EvaluationError(f"{file}, {where}: {explain(error)}") from error
        except ValueError as error:
            raise EvaluationError(f"{file}, {where}: {error}") from error
        if any(WITHHELD in text for text in prompt.turns):
            raise EvaluationError(
                f"{file}, {where}: the prompt is a placeholder. SPEED-Bench leaves out texts of other data sets; its "
                "own preparation script puts them in"
            )
        ids.add(prompt.id)
        found.setdefault(row.category.strip(), []).append(prompt)
    return found


def _from_hub(name: str, benchmark: Benchmark) -> list[Prompt]:
    try:
        table = load_dataset(benchmark.dataset, benchmark.split, benchmark.config, benchmark.files)
        return [Prompt(f"{name}-{index}", tuple(benchmark.turns(row))) for index, row in enumerate(table)]
    except KeyError as error:
        raise EvaluationError(f"{benchmark.dataset} has no column {error}") from error
    except ValueError as error:  # PromptError among them, and rows that are no prompts
        raise EvaluationError(f"{name}: {error}; a folder with {name}.jsonl does as well: --prompts") from error
