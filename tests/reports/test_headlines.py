"""The result in words: no gain that its own interval denies, predicted lengths first, like compared with like."""

import pytest

from blockdraft.evaluation.results import Interval
from blockdraft.reports import headlines, read_evaluations
from blockdraft.reports.comparison import Gain

import synthetic

CE_AND_BV = (("dflash", "CE"), ("dflash", "BV"))


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


def only(folder, results):
    (headline,) = headlines(read_evaluations([synthetic.write(folder, results)]))
    return headline


def with_recipes(results, **sections):
    """The same drafters, trained with other settings: a value by name of the drafter for each section."""
    drafters = [
        d.model_copy(update={"recipe": d.recipe | {part: by_name[d.name] for part, by_name in sections.items()}})
        for d in results.drafters
    ]
    return results.model_copy(update={"drafters": drafters})


def test_a_paired_gain_comes_with_its_interval(evaluations):
    found = headlines(read_evaluations(evaluations))
    assert [(h.target, h.kind) for h in found] == [("pocket", "DFlash"), ("pocket", "DSpark"), ("Qwen_3", "DFlash")]
    # predicted: measured + 0.03, so (3 + 0.75 - 0.25 / 3 + 0.03) / (3 - 0.25 / 3 + 0.03), and 0.02 to both sides
    ratio = (3.78 - 0.25 / 3) / (3.03 - 0.25 / 3)
    assert (found[0].figure, found[0].settled) == (f"{ratio - 1:+.1%}", True)
    assert found[0].figure == "+25.5%"
    assert found[0].basis == "95% interval +23.5% to +27.5%"
    assert found[0].claim == "predicted tokens per verification call, BV over CE"
    predicted, measured, speed = found[0].sentences
    assert predicted == (
        "Predicted from the target's own texts, BV yields 3.70 [3.65, 3.75] tokens per verification call and CE 2.95 "
        "[2.90, 3.00]: +25.5% (95% interval +23.5% to +27.5%)."
    )
    assert measured == (
        "Measured in decoding, BV yields 3.67 [3.57, 3.77] and CE 2.92 [2.82, 3.02]: +25.7% (95% interval +23.7% to "
        "+27.7%)."
    )
    assert speed == (
        "Decoding with BV is 2.50× [2.40, 2.60] as fast as without a drafter, with CE 1.99× [1.89, 2.09]: +25.9% (95% "
        "interval +23.9% to +27.9%)."
    )
    assert str(found[0]).startswith("pocket, DFlash, T=1 (block verification). Predicted from")


def test_without_pairs_separate_intervals_decide(evaluations):
    found = headlines(read_evaluations(evaluations))[1]
    assert (found.figure, found.basis) == ("+21.8%", "their 95% intervals do not overlap")


def test_a_paired_interval_around_one_denies_the_gain(tmp_path):
    # the separate intervals are far apart, and yet the paired one contains no difference
    made = synthetic.paired(synthetic.results(drafters=CE_AND_BV), "dflash-bv", "dflash-ce", spread=0.3)
    found = only(tmp_path, made)
    assert (found.figure, found.settled) == ("undecided", False)
    assert found.basis == "95% interval -4.5% to +55.5%"
    assert all("undecided (95% interval" in sentence for sentence in found.sentences)
    assert "+25" not in str(found)


def test_overlapping_intervals_show_no_gain(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "KL")))
    averages = [
        a.model_copy(update={"predicted_length": synthetic.estimate(a.predicted_length.value, 0.1)})
        for a in made.averages
    ]
    found = only(tmp_path, made.model_copy(update={"averages": averages}))
    assert (found.new, found.old) == ("KL", "CE")
    assert (found.figure, found.basis) == ("undecided", "their 95% intervals overlap")
    assert "%" not in str(found).replace("95%", "")


@pytest.mark.parametrize(
    ("new", "old", "figure", "basis"),
    [
        (interval(3, 2.9, 3.1), interval(2, 1.9, 2.1), "+50.0%", "their 95% intervals do not overlap"),
        (interval(2, 1.9, 2.1), interval(2.5, 2.4, 2.6), "-20.0%", "their 95% intervals do not overlap"),
        (interval(2.1, 1.9, 2.3), interval(2, 1.8, 2.2), None, "their 95% intervals overlap"),
        (interval(2.1, 1.9, 2.0), interval(2, 2.0, 2.2), None, "their 95% intervals overlap"),  # they touch
        (interval(3, 3, 3), interval(2, 2, 2), None, "too few prompts for an interval"),
    ],
)
def test_separate_intervals(new, old, figure, basis):
    gain = Gain.unpaired(new, old)
    assert (gain.figure, gain.basis) == (figure, basis)


@pytest.mark.parametrize(
    ("ratio", "figure"),
    [
        (interval(1.1, 1.05, 1.15), "+10.0%"),
        (interval(0.9, 0.85, 0.95), "-10.0%"),
        (interval(1.1, 1.0, 1.2), None),
        (interval(0.95, 0.9, 1.0), None),
        (interval(1.1, 1.1, 1.1), None),
    ],
)
def test_paired_intervals(ratio, figure):
    assert Gain.paired(ratio).figure == figure


def test_a_comparison_the_other_way_round_is_turned(tmp_path):
    made = synthetic.paired(synthetic.results(drafters=CE_AND_BV), "dflash-ce", "dflash-bv", spread=0.02)
    found = only(tmp_path, made)
    ratio = (3.03 - 0.25 / 3) / (3.78 - 0.25 / 3)  # CE over BV
    assert found.figure == f"{1 / ratio - 1:+.1%}" == "+25.5%"
    assert found.basis == f"95% interval {1 / (ratio + 0.02) - 1:+.1%} to {1 / (ratio - 0.02) - 1:+.1%}"


@pytest.mark.parametrize(
    ("drafters", "figure", "claim"),
    [
        ((("dflash", "BV"),), "3.70", "predicted tokens per verification call, with BV"),
        ((("dflash", "CE"),), "2.95", "predicted tokens per verification call, with CE"),
        ((("dflash", "CE"), ("dflash", "BV w/o annealing")), "+17.0%", "BV w/o annealing over CE"),
    ],
)
def test_headlines_of_less(tmp_path, drafters, figure, claim):
    found = only(tmp_path, synthetic.results(drafters=drafters))
    assert found.figure == figure
    assert found.claim.endswith(claim)
    if found.old is None:
        speed = found.findings[2].new
        shown = f"{speed.value:.2f}× [{speed.low:.2f}, {speed.high:.2f}]"
        assert found.sentences[2] == f"Decoding with {found.new} is {shown} as fast as without a drafter."


def test_a_loss_is_said_too(tmp_path):
    folders = [
        synthetic.write(tmp_path / "a", synthetic.results(drafters=(("dflash", "CE"),), shift=1.5)),
        synthetic.write(tmp_path / "b", synthetic.results(drafters=(("dflash", "BV"),))),
    ]
    (headline,) = headlines(read_evaluations(folders))
    assert (headline.figure, headline.settled) == ("-16.9%", True)


def test_drafters_trained_alike_are_compared(tmp_path):
    """A drafter trained longer is not set against a CE that was trained for less."""
    short = synthetic.results(drafters=CE_AND_BV)
    long = synthetic.results(drafters=(("dflash", "BV"),), prefix="long-", shift=1.0)
    both = short.model_copy(
        update={part: getattr(short, part) + getattr(long, part) for part in ("drafters", "cells", "averages")}
    )
    steps = {"dflash-ce": {"steps": 700}, "dflash-bv": {"steps": 700}, "long-dflash-bv": {"steps": 9000}}
    folder = synthetic.write(tmp_path, with_recipes(both, optimizer=steps))
    found = headlines(read_evaluations([folder]))
    assert [(h.new, h.old, h.note) for h in found] == [
        ("BV (dflash-bv)", "CE", None), ("BV (long-dflash-bv)", None, None),
    ]  # fmt: skip
    assert found[0].figure == "+25.5%"


def test_where_nothing_was_trained_alike_the_difference_is_said(tmp_path):
    made = synthetic.results(drafters=CE_AND_BV)
    steps = {"dflash-ce": {"steps": 700}, "dflash-bv": {"steps": 9000}}
    found = only(tmp_path, with_recipes(made, optimizer=steps))
    assert (found.new, found.old) == ("BV", "CE")
    assert found.note == "They were trained differently (optimizer), so the loss is not all that differs."
    assert str(found).endswith(found.note)


def trained_on(results, *texts):
    """Return the same drafters with an identity of texts, and what their recipes say of them."""
    drafters = [
        about.model_copy(update={"data": identity, "recipe": about.recipe | {"data": section, "batch": batch}})
        for about, (identity, section, batch) in zip(results.drafters, texts, strict=True)
    ]
    return results.model_copy(update={"drafters": drafters})


def test_where_texts_lie_and_how_a_step_is_computed_is_no_other_training(tmp_path):
    made = synthetic.results(drafters=CE_AND_BV)
    one = {"path": "data", "num_heldout": 6, "features": "online", "cache": None, "cache_gib": 20.0}
    other = {"path": "moved", "num_heldout": 6, "features": "cached", "cache": "cache", "cache_gib": 1.0}
    few, many = ({"num_texts": 32, "gradient_accumulation_steps": number} for number in (1, 8))
    said = "They were trained differently ({}), so the loss is not all that differs."
    cases = (
        (("x", one, few), ("x", other, many), None),
        (("x", one, few), ("y", one, many), said.format("data")),
        (("x", one, few), ("x", one | {"num_heldout": 7}, few), said.format("data")),
        (("x", one, few), ("x", one, few | {"num_texts": 16}), said.format("batch")),
        ((None, one, few), ("x", other | {"path": "data"}, many), None),  # of an earlier version
        ((None, one, few), (None, other, few), said.format("data")),
    )
    for number, (ce, bv, note) in enumerate(cases):
        assert only(tmp_path / str(number), trained_on(made, ce, bv)).note == note


def test_a_run_that_was_stopped_is_not_set_against_a_whole_one_without_a_word(tmp_path):
    made = synthetic.results(drafters=CE_AND_BV)
    stopped = made.drafters[1].model_copy(update={"step": 264, "num_steps": 20_000, "unfinished": True})
    found = only(tmp_path, made.model_copy(update={"drafters": [made.drafters[0], stopped]}))
    assert (found.new, found.old) == ("BV at step 264 of 20,000", "CE")
    assert found.note == "They were trained differently (steps taken), so the loss is not all that differs."


def test_a_drafter_that_was_trained_with_bv_last_is_a_variant_of_bv(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "LK"), ("dflash", "BV")))
    further = {"label": "D-PACE, then BV (beta from 0.5)", "objective": "bv"}
    longer = {"label": "Rounds", "objective": "rounds"}  # the longest drafts are not what decides
    changes = ({}, further, longer)
    drafters = [about.model_copy(update=each) for about, each in zip(made.drafters, changes, strict=True)]
    folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": drafters}))
    comparison = read_evaluations([folder])
    (found,) = headlines(comparison)
    assert (found.new, found.old) == ("D-PACE, then BV (beta from 0.5)", "CE")
    assert comparison.labels() == ["CE", "Rounds", "D-PACE, then BV (beta from 0.5)"]
