"""Family chat is right where it can be wrong, says so where it does not know, and branches everywhere else."""

import re
from collections import Counter
from itertools import islice

import pytest

from blockdraft.pocket.build.__main__ import CHAT_KINDS, SAMPLES
from blockdraft.pocket.corpus import examples
from blockdraft.pocket.corpus.dice import TOPICS, Dice, words
from blockdraft.pocket.corpus.knowledge import BY_GROUP, THINGS, describe_thing, is_right, plural
from blockdraft.pocket.corpus.smalltalk import made_up_word


@pytest.fixture(scope="module")
def sample():
    return list(islice(examples("chat", "train", 1), 6000))


def test_every_kind_comes_up_and_can_be_judged(sample):
    kinds = Counter(each.kind for each in sample)
    assert set(CHAT_KINDS) < set(kinds)
    assert min(kinds.values()) > 30
    for each in sample:
        assert (each.answer is not None) == (each.kind in CHAT_KINDS)
        if each.answer is not None:
            assert is_right(each.answer, each.response), each


def test_one_thing_s_facts_are_not_another_s():
    """A definition is judged by its fact: nearly each belongs to one thing, and none to two of one kind."""
    facts = Counter(thing.fact for thing in THINGS)
    assert sum(count > 1 for count in facts.values()) <= 4
    assert len({(thing.kind, thing.fact) for thing in THINGS}) == len(THINGS)
    assert len({thing.name for thing in THINGS}) == len(THINGS) > 300


@pytest.mark.parametrize(
    ("answer", "response", "verdict"),
    [
        ("boil water", "You need it to Boil Water.", True),
        ("boil water", "You need it to cook.", False),
        ("boil water;sweep", "One boils. boil water and sweep", True),
        ("boil water;sweep", "boil water", False),
        ("not know|never heard", "I have never heard of it.", True),
        ("not know|never heard", "It is a bird.", False),
    ],
)
def test_is_right(answer, response, verdict):
    assert is_right(answer, response) is verdict


def test_a_thing_is_asked_about_in_many_ways_and_answered_in_many():
    river = next(thing for thing in THINGS if thing.name == "river")
    dice = Dice(0)
    drafts = [describe_thing(dice, river) for _ in range(1000)]
    assert len({draft.prompt for draft in drafts}) > 40
    plain = [draft.response for draft in drafts if draft.prompt == "What is a river?"]
    assert len(set(plain)) > 10
    assert all("flows to a lake or the sea" in response for response in plain)


def test_the_text_is_clean(sample):
    """No template is left open, no article is wrong, no words are doubled."""
    for each in sample:
        text = f"{each.prompt}\n{each.response}"
        assert not re.search(r"  |[{}\[\]|]|\.\.|\bthe the\b|\b(\w+) is are\b|\?\?", text), each
        for article, noun in re.findall(r"\b(an?) ([a-z]+)", text):
            vowel = noun[0] in "aeiou" and not noun.startswith(("uni", "use", "one"))
            assert (article == "an") == vowel or noun == "hour", each


def test_no_word_is_both_known_and_unknown():
    known = {thing.name for thing in THINGS} | {thing.many for thing in THINGS}
    assert not known & {word.removeprefix("=") for word in words("unknown")}
    assert not {country for country, _ in TOPICS["capitals"]} & set(words("unknown capitals"))


def test_made_up_words_are_hardly_ever_real():
    dice = Dice(0)
    known = {thing.name for thing in THINGS}
    assert sum(made_up_word(dice) in known for _ in range(5000)) < 10


def test_lists_have_as_many_items_as_were_asked_for(sample):
    numbers = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
    seen = 0
    for each in sample:
        asked = re.search(rf"\b({'|'.join(numbers)})\b", each.prompt)
        told = "six years old" in each.prompt
        if each.kind == "list" and asked and not told and re.search(r"^(-|1\.) ", each.response, flags=re.MULTILINE):
            assert len(re.findall(r"^(?:-|\d\.) ", each.response, flags=re.MULTILINE)) == numbers[asked.group(1)]
            seen += 1
    assert seen > 50


def test_instructions_keep_their_order(sample):
    tables = {task: [step.lower() for step in steps] for task, *steps in TOPICS["instructions"]}
    seen = 0
    for each in sample:
        task = next((task for task in tables if task in each.response), None)
        if each.kind == "instructions" and task is not None:
            places = [each.response.lower().find(step) for step in tables[task]]
            assert -1 not in places
            assert places == sorted(places)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    ("noun", "many"),
    [("kettle", "kettles"), ("battery", "batteries"), ("knife", "knives"), ("bus", "buses"), ("key", "keys")],
)
def test_plurals(noun, many):
    assert plural(noun) == many


def test_groups_have_what_their_questions_need():
    assert all(thing.num_legs is None or 0 <= thing.num_legs <= 10 for thing in BY_GROUP["animals"])
    assert sum(thing.num_legs is not None for thing in BY_GROUP["animals"]) > 40
    assert all(thing.note.endswith(".") and not thing.where.endswith(".") for thing in THINGS)


def test_the_first_things_a_person_would_say_are_trained(sample):
    prompts = {each.prompt for each in [*sample, *islice(examples("chat", "train", 2), 6000)]}
    assert {"Hello", "Hi", "Who are you?", "Thanks", "Tell me a very short story."} <= prompts & set(SAMPLES)
