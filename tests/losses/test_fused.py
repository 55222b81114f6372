"""The fused path against the plain one: values, all gradients, statistics, memory."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from blockdraft.losses import block_statistics, fused, fused_linear_objective, head_products, objective, scores
from blockdraft.losses.fused import CHUNK_BYTES, chunk_bytes
from blockdraft.losses.rows import Rows
from blockdraft.losses.scores import check_labels

from batches import IDS, OBJECTIVES


def problem(num_blocks=5, block_size=4, vocab_size=37, width=8, rank=3, *, dtype=torch.float64, masked=True, seed=0):
    """Hidden states, heads, labels, mask and Markov factors; the target is wider than the drafter."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    target_width = width + 2
    labels = torch.randint(vocab_size, (num_blocks, block_size), generator=g)
    lengths = torch.randint(0, block_size + 1, (num_blocks,), generator=g)
    return {
        "draft_hidden": randn(num_blocks, block_size, width),
        "target_hidden": randn(num_blocks, block_size, target_width),
        "draft_head": randn(vocab_size, width),
        "target_head": randn(vocab_size, target_width),
        "labels": labels,
        "valid": torch.arange(block_size) < lengths[:, None] if masked else None,
        "markov": (randn(num_blocks, block_size, rank), randn(vocab_size, rank)),
    }


def leaves_of(data):
    return [data["draft_hidden"], data["draft_head"], *(data["markov"] or ())]


def with_leaves(data, trains=(True, True, True, True)):
    data = dict(data)
    made = [x.detach().clone().requires_grad_(t) for x, t in zip(leaves_of(data), trains, strict=False)]
    data["draft_hidden"], data["draft_head"] = made[:2]
    if data["markov"] is not None:
        data["markov"] = tuple(made[2:])
    return data


def plain_logits(data):
    draft = data["draft_hidden"] @ data["draft_head"].T
    if data["markov"] is not None:
        draft = draft + data["markov"][0] @ data["markov"][1].T
    return draft, data["target_hidden"] @ data["target_head"].T


@pytest.mark.parametrize(("name", "options"), OBJECTIVES, ids=IDS)
@pytest.mark.parametrize(("masked", "markov"), [(False, False), (True, True)])
def test_equals_the_plain_path(name, options, masked, markov):
    obj, data = objective(name, temperature=0.8, **options), problem(masked=masked)
    if not markov:
        data["markov"] = None
    fast, slow = with_leaves(data), with_leaves(data)
    value = fused_linear_objective(obj, **fast, chunk_blocks=2)
    expected = obj(*plain_logits(slow), slow["labels"], slow["valid"])
    for part in ("loss", "numerator", "denominator", "per_block"):
        torch.testing.assert_close(getattr(value, part).detach(), getattr(expected, part).detach())
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(1, 7),
    block_size=st.integers(1, 6),
    vocab_size=st.integers(2, 200),
    width=st.integers(1, 9),
    chunk_blocks=st.one_of(st.none(), st.integers(1, 9)),
    choice=st.integers(0, len(OBJECTIVES) - 1),
)
def test_chunks_and_odd_shapes_change_nothing(seed, num_blocks, block_size, vocab_size, width, chunk_blocks, choice):
    name, options = OBJECTIVES[choice]
    obj = objective(name, **options)
    data = problem(num_blocks, block_size, vocab_size, width, seed=seed)
    fast, slow = with_leaves(data), with_leaves(data)
    value = fused_linear_objective(obj, **fast, chunk_blocks=chunk_blocks)
    expected = obj(*plain_logits(slow), slow["labels"], slow["valid"])
    torch.testing.assert_close(value.loss.detach(), expected.loss.detach())
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-9, rtol=1e-6)
    stats = block_statistics(*(x.detach() for x in plain_logits(data)), data["labels"], data["valid"])
    for rule in ("greedy", "token", "block"):
        torch.testing.assert_close(value.stats.retention(rule), stats.retention(rule))
    torch.testing.assert_close(value.stats.token_accuracy, stats.token_accuracy)
    torch.testing.assert_close(value.stats.argmax_agreement, stats.argmax_agreement)


@pytest.mark.parametrize(
    "trains", [(True, False, False, False), (False, True, False, False), (False, False, True, True)]
)
def test_gradients_only_where_they_are_wanted(trains):
    data = with_leaves(problem(), trains)
    fused_linear_objective(objective("bv"), **data).loss.backward()
    assert [x.grad is not None for x in leaves_of(data)] == list(trains)


@pytest.mark.parametrize("trains", [(True, False, True, True), (True, True, True, True), (False, True, False, True)])
@pytest.mark.parametrize(("name", "options"), [("bv", {}), ("ce", {}), ("kl", {})])
def test_head_and_bias_as_one_product_are_head_and_bias(name, options, trains, monkeypatch):
    """As on a GPU: one product of both makes the logits, and one takes the gradient back."""
    obj, data, results = objective(name, temperature=0.8, **options), problem(), []
    for separate in (("cpu",), ()):
        monkeypatch.setattr(head_products, "SEPARATE_DEVICES", separate)
        mine = with_leaves(data, trains)
        value = fused_linear_objective(obj, **mine, chunk_blocks=2)
        value.loss.backward()
        results.append([value.loss.detach(), value.stats.block, *(leaf.grad for leaf in leaves_of(mine))])
    for expected, got in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected)


def test_without_any_gradient_it_still_evaluates():
    data = problem()
    value = fused_linear_objective(objective("bv"), **data)
    assert not value.loss.requires_grad
    torch.testing.assert_close(value.loss, objective("bv")(*plain_logits(data), data["labels"], data["valid"]).loss)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("name", "options"), [*OBJECTIVES[:5], ("bv", {}), ("bv", {"beta": 0.5})])
def test_lower_precision(name, options, dtype, tolerance):
    """Products in the head's dtype, the rest in float32; gradients come back in the dtype of what they belong to."""
    obj = objective(name, **options)
    data = problem(vocab_size=64, width=16, dtype=dtype)
    data["markov"] = None
    low = with_leaves(data)
    value = fused_linear_objective(obj, **low, chunk_blocks=2)
    value.loss.backward()
    draft, target = (x.detach().double() for x in plain_logits(data))  # as rounded by the products
    draft.requires_grad_()
    expected = obj(draft, target, data["labels"], data["valid"])
    expected.loss.backward()
    assert value.loss.dtype == torch.float32
    assert value.loss.item() == pytest.approx(expected.loss.item(), rel=tolerance)
    rows = draft.grad.flatten(0, 1)
    wanted = (
        (rows @ data["draft_head"].double()).view_as(data["draft_hidden"]),
        rows.T @ data["draft_hidden"].double().flatten(0, 1),
    )
    for got, want in zip(leaves_of(low), wanted, strict=True):
        assert got.grad.dtype == dtype
        assert float((got.grad.double() - want).norm() / want.norm()) < tolerance


def test_hidden_states_of_another_dtype_than_the_head():
    data = problem(dtype=torch.float32)
    mixed = with_leaves(data | {"draft_head": data["draft_head"].bfloat16()})
    value = fused_linear_objective(objective("bv"), **mixed)
    value.loss.backward()
    assert [x.grad.dtype for x in leaves_of(mixed)] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def test_the_vocabulary_of_qwen3():
    """V = 151,936, in chunks, against plain autograd of the definition."""
    vocab_size = 151_936
    data = problem(3, 3, vocab_size, 8, dtype=torch.float32)
    data["markov"] = None
    data["labels"] = (data["target_hidden"] @ data["target_head"].T).argmax(-1)
    fast, slow = with_leaves(data, (True, False)), with_leaves(data, (True, False))
    value = fused_linear_objective(objective("bv"), **fast, chunk_blocks=2)
    draft, target = (x.log_softmax(-1) for x in plain_logits(slow))
    at = slow["labels"].unsqueeze(-1)
    log_r = torch.nn.functional.pad((draft.gather(-1, at) - target.gather(-1, at)).squeeze(-1).cumsum(-1), (1, 0))
    lowest = log_r.cummin(-1).values
    scores = torch.minimum(target + lowest[:, :-1, None], draft + log_r[:, :-1, None]).exp().sum(-1)
    lengths = slow["valid"].sum(-1)
    per_block = lengths.clamp(min=1).log() - (scores * slow["valid"]).sum(-1).clamp(min=1e-30).log()
    expected = per_block[lengths > 0].mean()
    assert value.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    value.loss.backward()
    expected.backward()
    torch.testing.assert_close(fast["draft_hidden"].grad, slow["draft_hidden"].grad, atol=1e-6, rtol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Sees the result of every operation, those of an autograd function's forward pass too."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("name", sorted({name for name, _ in OBJECTIVES}))
def test_no_tensor_of_all_rows_by_vocabulary_is_made(name):
    """The largest tensor of the whole step is one chunk of logits."""
    num_blocks, block_size, vocab_size = 16, 4, 5_000
    data = with_leaves(problem(num_blocks, block_size, vocab_size, dtype=torch.float32))
    with LargestTensor() as seen:
        fused_linear_objective(objective(name), **data, chunk_blocks=4).loss.backward()
    assert seen.num_elements == 4 * block_size * vocab_size
    with LargestTensor() as seen:
        objective(name)(*plain_logits(data), data["labels"], data["valid"]).loss.backward()
    assert seen.num_elements == num_blocks * block_size * vocab_size


def test_buffers_are_freed_without_the_garbage_collector():
    """No reference cycle may hold vocabulary-sized storage."""
    gc.collect()
    gc.disable()
    try:
        data = with_leaves(problem(vocab_size=997, dtype=torch.float32))
        kept = {id(data["draft_head"]), id(data["target_head"]), id(data["markov"][1])}
        fused_linear_objective(objective("bv"), **data).loss.backward()
        objective("bv")(*plain_logits(data), data["labels"], data["valid"]).loss.backward()
        alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and 997 in x.shape and id(x) not in kept]
        assert not [x.shape for x in alive if x.dim() == 3 or x.shape[-1] == 997]
    finally:
        gc.enable()


def test_a_chunk_is_freed_before_the_next_is_built(monkeypatch):
    """Its log-probabilities, float32 beside low-precision buffers, would otherwise be there twice."""
    previous = []

    class Watched(Rows):
        def __init__(self, *arguments, **options):
            assert not [made for made in previous if made() is not None]
            previous.append(weakref.ref(self))
            super().__init__(*arguments, **options)

    monkeypatch.setattr(fused, "choose_rows", lambda *_: Watched)
    gc.disable()
    try:
        data = with_leaves(problem(dtype=torch.bfloat16))
        fused_linear_objective(objective("bv"), **data, chunk_blocks=1).loss.backward()
    finally:
        gc.enable()
    assert len(previous) == 5


def test_labels_are_checked_once_for_all_chunks(monkeypatch):
    """On a device every check waits for it."""
    calls = []
    for module in (fused, scores):
        monkeypatch.setattr(module, "check_labels", lambda *a, **k: calls.append(1) or check_labels(*a, **k))
    fused_linear_objective(objective("bv"), **problem(), chunk_blocks=1)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "options", "num_scales"),
    [
        ("tv", {}, 1),
        ("bv", {}, 1),
        ("bv", {"control_variate": True}, 1),
        ("ce", {}, 0),
        ("kl", {}, 0),
        ("lk-hybrid", {}, 1),
    ],
)
def test_without_statistics_only_the_sums_of_the_objective_are_taken(name, options, num_scales, monkeypatch):
    taken = []
    sweep = Rows._sweep
    monkeypatch.setattr(
        Rows, "_sweep", lambda rows, scales, **options: taken.append(len(scales)) or sweep(rows, scales, **options)
    )
    value = fused_linear_objective(objective(name, **options), **problem(), stats=False)
    assert taken == ([] if name == "ce" else [num_scales])
    taken.clear()
    with_statistics = fused_linear_objective(objective(name, **options), **problem())
    assert taken == [2]
    torch.testing.assert_close(value.loss, with_statistics.loss, atol=0, rtol=0)


def test_chunks_are_larger_on_an_accelerator_and_follow_its_free_memory(monkeypatch):
    assert chunk_bytes(torch.device("cpu")) == CHUNK_BYTES
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: 0)
    sizes = {}
    for free in (2**26, 2**31, 2**36):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (free, 2**37))
        sizes[free] = chunk_bytes(torch.device("cuda"))
    assert sizes[2**26] == CHUNK_BYTES < sizes[2**31] == 2**28 < sizes[2**36]
    assert 2_048 < sizes[2**36] / (151_936 * 2) < 4_096


def test_nan_in_padding_reaches_no_gradient():
    data = problem()
    clean, dirty = with_leaves(data), dict(data)
    outside = ~data["valid"].unsqueeze(-1)
    dirty["draft_hidden"] = data["draft_hidden"].masked_fill(outside, math.nan)
    dirty["target_hidden"] = data["target_hidden"].masked_fill(outside, math.nan)
    dirty["markov"] = (data["markov"][0].masked_fill(outside, math.nan), data["markov"][1])
    dirty = with_leaves(dirty)
    for each in (clean, dirty):
        fused_linear_objective(objective("bv"), **each).loss.backward()
    for got, want in zip(leaves_of(dirty), leaves_of(clean), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_ce_without_statistics_leaves_the_target_out():
    data = problem()
    expected = fused_linear_objective(objective("ce"), **data).loss
    data["target_hidden"] = data["target_head"] = None
    value = fused_linear_objective(objective("ce"), **data, stats=False)
    torch.testing.assert_close(value.loss, expected)
    assert value.stats is None
    with pytest.raises(ValueError, match="needs target_hidden and target_head"):
        fused_linear_objective(objective("bv"), **data, stats=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_hidden": torch.zeros(5, 3, 8)}, r"draft hidden states must be \[N, B, H\]"),
        ({"draft_head": torch.zeros(37, 9)}, r"the draft head must be \[V, 8\]"),
        ({"target_head": torch.zeros(36, 10)}, "differ in vocabulary"),
        ({"markov": (torch.zeros(5, 4, 3), torch.zeros(37, 2))}, r"the markov head must be \[V, 3\]"),
        ({"markov": (torch.zeros(5, 4, 3), torch.zeros(30, 3))}, "differ in vocabulary"),
        ({"chunk_blocks": 0}, "chunk_blocks must be at least 1"),
        ({"markov": (torch.zeros(5, 4, 3), None)}, "one of them is None"),
        ({"valid": torch.ones(5, 4)}, r"valid must be bool \[5, 4\]"),
        ({"valid": torch.ones(4, 4, dtype=torch.bool)}, r"valid must be bool \[5, 4\]"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        fused_linear_objective(objective("bv"), **(problem() | change))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_work_where_none_is_wanted(mode, monkeypatch):
    monkeypatch.setattr(Rows, "draft_gradient", lambda *_: pytest.fail("a gradient was computed"))
    data = with_leaves(problem())
    with mode():
        value = fused_linear_objective(objective("bv"), **data)
    torch.testing.assert_close(
        value.loss, objective("bv")(*(x.detach() for x in plain_logits(data)), data["labels"], data["valid"]).loss
    )


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1 / 3), (torch.float16, 65_536.0)])
def test_low_precision_gradients_are_scaled_before_they_are_rounded(dtype, scale):
    """By a factor that the dtype cannot hold: 1/3 would come out biased, a loss scale of 65,536 infinite."""
    data = problem(3, 4, vocab_size=64, width=16, dtype=dtype, masked=False)
    data["markov"] = None
    for name in ("draft_hidden", "draft_head"):
        data[name] = data[name] * 1e-2
    scaled, exact = with_leaves(data), with_leaves(data)
    (fused_linear_objective(objective("ce"), **scaled).loss * scale).backward()
    fused_linear_objective(objective("ce"), **exact).loss.backward()
    for got, base in zip(leaves_of(scaled), leaves_of(exact), strict=True):
        got, base = got.grad.double(), base.grad.double()
        assert got.isfinite().all()
        assert float((got * base).sum() / (base * base).sum()) == pytest.approx(scale, rel=8e-4)


def test_a_low_precision_head_sums_its_gradient_in_float32():
    """One block after another, a hundred of them: summed in bfloat16 the small ones would drown."""
    data = problem(100, 2, vocab_size=16, width=4, dtype=torch.bfloat16, masked=False)
    data["markov"] = None
    many, one = with_leaves(data), with_leaves(data)
    fused_linear_objective(objective("ce"), **many, chunk_blocks=1).numerator.backward()
    fused_linear_objective(objective("ce"), **one, chunk_blocks=100).numerator.backward()
    difference = many["draft_head"].grad.double() - one["draft_head"].grad.double()
    assert float(difference.norm() / one["draft_head"].grad.double().norm()) < 6e-3


def test_autocast_changes_nothing():
    data = problem(dtype=torch.float32)
    inside, outside = with_leaves(data), with_leaves(data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused_linear_objective(objective("bv"), **inside).loss.backward()
    fused_linear_objective(objective("bv"), **outside).loss.backward()
    for got, want in zip(leaves_of(inside), leaves_of(outside), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=0, rtol=0)
