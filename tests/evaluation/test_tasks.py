"""Which prompts are asked."""

import json
from inspect import signature

import datasets
import pytest

from blockdraft.cli.evaluate import evaluate
from blockdraft.data import Prompt, write_prompts
from blockdraft.evaluation import EvaluationError, Protocol, load_tasks
from blockdraft.evaluation.tasks import BENCHMARKS, choose, code, contest, reason


def test_pocket_is_the_default_and_built_in():
    tasks = load_tasks()
    assert [(task.name, task.group, len(task.prompts)) for task in tasks] == [
        ("pocket-math", "math", 64), ("pocket-code", "code", 64), ("pocket-chat", "chat", 64),
    ]  # fmt: skip
    assert load_tasks(num_prompts=5)[0].prompts == tasks[0].prompts[:5]


def test_the_protocol_is_the_papers():
    counts = {name: (each.group, each.num_prompts) for name, each in BENCHMARKS.items()}
    assert counts == {
        "gsm8k": ("math", 512), "math500": ("math", 500), "aime25": ("math", 30), "humaneval": ("code", 164),
        "mbpp": ("code", 257), "livecodebench": ("code", 256), "mt-bench": ("chat", 80),
    }  # fmt: skip
    protocol = Protocol()
    assert (protocol.rules, protocol.temperature, protocol.max_new_tokens) == (("greedy", "token", "block"), 1.0, 256)
    assert protocol.dynamics_texts * protocol.dynamics_blocks == 4096
    given = signature(evaluate).parameters
    assert {name: given[name].default for name in ("temperature", "max_new_tokens", "dynamics_texts")} == {
        "temperature": 1.0, "max_new_tokens": 256, "dynamics_texts": 512,
    }  # fmt: skip


def test_fewer_prompts_are_a_part_of_more_and_chosen_by_the_seed():
    prompts = [Prompt(str(i), ("?",)) for i in range(100)]
    few, more = choose(prompts, 10, seed=1), choose(prompts, 30, seed=1)
    assert len(few) == 10
    assert set(few) < set(more)
    assert choose(prompts, 10, seed=1) == few != choose(prompts, 10, seed=2)
    assert [int(p.id) for p in more] == sorted(int(p.id) for p in more)


def test_a_file_is_a_task(tmp_path):
    write_prompts({tmp_path / "mine.jsonl": [Prompt("a", ("one",)), Prompt("b", ("two", "three"))]})
    (task,) = load_tasks([str(tmp_path / "mine.jsonl")])
    about = task.about()
    assert (about.name, about.num_prompts, about.num_turns) == ("mine", 2, 3)


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_file_with_categories_is_a_task_for_each(tmp_path):
    """Keys as in Spec-Bench (numbers as ids, references) and as in SPEED-Bench."""
    spec_bench = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "reference": []},
        {"question_id": 161, "category": "translation", "turns": ["Translate."], "reference": ["..."]},
        {"question_id": 82, "category": "writing", "turns": ["Write more."]},
    ]
    speed_bench = [
        {"question_id": f"{name}-{i}", "category": name, "sub_category": None, "turns": [f"{name} {i}?"], "source": "x",
         "src_id": "1", "difficulty": "easy", "multiturn": False}
        for i in range(8)
        for name in ("coding", "rag")
    ]  # fmt: skip
    files = [
        write_rows(tmp_path / "spec.jsonl", spec_bench), write_rows(tmp_path / "speed.jsonl", speed_bench)
    ]  # fmt: skip
    tasks = load_tasks(files)
    assert [(task.name, task.title, task.group, len(task.prompts)) for task in tasks] == [
        ("spec/writing", "writing", "spec", 2), ("spec/translation", "translation", "spec", 1),
        ("speed/coding", "coding", "speed", 8), ("speed/rag", "rag", "speed", 8),
    ]  # fmt: skip
    assert tasks[0].prompts == [Prompt("81", ("Write.", "Shorter.")), Prompt("82", ("Write more.",))]
    assert tasks[0].about().num_turns == 3
    few = load_tasks(files, num_prompts=2, seed=1)
    assert [len(task.prompts) for task in few] == [2, 1, 2, 2]
    assert set(few[2].prompts) < set(tasks[2].prompts)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"category": "a", "turns": ["x"]}, {"turns": ["y"]}], "line 2: category: Field required"),
        ([{"category": "a"}], "line 1: turns: Field required"),
        ([{"category": "a", "turns": "x"}], "line 1: turns: Input should be"),
        ([{"category": "a", "turns": []}], "line 1: no user message"),
        ([{"category": "a", "turns": [" "]}], "line 1: user message is empty"),
        ([{"category": " ", "turns": ["x"]}], "line 1: category is empty"),
        ([{"id": 1, "category": "a", "turns": ["x"]}] * 2, "line 2: the id '1' is taken"),
        (
            [{"category": "a", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}],
            "line 1: the prompt is a placeholder",
        ),
    ],
)
def test_rows_with_categories_that_cannot_be_asked(tmp_path, rows, message):
    with pytest.raises(EvaluationError, match=rf"mine\.jsonl, {message}"):
        load_tasks([write_rows(tmp_path / "mine.jsonl", rows)])


@pytest.mark.parametrize(
    ("names", "message"),
    [(["gsm8"], "did you mean 'gsm8k'"), (["zzz"], "or a file of prompts"), (["pocket", "pocket-math"], "named twice")],
)
def test_mistakes(names, message):
    with pytest.raises(EvaluationError, match=message):
        load_tasks(names)


def test_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_prompts({tmp_path / folder / "mine.jsonl": [Prompt(folder, ("Hi",))]})
    with pytest.raises(EvaluationError, match="two files are called 'mine'"):
        load_tasks([str(tmp_path / folder / "mine.jsonl") for folder in ("a", "b")])


def test_the_hub_is_not_there(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EvaluationError, match=r"aime25\.jsonl"):
        load_tasks(["aime25"])


def test_what_is_asked_of_the_hub(monkeypatch):
    asked = {}
    columns = {"question": "Q", "problem": "P", "prompt": "C", "question_content": "S", "starter_code": ""}

    def load_dataset(name, config=None, *, split, data_files=()):
        asked[data_files[0].split("/test")[0] if data_files else name] = (config, split, len(data_files))
        return datasets.Dataset.from_list([columns | {"prompt": ["A", "B"] if "mt_bench" in name else "C"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("blockdraft.data.selection.refuse_unreachable_hub", lambda *_: None)
    tasks = load_tasks(["benchmarks"])
    assert asked == {
        "openai/gsm8k": ("main", "test", 0), "HuggingFaceH4/MATH-500": (None, "test", 0),
        "math-ai/aime25": (None, "test", 0), "openai/openai_humaneval": (None, "test", 0),
        "google-research-datasets/mbpp": ("sanitized", "test", 0),
        "hf://datasets/livecodebench/code_generation_lite": (None, "train", 6),
        "HuggingFaceH4/mt_bench_prompts": (None, "train", 0),
    }  # fmt: skip
    turns = {task.name: task.prompts[0].turns for task in tasks}
    assert turns["mt-bench"] == ("A", "B")
    assert turns["mbpp"] == ("C",)
    assert turns["math500"][0].startswith("P\nPlease reason")
    assert "### Question:\nS" in turns["livecodebench"][0]


def test_the_seven_from_a_folder(real_prompts):
    tasks = load_tasks(["benchmarks"], folder=real_prompts)
    assert [len(task.prompts) for task in tasks] == [512, 500, 30, 164, 257, 256, 80]
    assert sum(task.about().num_turns for task in tasks) == 1879  # generations
    assert {len(prompt.turns) for prompt in tasks[-1].prompts} == {2}


def test_wrappers_are_those_of_the_files(real_prompts):
    def rows(name):
        with (real_prompts / f"{name}.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line)["turns"][0] for line in file]

    end = reason("")
    for name in ("gsm8k", "math500", "aime25"):
        assert all(text.endswith(end) and reason(text.removesuffix(end)) == text for text in rows(name))
    for text in rows("humaneval"):
        before, _, after = code("|").partition("|")
        assert text.startswith(before)
        assert text.endswith(after)
    for text in rows("livecodebench"):
        statement, _, rest = text.partition("### Question:\n")[2].rpartition("\n\n### Format: ")
        starter = rest.partition("```python\n")[2].rpartition("\n```")[0]
        assert contest(statement, "" if starter == "# YOUR CODE HERE" else starter) == text
