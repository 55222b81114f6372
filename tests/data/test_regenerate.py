"""Data folders: interrupted anywhere, the rows are those of a run left alone; damage is found and named."""

import json
import random
import shutil
import signal
from dataclasses import asdict

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
    read_completions,
    read_manifest,
    regenerate,
)
from blockdraft.decoding import generate
from blockdraft.targets import Sampling

from killing import killed
from tiny import tiny_target

SETTINGS = GenerationSettings(max_new_tokens=12, max_length=60)
PROMPTS = [Prompt(f"p{i}", (f"w{5 + i % 30} w7", "w8")[: 1 + i % 2]) for i in range(23)]


def make(folder, target=None, *, prompts=PROMPTS, settings=SETTINGS, engine=None, shard_size=5, **options):
    target = target or tiny_target()
    engine = engine or LocalEngine(target, 4)
    return regenerate(prompts, target, settings, folder, engine=engine, shard_size=shard_size, **options)


def rows(folder):
    names = json.loads((folder / "manifest.json").read_text())["shards"]
    return [row for name in names for row in pq.read_table(folder / name).to_pylist()]


class Halting(LocalEngine):
    """Stops after so many conversations, as a crash would."""

    def __init__(self, *args, after):
        super().__init__(*args)
        self.after = after

    def run(self, conversations):
        for conversation in super().run(conversations):
            if self.after == 0:
                raise KeyboardInterrupt
            self.after -= 1
            yield conversation


class Unordered(Engine):
    """Like a server: answers in any order, is not asked by shard, and cannot answer the prompts that are ``odd``."""

    name = "unordered"
    repeatable = False

    def __init__(self, fail_after=None, odd=()):
        self.fail_after, self.odd, self.asked = fail_after, odd, []

    def prepare(self, target, sampling):
        pass

    def describe(self):
        return {"servers": []}

    def run(self, conversations):
        conversations = list(conversations)
        for number, each in enumerate(random.Random(len(conversations)).sample(conversations, len(conversations))):
            if number == self.fail_after:
                raise EngineError("the server has gone")
            self.asked.append(each.index)
            if each.index in self.odd:
                each.fail("the server failed on it")
            while not each.done:
                each.answer([5 + each.index % 30, 0])
            yield each


def test_the_rows_are_all_turns_in_order_and_the_manifest_counts_them(tmp_path):
    target = tiny_target()
    manifest = make(tmp_path, target)
    found = rows(tmp_path)
    assert manifest == read_manifest(tmp_path)
    assert manifest.complete
    assert len(manifest.shards) == 5
    conversations = [row["id"].split("#")[0] for row in found]
    assert list(dict.fromkeys(conversations)) == [prompt.id for prompt in PROMPTS]
    assert manifest.totals.rows == len(found)
    assert manifest.totals.response_tokens == sum(len(row["response_ids"]) for row in found)
    assert found[0]["prompt_ids"] == Conversation(PROMPTS[0], target, SETTINGS).request.prompt_ids
    dataset = open_dataset(tmp_path, target)
    assert len(dataset) == len(found)
    for index, row in enumerate(found):
        assert dataset[index].tolist() == row["prompt_ids"] + row["response_ids"]
        assert dataset.prompt_lengths[index] == len(row["prompt_ids"])
    assert [asdict(each) for each in read_completions(tmp_path)] == found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder that was made in one go, for tests that do not change it; `copied` is for those that do."""
    folder = tmp_path_factory.mktemp("whole")
    make(folder)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A finished folder of a test's own."""
    return shutil.copytree(whole, tmp_path / "copied")


@pytest.mark.parametrize("after", [3, 22, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 5, 11))])
def test_an_interrupted_run_resumes_to_the_same_rows(tmp_path, whole, after):
    target = tiny_target()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "parts", target, engine=Halting(target, 4, after=after))
    seen = []
    make(tmp_path / "parts", target, on_progress=lambda num, _tokens, new: seen.append((num, new)))
    assert rows(tmp_path / "parts") == rows(whole)
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


@pytest.mark.parametrize("num_first", [pytest.param(10, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize("interrupted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_grows_by_more_prompts_to_the_rows_that_all_of_them_give(tmp_path, num_first, interrupted):
    target = tiny_target()
    make(tmp_path / "whole", target)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "grown", target, prompts=PROMPTS[:num_first], engine=Halting(target, 4, after=6))
    else:
        make(tmp_path / "grown", target, prompts=PROMPTS[:num_first])
    seen = []
    manifest = make(tmp_path / "grown", target, on_progress=lambda num, _tokens, new: seen.append((num, new)))
    assert manifest == read_manifest(tmp_path / "whole")
    assert rows(tmp_path / "grown") == rows(tmp_path / "whole")
    assert sum(num for num, new in seen if not new) == (5 if interrupted else 10)  # whole shards of five are kept


def test_a_folder_of_an_unexact_engine_grows_as_well(tmp_path):
    make(tmp_path / "grown", prompts=PROMPTS[:12], engine=Unordered())
    later = Unordered()
    make(tmp_path / "grown", engine=later)
    assert sorted(later.asked) == list(range(10, len(PROMPTS)))
    make(tmp_path / "whole", engine=Unordered())
    assert rows(tmp_path / "grown") == rows(tmp_path / "whole")


def test_every_prompt_is_answered_several_times_by_draws_of_its_own(tmp_path):
    make(tmp_path / "once")
    manifest = make(tmp_path / "thrice", num_responses=3)
    once, thrice = rows(tmp_path / "once"), rows(tmp_path / "thrice")
    assert manifest.complete
    assert manifest.num_shards == -(-3 * len(PROMPTS) // 5)
    conversations = list(dict.fromkeys(row["id"].split("#")[0] for row in thrice))
    assert conversations == [f"p{i}{again}" for again in ("", "@1", "@2") for i in range(len(PROMPTS))]
    assert [row["id"] for row in thrice[: len(once)]] == [row["id"] for row in once]
    first = {row["id"]: row for row in thrice if row["id"].endswith("#0")}
    for prompt in PROMPTS:
        same = [first[f"{prompt.id}{again}#0"] for again in ("", "@1", "@2")]
        assert len({tuple(row["prompt_ids"]) for row in same}) == 1
    different = [
        first[f"{prompt.id}#0"]["response_ids"] != first[f"{prompt.id}@1#0"]["response_ids"] for prompt in PROMPTS
    ]
    assert sum(different) > len(PROMPTS) // 2


@pytest.mark.parametrize("interrupted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_grows_by_more_responses_to_the_rows_that_all_of_them_give(tmp_path, interrupted):
    make(tmp_path / "whole", num_responses=2)
    make(tmp_path / "grown")
    if interrupted:
        target = tiny_target()
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "grown", target, engine=Halting(target, 4, after=9), num_responses=2)
    make(tmp_path / "grown", num_responses=2)
    assert rows(tmp_path / "grown") == rows(tmp_path / "whole")
    with pytest.raises(DataError, match="num_responses 2 there, 1 here"):
        make(tmp_path / "grown")
    before = (tmp_path / "grown" / "manifest.json").read_bytes()
    with pytest.raises(DataError, match="num_prompts 23 there, 22 here"):
        make(tmp_path / "grown", prompts=PROMPTS[:-1], num_responses=3)
    with pytest.raises(DataError, match="num_prompts 23 there, 24 here"):  # their answers would not come first
        make(tmp_path / "grown", prompts=[*PROMPTS, Prompt("new", ("w9",))], num_responses=2)
    with pytest.raises(DataError, match="num_prompts 23 there, 24 here"):
        make(tmp_path / "grown", prompts=[*PROMPTS, Prompt("new", ("w9",))], num_responses=3)
    assert (tmp_path / "grown" / "manifest.json").read_bytes() == before


def test_several_answers_to_one_prompt_are_held_out_together(tmp_path):
    make(tmp_path, num_responses=4)
    ids = [row["id"].split("#")[0].split("@")[0] for row in rows(tmp_path)]
    texts = open_dataset(tmp_path)
    for seed in range(5):
        training, heldout = texts.split(10, seed)
        parts = [{ids[row] for row in part.whole[1]} for part in (training, heldout)]
        assert not parts[0] & parts[1]
        assert parts[0] | parts[1] == set(ids)
        assert 10 <= len(heldout) <= 10 + 4 * 2
        assert len(training) + len(heldout) == len(texts)
        again, more = training.split(8, seed)
        assert not {ids[row] for row in again.whole[1]} & {ids[row] for row in more.whole[1]}
    assert len(texts.split(0)[1]) == 0
    assert texts.split(10)[1].first_responses.tolist() == list(
        range(len({ids[i] for i in texts.split(10)[1].whole[1]}))
    )
    with pytest.raises(
        DataError, match=f"cannot hold out {len(texts) - 1} of .* of the 23 that they answer one must be left"
    ):
        texts.split(len(texts) - 1)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_k=1)])
def test_equal_answers_are_not_asked_for_twice(tmp_path, sampling):
    settings = GenerationSettings(sampling, max_new_tokens=4, max_length=60)
    with pytest.raises(DataError, match="all answers to a prompt are the same"):
        make(tmp_path, settings=settings, num_responses=2)
    assert make(tmp_path, settings=settings).complete


def test_an_id_that_could_be_a_further_responses_is_refused(tmp_path):
    named = [Prompt("a@1", ("w5",)), Prompt("b", ("w6",))]
    with pytest.raises(DataError, match="'a@1' ends in @ and a number"):
        make(tmp_path, prompts=named, num_responses=2)
    assert not list(tmp_path.iterdir())
    assert make(tmp_path, prompts=named).complete
    with pytest.raises(DataError, match="num_responses must be at least 1, got 0"):
        make(tmp_path, num_responses=0)


def test_a_folder_of_other_prompts_does_not_grow(tmp_path):
    make(tmp_path, prompts=PROMPTS[1:12])
    before = rows(tmp_path), read_manifest(tmp_path)
    with pytest.raises(DataError, match="num_prompts 11 there, 23 here"):
        make(tmp_path)
    with pytest.raises(DataError, match=r"temperature 1\.0 there, 0\.7 here"):
        make(tmp_path, prompts=PROMPTS[1:13], settings=GenerationSettings(Sampling(0.7), 12, 60))
    assert (rows(tmp_path), read_manifest(tmp_path)) == before


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
def test_a_folder_begun_with_something_else_is_refused(copied, change, message):
    before = rows(copied)
    with pytest.raises(DataError, match=message):
        make(copied, **change)
    assert rows(copied) == before


def test_damage_is_found_and_named(copied):
    shard = copied / "shard-00002.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-20])
    for reader in (lambda: open_dataset(copied), lambda: make(copied)):
        with pytest.raises(DataError, match=r"shard-00002.parquet is not as it was written"):
            reader()
    altered = bytearray(content)
    altered[len(content) // 2] ^= 1
    shard.write_bytes(altered)
    with pytest.raises(DataError, match=r"shard-00002.parquet is not as it was written"):
        open_dataset(copied)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00002.parquet is missing"):
        open_dataset(copied)


def test_a_deleted_shard_is_made_anew_as_it_was(copied):
    before = rows(copied)
    manifest = json.loads((copied / "manifest.json").read_text())
    del manifest["shards"]["shard-00002.parquet"]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    (copied / "shard-00002.parquet").unlink()
    make(copied)
    assert rows(copied) == before


def test_data_of_another_target_or_template_is_refused(whole):
    with pytest.raises(DataError, match=r"was sampled from tiny qwen3 .* not from tiny llama"):
        open_dataset(whole, tiny_target("llama"))
    target = tiny_target()
    usual = target.tokenizer.chat_template
    try:
        target.tokenizer.chat_template = usual + " "
        with pytest.raises(DataError, match="another chat template"):
            open_dataset(whole, target)
    finally:
        target.tokenizer.chat_template = usual


def test_an_unfinished_folder_is_opened_only_if_asked(tmp_path):
    target = tiny_target()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, target, engine=Halting(target, 4, after=12))
    with pytest.raises(DataError, match="has 2 of 5 shards; run the same data regenerate again"):
        open_dataset(tmp_path, target)
    assert len(open_dataset(tmp_path, target, partial=True)) == len(rows(tmp_path))


def test_texts_longer_than_the_target_reads_and_no_prompts_are_refused(tmp_path):
    with pytest.raises(DataError, match="reads texts of up to 512 tokens"):
        make(tmp_path, settings=GenerationSettings(max_length=513))
    with pytest.raises(DataError, match="there are no prompts"):
        make(tmp_path, prompts=[])
    with pytest.raises(DataError, match="shard_size must be at least 1"):
        make(tmp_path, shard_size=0)
    assert list(tmp_path.iterdir()) == []


def test_killed_at_random_moments_the_final_rows_are_those_of_an_uninterrupted_run(tmp_path):
    make(tmp_path / "whole")
    source = "import pathlib, test_regenerate as t\nwork = lambda folder: t.make(pathlib.Path(folder))"
    ended = list(killed(source, tmp_path / "parts", kills=12, within=0.4, seed=7))
    assert ended[-1] == 0
    assert signal.SIGKILL in ended[:-1]
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    left = {path.name for path in (tmp_path / "parts").iterdir()}
    assert left == {".lock", "manifest.json", *(f"shard-{i:05d}.parquet" for i in range(5))}


def test_the_sampling_in_the_manifest_is_what_was_sampled(tmp_path):
    """There is one place to say it: a greedy folder holds the greedy text, whatever the engine did before."""
    target = tiny_target()
    engine = LocalEngine(target, 4)
    greedy = GenerationSettings(Sampling(0.0), 12, 60)
    sampled = make(tmp_path / "sampled", target, engine=engine)
    manifest = make(tmp_path / "greedy", target, settings=greedy, engine=engine)
    assert (sampled.identity.sampling, manifest.identity.sampling) == (Sampling(), Sampling(0.0))
    for row in read_completions(tmp_path / "greedy"):
        assert row.response_ids == generate(target, None, row.prompt_ids, rule="greedy", max_new_tokens=12).tokens
    assert rows(tmp_path / "sampled") != rows(tmp_path / "greedy")


def test_an_engine_with_another_target_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(EngineError, match="give the engine the very target"):
        make(tmp_path / "new", tiny_target(), engine=LocalEngine(tiny_target(seed=1)))
    assert not (tmp_path / "new").exists()


def test_conversations_that_an_engine_fails_on_are_dropped_and_counted(tmp_path):
    manifest = make(tmp_path, engine=Unordered(odd={3, 17}))
    assert manifest.totals.dropped == {"the server failed on it": 2}
    kept = {row["id"].split("#")[0] for row in rows(tmp_path)}
    assert kept == {prompt.id for prompt in PROMPTS} - {"p3", "p17"}


def test_an_engine_that_fails_on_nearly_all_is_an_error_and_all_are_asked_again(tmp_path):
    everything = range(len(PROMPTS))
    with pytest.raises(
        DataError, match=r"failed on 22 of 23 conversations \(the server failed on it: 22\).*asks again"
    ):
        make(tmp_path, engine=Unordered(odd={*everything} - {5}))
    mended = Unordered()
    make(tmp_path, engine=mended)
    assert sorted(mended.asked) == [index for index in everything if index != 5]
    make(tmp_path / "whole", engine=Unordered())
    assert rows(tmp_path) == rows(tmp_path / "whole")


def test_few_failures_among_many_are_written_down_before_the_end(tmp_path):
    """Every shard has a failure: if they waited for the end, all rows would wait in memory with them."""
    many = [Prompt(f"p{i}", ("w5",)) for i in range(300)]
    written = []

    class InOrder(Unordered):
        def run(self, conversations):
            for each in conversations:
                yield from super().run([each])
                written.append(len(list(tmp_path.glob("*.parquet"))))

    manifest = make(tmp_path, prompts=many, engine=InOrder(odd=range(0, 300, 30)), shard_size=30)
    assert manifest.totals.dropped == {"the server failed on it": 10}
    assert (written[59], written[150], written[299]) == (0, 5, 10)


def test_an_engine_that_fails_on_nearly_all_is_stopped_early(tmp_path):
    many = [Prompt(f"p{i}", ("w5",)) for i in range(500)]
    engine = Unordered(odd=range(500))
    with pytest.raises(DataError, match="failed on 64 of 64 conversations"):
        make(tmp_path, prompts=many, engine=engine)
    assert len(engine.asked) == 64


def test_a_failure_that_is_left_over_after_an_interruption_is_no_reason_to_stop(tmp_path):
    """What counts is the whole folder: one odd conversation may be the last that is left."""
    with pytest.raises(EngineError, match="gone"):
        make(tmp_path, engine=Unordered(fail_after=22))
    (left,) = {*range(len(PROMPTS))} - {json.loads(line)["index"] for line in journal(tmp_path)}
    manifest = make(tmp_path, engine=Unordered(odd={left}))
    assert manifest.totals.dropped == {"the server failed on it": 1}


def test_a_folder_in_which_nearly_nothing_was_kept_is_an_error(tmp_path):
    settings = GenerationSettings(max_new_tokens=12, max_length=4)
    for _ in range(2):  # also when it is complete already
        with pytest.raises(DataError, match=r"nearly nothing was kept: 0 responses of 23 .*prompt too long: 23"):
            make(tmp_path, settings=settings)


def journal(folder):
    return (folder / "journal.jsonl").read_bytes().splitlines()


def journal_line(index, response_ids, finish="stop"):
    row = {"id": f"p{index}#0", "prompt_ids": [5], "response_ids": response_ids, "finish_reason": finish}
    return json.dumps({"index": index, "rows": [row], "dropped": None}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"{}",
        b"[1, 2]",
        journal_line(0, [True, 0]),
        journal_line(0, [99, 0]),
        journal_line(0, ["7", 0]),
        journal_line(0, [7], "tired"),
        journal_line(99, [7, 0]),
        journal_line(True, [7, 0]),
    ],
)
def test_a_damaged_line_of_the_journal_is_asked_again(tmp_path, line):
    with pytest.raises(EngineError, match="gone"):
        make(tmp_path, engine=Unordered(fail_after=9))
    kept = journal(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join([*kept[:4], line, *kept[4:]]) + b"\n")
    engine = Unordered()
    with pytest.warns(UserWarning, match="damaged in line 5; these conversations are asked again"):
        make(tmp_path, engine=engine)
    assert len(engine.asked) == len(PROMPTS) - 9
    make(tmp_path / "whole", engine=Unordered())
    assert rows(tmp_path) == rows(tmp_path / "whole")


def test_an_engine_that_loses_conversations_does_not_lose_the_journal(tmp_path):
    class Forgetful(Unordered):
        def run(self, conversations):
            yield from list(super().run(conversations))[:-2]

    with pytest.raises(RuntimeError, match="left 2 conversations out"):
        make(tmp_path, engine=Forgetful())
    engine = Unordered()
    make(tmp_path, engine=engine)
    assert len(engine.asked) == 2
