"""Any text survives, digits stay single, the template is ChatML; packed conversations are whole and stay apart."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from blockdraft.pocket.build.text import (
    PROMPT_WEIGHT,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    encode_conversation,
    pack_rows,
    render,
    save_tokenizer,
    train_tokenizer,
    training_batch,
)
from blockdraft.pocket.build.training import Shape, new_model, weighted_loss
from blockdraft.pocket.corpus import FAMILIES, examples, split_of


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_survives_the_round_trip(loaded, tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert loaded(text).input_ids == ids
    assert loaded.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["  two  spaces \n\n\tand tabs ", "naïve 😀 日本", "a<|im_end|>b", "don't 'quote'", "\r\n"]
)
def test_awkward_text_survives_too(loaded, text):
    assert loaded.decode(loaded(text).input_ids) == text


def test_digits_are_single_tokens(tokenizer):
    for number in (7, 42, 199, 1234567890):
        pieces = tokenizer.encode(f"Answer: {number}.").tokens
        assert [piece for piece in pieces if piece.isdecimal()] == list(str(number))
    assert not [entry for entry in tokenizer.get_vocab() if sum(map(str.isdecimal, entry)) and len(entry) > 1]


def test_vocabulary_and_special_tokens(loaded, tokenizer):
    assert tokenizer.get_vocab_size() == len(loaded) == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert (loaded.pad_token, loaded.eos_token, loaded.mask_token) == ("<|endoftext|>", "<|im_end|>", "<|mask|>")
    assert set(SPECIAL_TOKENS) <= set(loaded.all_special_tokens)
    assert loaded.decode(loaded("a<|im_end|>b").input_ids, skip_special_tokens=True) == "ab"


def test_training_it_again_gives_the_same_merges():
    assert train_tokenizer(200, 600).to_str() == train_tokenizer(200, 600).to_str()


CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
RENDERED = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_the_template_renders_one_turn(loaded, thinking):
    assert loaded.apply_chat_template(CHAT, tokenize=False, **thinking) == RENDERED
    prompt = loaded.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **thinking)
    assert prompt == RENDERED + "<|im_start|>assistant\n"


def test_the_template_renders_system_and_many_turns_as_the_training_does(loaded):
    messages = [
        {"role": "system", "content": "Be brief."},
        *CHAT,
        {"role": "assistant", "content": "Seven.\n"},
        {"role": "user", "content": " and {{ 1 + 1 }}?"},
    ]
    for prompt in (False, True):
        rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert rendered == render(messages, add_generation_prompt=prompt)
    assert rendered.startswith("<|im_start|>system\nBe brief.<|im_end|>\n" + RENDERED)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_tokens_are_those_of_the_template(loaded, tokenizer, family):
    """Prompt and response are encoded apart for their weights; together they are the rendered conversation."""
    for each in islice(examples(family, "train", 0), 100):
        messages = [{"role": "user", "content": each.prompt}, {"role": "assistant", "content": each.response}]
        ids = encode_conversation(tokenizer, [(each.prompt, each.response)] * 2, "Help.").tokens
        rendered = loaded.apply_chat_template([{"role": "system", "content": "Help."}, *messages * 2], tokenize=False)
        assert ids == loaded(rendered).input_ids


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
    packed = pack_rows([long, short], 1, 40, pad_id=0)
    assert packed.tokens[0, : len(short.tokens)].tolist() == short.tokens
    assert packed.segments.max() == 1


def test_a_packed_batch_has_the_loss_of_its_conversations_alone(tokenizer):
    turns = [[("Hi", "Hello there")], [("What?", "That, I think."), ("Why?", "So.")], [("Go on", "No, no, no.")]]
    found = [encode_conversation(tokenizer, each) for each in turns]
    model = new_model(TINY, 2, tokenizer, seed=0).double()
    packed = pack_rows(found, 2, 60, pad_id=0)
    assert int(packed.segments.max()) > 1
    alone = [pack_rows([each], 1, len(each.tokens), pad_id=0) for each in found]
    weights = [float(each.weights.double().sum()) for each in alone]
    expected = sum(weighted_loss(model, each).item() * w for each, w in zip(alone, weights, strict=True)) / sum(weights)
    assert weighted_loss(model, packed).item() == pytest.approx(expected, rel=1e-6)
