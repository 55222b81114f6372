"""Files, data sets on disk, presets and pocket's generator."""

import json
import sys
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from blockdraft.data import Prompt, PromptError
from blockdraft.data.prompts import Dropped
from blockdraft.data.selection import PRESETS, load_dataset, pocket_prompts, read_source, select
from blockdraft.pocket.corpus import split_of

ROWS = [
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "source": "x"},
    {"conversations": [{"from": "tool", "value": "Hi"}], "source": "x"},
]
EXPECTED = [("Hi",), Dropped("unknown role 'tool'")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("blockdraft.data.selection.refuse_unreachable_hub", lambda *_: None)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_a_file(name, tmp_path):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, ROWS)) if name.endswith("l") else json.dumps(ROWS))
    assert list(read_source(str(path))) == [Prompt("chats-0", ("Hi",), source="x"), EXPECTED[1]]


def test_a_folder_of_parquet_and_its_splits(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{**row, "other": 1.5} for row in ROWS]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    assert list(read_source(str(folder))) == [Prompt("chats-train-0", ("Hi",), source="x"), EXPECTED[1]]
    assert next(read_source(str(folder), split="test")) == Prompt("chats-test-0", ("Hi",), source="x")
    with pytest.raises(PromptError, match='split dev: cannot be loaded as a data set: Unknown split "dev"'):
        list(read_source(str(folder), split="dev"))


def test_a_folder_without_conversations(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "Hi", "answer": "Ho"}\n')
    with pytest.raises(PromptError, match=r"no column messages, .* or prompt .*it has question, answer"):
        list(read_source(str(tmp_path)))


def test_an_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match="empty, split train: cannot be loaded as a data set"):
        list(read_source(str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("name", "split", "asked"),
    [
        ("open-perfectblend", None, ("mlabonne/open-perfectblend", "train")),
        ("open-perfectblend", "train[:10]", ("mlabonne/open-perfectblend", "train[:10]")),
        ("someone/chats", None, ("someone/chats", "train")),
        ("someone/chats", "test", ("someone/chats", "test")),
    ],
)
def test_a_name_is_asked_of_the_hub(name, split, asked, monkeypatch):
    calls = []

    def load_dataset(name, config, split):
        assert config is None
        calls.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(read_source(name, split=split))
    assert calls == [asked]
    assert rows[0].id == f"{asked[0].split('/')[1]}-{asked[1]}-0"
    assert rows[1] == EXPECTED[1]


def test_a_hub_that_cannot_be_reached(monkeypatch):
    def load_dataset(name, config, split):  # noqa: ARG001
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(PromptError, match=r"^someone/chats, split train: cannot be loaded as a data set: no route$"):
        list(read_source("someone/chats"))


def test_files_of_a_data_set_that_is_a_script(tmp_path):
    (tmp_path / "lists.py").write_text("raise RuntimeError('a script')\n")
    for number, row in enumerate(ROWS):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps(row) + "\n")
    table = load_dataset(str(tmp_path), "test", files=[f"part{number}.jsonl" for number in range(len(ROWS))])
    assert [row["conversations"][0]["from"] for row in table] == ["human", "tool"]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match=r"needs the package datasets: pip install 'blockdraft\[datasets\]'$"):
        list(read_source("someone/chats"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "./nowhere: no such file or folder"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file or folder"),
        ("nowhere.jsonl.gz", "no such file or folder"),
        ("open-perfect-blend", "did you mean open-perfectblend?"),
        ("Pocket", "did you mean pocket?"),
    ],
)
def test_a_name_that_is_nothing_is_not_asked_of_the_hub(name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())
    with pytest.raises(PromptError) as caught:
        list(read_source(name))
    assert message in str(caught.value)


def test_a_file_has_no_splits(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(PromptError, match="is a file and has no splits"):
        read_source(str(tmp_path / "a.jsonl"), split="train")


def test_presets_name_a_data_set_each():
    assert PRESETS["open-perfectblend"].id == "mlabonne/open-perfectblend"
    assert all(preset.id.count("/") == 1 and preset.split for preset in PRESETS.values())


def test_pocket_mixes_families_and_turns():
    prompts = list(islice(pocket_prompts(0), 2000))
    families = Counter(prompt.source for prompt in prompts)
    assert 500 < families["pocket/math"] < 700
    assert 500 < families["pocket/code"] < 700
    assert 700 < families["pocket/chat"] < 900
    turns = Counter(len(prompt.turns) for prompt in prompts)
    assert turns.keys() == {1, 2}
    assert 150 < turns[2] < 250
    assert len({prompt.id for prompt in prompts}) == 2000
    assert all(split_of(text) == "train" for prompt in prompts for text in prompt.turns)


def test_pocket_is_a_function_of_the_seed():
    def some(*arguments):
        return list(islice(pocket_prompts(*arguments), 50))

    assert some(3) == some(3)
    assert some(3) != some(4)
    assert {prompt.source for prompt in some(3, "code")} == {"pocket/code"}
    with pytest.raises(PromptError, match=r"unknown family 'poetry' .*known: math, code, chat"):
        some(3, "poetry")


def test_real_training_prompts_all_pass(real_prompts):
    path = real_prompts / "train_prompts.jsonl"
    summary = select(read_source(str(path)), num=500, heldout=50).summary
    assert summary.to_dict() == {
        "read": 19877,
        "kept": 500,
        "heldout": 50,
        "dropped": {"more than asked for": 19877 - 550},
    }
