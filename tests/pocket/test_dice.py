"""Choices, templates and tables."""

from collections import Counter

import pytest

from blockdraft.pocket.corpus.dice import Dice, capitalized, joined, read_table, read_talks, with_article


def test_every_option_comes_up():
    dice = Dice(0)
    assert Counter(dice.pick("abc") for _ in range(3000)).keys() == set("abc")
    assert {dice.between(3, 5) for _ in range(200)} == {3, 4, 5}
    assert {dice.say("[a|b[1|2]|]") for _ in range(200)} == {"a", "b1", "b2", ""}
    assert 400 < sum(dice.chance(0.5) for _ in range(1000)) < 600


def test_samples_have_no_repeats():
    dice = Dice(0)
    for _ in range(50):
        assert len(set(dice.sample(range(6), 4))) == 4
        kept = dice.some(range(6), 4)
        assert kept == sorted(kept)
        assert len(set(kept)) == 4


def test_words_may_hold_brackets():
    assert Dice(0).say("[{x}|{x}]", x="[1|2]") == "[1|2]"


@pytest.mark.parametrize(
    ("noun", "phrase"), [("kettle", "a kettle"), ("umbrella", "an umbrella"), ("university", "a university")]
)
def test_articles(noun, phrase):
    assert with_article(noun) == phrase


def test_capitalized_leaves_the_rest():
    assert capitalized("he sees Mia") == "He sees Mia"
    assert capitalized("") == ""


@pytest.mark.parametrize(("items", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")])
def test_joined(items, text):
    assert joined(items) == text


def test_casual_messages_keep_their_words():
    dice, text = Dice(0), "What is a River?"
    written = Counter(dice.casually(text) for _ in range(1000))
    assert set(written) == {text, "What is a River", "what is a river?", "what is a river"}
    assert 650 < written[text] < 900


def test_tables_have_sections_rows_and_comments():
    table = read_table("topics.txt")
    assert ["France", "Paris"] in table["capitals"]
    assert not [row for rows in table.values() for row in rows if row[0].startswith("#") or "" in row]


def test_templates_are_questions_with_answers():
    talks = read_talks("talks.txt")
    assert all(question and answer for question, answer in talks["small talk"] + talks["messages"])
    assert all(question and not answer for question, answer in talks["beyond"])
