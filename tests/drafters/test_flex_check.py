"""Flex attention on its first use on a device: used where it agrees with the definition, and nowhere else.

PyTorch has no backward pass of flex attention on a CPU, so a dense one with the same mask stands in for the right one.
"""

import warnings

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from blockdraft import selfcheck
from blockdraft.drafters import attention
from blockdraft.drafters.attention import (
    Anchors,
    FlexAttention,
    GroupedAttention,
    ReferenceAttention,
    default_attention,
)
from blockdraft.selfcheck import STRICT, SelfCheckError, SelfCheckWarning

ANCHORS = Anchors.of(torch.tensor([0, 1]), torch.tensor([3, 7]))
SHAPE = (ANCHORS, 4, 2, 9, (4, 2, 16))


def dense(query, key, value, *, block_mask, enable_gqa):
    """What flex attention computes, all of it."""
    mask = create_mask(block_mask.mask_mod, None, None, query.shape[2], key.shape[2], device="cpu")
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=enable_gqa)


def without_mask(query, key, value, *, block_mask, enable_gqa):
    del block_mask
    return scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)


def with_a_wrong_gradient(query, key, value, **options):
    return dense(query, key.detach() + 0.5 * (key - key.detach()), value, **options)


def without_a_gradient(query, key, value, **options):
    return dense(query, key, value.detach(), **options)


def raising(*_, **__):
    raise RuntimeError("no valid triton configs")


WRONG = [without_mask, with_a_wrong_gradient, without_a_gradient, raising]


@pytest.fixture(autouse=True)
def _tried_here(monkeypatch):
    monkeypatch.setattr(selfcheck, "_failures", {})
    monkeypatch.setattr(attention, "FLEX_DEVICES", ("cpu",))
    monkeypatch.delenv(STRICT, raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_agrees_with_the_definition_is_used(dtype, monkeypatch):
    monkeypatch.setattr(attention, "_flex", lambda _compiled: dense)
    monkeypatch.setenv(STRICT, "1")
    assert isinstance(default_attention(*SHAPE, dtype), FlexAttention)
    with torch.inference_mode():  # where a first use may be, too
        assert isinstance(default_attention(*SHAPE[:-1], (6, 2, 8), dtype), FlexAttention)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_is_wrong_is_reported_once_and_not_used(wrong, monkeypatch):
    monkeypatch.setattr(attention, "_flex", lambda _compiled: wrong)
    with pytest.warns(SelfCheckWarning, match="flex attention cannot be used on cpu: .* the plain path is used"):
        assert isinstance(default_attention(*SHAPE), GroupedAttention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(default_attention(*SHAPE), GroupedAttention)
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(SelfCheckError, match="flex attention"):
        default_attention(*SHAPE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_shapes_that_change_do_not_compile_it_anew_for_ever(monkeypatch):
    """Mask and attention: a graph each, one more for any shape, one for several rows; the counts may only shrink."""
    mask, flex = (torch.compile(each, backend="eager") for each in (create_block_mask, flex_attention))
    monkeypatch.setattr(attention, "_make_mask", lambda _compiled: mask)
    monkeypatch.setattr(attention, "_flex", lambda _compiled: flex)
    torch._dynamo.reset()
    counters.clear()
    for num_blocks, num_rows, length in ((3, 1, 130), (5, 1, 141), (7, 2, 152), (4, 3, 163), (12, 4, 100)):
        position = torch.arange(num_blocks) * 4 + 2
        anchors = Anchors.of(torch.zeros_like(position), position)
        shapes = [(num_blocks, 4, 8, 16), (num_blocks, 2, 8, 16), (num_rows, 2, length, 16)]
        q, k, context = (torch.randn(shape) for shape in shapes)
        found = FlexAttention(anchors, 8, num_rows, length)(q, k, k, context, context)
        torch.testing.assert_close(found, ReferenceAttention(anchors)(q, k, k, context, context))
    assert counters["stats"]["unique_graphs"] <= 5
    assert not counters["graph_break"]
    torch._dynamo.reset()
