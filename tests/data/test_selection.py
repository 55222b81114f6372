"""The choice of prompts: what it depends on, and that every row is accounted for."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.data.prompts import Dropped, Prompt, PromptError
from blockdraft.data.selection import Limits, select, select_generated, text_key

WORDS = st.sampled_from(["a", "b", "c", "A", "a b", " a  B", "c\nd"])
ROWS = st.lists(
    st.builds(
        Prompt,
        st.integers(0, 30).map(str),
        st.lists(WORDS, min_size=1, max_size=3).map(tuple),
        system=st.sampled_from([None, "x", "y"]),
    )
    | st.sampled_from([Dropped("one reason"), Dropped("another")]),
    max_size=40,
).map(lambda rows: [Prompt("always", ("there",)), *rows])
SEEDS = st.integers(-3, 3)


def keys(prompts):
    return [text_key(*prompt.turns) for prompt in prompts]


def many(num, **fields):
    return [Prompt(f"p-{index}", (f"Question {index}",), **fields) for index in range(num)]


def test_case_and_white_space_do_not_count_but_turns_do():
    assert text_key("Straße  is\nlong ") == text_key("STRASSE is long")
    assert text_key("a", "b") != text_key("a b")
    assert text_key("a", "b") != text_key("a\nb")


@settings(deadline=None)
@given(ROWS, st.data(), SEEDS)
def test_the_order_of_rows_does_not_matter(rows, data, seed):
    shuffled = data.draw(st.permutations(rows))
    assert select(shuffled, num=4, seed=seed) == select(rows, num=4, seed=seed)


@settings(deadline=None)
@given(ROWS, st.integers(1, 10), st.integers(1, 10), SEEDS)
def test_a_smaller_choice_begins_a_larger_one(rows, small, more, seed):
    assert select(rows, num=small, seed=seed).kept == select(rows, num=small + more, seed=seed).kept[:small]


@settings(deadline=None)
@given(ROWS, st.integers(0, 3), SEEDS)
def test_what_is_chosen_differs_and_every_row_is_counted(rows, heldout, seed):
    rows += many(10)  # something to keep, whatever is held out
    chosen = select(rows, num=5, heldout=heldout, seed=seed)
    both = chosen.kept + chosen.heldout
    assert len(set(keys(both))) == len({prompt.id for prompt in both}) == len(both)
    assert len(chosen.heldout) == heldout
    assert not {key.split("\n")[0] for key in keys(chosen.kept)} & {key.split("\n")[0] for key in keys(chosen.heldout)}
    summary = chosen.summary
    assert summary.num_read == len(rows) == summary.num_kept + summary.num_heldout + sum(summary.dropped.values())
    assert (summary.num_kept, summary.num_heldout) == (len(chosen.kept), len(chosen.heldout))
    assert all(summary.dropped.values())


@settings(deadline=None)
@given(ROWS, SEEDS)
def test_choosing_again_changes_nothing(rows, seed):
    chosen = select(rows, num=6, seed=seed).kept
    again = select(chosen, num=6, seed=seed)
    assert again.kept == chosen
    assert again.summary.dropped == {}


def test_held_out_prompts_do_not_depend_on_how_many_are_kept():
    rows = many(100)
    few, all_ = select(rows, num=3, heldout=10), select(rows, heldout=10)
    assert few.heldout == all_.heldout
    assert few.kept == all_.kept[:3]
    assert select(rows, heldout=4).heldout == few.heldout[:4]


def test_the_seed_changes_the_choice():
    rows = many(100)
    assert select(rows, num=20, seed=0).kept != select(rows, num=20, seed=1).kept
    assert select(rows, heldout=20, seed=0).heldout != select(rows, heldout=20, seed=1).heldout


def test_a_choice_made_before_is_made_again():
    """Pinned: data chosen by one version must be chosen by the next."""
    chosen = select(many(1000), num=4, heldout=3, seed=7)
    assert [prompt.id for prompt in chosen.kept] == ["p-415", "p-52", "p-947", "p-271"]
    assert [prompt.id for prompt in chosen.heldout] == ["p-705", "p-627", "p-946"]


def test_reasons_are_told_apart():
    rows = [
        Prompt("a", ("Hello there",)),
        Prompt("b", ("hello  THERE",)),
        Prompt("c", ("Hello there",), system="x"),
        Prompt("d", ("Hi",)),
        Prompt("e", ("much too long",), system="for the limit"),
        Prompt("f", ("one", "two", "three")),
        Prompt("g", ("first",)),
        Prompt("g", ("second",)),
        Dropped("of its own"),
    ]
    chosen = select(rows, limits=Limits(min_chars=3, max_chars=20, max_turns=2))
    assert chosen.summary.to_dict() == {
        "read": 9,
        "kept": 2,
        "heldout": 0,
        "dropped": {
            "same text as another": 2,
            "of its own": 1,
            "over 2 turns": 1,
            "over 20 characters": 1,
            "same id as another": 1,
            "under 3 characters": 1,
        },
    }
    assert set(chosen.kept) == {rows[0], rows[6]}
    assert select(rows, limits=Limits(min_turns=2)).kept == [rows[5]]
    assert select(rows, limits=Limits(min_turns=2)).summary.dropped["under 2 turns"] == 7


def test_what_opens_like_a_held_out_prompt_is_not_kept():
    rows = [Prompt(f"{first}{second}", (first, second)) for first in "ab" for second in "xyz"]
    chosen = select(rows, heldout=1)
    assert {prompt.turns[0] for prompt in chosen.kept} | {chosen.heldout[0].turns[0]} == {"a", "b"}
    assert chosen.summary.dropped == {"opens like a held-out prompt": 2}
    assert len(chosen.kept) == 3


def test_limits_that_nothing_can_meet():
    with pytest.raises(PromptError, match="--min-chars 9 is more than --max-chars 8"):
        Limits(min_chars=9, max_chars=8)
    with pytest.raises(PromptError, match="--min-turns 2 is more than --max-turns 1"):
        Limits(min_turns=2, max_turns=1)


def test_nothing_left_is_an_error_with_the_reasons():
    with pytest.raises(PromptError, match=r"no prompt is left to keep of 4 rows \(under 50 characters: 3; odd: 1\)"):
        select([*many(3), Dropped("odd")], limits=Limits(min_chars=50))
    with pytest.raises(PromptError, match="of 3 rows, 3 held out"):
        select(many(3), heldout=5)
    with pytest.raises(PromptError, match=r"of 0 rows \(none dropped\)"):
        select([])


def test_drawing_takes_new_prompts_as_they_come():
    texts = ["a", "b", "A", "c", "b", "d", "e"]
    stream = [Prompt(str(index), (text,)) for index, text in enumerate(texts)]
    stream.insert(3, Prompt("two", ("a", "again")))
    chosen = select_generated(stream, num=2, heldout=2)
    assert keys(chosen.heldout) == ["a", "b"]
    assert keys(chosen.kept) == ["c", "d"]
    assert chosen.summary.dropped == {"same text as another": 2, "opens like a held-out prompt": 1}
    assert chosen.summary.num_read == 7
    assert select_generated(stream, num=1, heldout=2).kept == chosen.kept[:1]


@pytest.mark.parametrize("limits", [Limits(), Limits(max_chars=3)])
def test_a_generator_with_nothing_new_to_say_is_an_error(limits):
    repeating = (Prompt(str(index), (f"Question {index % 5}",)) for index in count())
    with pytest.raises(PromptError, match=r"[05] of 12 prompts, then 10000 in a row dropped .*ask for fewer"):
        select_generated(repeating, num=10, heldout=2, limits=limits)
