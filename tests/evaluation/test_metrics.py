"""Counting, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from blockdraft.decoding import Generation, Round
from blockdraft.evaluation import EvaluationError
from blockdraft.evaluation.metrics import (
    Bootstrap,
    DecodedPrompt,
    GenerationRecord,
    RecordFiles,
    Sums,
    baselines_of,
    conditional,
    mean_over_tasks,
    paired_ratio,
    profile,
    with_bootstrap_interval,
)

import synthetic


def a_round(drafted, accepted, next_token):
    return Round(drafted, accepted, next_token, {"draft": 0.5, "verify": 1.0, "rest": 0.25})


def test_a_record_counts_rounds_before_cropping_and_leaves_the_prefill_out():
    rounds = [a_round([11, 12, 13], 3, 14), a_round([15, 16, 17], 1, 18)]
    budget = 5  # prefill token, four of the first round; the second one is cropped away but for nothing
    generation = Generation([1], [10, 11, 12, 13, 14, 15, 18][:budget], None, rounds, prefill_seconds=2.0)
    record = GenerationRecord.of(generation)
    assert record.tokens == [10, 11, 12, 13, 14]
    assert record.accepted == [3, 1]
    assert record.added == [4, 2]  # correction and bonus in, prefill out, nothing cropped
    assert record.seconds == {"prefill": 2.0, "draft": 1.0, "verify": 2.0, "rest": 0.5}


def test_an_end_token_inside_a_block_has_no_correction():
    record = GenerationRecord.of(Generation([1], [10, 11, 2], None, [a_round([11, 2], 2, None)]))
    assert record.accepted == [2]
    assert record.added == [2]


def a_record(tokens, accepted, added, **seconds):
    phases = {"prefill": 1.0, "draft": 0.0, "verify": 1.0, "rest": 0.0}
    return GenerationRecord(tokens=tokens, accepted=accepted, added=added, seconds=phases | seconds)


def test_sums_over_two_turns():
    turns = [a_record([10, 11, 12], [1, 0], [2, 1]), a_record([20, 21], [2], [3], draft=0.5, rest=0.5)]
    sums = Sums.of(turns, num_proposals=3)
    assert (sums.rounds, sums.added, sums.accepted, sums.tokens) == (3, 6, 3, 5)
    assert sums.total_seconds == 5.0
    assert sums.retained.tolist() == [2, 1, 0]  # of three rounds: two kept one or more, one kept two
    assert conditional((sums.retained / 3).tolist()) == [pytest.approx(2 / 3), pytest.approx(1 / 2), 0.0]


def test_no_turn_at_all_counts_for_nothing():
    sums = Sums.of([], 3)
    assert (sums.rounds, sums.tokens, sums.retained.tolist()) == (0, 0, [0, 0, 0])


def test_a_condition_that_was_never_met_has_no_rate():
    assert conditional([0.0, 0.0]) == [0.0, None]


def test_pooling_is_not_averaging():
    resampled = Bootstrap(2, 0, seed=0, stream=0)
    added, rounds = [9.0, 2.0], [3.0, 2.0]  # 3 and 1 tokens a call
    assert resampled.ratio(added, rounds)[0] == pytest.approx(11 / 5)
    assert mean_over_tasks([np.array([3.0]), np.array([1.0])]).value == 2.0


def test_intervals_hold_the_value_and_shrink_with_prompts():
    rng = np.random.default_rng(0)
    widths = []
    for num in (20, 2000):
        rounds = rng.integers(1, 10, num).astype(float)
        added = rounds * rng.uniform(1, 3, num)
        found = with_bootstrap_interval(Bootstrap(num, 400, seed=1, stream=0).ratio(added, rounds))
        assert found.low < found.value < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 4


def test_an_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        rounds = rng.integers(5, 15, 60).astype(float)
        added = rounds + rng.binomial(rounds.astype(int) * 4, 0.25)  # two tokens a call
        found = with_bootstrap_interval(Bootstrap(60, 200, seed=trial, stream=0).ratio(added, rounds))
        covered += found.low <= 2.0 <= found.high
    assert 175 <= covered <= 199


def test_resamples_are_the_same_for_all_quantities_of_a_task():
    one, two = (Bootstrap(10, 50, seed=4, stream=2).ratio(np.arange(10.0) + 1, np.ones(10)) for _ in range(2))
    assert (one == two).all()
    other = Bootstrap(10, 50, seed=4, stream=3).ratio(np.arange(10.0) + 1, np.ones(10))
    assert not (one == other).all()


def test_a_paired_interval_is_narrower_than_the_two_apart_suggest():
    """Prompts differ far more from each other than drafters do; over the same prompts that cancels."""
    rng = np.random.default_rng(5)
    ours, theirs = [], []
    for stream in range(2):
        rounds = rng.integers(20, 40, 60).astype(float)
        added = rounds * rng.uniform(1, 5, 60)
        resampled = Bootstrap(60, 400, seed=0, stream=stream)
        theirs.append(resampled.ratio(added, rounds))
        ours.append(resampled.ratio(1.1 * added + rng.uniform(0, 1, 60), rounds))
    found = paired_ratio(ours, theirs)
    assert found.value == pytest.approx(np.mean([each[0] for each in ours]) / np.mean([each[0] for each in theirs]))
    assert 1.09 < found.low < found.value < found.high < 1.13
    apart = [mean_over_tasks(each) for each in (ours, theirs)]
    assert apart[0].low / apart[1].high < 1 < found.low  # apart, they overlap


def test_a_drafter_compared_with_itself_has_no_spread():
    drawn = [Bootstrap(9, 50, seed=1, stream=0).ratio(np.arange(9.0) + 1, np.ones(9))]
    found = paired_ratio(drawn, drawn)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


def test_micro_pools_calls_and_macro_averages_tasks():
    results = synthetic.results()
    made = profile(results)
    assert len(made.entries) == len(results.averages)
    for entry, average in zip(made.entries, results.averages, strict=True):
        key = (entry.drafter, entry.rule, entry.choice)
        cells = [each for each in results.cells if (each.drafter, each.rule, each.choice) == key]
        rounds = sum(each.num_rounds for each in cells)
        assert (entry.num_rounds, entry.num_tasks) == (rounds, len(cells)) == (600, 3)
        pooled = [sum(c.retention[i] * c.num_rounds for c in cells) / rounds for i in range(entry.num_proposals)]
        assert entry.micro.marginal == pytest.approx(pooled)
        length = sum(each.acceptance_length.value * each.num_rounds for each in cells) / rounds
        assert entry.micro.acceptance_length == pytest.approx(length)
        assert entry.macro.acceptance_length == pytest.approx(average.acceptance_length.value)
        assert entry.macro.acceptance_length != pytest.approx(length)
        for rates in (entry.micro, entry.macro):
            assert np.cumprod(rates.conditional) == pytest.approx(rates.marginal)
            assert rates.draft_length == pytest.approx(sum(rates.marginal))


def test_records_come_back_as_they_were_written(tmp_path):
    line = DecodedPrompt(
        prompt="one/a", drafter=None, rule="block", draft_temperature=0.1 + 0.2, turns=[a_record([1, 2], [0], [1])]
    )
    first, second = RecordFiles(tmp_path / "records", 0), RecordFiles(tmp_path / "records", 1)
    first.append(line)
    second.append(line.model_copy(update={"drafter": "a"}))
    assert list(first.read()) == [line, line.model_copy(update={"drafter": "a"})]
    assert next(iter(second.read())).key == (None, "block", 0.1 + 0.2)


HALF = '{"tokens": [1], "accepted": [1], "added": [], "seconds": {}}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ('{"prompt": "a"}', "drafter: Field required"),
        (
            '{"prompt": "a", "drafter": null, "rule": "blok", "draft_temperature": 1, "turns": []}',
            "rule: Input should be",
        ),
        (
            '{"prompt": "a", "drafter": "a", "rule": "block", "draft_temperature": 1, "turns": [' + HALF + "]}",
            "every round needs accepted and added",
        ),
    ],
)
def test_a_damaged_record_is_named(tmp_path, line, message):
    file = tmp_path / "0.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(EvaluationError, match=r"0\.jsonl, line 1, is damaged: .*" + message):
        list(RecordFiles(tmp_path, 0).read())


def trained(kind, objective, budget=None, name=None):
    config = SimpleNamespace(kind=kind)
    return SimpleNamespace(drafter=SimpleNamespace(config=config), objective=objective, budget=budget, name=name)


def test_a_drafter_is_compared_with_the_ce_of_its_own_budget():
    short, long = {"optimizer": 700}, {"optimizer": 9000}
    ce, bv, long_ce, long_bv = (trained("dflash", o, b) for b in (short, long) for o in ("ce", "bv"))
    kl, dspark, stranger = trained("dflash", "kl", {}), trained("dspark", "bv", long), trained("dflash", None, None)
    everyone = [kl, ce, bv, long_ce, long_bv, dspark, stranger]
    for drafter, baseline in ((bv, ce), (long_bv, long_ce), (kl, ce), (stranger, ce)):
        assert baselines_of(drafter, everyone) == [baseline]
    assert baselines_of(dspark, everyone) == baselines_of(ce, everyone) == []
    assert baselines_of(bv, [kl, bv]) == [kl]


def test_drafters_are_compared_with_the_baselines_that_are_asked_for():
    ce, lk, bv = everyone = [trained("dspark", each, name=each) for each in ("ce", "lk", "bv")]
    flash = trained("dflash", "bv", name="flash")
    assert baselines_of(bv, everyone, ["lk"]) == baselines_of(flash, [*everyone, flash], ["lk"]) == [lk]
    assert baselines_of(lk, everyone, ["lk"]) == []
    assert baselines_of(bv, everyone, ["lk", "ce"]) == [ce, lk]  # in the order of the drafters
    assert baselines_of(bv, [*everyone, flash], ["flash", "lk"]) == [lk]  # its own kind goes first
