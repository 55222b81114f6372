"""A fast path that is wrong, raises, or is not there, on its first use."""

import sys
import warnings

import pytest
import torch

from blockdraft import selfcheck
from blockdraft.losses import fused, fused_linear_objective, objective
from blockdraft.selfcheck import STRICT, SelfCheckError, SelfCheckWarning, compare, passes_check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(selfcheck, "_failures", {})
    monkeypatch.delenv(STRICT, raising=False)


def wrong():
    compare("the answer", torch.tensor([41.0, 1.0]), torch.tensor([42.0, 1.0]), 1e-3)


def raises():
    raise ZeroDivisionError("two\nlines")


def test_what_agrees_is_used_and_checked_once_per_key():
    calls = []
    for key in ((), (), (torch.float32,)):
        assert passes_check("a part", CPU, lambda: calls.append(1), key=key)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("check", "message"),
    [(wrong, r"the answer is off by 2\.4e-02 of its largest value \(tolerance 1e-03\)"),
     (raises, "ZeroDivisionError: two lines")],
)  # fmt: skip
def test_what_fails_is_reported_once_in_one_line_with_versions(check, message):
    with pytest.warns(SelfCheckWarning, match=message) as caught:
        assert not passes_check("a part", CPU, check)
    text = str(caught[0].message)
    assert text.startswith("a part cannot be used on cpu: ")
    assert "\n" not in text
    assert f"torch {torch.__version__}" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not passes_check("a part", CPU, check)


@pytest.mark.parametrize(("variable", "strict"), [("1", None), ("0", True), (None, True)])
def test_strictness_makes_it_an_error_every_time(variable, strict, monkeypatch):
    if variable is not None:
        monkeypatch.setenv(STRICT, variable)
    for _ in range(2):
        with pytest.raises(SelfCheckError, match="the answer is off"):
            passes_check("a part", CPU, wrong, strict=strict)


@pytest.mark.parametrize(
    ("found", "expected", "is_close"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0], [1.0, 2.0], False),
        ([], [], True),
        ([0.0], [0.0], True),
        ([1e-20], [0.0], False),
    ],
)
def test_comparison(found, expected, is_close):
    if is_close:
        compare("x", torch.tensor(found), torch.tensor(expected), 1e-3)
    else:
        with pytest.raises(SelfCheckError, match="x is"):
            compare("x", torch.tensor(found), torch.tensor(expected), 1e-3)


def test_a_gpu_without_triton_takes_the_plain_path_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fused, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setitem(sys.modules, "triton", None)
    data = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(9, 4), torch.randn(9, 4), torch.zeros(2, 3).long()
    with pytest.warns(SelfCheckWarning, match=r"Triton is not installed \(pip install 'blockdraft\[gpu\]'\)"):
        value = fused_linear_objective(objective("bv"), *data)
    expected = fused_linear_objective(objective("bv"), *data, kernels=False)
    torch.testing.assert_close(value.loss, expected.loss, atol=0, rtol=0)
    with pytest.raises(SelfCheckError, match=r"blockdraft\[gpu\]"):
        fused_linear_objective(objective("bv"), *data, kernels=True)
