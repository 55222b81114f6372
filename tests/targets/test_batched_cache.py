"""Texts side by side give what each gives alone, whatever comes and goes."""

import gc
import random
import weakref

import pytest
import torch

from blockdraft.targets import BatchedKVCache, Span, attention, cache

from tiny import FAMILIES, tiny_target


def alone(target, text):
    return target.forward(torch.tensor([text])).hidden[0, -1]


@pytest.fixture(params=[False, True], ids=["fused", "products"])
def by_products(request, monkeypatch):
    """Attend in both ways, whatever the processor prefers."""
    for module in (attention, cache):
        monkeypatch.setattr(module, "multiplies_whole_rows", lambda _x: request.param)
    return request.param


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("by_products")
def test_hidden_states_are_those_of_each_text_alone_while_texts_come_and_go(family, own):
    """Through the package's own forward pass, and through transformers."""
    target = tiny_target(family)
    target.use_decoder = own
    dice = random.Random(0)
    slots, texts = BatchedKVCache(target, 5, 40), []
    assert (slots._decoder is not None) == own
    for _ in range(60):
        free = 5 - len(texts)
        if free and dice.random() < 0.5:
            new = [[dice.randrange(40) for _ in range(dice.randint(1, 9))] for _ in range(dice.randint(1, free))]
            hidden = slots.add(new)
            torch.testing.assert_close(hidden, torch.stack([alone(target, text) for text in new]))
            texts += new
        elif texts and dice.random() < 0.3:
            slot = dice.randrange(len(texts))
            slots.remove(slot)
            texts[slot] = texts[-1]
            texts.pop()
        elif texts and max(map(len, texts)) < 40:
            tokens = [dice.randrange(40) for _ in texts]
            hidden = slots.step(tokens)
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
            torch.testing.assert_close(hidden, torch.stack([alone(target, text) for text in texts]))
        assert slots.lengths == [len(text) for text in texts]


@pytest.mark.usefixtures("by_products")
def test_storage_that_was_never_written_does_not_matter(monkeypatch):
    """Memory comes with whatever was in it: here, with NaN."""
    target = tiny_target()
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        out = empty(self, *args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    slots = BatchedKVCache(target, 3, 200)
    slots.add([[5, 6, 7], list(range(3, 30))])
    for token in range(3, 20):
        hidden = slots.step([token, token])
    expected = alone(target, [5, 6, 7, *range(3, 20)])
    torch.testing.assert_close(hidden[0], expected)


def test_storage_grows_with_the_texts_and_not_with_the_capacity(by_products):
    target = tiny_target()
    slots = BatchedKVCache(target, 3, 10**7)
    slots.add([[5, 6, 7], list(range(3, 30))])
    tokens = [3 + number % 20 for number in range(200)]
    for token in tokens:
        hidden = slots.step([token, token])
    torch.testing.assert_close(hidden[0], alone(target, [5, 6, 7, *tokens]))
    room = slots._layers[0].keys.shape[2]
    assert room == 256 if by_products else 227 <= room <= 2 * 227


@pytest.mark.parametrize("length", [1, 30, 64])
def test_attention_by_products_is_the_fused_one_up_to_the_rounding_of_bfloat16(monkeypatch, length):
    torch.manual_seed(0)
    query, key, value = (torch.randn(5, heads, 64, 16).bfloat16() for heads in (6, 2, 2))
    query = query[:, :, :1]
    seen = (torch.arange(64) < torch.randint(1, length + 1, (5, 1)))[:, None, None]
    expected = attention.SlotAttention(seen)(query.double(), key.double(), value.double(), 0.3)
    calls = []
    products = attention._by_products
    monkeypatch.setattr(attention, "_by_products", lambda *given: calls.append(1) or products(*given))
    monkeypatch.setattr(attention, "multiplies_whole_rows", lambda _x: True)
    found = attention.SlotAttention(seen)(query, key, value, 0.3)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)
    assert calls == [1]


def test_slices_with_gaps_are_attended_without_products(monkeypatch):
    monkeypatch.setattr(attention, "multiplies_whole_rows", lambda _x: True)
    monkeypatch.setattr(attention, "_by_products", None)
    key, value = torch.randn(2, 3, 2, 9, 4)[:, :, :, :7]
    seen = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    query = torch.randn(3, 4, 1, 4)
    found = attention.SlotAttention(seen)(query, key, value, None)
    grouped = query.view(3, 2, 2, 4)
    expected = (grouped @ key.mT / 2).softmax(-1) @ value
    torch.testing.assert_close(found, expected.view(3, 1, 4, 4))


def test_more_texts_or_tokens_than_there_is_room_for_are_refused():
    target = tiny_target()
    slots = BatchedKVCache(target, 2, 4)
    with pytest.raises(ValueError, match="2 slots are taken; 3 texts"):
        slots.add([[3], [4], [5]])
    with pytest.raises(ValueError, match="a slot holds 4 tokens; a text has 5"):
        slots.add([[3, 4, 5, 6, 7]])
    slots.add([[3, 4, 5, 6]])
    with pytest.raises(ValueError, match="a text needs 5"):
        slots.step([3])


@pytest.mark.parametrize("own", [True, False])
def test_keys_and_values_go_with_the_cache_and_do_not_wait_for_the_garbage_collector(own):
    """Regenerating makes a cache for every shard; of many gigabytes, the next would not fit beside the last."""
    target = tiny_target()
    target.use_decoder = own
    gc.disable()
    try:
        slots = BatchedKVCache(target, 2, 20)
        slots.add([[1, 2], [3]])
        slots.step([4, 5])
        keys = [weakref.ref(layer.keys) for layer in slots._layers]
        assert all(key() is not None for key in keys)
        del slots
        assert [key() for key in keys] == [None] * target.num_layers
    finally:
        gc.enable()


def test_the_target_is_as_before_afterwards():
    target = tiny_target()
    usual = target.model.config._attn_implementation
    slots = BatchedKVCache(target, 1, 4)
    slots.add([[3, 4]])
    with pytest.raises(IndexError):
        slots.step([10_000])
    assert target.model.config._attn_implementation == usual
    assert slots.lengths == [2]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_are_read_as_if_each_were_alone(family):
    target = tiny_target(family)
    texts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    spans = [Span(0, 0, 5), Span(1, 1, 3), Span(1, 3, 6)]
    tokens = torch.zeros(2, 7, dtype=torch.long)
    for text, span in zip(texts, spans, strict=True):
        tokens[span.row, span.start : span.end] = torch.tensor(text)
    packed = target.forward(tokens, layers=(1, 3), spans=spans)
    for text, span in zip(texts, spans, strict=True):
        single = target.forward(torch.tensor([text]), layers=(1, 3))
        torch.testing.assert_close(packed.hidden[span.row, span.start : span.end], single.hidden[0])
        torch.testing.assert_close(packed.features[span.row, span.start : span.end], single.features[0])
