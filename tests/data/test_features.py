"""Cached features are the online ones; a cache of something else, too large or damaged is refused."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock

from blockdraft.data import (
    BatchSampler,
    CachedFeatures,
    Completion,
    DataError,
    OnlineFeatures,
    TextDataset,
    build_cache,
    collate,
    partition,
)
from blockdraft.data import features as module
from blockdraft.files import FolderInUseError, exclusive

from tiny import tiny_target

LAYERS = (1, 3)


@pytest.fixture
def paths():
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(1, 8)), int(rng.integers(2, 20))) for _ in range(11)]
    return TextDataset.of(
        [Completion("t", rng.integers(3, 40, p).tolist(), rng.integers(3, 40, r).tolist(), "stop") for p, r in sizes]
    )


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(module, "TEXTS_PER_FILE", 4)
    monkeypatch.setattr(module, "TOKENS_PER_PASS", 30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cache_gives_what_the_target_gives(tmp_path, paths, dtype):
    target = tiny_target(dtype=dtype)
    counted = []
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, on_tokens=counted.append)
    assert sum(counted) == len(paths.tokens)
    cached, online = CachedFeatures(tmp_path, target, paths, LAYERS), OnlineFeatures(target, LAYERS)
    plan = BatchSampler(paths, num_texts=5, num_anchors=15, num_proposals=3, seed=0)
    for step in range(plan.steps_per_epoch):
        (part,) = partition(plan.step(0, step), 1, paths)
        batch = collate(part, paths, 3)
        ours, theirs = cached(batch), online(batch)
        for span in batch.spans:
            at = (span.row, slice(span.start, span.end))
            near = {"atol": 0.1, "rtol": 0.1} if dtype == torch.bfloat16 else {}  # rounded by what lies side by side
            torch.testing.assert_close(ours.hidden[at], theirs.hidden[at], **near)
            torch.testing.assert_close(ours.features[at], theirs.features[at], **near)
        assert ours.hidden.dtype == dtype


def test_progress_counts_files_that_others_made_meanwhile(tmp_path, paths, monkeypatch):
    make, counted = module._make, []

    def make_all(folder, identity, target, dataset, _texts, layers):
        for texts in module._groups(dataset):
            make(folder, identity, target, dataset, texts, layers)

    monkeypatch.setattr(module, "_make", make_all)
    build_cache(tmp_path, tiny_target(), paths, LAYERS, max_bytes=10**8, on_tokens=counted.append)
    assert counted == [len(paths.tokens)]


def test_texts_are_read_by_threads_into_memory_that_a_gpu_can_fetch(tmp_path, paths, monkeypatch):
    """For a GPU every tensor is asked for pinned; the numbers are those of a plain read, whoever reads them."""
    target = tiny_target()
    options = {"normalizer_temperature": 1.0}
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, **options)
    cached = CachedFeatures(tmp_path, target, paths, LAYERS, **options)
    plan = BatchSampler(paths, num_texts=11, num_anchors=15, num_proposals=3, seed=0)
    batch = collate(partition(plan.step(0, 0), 1, paths)[0], paths, 3)
    plain = cached.load(batch)
    readers, asked, zeros, held = set(), [], torch.zeros, CachedFeatures._held
    meeting = threading.Barrier(2)  # two of them read at the same time, or this never ends

    def watched(self, maps, text, length):
        if text in batch.texts[:2] and maps is self._features:
            meeting.wait(timeout=60)
        readers.add(threading.current_thread().name)
        return held(self, maps, text, length)

    def pinned(*shape, pin_memory=False, **others):
        asked.append(pin_memory)
        return zeros(*shape, **others)

    monkeypatch.setattr(CachedFeatures, "_held", watched)
    monkeypatch.setattr(torch, "zeros", pinned)
    cached.device = torch.device("cuda")
    again = cached.load(batch)
    assert asked == [True, True]
    assert len(readers) > 1
    assert all(name.startswith("features") for name in readers)
    for ours, theirs in zip(again.loaded, plain.loaded, strict=True):
        assert torch.equal(ours, theirs)


def test_the_online_normalizer_is_computed_where_blocks_read_it(paths, monkeypatch):
    target = tiny_target()
    plan = BatchSampler(paths, num_texts=11, num_anchors=15, num_proposals=3, seed=0)
    batch = collate(partition(plan.step(0, 0), 1, paths)[0], paths, 3)
    output = OnlineFeatures(target, LAYERS)(batch)
    whole = target.normalizer(output.hidden, 0.7)
    rows, logits = [], type(target).logits
    monkeypatch.setattr(type(target), "logits", lambda self, x: rows.append(len(x)) or logits(self, x))
    found = OnlineFeatures(target, LAYERS, 0.7)(batch).normalizer
    assert sum(rows) == len(batch.read_positions) < batch.tokens.numel()
    is_read = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    is_read[batch.read_positions] = True
    is_read = is_read.view(batch.tokens.shape)
    for ours, theirs in ((found.log_z, whole.log_z), (found.argmax, whole.argmax)):
        torch.testing.assert_close(ours[is_read], theirs[is_read])
        assert not ours[~is_read].any()
    assert torch.equal(batch.spread_to_positions(batch.read_by_blocks(whole.log_z)), whole.log_z * is_read)
    at = batch.at_blocks(is_read)
    assert at[batch.valid].all()


def test_every_tensor_of_a_batch_is_pinned(paths, monkeypatch):
    plan = BatchSampler(paths, num_texts=5, num_anchors=15, num_proposals=3, seed=0)
    batch = collate(partition(plan.step(0, 0), 1, paths)[0], paths, 3)
    batch = replace(batch, loaded=(torch.ones(2), torch.ones(3)))
    tensors = []
    batch._each(lambda x: tensors.append(x) or x)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    assert batch.pinned() is not batch
    assert list(map(id, pinned)) == list(map(id, tensors))
    assert {id(x) for x in (batch.tokens, batch.positions, batch.valid, *batch.loaded)} <= set(map(id, pinned))


def test_an_interrupted_build_goes_on(tmp_path, paths):
    target = tiny_target()
    seen = []

    def interrupt(num):
        seen.append(num)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, on_tokens=interrupt)
    with pytest.raises(DataError, match="has 1 of 3 files"):
        CachedFeatures(tmp_path, target, paths, LAYERS)
    (first,) = tmp_path.glob("features-*.npy")
    written = first.stat().st_mtime_ns
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    assert first.stat().st_mtime_ns == written
    CachedFeatures(tmp_path, target, paths, LAYERS)


def test_a_complete_cache_serves_several_runs_at_once(tmp_path, paths, monkeypatch):
    target = tiny_target()
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    monkeypatch.setattr(module, "SECONDS_FOR_THE_INDEX", 0)
    with exclusive(tmp_path):
        build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)  # there is nothing to write
        with pytest.raises(FolderInUseError, match="another process"):
            build_cache(tmp_path, tiny_target(seed=5), paths, LAYERS, max_bytes=10**8)


def test_two_builders_share_the_files_and_end_together(tmp_path, paths, monkeypatch):
    """Each computes files that the other does not; both return when all are there."""
    run, meeting, one_pass, made, seen = module._run, threading.Barrier(2), threading.Lock(), [], {}

    def watched(target, dataset, texts, *rest):
        made.append(texts)
        if len(made) <= 2:
            meeting.wait(timeout=60)  # both compute at the same time, or this never ends
        with one_pass:  # attention hears of the bounds of texts through a variable of the process
            yield from run(target, dataset, texts, *rest)

    def build(name, target):
        tokens = seen.setdefault(name, [])
        build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, on_tokens=tokens.append)
        CachedFeatures(tmp_path, target, paths, LAYERS)

    monkeypatch.setattr(module, "_run", watched)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.01)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, ["first", "second"], [tiny_target(), tiny_target()]))
    assert sorted(made, key=lambda texts: texts.start) == [range(4), range(4, 8), range(8, 11)]
    assert [sum(tokens) for tokens in seen.values()] == [len(paths.tokens)] * 2  # whoever made them
    alone = tmp_path / "alone"
    monkeypatch.setattr(module, "_run", run)
    build_cache(alone, tiny_target(), paths, LAYERS, max_bytes=10**8)
    for file in alone.glob("*.npy"):
        np.testing.assert_allclose(np.load(tmp_path / file.name), np.load(file), rtol=1e-9)


def test_files_of_a_builder_that_died_are_made_by_another(tmp_path, paths, monkeypatch):
    """A lock that nobody holds and half of a file stand in nobody's way; a lock that is held does."""
    target = tiny_target()
    digests = [module._digest(paths, texts) for texts in module._groups(paths)]
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / digests[0]).touch()
    halves = [tmp_path / f"features-{digest}.npy.4711.unfinished" for digest in (digests[0], "0" * 16, digests[1])]
    for half in halves:  # of these texts, of texts that the folder no longer has, and of somebody at work
        half.write_bytes(b"half")
    held = FileLock(tmp_path / "locks" / digests[1])
    held.acquire()
    there = []

    def release(_seconds):
        there.append(halves[2].exists())
        held.release()

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=release))
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    CachedFeatures(tmp_path, target, paths, LAYERS)
    assert there == [True]
    assert not any(half.exists() for half in halves)


def test_a_cache_that_gains_normalizers_while_it_is_built_has_them_everywhere(tmp_path, paths):
    """A build that began without them makes its other files with them; the first is completed by who needs them."""
    target, later = tiny_target(), []

    def begin_another(_tokens):
        if not later:
            later.append(True)
            with module._updating(tmp_path, module.cache_identity(target, LAYERS, 1.0)):
                pass

    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, on_tokens=begin_another)
    assert len(list(tmp_path.glob("normalizer-*.npy"))) == 2
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, normalizer_temperature=1.0)
    CachedFeatures(tmp_path, target, paths, LAYERS, 1.0)


def test_what_one_builder_cannot_make_is_left_to_the_others(tmp_path, paths, monkeypatch):
    target, run = tiny_target(), module._run

    def fails(*_arguments):
        raise MemoryError

    monkeypatch.setattr(module, "_run", fails)
    with pytest.raises(MemoryError):
        build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    assert not list(tmp_path.glob("*.npy*"))
    monkeypatch.setattr(module, "_run", run)
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    CachedFeatures(tmp_path, target, paths, LAYERS)


def test_a_cache_of_something_else_is_refused(tmp_path, paths):
    target = tiny_target()
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    with pytest.raises(DataError, match="target"):
        CachedFeatures(tmp_path, tiny_target(seed=5), paths, LAYERS)
    with pytest.raises(DataError, match=r"layers \[1, 3\] there, \[1, 2\] here"):
        CachedFeatures(tmp_path, target, paths, (1, 2))
    others = TextDataset.of([Completion("x", [1, 2], [3, 4], "stop")])
    with pytest.raises(DataError, match="has 0 of 1 files of these texts"):
        CachedFeatures(tmp_path, target, others, LAYERS)
    with pytest.raises(DataError, match="dtype 'float64' there, 'float32' here"):
        build_cache(tmp_path, tiny_target(dtype=torch.float32), paths, LAYERS, max_bytes=10**8)
    with pytest.raises(DataError, match="not a feature cache"):
        CachedFeatures(tmp_path / "nothing", target, paths, LAYERS)


def test_a_cache_with_normalizers_also_serves_drafters_that_need_none(tmp_path, paths):
    target = tiny_target()

    def interrupt(_num):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8, normalizer_temperature=0.5, on_tokens=interrupt)
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)  # builds the rest, normalizers included
    plan = BatchSampler(paths, num_texts=5, num_anchors=15, num_proposals=3, seed=0)
    batch = collate(partition(plan.step(0, 0), 1, paths)[0], paths, 3)
    without = CachedFeatures(tmp_path, target, paths, LAYERS)(batch)
    with_them = CachedFeatures(tmp_path, target, paths, LAYERS, 0.5)(batch)
    assert without.normalizer is None
    assert torch.equal(without.features, with_them.features)
    assert with_them.normalizer is not None
    with pytest.raises(DataError, match=r"normalizer 0\.5 there, 1\.0 here"):
        CachedFeatures(tmp_path, target, paths, LAYERS, 1.0)


def test_a_cache_without_normalizers_gets_them_when_they_are_needed(tmp_path, paths):
    target = tiny_target()
    build_cache(tmp_path / "plain", target, paths, LAYERS, max_bytes=10**8)
    with pytest.raises(DataError, match=r"normalizer None there, 1\.0 here"):
        CachedFeatures(tmp_path / "plain", target, paths, LAYERS, 1.0)
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "plain").glob("features-*.npy")}
    for folder in ("plain", "at once"):
        build_cache(tmp_path / folder, target, paths, LAYERS, max_bytes=10**8, normalizer_temperature=1.0)
        CachedFeatures(tmp_path / folder, target, paths, LAYERS, 1.0)
    assert {file: file.stat().st_mtime_ns for file in written} == written
    assert {file.name: file.read_bytes() for file in (tmp_path / "plain").glob("*.npy")} == {
        file.name: file.read_bytes() for file in (tmp_path / "at once").glob("*.npy")
    }
    with pytest.raises(DataError, match=r"normalizer 1\.0 there, 0\.5 here"):
        build_cache(tmp_path / "plain", target, paths, LAYERS, max_bytes=10**8, normalizer_temperature=0.5)


def test_one_cache_serves_every_split_of_its_texts(tmp_path, paths):
    target = tiny_target()
    build_cache(tmp_path, target, paths.split(3, seed=1)[0], LAYERS, max_bytes=10**8)
    before = (tmp_path / "features.json").read_bytes()
    for seed in (2, 3):
        training, heldout = paths.split(4, seed)
        for part in (training, heldout, training.split(2, seed)[0]):
            build_cache(tmp_path, target, part, LAYERS, max_bytes=10**8)
            steps = BatchSampler(part, num_texts=len(part), num_anchors=99, num_proposals=3, seed=0).step(0, 0)
            (chosen,) = partition(steps, 1, part)
            batch = collate(chosen, part, 3)
            ours, theirs = CachedFeatures(tmp_path, target, part, LAYERS)(batch), OnlineFeatures(target, LAYERS)(batch)
            for span in batch.spans:
                at = (span.row, slice(span.start, span.end))
                torch.testing.assert_close(ours.hidden[at], theirs.hidden[at])
                torch.testing.assert_close(ours.features[at], theirs.features[at])
    assert (tmp_path / "features.json").read_bytes() == before


def test_a_cache_grows_with_its_texts_and_serves_the_fewer_ones_still(tmp_path):
    target, rng = tiny_target(), np.random.default_rng(1)
    rows = [Completion("t", [5, 6], rng.integers(3, 40, 9).tolist(), "stop") for _ in range(11)]
    fewer, more = TextDataset.of(rows[:6]), TextDataset.of(rows)
    build_cache(tmp_path, target, fewer, LAYERS, max_bytes=10**8)
    written = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.npy")}
    build_cache(tmp_path, target, more, LAYERS, max_bytes=10**8)
    # of texts 0-3, 4-5 the first file is kept and stands for both; then come 4-7 and 8-10
    assert len(list(tmp_path.glob("*.npy"))) == 4
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in written} == written
    for dataset in (fewer, more):
        sampler = BatchSampler(dataset, num_texts=len(dataset), num_anchors=99, num_proposals=3, seed=0)
        (part,) = partition(sampler.step(0, 0), 1, dataset)
        batch = collate(part, dataset, 3)
        ours, theirs = CachedFeatures(tmp_path, target, dataset, LAYERS)(batch), OnlineFeatures(target, LAYERS)(batch)
        for span in batch.spans:
            at = (span.row, slice(span.start, span.end))
            torch.testing.assert_close(ours.hidden[at], theirs.hidden[at])
            torch.testing.assert_close(ours.features[at], theirs.features[at])


def test_texts_of_equal_tokens_and_other_bounds_are_other_texts(tmp_path):
    target = tiny_target()
    first = TextDataset.of([Completion("t", [5], [6, 7], "stop"), Completion("t", [5], [8], "stop")])
    second = TextDataset.of([Completion("t", [5], [6], "stop"), Completion("t", [7], [5, 8], "stop")])
    assert first.tokens.tolist() == second.tokens.tolist()
    build_cache(tmp_path, target, first, LAYERS, max_bytes=10**8)
    with pytest.raises(DataError, match="has 0 of 1 files"):
        CachedFeatures(tmp_path, target, second, LAYERS)


def test_what_a_cache_holds_of_other_texts_counts_towards_its_size(tmp_path, paths):
    target = tiny_target()
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    others = TextDataset.of([Completion("x", [1, 2], [3, 4], "stop")])
    with pytest.raises(DataError, match=r"beside .* of other texts in .*name another folder"):
        build_cache(tmp_path, target, others, LAYERS, max_bytes=len(paths.tokens) * 3 * 32 * 8)
    build_cache(tmp_path, target, others, LAYERS, max_bytes=10**8)
    CachedFeatures(tmp_path, target, others, LAYERS)
    CachedFeatures(tmp_path, target, paths, LAYERS)


def test_a_cache_that_would_be_too_large_is_refused_before_it_is_begun(tmp_path, paths):
    target = tiny_target()
    needed = len(paths.tokens) * 3 * 32 * 8
    with pytest.raises(DataError, match="GiB allowed"):
        build_cache(tmp_path / "cache", target, paths, LAYERS, max_bytes=needed - 1)
    assert not (tmp_path / "cache").exists()
    build_cache(tmp_path / "cache", target, paths, LAYERS, max_bytes=needed)
    size = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.npy"))
    assert needed <= size <= needed + 3 * 200


def test_damage_is_found(tmp_path, paths):
    target = tiny_target()
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    file = sorted(tmp_path.glob("features-*.npy"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file.name} is not as it was written"):
        CachedFeatures(tmp_path, target, paths, LAYERS)
    (tmp_path / "features.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        CachedFeatures(tmp_path, target, paths, LAYERS)


def test_a_file_made_anew_takes_its_old_place(tmp_path, paths):
    target = tiny_target()
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    index = json.loads((tmp_path / "features.json").read_text())
    del index["files"][next(iter(index["files"]))]
    (tmp_path / "features.json").write_text(json.dumps(index))
    build_cache(tmp_path, target, paths, LAYERS, max_bytes=10**8)
    (part,) = partition(BatchSampler(paths, num_texts=11, num_anchors=99, num_proposals=3, seed=0).step(0, 0), 1, paths)
    batch = collate(part, paths, 3)
    ours = CachedFeatures(tmp_path, target, paths, LAYERS)(batch)
    theirs = OnlineFeatures(target, LAYERS)(batch)
    for span in batch.spans:
        at = (span.row, slice(span.start, span.end))
        torch.testing.assert_close(ours.features[at], theirs.features[at])
