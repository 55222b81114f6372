"""Target rows that several blocks read are made once, and nothing else changes: values, gradients, statistics."""

from dataclasses import fields

import pytest
import torch
from test_fused import leaves_of, problem, with_leaves

from blockdraft.losses import ReducedTarget, fused, fused_linear_objective, objective, restrict_labels, restrict_target
from blockdraft.losses.head_products import TargetIndex
from blockdraft.losses.rows import Rows
from blockdraft.losses.scores import Blocks

from batches import IDS, OBJECTIVES, ONE_EACH

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS = 12, 4, 21


def overlapping(*, dtype=torch.float64, in_order=True, masked=True, seed=0):
    """Blocks of two texts that overlap, and the rows of the target that they read."""
    g = torch.Generator().manual_seed(seed)
    data = problem(NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, masked=masked, seed=seed)
    begins = torch.randint(NUM_ROWS - BLOCK_SIZE + 1, (NUM_BLOCKS,), generator=g)
    begins = begins.sort().values if in_order else begins
    rows = begins[:, None] + torch.arange(BLOCK_SIZE)
    hidden = torch.randn(NUM_ROWS, data["target_head"].shape[1], generator=g, dtype=torch.float64).to(dtype)
    if masked:
        rows = torch.where(data["valid"], rows, 10**6)  # whatever stands here is not looked at
    return data | {"target_hidden": hidden}, rows


def expanded(data, rows):
    return data | {"target_hidden": data["target_hidden"][rows.clamp(max=NUM_ROWS - 1)]}


def same(obj, data, rows, *, index=None, chunk_blocks=4, tolerance=None, **options):
    """One evaluation with shared rows and one with a row for each position agree in everything."""
    shared, each = with_leaves(data), with_leaves(expanded(data, rows))
    index = index or TargetIndex(rows)
    found = fused_linear_objective(obj, **shared, chunk_blocks=chunk_blocks, target_index=index, **options)
    expected = fused_linear_objective(obj, **each, chunk_blocks=chunk_blocks, **options)
    tolerance = tolerance or {}
    for part in ("loss", "numerator", "denominator", "per_block", "survival"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), **tolerance)
    for field in fields(expected.stats):
        torch.testing.assert_close(getattr(found.stats, field.name), getattr(expected.stats, field.name), **tolerance)
    found.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(shared), leaves_of(each), strict=True):
        torch.testing.assert_close(got.grad, want.grad, **tolerance)


@pytest.mark.parametrize(("name", "options"), OBJECTIVES, ids=IDS)
def test_sharing_rows_changes_nothing(name, options):
    same(objective(name, temperature=0.8, **options), *overlapping())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("chunk_blocks", [1, 5, None])
def test_neither_the_order_of_blocks_nor_the_chunks_matter(masked, in_order, chunk_blocks):
    data, rows = overlapping(in_order=in_order, masked=masked, seed=2)
    same(objective("bv"), data, rows, chunk_blocks=chunk_blocks)
    same(objective("rkl"), data, rows, chunk_blocks=chunk_blocks)


def test_bounds_may_be_known_beforehand():
    data, rows = overlapping()
    same(objective("bv"), data, rows, index=TargetIndex(rows, TargetIndex(rows).known_bounds(data["valid"])))


@pytest.mark.parametrize(("name", "options"), ONE_EACH)
def test_over_a_reduced_vocabulary(name, options):
    data, rows = overlapping(seed=4)
    draft_ids = torch.randperm(37, generator=torch.Generator().manual_seed(1))[:19]
    data["labels"], data["valid"] = restrict_labels(data["labels"], data["valid"], draft_ids, 37)
    whole = restrict_target(expanded(data, rows)["target_hidden"], data["target_head"], draft_ids)
    outside = torch.where(data["valid"], whole.log_z, torch.nan)  # nobody knows it there
    data["target_head"], data["draft_head"] = data["target_head"][draft_ids], data["draft_head"][:19]
    data["markov"] = None
    same(objective(name, **options), data, rows, reduced=ReducedTarget(outside, whole.argmax))


def test_low_precision():
    data, rows = overlapping(dtype=torch.bfloat16)
    data["markov"] = None
    same(objective("bv"), data, rows, tolerance={"rtol": 2e-2, "atol": 1e-3})


def test_rows_that_are_not_numbers_do_no_harm_where_nobody_reads_them():
    data, rows = overlapping()
    read = rows[data["valid"]]
    unread = torch.ones(NUM_ROWS, dtype=torch.bool)
    unread[read] = False
    assert unread.any()
    data["target_hidden"][unread] = torch.nan
    same(objective("bv"), data, rows)


def test_each_row_is_multiplied_once(monkeypatch):
    """The products of all chunks have as many target rows as the texts have, and a uniform one each."""
    data, rows = overlapping(masked=False)
    made = []

    class Watched(Rows):
        def __init__(self, draft, target, **options):
            made.append((len(draft), len(target)))
            super().__init__(draft, target, **options)

    monkeypatch.setattr(fused, "choose_rows", lambda *_: Watched)
    fused_linear_objective(objective("bv"), **data, target_index=TargetIndex(rows), chunk_blocks=NUM_BLOCKS)
    assert made == [(NUM_BLOCKS * BLOCK_SIZE, int(rows.max() - rows.min()) + 2)]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (TargetIndex(torch.zeros(5, 3, dtype=torch.long)), r"target_index must be \[N, B\] = \[12, 4\]"),
        (TargetIndex(torch.zeros(12, 4, dtype=torch.long), [(0, 1)] * 11), "bounds must be a pair for each of 12"),
    ],
)
def test_bad_input_is_named(index, message):
    data, _ = overlapping()
    with pytest.raises(ValueError, match=message):
        fused_linear_objective(objective("bv"), **data, target_index=index)
    rows = TargetIndex(torch.zeros(12, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"with an index target_hidden must be \[P, H\]"):
        fused_linear_objective(objective("bv"), **expanded(data, rows.rows), target_index=rows)
    with pytest.raises(ValueError, match=r"with an index target_logits must be \[P, 37\]"):
        Blocks(torch.zeros(1, 2, 37), torch.zeros(3, 36), torch.zeros(1, 2).long(), target_index=torch.zeros(1, 2))
