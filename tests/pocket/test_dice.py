from collections import Counter

import pytest

from blockdraft.pocket.dice import Dice, capitalized, with_article


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


@pytest.mark.parametrize(("noun", "phrase"), [("kettle", "a kettle"), ("umbrella", "an umbrella")])
def test_articles(noun, phrase):
    assert with_article(noun) == phrase


def test_capitalized_leaves_the_rest():
    assert capitalized("he sees Mia") == "He sees Mia"
    assert capitalized("") == ""
