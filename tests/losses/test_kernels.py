"""The Triton kernels against the definition and the plain path: on a GPU if there is one, else in Triton's interpreter.

Tolerances are relative to the largest value. Kernels and plain path both compute in float32, so 2e-6 is a few
roundings. Gradients in low precision are within half a unit in their last place, a whole one where Triton's interpreter
makes bfloat16 numbers: it cuts where a GPU rounds.
"""

import math
import warnings

import pytest
import torch
from test_fused import leaves_of, problem, with_leaves
from test_shared_rows import expanded, overlapping

from blockdraft.losses import (
    OUTSIDE,
    Blocks,
    Objective,
    ReducedTarget,
    fused,
    fused_linear_objective,
    objective,
    restrict_labels,
    restrict_target,
)
from blockdraft.losses.head_products import TargetIndex
from blockdraft.losses.objective import differentiate
from blockdraft.losses.reference import reference_loss
from blockdraft.losses.rows import Rows
from blockdraft.losses.rows_triton import KernelLimitError, TritonRows
from blockdraft.selfcheck import STRICT, SelfCheckError, SelfCheckWarning, _failures

from batches import OBJECTIVES, batch

triton = pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` installs it beside .venv")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and not triton.knobs.runtime.interpret:
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1 as in `make test-kernels`", allow_module_level=True)

from blockdraft.losses import kernels  # noqa: E402, imports Triton

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ROUNDING = {torch.bfloat16: 2**-8 if HAS_GPU else 2**-7, torch.float16: 2**-11}
ONE_OF_A_KIND = [
    ("ce", {}), ("kl", {}), ("rkl", {}), ("lk", {}), ("bv", {}), ("bv", {"estimator": "sampled", "form": "population"}),
    ("bv", {"beta": 0.37}), ("bv", {"control_variate": True}), ("token-bv", {}), ("lk-hybrid", {}),
    ("dspark", {}), ("dpace", {}),
]  # fmt: skip
"""Objectives that differ in their sums."""


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    """Small vocabularies span several tiles, the last one not full."""
    monkeypatch.setattr(kernels, "TILE", 32)


@pytest.fixture
def _trusted(monkeypatch):
    """The check on first use has tests of its own."""
    monkeypatch.setattr(fused, "passes_check", lambda *_, **__: True)


@pytest.fixture
def _unchecked(monkeypatch):
    """A process in which nothing has been checked, and whose device asks for kernels."""
    monkeypatch.setattr(fused, "KERNEL_DEVICES", (DEVICE.type,))
    monkeypatch.setattr(fused, "CHECK_VOCABULARY", 48)
    monkeypatch.delenv(STRICT, raising=False)
    _failures.clear()
    yield
    _failures.clear()


def assert_close(found, expected, *, rtol=2e-6):
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=rtol * scale, rtol=0)


def on_device(data):
    def move(x):
        return tuple(move(y) for y in x) if isinstance(x, tuple) else x if x is None else x.to(DEVICE)

    return {name: move(x) for name, x in data.items()}


@pytest.mark.parametrize(
    ("name", "options", "temperature"),
    [*((*each, 1.0) for each in OBJECTIVES), *((*each, 0.7) for each in ONE_OF_A_KIND)],
)
def test_values_and_gradients_are_those_of_the_definition(name, options, temperature):
    exact = batch(block_size=3, vocab_size=37).leaf()
    draft, target = (x.detach().float().to(DEVICE) for x in (exact.draft, exact.target))
    draft.requires_grad_()
    blocks = Blocks(
        draft, target, exact.labels.to(DEVICE), exact.valid.to(DEVICE), temperature=temperature, rows=TritonRows
    )
    obj = objective(name, temperature=temperature, **options)
    loss = obj.value(*differentiate(obj.sums, draft, blocks)).loss
    expected = reference_loss(name, *exact.arguments(), temperature=temperature, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6, abs=1e-6)
    (found,), (gradient,) = torch.autograd.grad(loss, draft), torch.autograd.grad(expected, exact.draft)
    assert_close(found, gradient)
    assert not found[~blocks.valid].any()


@pytest.mark.usefixtures("_trusted")
@pytest.mark.parametrize(("name", "options"), ONE_OF_A_KIND)
@pytest.mark.parametrize("masked", [False, True])
def test_fused_with_kernels_equals_fused_without(name, options, masked):
    """Chunks, DSpark's bias, statistics and all gradients, in float32."""
    data = on_device(problem(3, 3, dtype=torch.float32, masked=masked, seed=3))
    fast, slow = with_leaves(data), with_leaves(data)
    obj = objective(name, temperature=0.7, **options)
    value = fused_linear_objective(obj, **fast, chunk_blocks=2, kernels=True)
    expected = fused_linear_objective(obj, **slow, chunk_blocks=2, kernels=False)
    for part in ("loss", "numerator", "denominator", "per_block", "survival"):
        assert_close(getattr(value, part), getattr(expected, part), rtol=1e-5)
    for part in ("greedy", "token", "block", "accuracy", "agreement", "num_positions"):
        assert_close(getattr(value.stats, part), getattr(expected.stats, part), rtol=1e-5)
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        assert_close(got.grad, want.grad, rtol=1e-5)


@pytest.mark.usefixtures("_trusted")
@pytest.mark.parametrize(("name", "options"), ONE_OF_A_KIND)
def test_rows_of_the_target_that_blocks_share(name, options):
    data, rows = overlapping(dtype=torch.float32)
    obj, index = objective(name, **options), TargetIndex(rows.to(DEVICE))
    fast, slow = with_leaves(on_device(data)), with_leaves(on_device(expanded(data, rows)))
    value = fused_linear_objective(obj, **fast, target_index=index, chunk_blocks=6, kernels=True)
    expected = fused_linear_objective(obj, **slow, chunk_blocks=6, kernels=False)
    for part in ("loss", "per_block", "survival"):
        assert_close(getattr(value, part), getattr(expected, part), rtol=1e-5)
    for part in ("greedy", "token", "block", "accuracy", "agreement"):
        assert_close(getattr(value.stats, part), getattr(expected.stats, part), rtol=1e-5)
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        assert_close(got.grad, want.grad, rtol=1e-5)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("name", ["bv", "kl", "rkl", "lk-hybrid"])
@pytest.mark.parametrize("stats", [False, True])
def test_one_sweep_takes_all_sums_and_the_check_on_first_use_shares_rows_as_training_does(name, stats, monkeypatch):
    data, rows = overlapping(dtype=torch.float32)
    calls = count_calls(monkeypatch, "launch_sums")
    value = fused_linear_objective(
        objective(name), **on_device(data), target_index=TargetIndex(rows.to(DEVICE)), stats=stats
    )
    assert (value.stats is not None) is stats
    sweeps = 2 if stats and name == "rkl" else 1  # statistics have overlaps, which go with KL but not with reverse KL
    assert len(calls) == 2 * sweeps, "for the check, and for the batch"
    assert all(call[8] is not None for call in calls)


@pytest.mark.usefixtures("_trusted")
@pytest.mark.parametrize(("name", "options"), ONE_OF_A_KIND)
def test_a_reduced_vocabulary(name, options):
    data = problem(4, 3, dtype=torch.float32)
    draft_ids = torch.randperm(37, generator=torch.Generator().manual_seed(1))[:19]
    data["labels"], data["valid"] = restrict_labels(data["labels"], data["valid"], draft_ids, 37)
    assert (data["labels"] == OUTSIDE).any()
    reduced = restrict_target(data["target_hidden"], data["target_head"], draft_ids)
    reduced = ReducedTarget(reduced.log_z.to(DEVICE), reduced.argmax.to(DEVICE))
    data["target_head"] = data["target_head"][draft_ids]
    data["draft_head"], data["markov"] = data["draft_head"][:19], None
    fast, slow = with_leaves(on_device(data)), with_leaves(on_device(data))
    obj = objective(name, **options)
    value = fused_linear_objective(obj, **fast, reduced=reduced, kernels=True)
    expected = fused_linear_objective(obj, **slow, reduced=reduced, kernels=False)
    assert_close(value.per_block, expected.per_block, rtol=1e-5)
    for part in ("greedy", "token", "block", "accuracy", "agreement"):
        assert_close(getattr(value.stats, part), getattr(expected.stats, part), rtol=1e-5)
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        assert_close(got.grad, want.grad, rtol=1e-5)


def everything(rows, labels, scales, valid=None):
    """All sums of some rows and the gradient of a mixture of them, of the valid rows as objectives take it."""
    label, reverse_kl = rows.draft_label(labels), rows.reverse_kl()
    kl, *overlaps = rows.kl_and_overlaps(*scales)
    results = {
        "label": label, "target label": rows.target_label(labels), "kl": kl, "reverse kl": reverse_kl,
        "overlaps": torch.stack(overlaps), "argmax": rows.draft_argmax(), "target argmax": rows.target_argmax(),
    }  # fmt: skip
    # a sum is the same to the last digit, whatever else its sweep takes
    torch.testing.assert_close(rows.kl(), kl, atol=0, rtol=0)
    torch.testing.assert_close(torch.stack(rows.overlaps(*scales)), results["overlaps"], atol=0, rtol=0)
    mixture = label + 0.3 * kl + 0.2 * reverse_kl - 2 * overlaps[0] + 0.7 * overlaps[1] ** 2
    weights = torch.ones_like(mixture) if valid is None else valid.to(mixture.dtype)
    return results | {"gradient": rows.draft_gradient([mixture], [weights])}


def compare_rows(draft, target, labels, *, rtol=2e-6, **options):
    """Compare kernels on these logits with the plain path on the same numbers in float64."""
    scales = [torch.linspace(0, 1.5, len(labels)), torch.ones(len(labels))]
    given = {name: x if not torch.is_tensor(x) else x.to(DEVICE) for name, x in options.items()}
    fast = TritonRows(draft.to(DEVICE), target.to(DEVICE), **given)
    found = everything(fast, labels.to(DEVICE), [s.to(DEVICE) for s in scales], given.get("valid"))
    exact = Rows(draft.double(), target.double(), **options)
    expected = everything(exact, labels, [s.double() for s in scales], options.get("valid"))
    for name, value in expected.items():
        got = found[name].detach().double().cpu()
        if name == "gradient" and draft.dtype in ROUNDING:
            allowed = 1.001 * ROUNDING[draft.dtype] * value.abs() + rtol * value.abs().max()
            assert bool(((got - value).abs() <= allowed).all())
        elif name == "overlaps":
            for each, want in zip(got, value.detach(), strict=True):
                assert_close(each, want, rtol=rtol)
        else:
            assert_close(got, value, rtol=0 if "argmax" in name else rtol)
    return found


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_odd_vocabularies(vocab_size, temperature):
    draft, target = 2 * torch.randn(5, vocab_size), 2 * torch.randn(5, vocab_size)
    compare_rows(draft, target, torch.randint(vocab_size, (5,)), temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_low_precision_logits(dtype, temperature):
    """Sums are as exact as for float32 logits; the gradient alone is rounded, to the dtype that it is stored in."""
    draft, target = (2 * torch.randn(6, 45).to(dtype) for _ in range(2))
    found = compare_rows(draft, target, torch.randint(45, (6,)), temperature=temperature)
    assert found["gradient"].dtype == dtype


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 1.0)])
def test_the_vocabulary_of_qwen3(dtype, temperature, monkeypatch):
    monkeypatch.setattr(kernels, "TILE", 16_384)  # fewer steps for the interpreter
    draft, target = (3 * torch.randn(2, 151_936).to(dtype) for _ in range(2))
    compare_rows(draft, target, target.argmax(-1), temperature=temperature, rtol=1e-5)


@pytest.mark.parametrize("zeros", ["draft", "target", "both"])
def test_zeros_in_either_distribution(zeros):
    """Logits of -inf, a whole tile of them included; a label of probability zero counts as `LOG_ZERO`."""
    draft, target = torch.randn(4, 40), torch.randn(4, 40)
    if zeros != "target":
        draft[:, :32], draft[:, 34] = -math.inf, -math.inf
    if zeros != "draft":
        target[:, 32:38], target[1:, 3] = -math.inf, -math.inf
    compare_rows(draft, target, torch.tensor([0, 34, 3, 39]))


def test_equal_distributions_are_a_stationary_point():
    """At a tie the target's side counts as the smaller one."""
    logits = torch.randn(3, 40, device=DEVICE)
    rows = TritonRows(logits, logits.clone())
    (overlap,) = rows.overlaps(torch.ones(3, device=DEVICE))
    assert_close(overlap, torch.ones(3))
    assert not rows.draft_gradient([overlap], [torch.ones_like(overlap)]).any()


def test_nothing_in_padding_reaches_a_result():
    draft, target = torch.randn(4, 40), torch.randn(4, 40)
    valid = torch.tensor([True, False, True, False])
    clean = compare_rows(draft, target, torch.tensor([1, 2, 3, 4]), valid=valid)
    assert not clean["gradient"][~valid].any()
    for logits in (draft, target):
        logits[~valid] = math.nan
    dirty = everything(
        TritonRows(draft.to(DEVICE), target.to(DEVICE), valid=valid.to(DEVICE)),
        torch.tensor([1, 2, 3, 4], device=DEVICE),
        [torch.linspace(0, 1.5, 4, device=DEVICE), torch.ones(4, device=DEVICE)],
        valid.to(DEVICE),
    )
    for name, value in clean.items():
        torch.testing.assert_close(dirty[name], value, atol=0, rtol=0)


def test_nan_in_a_valid_row_is_not_hidden():
    logits = torch.randn(2, 40, device=DEVICE)
    logits[1, 20] = math.nan
    log_q = TritonRows(logits, None).draft_label(torch.zeros(2, dtype=torch.long, device=DEVICE))
    assert log_q.isnan().tolist() == [False, True]


def test_a_given_normaliser():
    draft, target = torch.randn(4, 40), torch.randn(4, 40)
    log_z = (target / 0.7).logsumexp(-1) + torch.rand(4)
    compare_rows(draft, target, torch.tensor([1, 2, 3, 4]), temperature=0.7, target_log_z=log_z)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_gradient_takes_the_place_of_the_logits_only_if_it_may(overwrite):
    logits = torch.randn(2, 40, device=DEVICE)
    before = logits.clone()
    rows = TritonRows(logits, None, overwrite=overwrite)
    label = rows.draft_label(torch.zeros(2, dtype=torch.long, device=DEVICE))
    gradient = rows.draft_gradient([label], [torch.ones_like(label)])
    assert (gradient.data_ptr() == logits.data_ptr()) is overwrite
    assert torch.equal(logits, before) is not overwrite


def test_log_probabilities_for_objectives_of_ones_own():
    """What no sum expresses goes through the full log-probabilities, with the kernels' sums beside it."""
    draft, target, labels = torch.randn(3, 40), torch.randn(3, 40), torch.tensor([1, 2, 3])
    gradients = []
    for make, dtype, device in ((TritonRows, torch.float32, DEVICE), (Rows, torch.float64, "cpu")):
        rows = make(draft.to(device, dtype), target.to(device, dtype), temperature=0.7)
        log_q = rows.differentiable_draft_log_probs
        entropy = (log_q.exp() * log_q * rows.target_log_probs).sum(-1) + rows.draft_label(labels.to(device))
        gradients.append(rows.draft_gradient([entropy], [torch.ones_like(entropy)]))
    assert_close(*gradients, rtol=1e-5)


def test_limits_are_named():
    rows = TritonRows(torch.randn(2, 40, device=DEVICE), torch.randn(2, 40, device=DEVICE))
    overlaps = rows.overlaps(*(torch.full((2,), s, device=DEVICE) for s in (0.3, 0.6, 0.9)))
    assert len(overlaps) == 3
    with pytest.raises(KernelLimitError, match="evaluate it with kernels=False"):
        rows.draft_gradient([sum(overlaps)], [torch.ones(2, device=DEVICE)])
    with pytest.raises(KernelLimitError, match=r"not torch\.float64"):
        TritonRows(torch.randn(2, 40, dtype=torch.float64, device=DEVICE), None)
    with pytest.raises(ValueError, match="needs target logits"):
        TritonRows(torch.randn(2, 40, device=DEVICE), None).kl()


@pytest.mark.usefixtures("_trusted")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients_or_blocks(mode):
    data = on_device(problem(2, 2, dtype=torch.float32))
    with mode():
        value = fused_linear_objective(objective("bv"), **data, kernels=True)
        empty = fused_linear_objective(
            objective("bv"),
            **{name: x if "head" in name else x[:0] for name, x in data.items() if name != "markov"},
            kernels=True,
        )
    assert_close(value.loss, fused_linear_objective(objective("bv"), **data, kernels=False).loss)
    assert empty.per_block.shape == (0,)


@pytest.mark.usefixtures("_trusted")
def test_bfloat16_heads_and_a_float32_bias():
    """All factors at the precision of the logits: the gradient is not copied to float32 for the sake of the bias."""
    data = on_device(problem(4, 3, dtype=torch.bfloat16, masked=False))
    data["markov"] = tuple(x.float() for x in data["markov"])
    fast, slow = with_leaves(data), with_leaves(data)
    fused_linear_objective(objective("bv"), **fast, kernels=True).loss.backward()
    fused_linear_objective(objective("bv"), **slow, kernels=False).loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        assert got.grad.dtype == want.grad.dtype
        assert_close(got.grad, want.grad, rtol=1e-2)


# The check on first use


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [37, 64])
def test_right_kernels_pass_and_are_used(dtype, vocab_size, monkeypatch):
    data = with_leaves(on_device(problem(2, 2, vocab_size, dtype=dtype)))
    launches = count_calls(monkeypatch, "launch_gradient")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused_linear_objective(objective("bv"), **data)
        fused_linear_objective(objective("bv", beta=0.3), **data)
    assert len(launches) == 3, "one for the check, one for each batch"


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize(("name", "options"), ONE_OF_A_KIND)
@pytest.mark.parametrize("is_reduced", [False, True])
def test_right_kernels_pass_for_every_objective(name, options, is_reduced):
    kind = fused.LogitKind(torch.bfloat16, torch.float32, 37, DEVICE, is_partial=is_reduced)
    assert fused.choose_rows(objective(name, **options), kind) is TritonRows


def count_calls(monkeypatch, name, spoil=None):
    calls, launch = [], getattr(kernels, name)

    def counted(*arguments, **options):
        calls.append(arguments)
        launch(*arguments, **options)
        if spoil is not None:
            spoil(*arguments)

    monkeypatch.setattr(kernels, name, counted)
    return calls


def fail(*_):
    raise RuntimeError("PassManager::run failed\n  on line 7")


SPOILT = {
    "a normaliser 1% off": ("launch_normaliser", lambda *a: a[2].add_(0.01), "bv", "off by"),
    "a wrong argmax": ("launch_normaliser", lambda *a: a[3].zero_(), "bv", "the statistic"),
    "an overlap 1% off": ("launch_sums", lambda *a: a[6][:4].mul_(1.01), "bv", "off by"),
    "a divergence 1% off": ("launch_sums", lambda *a: a[6][4].mul_(1.01), "kl", "the numerator is off by"),
    "a reverse divergence 1% off": ("launch_sums", lambda *a: a[6][6].mul_(1.01), "rkl", "the numerator is off by"),
    "an overlap beside a divergence 1% off": ("launch_sums", lambda *a: a[6][:2].mul_(1.01), "lk-hybrid", "off by"),
    "a divergence beside an overlap 1% off": ("launch_sums", lambda *a: a[6][4].mul_(1.01), "lk-hybrid", "off by"),
    "a mass 1% off": ("launch_sums", lambda *a: a[6][5].mul_(1.01), "kl", "the gradient is off by"),
    "a gradient 2% off": ("launch_gradient", lambda *a: a[0].mul_(1.02), "bv", "the gradient is off by"),
    "a gradient that is NaN": ("launch_gradient", lambda *a: a[0].fill_(math.nan), "ce", "off by nan"),
    "a compiler that fails": ("launch_sums", fail, "bv", "RuntimeError: PassManager::run failed on line 7"),
}


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("case", SPOILT.values(), ids=SPOILT.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_kernels_are_reported_once_and_not_used(case, dtype, monkeypatch):
    name, spoil, objective_name, message = case
    data = with_leaves(on_device(problem(2, 2, dtype=dtype)))
    calls = count_calls(monkeypatch, name, spoil)
    with pytest.warns(SelfCheckWarning) as caught:
        value = fused_linear_objective(objective(objective_name), **data)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert message in text
    assert "\n" not in text
    assert f"torch {torch.__version__}" in text
    assert f"triton {triton.__version__}" in text
    assert "the plain path is used instead" in text
    expected = fused_linear_objective(objective(objective_name), **data, kernels=False)
    torch.testing.assert_close(value.loss, expected.loss, atol=0, rtol=0)
    used = len(calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused_linear_objective(objective(objective_name), **data)
    assert len(calls) == used


@pytest.mark.usefixtures("_unchecked")
def test_an_objective_with_another_option_is_checked_by_itself(monkeypatch):
    data = with_leaves(on_device(problem(2, 2, dtype=torch.float32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused_linear_objective(objective("bv"), **data)
        count_calls(monkeypatch, "launch_gradient", lambda *a: a[0].mul_(1.02))
        fused_linear_objective(objective("bv"), **data)
    with pytest.warns(SelfCheckWarning, match="the gradient is off by"):
        fused_linear_objective(objective("bv", control_variate=True), **data)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("by", ["environment", "argument"])
def test_wrong_kernels_are_an_error_if_one_wants_them_to_be(by, monkeypatch):
    data = on_device(problem(2, 2, dtype=torch.float32))
    count_calls(monkeypatch, "launch_sums", lambda *a: a[6].mul_(1.01))
    monkeypatch.setenv(STRICT, "1" if by == "environment" else "0")
    for _ in range(2):
        with pytest.raises(SelfCheckError, match="off by"):
            fused_linear_objective(objective("bv"), **data, kernels=True if by == "argument" else None)


@pytest.mark.usefixtures("_unchecked")
def test_an_objective_beyond_the_kernels_takes_the_plain_path():
    class Three(Objective):
        name = "three-overlaps"

        def sums(self, blocks):
            scales = (torch.full((blocks.rows.num_rows,), s, device=DEVICE) for s in (0.2, 0.5, 0.9))
            total = sum(blocks.rows.overlaps(*scales)).view(blocks.labels.shape)
            return blocks.sum_over_valid(total), blocks.num_valid

    data = with_leaves(on_device(problem(2, 2, dtype=torch.float32)))
    with pytest.warns(SelfCheckWarning, match="KernelLimitError: the kernels differentiate one label and 2 overlaps"):
        fused_linear_objective(Three(), **data).loss.backward()


@pytest.mark.usefixtures("_unchecked")
def test_float64_takes_the_plain_path_unless_kernels_are_asked_for(monkeypatch):
    calls = count_calls(monkeypatch, "launch_normaliser")
    fused_linear_objective(objective("bv"), **on_device(problem(2, 2)))
    assert not calls
    with pytest.raises(SelfCheckError, match=r"float32, bfloat16 or float16, not torch\.float64"):
        fused_linear_objective(objective("bv"), **on_device(problem(2, 2)), kernels=True)
