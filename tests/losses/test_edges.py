"""Zeros, infinities, padding, emptiness: defined and finite."""

import math

import pytest
import torch

from blockdraft.losses import block_scores, block_statistics, fused_linear_objective, objective

from batches import IDS, OBJECTIVES, batch

EVERY = pytest.mark.parametrize(("name", "options"), OBJECTIVES, ids=IDS)


@EVERY
def test_zero_probabilities_stay_finite(name, options):
    """-inf logits in the draft, in the target, at labels and elsewhere."""
    for dtype in (torch.float32, torch.float64):
        data = batch(num_blocks=6, masked=False, dtype=dtype)
        draft, target = data.draft.clone(), data.target.clone()
        draft[0, 1, data.labels[0, 1]] = -math.inf
        target[1, 0, data.labels[1, 0]] = -math.inf
        draft[2, :, :3] = -math.inf
        target[3, :, 3:] = -math.inf
        draft[4], target[4] = -math.inf, -math.inf
        draft[4, :, 0], target[4, :, 1] = 0.0, 0.0  # disjoint supports
        draft.requires_grad_()
        value = objective(name, **options)(draft, target, data.labels)
        assert value.per_block.isfinite().all()
        gradient = torch.autograd.grad(value.loss, draft)[0]
        assert gradient.isfinite().all()
        untouched = objective(name, **options)(data.draft[5:], data.target[5:], data.labels[5:]).loss
        torch.testing.assert_close(value.per_block[5].detach(), untouched)


@EVERY
def test_hopeless_drafts_stay_finite(name, options):
    """Log-ratios of hundreds, both ways, in float32."""
    data = batch(num_blocks=4, block_size=15, vocab_size=8, masked=False, dtype=torch.float32, spread=40.0).leaf()
    value = objective(name, **options)(*data.arguments())
    assert value.per_block.isfinite().all()
    assert torch.autograd.grad(value.loss, data.draft)[0].isfinite().all()


def test_scores_never_exceed_one_however_large_the_ratio():
    """r = e^120 and more: a = a~/r underflows float32, the integrated score must not."""
    draft = torch.zeros(1, 4, 3)
    target = torch.zeros(1, 4, 3)
    target[..., 0] = -60.0
    log_sampled, log_integrated = block_scores(draft, target, torch.zeros(1, 4, dtype=torch.long))
    assert log_sampled.tolist() == [[0.0] * 4]
    assert (log_integrated <= 1e-6).all()
    expected = block_scores(draft.double(), target.double(), torch.zeros(1, 4, dtype=torch.long))[1]
    torch.testing.assert_close(log_integrated.double(), expected, atol=1e-5, rtol=0)


@EVERY
def test_nothing_in_padding_reaches_the_result(name, options):
    data = batch().leaf()
    clean = objective(name, **options)(*data.arguments())
    clean_gradient = torch.autograd.grad(clean.loss, data.draft)[0]
    outside = ~data.valid
    labels = data.labels.masked_fill(outside, -100)
    for garbage in (math.nan, math.inf, -math.inf):
        draft = data.draft.detach().masked_fill(outside.unsqueeze(-1), garbage).requires_grad_()
        target = data.target.masked_fill(outside.unsqueeze(-1), garbage)
        dirty = objective(name, **options)(draft, target, labels, data.valid)
        torch.testing.assert_close(dirty.loss, clean.loss, atol=0, rtol=0)
        torch.testing.assert_close(torch.autograd.grad(dirty.loss, draft)[0], clean_gradient, atol=0, rtol=0)


@EVERY
def test_a_batch_without_a_valid_block_is_zero(name, options):
    for num_blocks in (0, 3):
        draft = torch.randn(num_blocks, 5, 6, requires_grad=True)
        labels = torch.zeros(num_blocks, 5, dtype=torch.long)
        nowhere = torch.zeros_like(labels, dtype=torch.bool)
        value = objective(name, **options)(draft, torch.zeros_like(draft), labels, nowhere)
        assert value.loss.item() == value.denominator.item() == 0
        assert value.per_block.tolist() == [0.0] * num_blocks
        assert (torch.autograd.grad(value.loss, draft)[0] == 0).all()


def test_an_empty_batch_through_the_fused_path():
    head = torch.randn(6, 4)
    value = fused_linear_objective(
        objective("bv"), torch.zeros(0, 5, 4), torch.zeros(0, 5, 4), head, head, torch.zeros(0, 5, dtype=torch.long)
    )
    assert value.loss.item() == 0
    assert float(value.stats.expected_length("block")) == 0


def test_ce_needs_no_target():
    data = batch()
    with_target = objective("ce")(*data.arguments()).loss
    torch.testing.assert_close(objective("ce")(data.draft, None, data.labels, data.valid).loss, with_target)
    with pytest.raises(ValueError, match="needs target logits"):
        objective("kl")(data.draft, None, data.labels)


def test_the_floors_do_what_they_say():
    """Below a floor a score counts as the floor and passes no gradient; without it the gradient is there."""
    data = batch(num_blocks=2, block_size=15, vocab_size=40, masked=False, spread=6.0).leaf()
    log_scores = block_scores(*data.arguments())[1]
    assert (log_scores[:, -1] < math.log(1e-6)).all()

    def gradient_of_last_position(**options):
        loss = objective("bv", **options)(*data.arguments()).loss
        return float(torch.autograd.grad(loss, data.draft)[0][:, -1].abs().max())

    assert gradient_of_last_position(beta=0.0, ramp_floor=1e-6) == 0
    assert gradient_of_last_position(beta=0.0) > 1e-3
    floored = objective("bv", beta=0.0, ramp_floor=1e-6)(*data.arguments()).per_block
    torch.testing.assert_close(floored, -log_scores.clamp(min=math.log(1e-6)).mean(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_logits": torch.zeros(4, 6)}, r"\[N, B, V\]"),
        ({"target_logits": torch.zeros(4, 5, 7)}, "differ in shape"),
        ({"labels": torch.zeros(4, 4, dtype=torch.long)}, r"labels must be \[N, B\]"),
        ({"labels": torch.full((4, 5), 6)}, "outside the vocabulary of 6"),
        ({"labels": torch.full((4, 5), -100)}, "outside the vocabulary of 6"),
        ({"labels": torch.zeros(4, 5)}, "labels must be token ids"),
        ({"valid": torch.tensor([[True, False, True, True, True]]).expand(4, 5)}, "contiguous prefix"),
        ({"valid": torch.ones(4, 5)}, "valid must be bool"),
    ],
)
def test_bad_input_is_named(change, message):
    data = batch(masked=False)
    arguments = {"draft_logits": data.draft, "target_logits": data.target, "labels": data.labels}
    with pytest.raises(ValueError, match=message):
        objective("bv")(**(arguments | change))


def test_statistics_of_partial_blocks_count_valid_positions_only():
    data = batch(num_blocks=4)
    stats = block_statistics(*data.arguments())
    assert stats.num_positions.tolist() == data.valid.sum(0).tolist()
    assert data.valid.any(-1).tolist() == [True, True, False, True]
    assert float(stats.num_blocks) == 3
    assert float(stats.expected_length("block")) == pytest.approx(float(stats.block.sum()) / 3)
