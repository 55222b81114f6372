"""Packed conversations are whole, do not see each other, and depend on seed and step alone."""

import pytest
import torch

from blockdraft.pocket.build.model import Shape, new_model, weighted_loss
from blockdraft.pocket.build.packing import PROMPT_WEIGHT, encode_conversation, pack, training_batch
from blockdraft.pocket.corpus import split_of

TINY = Shape(hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def batch(tokenizer):
    return training_batch(tokenizer, 4, 384, seed=42, step=7)


def test_a_batch_is_a_function_of_seed_and_step(tokenizer, batch):
    again = training_batch(tokenizer, 4, 384, seed=42, step=7)
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.weights, again.weights)
    assert not torch.equal(batch.tokens, training_batch(tokenizer, 4, 384, seed=42, step=8).tokens)
    assert not torch.equal(batch.tokens, training_batch(tokenizer, 4, 384, seed=43, step=7).tokens)


def test_rows_are_full_of_whole_training_conversations(tokenizer, batch):
    assert (batch.segments > 0).float().mean() > 0.9
    for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            text = tokenizer.decode(tokens[segments == segment].tolist(), skip_special_tokens=False)
            assert text.startswith("<|im_start|>")
            assert text.endswith("<|im_end|>\n")
            for turn in text.split("<|im_start|>user\n")[1:]:
                assert split_of(turn.split("<|im_end|>")[0]) == "train"


def test_weights_positions_and_padding(batch):
    first = batch.positions == 0
    assert (batch.weights[first] == 0).all()
    assert (batch.weights[batch.segments == 0] == 0).all()
    assert (batch.tokens[batch.segments == 0] == 0).all()
    assert batch.weights.unique().tolist() == pytest.approx([0.0, PROMPT_WEIGHT, 1.0])
    assert (batch.tokens[batch.weights == 1] == 2).sum() >= batch.segments.max(-1).values.sum()  # the end is learnt


def test_what_fits_nowhere_is_left_out(tokenizer):
    short = encode_conversation(tokenizer, [("Hi", "Hello")])
    long = encode_conversation(tokenizer, [("Hi", "Hello " * 100)])
    packed = pack([long, short], 1, 40, pad_id=0)
    assert packed.tokens[0, : len(short.tokens)].tolist() == short.tokens
    assert packed.segments.max() == 1


def test_a_packed_batch_has_the_loss_of_its_conversations_alone(tokenizer):
    turns = [[("Hi", "Hello there")], [("What?", "That, I think."), ("Why?", "So.")], [("Go on", "No, no, no.")]]
    found = [encode_conversation(tokenizer, each) for each in turns]
    model = new_model(TINY, 2, tokenizer, seed=0).double()
    packed = pack(found, 2, 60, pad_id=0)
    assert int(packed.segments.max()) > 1
    alone = [pack([each], 1, len(each.tokens), pad_id=0) for each in found]
    weights = [float(each.weights.double().sum()) for each in alone]
    expected = sum(weighted_loss(model, each).item() * w for each, w in zip(alone, weights, strict=True)) / sum(weights)
    assert weighted_loss(model, packed).item() == pytest.approx(expected, rel=1e-6)
