"""Data folders: interrupted anywhere, the rows are those of a run left alone; damage is found and named."""

import json
import random
import signal

import pyarrow.parquet as pq
import pytest

from blockdraft.data import (
    Conversation,
    DataError,
    Engine,
    EngineError,
    GenerationSettings,
    LocalEngine,
    Prompt,
    open_dataset,
    regenerate,
)
from blockdraft.targets import Sampling

from killing import killed
from tiny import tiny_target

SETTINGS = GenerationSettings(max_new_tokens=12, max_length=60)
PROMPTS = [Prompt(f"p{i}", (f"w{5 + i % 30} w7", "w8")[: 1 + i % 2]) for i in range(23)]


def make(folder, target=None, *, prompts=PROMPTS, settings=SETTINGS, engine=None, shard_size=5, **options):
    target = target or tiny_target()
    engine = engine or LocalEngine(target, settings, 4)
    return regenerate(prompts, target, engine, settings, folder, shard_size=shard_size, **options)


def rows(folder):
    names = json.loads((folder / "manifest.json").read_text())["shards"]
    return [row for name in names for row in pq.read_table(folder / name).to_pylist()]


class Halting(LocalEngine):
    """Stops after so many conversations, as a crash would."""

    def __init__(self, *args, after):
        super().__init__(*args)
        self.after = after

    def run(self, dialogues):
        for dialogue in super().run(dialogues):
            if self.after == 0:
                raise KeyboardInterrupt
            self.after -= 1
            yield dialogue


class Unordered(Engine):
    """Like a server: answers in any order, and is not asked by shard."""

    name = "unordered"
    by_shard = False

    def __init__(self, fail_after=None):
        self.fail_after, self.asked = fail_after, []

    def describe(self):
        return {"name": self.name}

    def run(self, dialogues):
        for number, dialogue in enumerate(random.Random(len(dialogues)).sample(dialogues, len(dialogues))):
            if number == self.fail_after:
                raise EngineError("the server has gone")
            self.asked.append(dialogue.index)
            while not dialogue.done:
                dialogue.answer([5 + dialogue.index % 30, 0])
            yield dialogue


def test_the_rows_are_all_turns_in_order_and_the_manifest_counts_them(tmp_path):
    target = tiny_target()
    manifest = make(tmp_path, target)
    found = rows(tmp_path)
    assert manifest["complete"]
    assert len(manifest["shards"]) == 5
    conversations = [row["id"].split("#")[0] for row in found]
    assert list(dict.fromkeys(conversations)) == [prompt.id for prompt in PROMPTS]
    assert sum(entry["rows"] for entry in manifest["shards"].values()) == len(found)
    tokens = sum(entry["response_tokens"] for entry in manifest["shards"].values())
    assert tokens == sum(len(row["response_ids"]) for row in found)
    first = Conversation(PROMPTS[0], 0, target, SETTINGS)
    assert found[0]["prompt_ids"] == first.prompt_ids
    paths = open_dataset(tmp_path, target)
    assert len(paths) == len(found)
    for index, row in enumerate(found):
        assert paths[index].tolist() == row["prompt_ids"] + row["response_ids"]
        assert paths.prompt_lengths[index] == len(row["prompt_ids"])


@pytest.mark.parametrize("after", [0, 3, 5, 11, 22])
def test_an_interrupted_run_goes_on_to_the_same_rows(tmp_path, after):
    target = tiny_target()
    make(tmp_path / "whole", target)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "parts", target, engine=Halting(target, SETTINGS, 4, after=after))
    seen = []
    make(tmp_path / "parts", target, on_progress=lambda num, _tokens, new: seen.append((num, new)))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert sum(num for num, _new in seen) == len(PROMPTS)
    assert sum(num for num, new in seen if not new) == after // 5 * 5


def test_an_engine_that_is_not_exact_loses_nothing_it_has_finished(tmp_path):
    engines = [Unordered(9), Unordered(4), Unordered()]
    for engine in engines[:2]:
        with pytest.raises(EngineError, match="gone"):
            make(tmp_path / "parts", engine=engine)
    with (tmp_path / "parts" / "journal.jsonl").open("ab") as file:
        file.write(b'{"index": 3, "rows": [')  # cut short by a crash
    make(tmp_path / "parts", engine=engines[2])
    asked = [index for engine in engines for index in engine.asked]
    assert sorted(asked) == list(range(len(PROMPTS)))
    make(tmp_path / "whole", engine=Unordered())
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert not (tmp_path / "parts" / "journal.jsonl").exists()


def test_a_finished_folder_asks_the_engine_for_nothing(tmp_path):
    make(tmp_path, engine=Unordered())
    again = Unordered()
    make(tmp_path, engine=again)
    assert again.asked == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": GenerationSettings(Sampling(0.7), 12, 60)}, "temperature 1.0 there, 0.7 here"),
        ({"settings": GenerationSettings(Sampling(top_k=20), 12, 60)}, "top_k 0 there, 20 here"),
        ({"settings": GenerationSettings(max_new_tokens=12, max_length=60, seed=1)}, "seed 42 there, 1 here"),
        ({"prompts": PROMPTS[:-1]}, "num_prompts 23 there, 22 here"),
        ({"shard_size": 4}, "shard_size 5 there, 4 here"),
        ({"engine": Unordered()}, "engine .* there, .*unordered.* here"),
        ({"target": tiny_target(seed=3)}, "target '[0-9a-f]{16}' there"),
    ],
)
def test_a_folder_begun_with_something_else_is_refused(tmp_path, change, message):
    make(tmp_path)
    before = rows(tmp_path)
    with pytest.raises(DataError, match=message):
        make(tmp_path, **change)
    assert rows(tmp_path) == before


def test_damage_is_found_and_named(tmp_path):
    make(tmp_path)
    shard = tmp_path / "shard-00002.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-20])
    for reader in (lambda: open_dataset(tmp_path), lambda: make(tmp_path)):
        with pytest.raises(DataError, match=r"shard-00002.parquet is not as it was written"):
            reader()
    altered = bytearray(content)
    altered[len(content) // 2] ^= 1
    shard.write_bytes(altered)
    with pytest.raises(DataError, match=r"shard-00002.parquet is not as it was written"):
        open_dataset(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00002.parquet is missing"):
        open_dataset(tmp_path)


def test_a_deleted_shard_is_made_anew_as_it_was(tmp_path):
    make(tmp_path)
    before = rows(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["shards"]["shard-00002.parquet"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "shard-00002.parquet").unlink()
    make(tmp_path)
    assert rows(tmp_path) == before


def test_other_folders_and_damaged_manifests_are_refused(tmp_path):
    with pytest.raises(DataError, match="is not a data folder"):
        open_dataset(tmp_path)
    (tmp_path / "other.parquet").touch()
    with pytest.raises(DataError, match="holds Parquet files but no manifest"):
        make(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1,')
    with pytest.raises(DataError, match="is damaged"):
        open_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="has format 99"):
        open_dataset(tmp_path)


def test_data_of_another_target_or_template_is_refused(tmp_path):
    target = tiny_target()
    make(tmp_path, target)
    with pytest.raises(DataError, match=r"was sampled from tiny qwen3 .* not from tiny llama"):
        open_dataset(tmp_path, tiny_target("llama"))
    target = tiny_target()
    usual = target.tokenizer.chat_template
    try:
        target.tokenizer.chat_template = usual + " "
        with pytest.raises(DataError, match="another chat template"):
            open_dataset(tmp_path, target)
    finally:
        target.tokenizer.chat_template = usual


def test_an_unfinished_folder_is_opened_only_if_asked(tmp_path):
    target = tiny_target()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, target, engine=Halting(target, SETTINGS, 4, after=12))
    with pytest.raises(DataError, match="has 2 of 5 shards; run the same data regenerate again"):
        open_dataset(tmp_path, target)
    assert len(open_dataset(tmp_path, target, partial=True)) == len(rows(tmp_path))


def test_texts_longer_than_the_target_reads_and_no_prompts_are_refused(tmp_path):
    with pytest.raises(DataError, match="reads texts of up to 512 tokens"):
        make(tmp_path, settings=GenerationSettings(max_length=513))
    with pytest.raises(DataError, match="there are no prompts"):
        make(tmp_path, prompts=[])


def test_killed_at_random_moments_the_final_rows_are_those_of_an_uninterrupted_run(tmp_path):
    make(tmp_path / "whole")
    source = "import pathlib, test_regenerate as t\nwork = lambda folder: t.make(pathlib.Path(folder))"
    ended = list(killed(source, tmp_path / "parts", kills=12, within=0.4, seed=7))
    assert ended[-1] == 0
    assert signal.SIGKILL in ended[:-1]
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    left = {path.name for path in (tmp_path / "parts").iterdir()}
    assert left == {".lock", "manifest.json", *(f"shard-{i:05d}.parquet" for i in range(5))}
