"""Conversations: seeds that stay what they were, one rule for what fits, answers fed back, no odd tokens."""

import hashlib

import pytest

from blockdraft.data import Conversation, GenerationSettings, Prompt
from blockdraft.decoding import generate
from blockdraft.evaluation.drafting import DecodingSetup, converse
from blockdraft.targets import Sampling

from tiny import EOS, tiny_drafter, tiny_target

TURNS = Prompt("p", ("w5 w6", "w7", "w8 w9 w10"))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def seed_of(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def test_seeds_are_a_function_of_stream_seed_conversation_and_turn(target):
    """Written out here, because data folders of earlier versions rest on them."""
    conversation = Conversation(TURNS, target, GenerationSettings(seed=7))
    assert conversation.request.seed == seed_of("7/p/0")
    conversation.answer([9, EOS])
    assert conversation.request.seed == seed_of("7/p/1")
    other = Conversation(TURNS, target, GenerationSettings(seed=7), stream="evaluate", index=5)
    assert other.request.seed == seed_of("evaluate/7/p/0")


def test_a_request_carries_all_that_an_engine_needs(target):
    prompt = Prompt("p", ("w5",), system="w6")
    request = Conversation(prompt, target, GenerationSettings(Sampling(0.5, 3, 0.9), 20, 60)).request
    assert request.messages == ({"role": "system", "content": "w6"}, {"role": "user", "content": "w5"})
    assert request.prompt_ids == target.render(list(request.messages))
    assert (request.target, request.sampling, request.eos_ids) == (target, Sampling(0.5, 3, 0.9), {EOS})
    assert not request.is_finished([9] * 19)
    assert request.is_finished([9] * 20)
    assert request.is_finished([9, EOS])


@pytest.mark.parametrize("room", [1, 4, 5, 6])
def test_what_fits(target, room):
    """A turn of training data needs room for one token, a turn of an evaluation for its whole budget."""
    length = len(target.render([{"role": "user", "content": "w5"}]))
    settings = {"max_new_tokens": 5, "max_length": length + room}
    training = Conversation(Prompt("p", ("w5",)), target, GenerationSettings(**settings))
    assert training.request.max_new_tokens == min(room, 5)
    measured = Conversation(Prompt("p", ("w5",)), target, GenerationSettings(**settings, whole_turns=True))
    assert (measured.request is None) == (room < 5)
    assert measured.dropped == ("prompt too long" if room < 5 else None)
    none = GenerationSettings(max_new_tokens=5, max_length=length)
    assert Conversation(Prompt("p", ("w5",)), target, none).dropped == "prompt too long"


def test_an_answer_that_was_cut_off_ends_training_texts_only(target):
    settings = GenerationSettings(max_new_tokens=2, max_length=60)
    conversation = Conversation(TURNS, target, settings)
    conversation.answer([9, 10])
    assert (conversation.done, conversation.failed) == (True, False)
    assert conversation.dropped == "cut off before its last turn"
    assert [each.finish_reason for each in conversation.completions] == ["length"]
    measured = Conversation(TURNS, target, GenerationSettings(max_new_tokens=2, max_length=60, whole_turns=True))
    measured.answer([9, 10])
    assert measured.request.messages[1]["content"] == target.decode([9, 10])


@pytest.mark.parametrize("response", [[], [True], [9, 1.0], ["9"], [None]])
def test_what_is_no_response_never_becomes_a_row(target, response):
    conversation = Conversation(TURNS, target, GenerationSettings())
    with pytest.raises(ValueError, match="a list of token ids"):
        conversation.answer(response)
    assert conversation.completions == []


def test_nothing_is_answered_twice(target):
    conversation = Conversation(Prompt("p", ("w5",)), target, GenerationSettings())
    conversation.answer([EOS])
    with pytest.raises(RuntimeError, match="asks for nothing"):
        conversation.answer([EOS])


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_temperatures_that_are_not_finite_are_refused(temperature):
    with pytest.raises(ValueError, match="finite"):
        GenerationSettings(Sampling(temperature))


@pytest.mark.parametrize("max_length", [60, 34])
def test_an_evaluation_holds_its_conversations_as_the_definition_says(target, max_length):
    """A loop written out here: render, stop if the budget does not fit, decode, feed the text back."""
    drafter = tiny_drafter("dflash", target)
    way = DecodingSetup("d", "block", 1.0)
    answers = converse(
        target, drafter, TURNS, way, temperature=1.0, max_new_tokens=8, max_length=max_length, seed=3
    )  # fmt: skip
    messages, expected = [], []
    for turn, text in enumerate(TURNS.turns):
        messages.append({"role": "user", "content": text})
        ids = target.render(messages)
        if len(ids) + 8 > max_length:
            break
        seed = seed_of(f"evaluate/3/p/{turn}")
        expected.append(generate(target, drafter, ids, rule="block", max_new_tokens=8, seed=seed).tokens)
        messages.append({"role": "assistant", "content": target.decode(expected[-1])})
    assert [each.tokens for each in answers] == expected
    assert len(expected) == (3 if max_length == 60 else 2)
