"""Anchors, masks, packing, sharing out: properties over random data, and values against a loop."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.data import BatchSampler, Completion, DataError, OnlineFeatures, TextDataset, collate, partition
from blockdraft.data.batches import pack

from tiny import tiny_drafter, tiny_target

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=12).filter(
    lambda pairs: any(response > 1 for _, response in pairs)
)


def paths_of(lengths):
    """Texts whose tokens are all different, so that a token tells where it came from."""
    numbers = iter(range(10**6))
    rows = []
    for index, (prompt, response) in enumerate(lengths):
        take = [next(numbers) for _ in range(prompt + response)]
        rows.append(Completion(f"t{index}#0", take[:prompt], take[prompt:], "stop"))
    return TextDataset.of(rows)


def plan_of(paths, **changes):
    options = {"num_texts": 4, "num_anchors": 20, "num_proposals": 5, "seed": 0}
    return BatchSampler(paths, **(options | changes))


@given(LENGTHS, st.integers(1, 6), st.integers(1, 40), st.integers(1, 7), st.integers(0, 3), st.booleans())
def test_anchors_are_different_response_positions_with_a_response_token_behind_them(
    lengths, num_texts, num_anchors, num_proposals, epoch, full
):
    paths = paths_of(lengths)
    behind = num_proposals if full else 1
    eligible = {i: max(0, response - behind) for i, (_, response) in enumerate(lengths)}
    options = {"num_texts": num_texts, "num_anchors": num_anchors, "num_proposals": num_proposals, "full_blocks": full}
    if not any(eligible.values()):
        with pytest.raises(DataError, match="long enough"):
            plan_of(paths, **options)
        return
    plan = plan_of(paths, **options)
    texts = []
    for step in range(plan.steps_per_epoch):
        chosen = plan.step(epoch, step)
        texts += [each.text for each in chosen]
        assert len(chosen) <= num_texts
        room = sum(eligible[each.text] for each in chosen)
        assert sum(len(each.anchors) for each in chosen) == min(num_anchors, room)
        for each in chosen:
            prompt, response = lengths[each.text]
            assert (np.diff(each.anchors) > 0).all()
            assert all(prompt <= anchor < prompt + response - behind for anchor in each.anchors)
    assert sorted(texts) == [i for i, num in eligible.items() if num]  # an epoch sees every text once


@given(LENGTHS, st.integers(1, 5), st.integers(0, 100))
def test_a_step_depends_on_seed_epoch_and_step_alone(lengths, step_size, seed):
    paths = paths_of(lengths)

    def steps(epoch):
        plan = plan_of(paths, num_texts=step_size, seed=seed)
        order = range(plan.steps_per_epoch)
        found = {step: plan.step(epoch, step) for step in reversed(order)}
        return [[(each.text, each.anchors.tolist()) for each in found[step]] for step in order]

    assert steps(0) == steps(0)
    assert steps(3) == steps(3)


def test_epochs_and_seeds_differ():
    paths = paths_of([(3, 20)] * 40)
    orders = {tuple(plan_of(paths, seed=seed).order(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    plan = plan_of(paths, num_texts=40, num_anchors=50)
    first, second = ({(c.text, a) for c in plan.step(e, 0) for a in c.anchors.tolist()} for e in (0, 1))
    assert first != second


def test_anchors_are_uniform_over_positions():
    """Each of 3 + 10 eligible positions is taken equally often: 5 of 13, within five standard errors."""
    paths = paths_of([(2, 4), (5, 11)])
    plan = plan_of(paths, num_texts=2, num_anchors=5)
    counts = collections.Counter(
        (each.text, anchor) for epoch in range(2000) for each in plan.step(epoch, 0) for anchor in each.anchors.tolist()
    )
    assert len(counts) == 13
    share = 5 / 13
    error = (share * (1 - share) / 2000) ** 0.5
    assert all(abs(count / 2000 - share) < 5 * error for count in counts.values())


@given(LENGTHS, st.integers(1, 7), st.integers(1, 5))
def test_a_batch_holds_the_right_tokens_and_masks(lengths, num_proposals, num_parts):
    paths = paths_of(lengths)
    plan = plan_of(paths, num_texts=len(lengths), num_proposals=num_proposals)
    parts = partition(plan.step(0, 0), num_parts, paths)
    seen = []
    for part in parts:
        if not part:
            continue
        batch = collate(part, paths, num_proposals)
        expected = [(each.text, int(anchor)) for each in part for anchor in each.anchors]
        seen += expected
        assert batch.block_tokens.shape == (len(expected), num_proposals + 1)
        for block, (text, anchor) in enumerate(expected):
            follows = paths[text][anchor : anchor + num_proposals + 1].tolist()
            num_valid = len(follows) - 1
            assert batch.block_tokens[block].tolist() == follows + [0] * (num_proposals - num_valid)
            assert batch.valid[block].tolist() == [True] * num_valid + [False] * (num_proposals - num_valid)
            row, at, start = (int(x[block]) for x in (batch.anchors.row, batch.anchors.position, batch.anchors.start))
            assert batch.tokens[row, start : at + 1].tolist() == paths[text][: anchor + 1].tolist()
        marks = torch.arange(batch.tokens.numel()).view(*batch.tokens.shape, 1)
        at_blocks = batch.at_blocks(marks)[..., 0]
        predicted_by = batch.tokens.flatten()[at_blocks]
        assert (predicted_by == batch.previous)[batch.valid].all()
    whole = [(each.text, int(anchor)) for each in plan.step(0, 0) for anchor in each.anchors]
    assert sorted(seen) == sorted(whole)  # every anchor once, whatever the number of parts


@given(LENGTHS, st.integers(1, 7), st.integers(0, 30), st.integers(1, 30))
def test_every_position_that_predicts_a_label_is_read_once(lengths, num_proposals, first, num_blocks):
    paths = paths_of(lengths)
    batch = collate(
        [each for each in plan_of(paths, num_proposals=num_proposals).step(0, 0) if len(each.anchors)],
        paths,
        num_proposals,
    )
    where = torch.arange(batch.tokens.numel()).view_as(batch.tokens)
    read = batch.read_by_blocks(where)
    assert (read.diff() > 0).all()
    assert torch.equal(read[batch.read_index][batch.valid], batch.at_blocks(where)[batch.valid])
    assert set(batch.read_index[batch.valid].tolist()) == set(range(len(read)))
    some = slice(first % len(batch.valid), first % len(batch.valid) + num_blocks)
    begin, end = min(low for low, _ in batch.read_bounds[some]), max(high for _, high in batch.read_bounds[some])
    assert batch.read_index[some].unique().tolist() == list(range(begin, end))  # neighbours read neighbours


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_packed_texts_lie_end_to_end(lengths):
    spans = pack(lengths)
    assert [span.end - span.start for span in spans] == lengths
    assert [t for span in spans for t in range(span.start, span.end)] == list(range(sum(lengths)))
    assert {span.row for span in spans} == {0}


@given(LENGTHS, st.integers(1, 6))
def test_parts_are_balanced(lengths, num_parts):
    paths = paths_of(lengths)
    chosen = plan_of(paths, num_texts=len(lengths)).step(0, 0)
    work = [
        sum(int(paths.lengths[e.text]) + 8 * len(e.anchors) for e in p) for p in partition(chosen, num_parts, paths)
    ]
    largest = max(int(paths.lengths[e.text]) + 8 * len(e.anchors) for e in chosen)
    assert max(work) - min(work) <= largest


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000))
def test_a_packed_batch_trains_on_what_each_block_alone_would_see(kind, seed):
    """Draft hidden states and target hidden states of a packed batch against one text and one block at a time."""
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    rng = np.random.default_rng(seed)
    sizes = [(rng.integers(1, 6), rng.integers(2, 15)) for _ in range(5)]
    rows = [Completion("t", rng.integers(3, 40, p).tolist(), rng.integers(3, 40, r).tolist(), "stop") for p, r in sizes]
    paths = TextDataset.of(rows)
    chosen = BatchSampler(paths, num_texts=5, num_anchors=12, num_proposals=4, seed=seed).step(0, 0)
    (part,) = partition(chosen, 1, paths)
    features = OnlineFeatures(target, drafter.config.target_layers)
    batch = collate(part, paths, 4)
    output = features(batch)
    hidden = drafter(output.features, batch.anchor_tokens, batch.anchors, target)
    at_blocks = batch.at_blocks(output.hidden)
    block = 0
    for each in part:
        for anchor in each.anchors:
            single = collate([type(each)(each.text, np.array([anchor]))], paths, 4)
            alone = features(single)
            one = drafter(alone.features, single.anchor_tokens, single.anchors, target)
            torch.testing.assert_close(hidden[block], one[0])
            valid = batch.valid[block]
            torch.testing.assert_close(at_blocks[block][valid], single.at_blocks(alone.hidden)[0][valid])
            block += 1
    assert block == len(hidden)


def test_nonsense_is_refused():
    paths = paths_of([(3, 10)])
    with pytest.raises(ValueError, match="at least 1"):
        plan_of(paths, num_anchors=0)
    with pytest.raises(IndexError, match="an epoch has 1 steps"):
        plan_of(paths).step(0, 1)
    with pytest.raises(DataError, match="cannot hold out"):
        paths.split(1)


def test_held_out_texts_are_apart_and_the_same_for_the_same_seed():
    paths = paths_of([(2, 5 + i % 7) for i in range(30)])
    kept, heldout = paths.split(8, seed=3)
    again = paths.split(8, seed=3)
    assert (len(kept), len(heldout)) == (22, 8)
    assert set(kept.tokens.tolist()).isdisjoint(heldout.tokens.tolist())
    assert sorted(kept.tokens.tolist() + heldout.tokens.tolist()) == paths.tokens.tolist()
    assert again[1].tokens.tolist() == heldout.tokens.tolist()
    assert again[1].identity == heldout.identity != kept.identity


def walked(sampler, survival, epochs):
    """Let anchors walk for some epochs, each block surviving as ``survival(text, position)`` says."""
    for epoch in range(epochs):
        walked_epoch(sampler, epoch, survival)


def test_an_anchor_moves_on_by_what_its_round_keeps_plus_one():
    dataset = paths_of([(3, 40)])
    sampler = plan_of(dataset, num_anchors=8, num_proposals=4, anchors="rounds")
    (chosen,) = sampler.step(0, 0)
    batch = collate([chosen], dataset, 4)
    survival = torch.tensor([0.9, 0.6, 0.6, 0.1], dtype=torch.float64).expand(8, -1)
    for uniform, kept in ((0.05, 4), (0.1, 4), (0.3, 3), (0.6, 3), (0.7, 1), (0.95, 0)):
        fixed = dataclasses.replace(batch, uniforms=torch.full((8,), uniform, dtype=torch.float64))
        sampler.move_on(fixed, survival)
        expected = chosen.anchors - 3 + kept + 1
        assert sampler.next_walk[0].tolist() == [a if a < 39 else 0 for a in expected]


@pytest.mark.slow
def test_walking_anchors_are_found_as_often_as_decoding_starts_rounds_there():
    """Rounds that keep all four tokens from even places and none from odd ones visit them as their chain does."""
    length, num = 41, 400
    dataset = paths_of([(2, length)] * num)
    sampler = plan_of(dataset, num_texts=100, num_anchors=100, num_proposals=4, anchors="rounds")

    def survival(_text, position):
        return [1.0, 1.0, 1.0, 0.5] if position % 3 == 0 else [0.5, 0.25, 0.0, 0.0]

    walked(sampler, survival, 30)
    counts = np.zeros(length)
    for epoch in range(30, 70):
        for step in range(sampler.steps_per_epoch):
            for each in sampler.step(epoch, step):
                np.add.at(counts, each.anchors - 2, 1)
        walked_epoch(sampler, epoch, survival)
    chance = np.zeros(length)
    chance[0] = 1.0
    for start in range(length):  # the chain of round starts from the first token to the end, then from the first again
        kept = [1.0, *survival(0, start), 0.0]
        for k in range(5):
            if start + k + 1 < length - 1:
                chance[start + k + 1] += chance[start] * (kept[k] - kept[k + 1])
    expected = chance[: length - 1] / chance[: length - 1].sum()
    found = counts[: length - 1] / counts.sum()
    assert np.abs(found - expected).max() < 0.012
    assert np.abs(1 / (length - 1) - expected).max() > 0.02  # uniform anchors would not pass


def walked_epoch(sampler, epoch, survival):
    prompts = sampler.dataset.prompt_lengths
    for step in range(sampler.steps_per_epoch):
        chosen = [each for each in sampler.step(epoch, step) if len(each.anchors)]
        batch = collate(chosen, sampler.dataset, sampler.num_proposals)
        rows = [survival(each.text, a - prompts[each.text]) for each in chosen for a in each.anchors]
        sampler.move_on(batch, torch.tensor(rows, dtype=torch.float64))
    sampler.finish_epoch()


@pytest.mark.parametrize("anchors", ["rounds", "mixed"])
def test_where_anchors_walk_survives_a_checkpoint_and_the_blocks_stay_as_many(anchors):
    dataset = paths_of([(2, 9), (3, 25), (1, 2), (4, 17), (2, 12)])
    ours, again = (plan_of(dataset, num_texts=2, num_anchors=9, anchors=anchors) for _ in range(2))
    plain = plan_of(dataset, num_texts=2, num_anchors=9)
    walked(ours, lambda _text, position: [0.8, 0.5, 0.3, 0.2, 0.1] if position % 2 else [0.3, 0.1, 0, 0, 0], 2)
    again.load_state_dict(ours.state_dict())
    for step in range(ours.steps_per_epoch):
        chosen = ours.step(2, step)
        uniform = plain.step(2, step)
        for one, other, drawn in zip(chosen, again.step(2, step), uniform, strict=True):
            assert one.anchors.tolist() == other.anchors.tolist()
            assert one.uniforms.tolist() == other.uniforms.tolist()
            assert len(one.anchors) == len(drawn.anchors)
            assert len(np.unique(one.anchors)) == len(one.anchors)
            if anchors == "rounds":
                walking = set((dataset.prompt_lengths[one.text] + ours.walk.get(one.text, [])).tolist())
                assert len(walking & set(one.anchors.tolist())) == min(len(walking), len(one.anchors))


@given(LENGTHS, st.integers(2, 6), st.integers(1, 40), st.integers(0, 3))
def test_runs_are_consecutive_anchors_of_one_text(lengths, run_length, num_anchors, epoch):
    dataset = paths_of(lengths)
    sampler = plan_of(dataset, num_anchors=num_anchors, run_length=run_length)
    for step in range(sampler.steps_per_epoch):
        chosen = [each for each in sampler.step(epoch, step) if len(each.anchors)]
        assert sum(len(each.anchors) for each in chosen) <= max(num_anchors, run_length)
        batch = collate(chosen, dataset, 5)
        for number in batch.segments.unique():
            inside = batch.segments == number
            positions = batch.anchors.position[inside]
            assert (positions.diff() == 1).all()
            assert len(batch.anchors.start[inside].unique()) == 1
            assert len(positions) <= run_length
        assert (batch.segments.diff() >= 0).all()
        for each in chosen:
            prompt, response = lengths[each.text]
            assert all(prompt <= anchor < prompt + response - 1 for anchor in each.anchors)


@pytest.mark.parametrize("run_length", [1, 3])
def test_no_text_has_more_anchors_than_the_cap(run_length):
    texts = paths_of([(2, 200), (3, 9), (2, 40)])
    free = plan_of(texts, num_texts=3, num_anchors=120, run_length=run_length).step(0, 0)
    capped = plan_of(texts, num_texts=3, num_anchors=120, run_length=run_length, max_anchors_per_text=24).step(0, 0)
    assert max(len(each.anchors) for each in free) > 24
    for before, after in zip(free, capped, strict=True):
        assert after.text == before.text
        assert set(after.anchors) <= set(before.anchors)
        assert len(after.anchors) == min(24, len(before.anchors)) or run_length > 1
        assert len(after.anchors) <= 24
        assert (np.diff(after.anchors) > 0).all()
