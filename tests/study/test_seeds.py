"""Means over seeds: an evaluation of its own, whose intervals are Student's, for the paper's tables and figures."""

import json
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest

from blockdraft.reports import read_evaluations, tables, write_report
from blockdraft.reports.figures import figures
from blockdraft.runs import Run
from blockdraft.study import load_study
from blockdraft.study.seeds import Spread, mean_over_seeds
from blockdraft.study.summary import Count, summarize

from synthetic import paired, results, traces, write

SHIFTS = {42: 0.0, 43: 0.3, 44: -0.1}


def of_seed(shift):
    return paired(results(drafters=(("dflash", "CE"), ("dflash", "BV")), shift=shift), "dflash-bv", "dflash-ce")


@pytest.fixture(scope="module")
def seeds():
    return {seed: of_seed(shift) for seed, shift in SHIFTS.items()}


def test_a_spread_over_seeds_is_students():
    three = Spread((1.0, 2.0, 3.0))
    assert (three.mean, three.deviation) == (2.0, 1.0)
    low, high = three.interval
    assert (low, high) == (pytest.approx(2 - 4.303 / 3**0.5), pytest.approx(2 + 4.303 / 3**0.5))
    alone = Spread((1.5,))
    assert alone.deviation is None
    twelve = Spread(tuple(float(i % 2) for i in range(12)))
    assert twelve.interval[1] - twelve.mean == pytest.approx(2.201 * twelve.deviation / 12**0.5, rel=1e-3)
    assert alone.interval is None


def test_a_single_seed_stays_as_it_is(seeds):
    assert mean_over_seeds({42: seeds[42]}) == seeds[42]


def test_values_are_means_and_intervals_over_seeds(seeds):
    joined = mean_over_seeds(seeds)
    assert joined.settings["seeds"] == [42, 43, 44]
    assert len(joined.cells) == len(seeds[42].cells)
    assert len(joined.averages) == len(seeds[42].averages)
    assert len(joined.comparisons) == len(seeds[42].comparisons)
    for place, average in enumerate(joined.averages):
        values = [found.averages[place].predicted_length.value for found in seeds.values()]
        half = 4.303 * stdev(values) / 3**0.5
        assert average.predicted_length.value == pytest.approx(fmean(values))
        assert average.predicted_length.low == pytest.approx(fmean(values) - half)
        assert average.predicted_length.high == pytest.approx(fmean(values) + half)
    for place, compared in enumerate(joined.comparisons):
        ratios = [found.comparisons[place].ratio.value for found in seeds.values()]
        assert compared.ratio.value == pytest.approx(fmean(ratios))
    for place, cell in enumerate(joined.cells):
        same = [found.cells[place] for found in seeds.values()]
        assert cell.num_rounds == sum(each.num_rounds for each in same)
        assert cell.retention == pytest.approx([fmean(each) for each in zip(*(c.retention for c in same), strict=True)])
        assert cell.conditional[0] == pytest.approx(cell.retention[0])
        assert cell.whole_block_rate == pytest.approx(fmean(each.whole_block_rate for each in same))
        assert cell.draft_temperature == pytest.approx(fmean(each.draft_temperature for each in same))
        assert cell.conditional[1] == pytest.approx(cell.retention[1] / cell.retention[0])
        seconds = sum(sum(each.seconds.values()) for each in same)
        assert cell.tokens_per_second == pytest.approx(sum(each.num_tokens for each in same) / seconds)


def test_drafters_have_mean_curves_and_the_best_temperature_of_these(seeds):
    def shifted(found, by):
        about = found.drafters[0]
        points = [
            p.model_copy(update={"acceptance_length": {"block": 3 - (p.draft_temperature - by) ** 2}})
            for p in about.temperatures
        ]
        lengths = {"block": [1.5 + (by > 0.5) / 2, 2.0 + (by > 0.5)]}
        changes = {"temperatures": points, "best_draft_temperature": {"block": by}, "lengths_by_proposals": lengths}
        drafters = [about.model_copy(update=changes)]
        return found.model_copy(update={"drafters": drafters})

    joined = mean_over_seeds({1: shifted(seeds[42], 0.4), 2: shifted(seeds[43], 0.8)})
    about = joined.drafters[0]
    assert about.best_draft_temperature == {"block": 0.6}
    assert about.temperatures[0].acceptance_length["block"] == pytest.approx(3 - (0 + 0.4**2) / 2)
    assert about.temperatures[0].deviation == {"block": pytest.approx(stdev([3.0, 3 - 0.4**2]))}
    assert about.fingerprint is None
    assert about.lengths_by_proposals == {"block": pytest.approx([1.75, 2.5])}
    assert "and 1 more" in about.path


def test_a_seed_whose_best_temperature_is_the_papers_counts_with_that(seeds):
    def is_best(item):
        return item.choice == "best" and item.drafter == "dflash-bv"

    left = {
        name: [item for item in getattr(seeds[43], name) if not is_best(item)]
        for name in ("cells", "averages", "comparisons")
    }
    joined = mean_over_seeds({42: seeds[42], 43: seeds[43].model_copy(update=left)})

    def value(found, choice):
        key = ("dflash-bv", "block", choice)
        return next(a.predicted_length.value for a in found.averages if (a.drafter, a.rule, a.choice) == key)

    assert value(joined, "best") == pytest.approx((value(seeds[42], "best") + value(seeds[43], "paper")) / 2)
    assert value(joined, "paper") == pytest.approx((value(seeds[42], "paper") + value(seeds[43], "paper")) / 2)


def test_what_stands_in_the_way_of_one_seed_is_said_with_it(seeds):
    reason = {"dflash-bv": "its data is gone"}
    joined = mean_over_seeds({42: seeds[42], 43: seeds[43].model_copy(update={"dynamics_obstacles": reason})})
    assert joined.dynamics_obstacles == {"dflash-bv": "its data is gone (seed 43)"}


def test_dynamics_are_means_of_the_checkpoints_that_all_seeds_have(seeds):
    shorter = seeds[43].dynamics[0].model_copy(update={"points": seeds[43].dynamics[0].points[:-1]})
    joined = mean_over_seeds({42: seeds[42], 43: seeds[43].model_copy(update={"dynamics": [shorter]})})
    assert [each.drafter for each in joined.dynamics] == [shorter.drafter]
    assert [p.step for p in joined.dynamics[0].points] == [p.step for p in shorter.points]
    first, second = (found.dynamics[0].points[0] for found in (seeds[42], seeds[43]))
    point = joined.dynamics[0].points[0]
    assert point.accuracy == pytest.approx((first.accuracy + second.accuracy) / 2)
    assert point.accuracy_deviation == pytest.approx(stdev([first.accuracy, second.accuracy]))
    assert point.draft_length_deviation == pytest.approx(stdev([first.draft_length, second.draft_length]))


def test_learning_curves_are_means_of_the_points_that_all_seeds_have(seeds):
    about = seeds[43].drafters[0]
    points = [
        point.model_copy(update={"num_blocks": 2, "accuracy": 0.5, "draft_length": {"block": 1.0 + number}})
        for number, point in enumerate(about.learning_curve)
    ]
    first = seeds[42].model_copy(update={"drafters": [about.model_copy(update={"learning_curve": points[:2]})]})
    higher = [
        point.model_copy(update={"num_blocks": 4, "accuracy": 0.7, "draft_length": {"block": 2.0}}) for point in points
    ]
    second = seeds[43].model_copy(update={"drafters": [about.model_copy(update={"learning_curve": higher})]})
    curve = mean_over_seeds({42: first, 43: second}).drafters[0].learning_curve
    assert [point.step for point in curve] == [point.step for point in points[:2]]
    assert [point.draft_length for point in curve] == [{"block": 1.5}, {"block": 2.0}]
    assert [(point.num_blocks, point.accuracy) for point in curve] == [(3, pytest.approx(0.6))] * 2
    assert [point.deviation for point in curve] == [{"block": pytest.approx(0.5**0.5)}, {"block": 0.0}]


def test_figures_of_means_have_bands_of_one_deviation_and_say_so(tmp_path, seeds):
    write(tmp_path / "one", seeds[42])
    write(tmp_path / "three", mean_over_seeds(seeds))
    alone, joined = (
        {drawn.name: drawn for drawn in figures(read_evaluations([tmp_path / name]))} for name in ("one", "three")
    )
    for name in ("temperature-pocket", "learning-pocket", "dynamics-pocket", "figure-4"):
        assert not any(panel.collections for panel in alone[name].figure.axes)
        assert "Bands" not in alone[name].caption
        assert "Bands are one standard deviation over seeds" in joined[name].caption
        for panel in joined[name].figure.axes:
            lines = [line for line in panel.lines if len(line.get_xdata()) > 1]
            for line, band in zip(lines, panel.collections, strict=True):
                x, y = line.get_data()
                edges = band.get_paths()[0].vertices
                assert (edges[:, 0].min(), edges[:, 0].max()) == pytest.approx((min(x), max(x)))
                assert edges[:, 1].min() <= min(y) < max(y) < edges[:, 1].max()
    about = mean_over_seeds(seeds).drafters[0]
    panel = joined["temperature-pocket"].figure.axes[0]
    first = sorted(about.temperatures, key=lambda point: point.draft_temperature)[0]
    rule = panel.get_title(loc="left").split(", ")[1].split()[0]
    below = [y for x, y in panel.collections[0].get_paths()[0].vertices if x == first.draft_temperature]
    assert min(below) == pytest.approx(first.acceptance_length[rule] - first.deviation[rule])
    assert max(below) == pytest.approx(first.acceptance_length[rule] + first.deviation[rule])


def test_the_report_of_a_study_has_a_row_for_each_objective_and_not_for_each_seed(tmp_path, seeds):
    spec = "name: s\ntargets: {pocket: {recipe: pocket}}\ndrafters: [dflash]\nseeds: [42, 43, 44]\n"
    spec += "objectives: {ce: {recipe: ce}, bv: {recipe: bv}}\n"
    (tmp_path / "s.yaml").write_text(spec)
    for seed, found in seeds.items():
        write(tmp_path / "evaluations" / f"pocket-seed{seed}", found, traces(found))
    summary = summarize(load_study(tmp_path / "s.yaml"), tmp_path)
    means = read_evaluations([tmp_path / "report" / "means" / "pocket"])
    assert [entry.label for entry in means.entries] == ["CE", "BV"]
    assert means.evaluations[0].traces is not None
    lengths = next(table for table in tables(means) if table.name == "lengths")
    assert "Student's t over 3 seeds" in lengths.caption
    said = "Means over 3 seeds; rounds, tokens and seconds are sums over them."
    drawn = {drawing.name: drawing.caption for drawing in figures(means)}
    captions = [table.caption for table in tables(means) if table.name != "objectives"] + list(drawn.values())
    assert all(caption.endswith(said) for caption in captions)
    assert f'<p class="note">{said}</p>' in summary.page.read_text()
    retention = next(table for table in tables(means) if table.name == "retention-pocket")
    for caption in (retention.caption, drawn["retention-pocket-dflash"]):
        assert "Decoded prompts for each seed: 40 of Sums, 30 of Functions, " in caption
    assert "on 40 prompts of Sums for each seed, " in drawn["figure-3"]
    for name in ("dynamics-pocket", "figure-4"):
        assert "512 blocks of 64 training texts for each seed. " in drawn[name]
    assert "bootstrap over prompts" not in summary.page.read_text()
    assert "seed43" not in summary.page.read_text()
    own = next(table for table in summary.tables if table.name == "study-predicted-length")
    joined = mean_over_seeds(seeds)
    expected = next(a for a in joined.averages if (a.drafter, a.rule) == ("dflash-bv", "greedy"))
    assert own.rows[1].values[0].number == pytest.approx(expected.predicted_length.value)
    assert "±" in own.rows[1].values[0].text
    (tmp_path / "one.yaml").write_text(spec.replace("[42, 43, 44]", "[42]"))
    alone = summarize(load_study(tmp_path / "one.yaml"), tmp_path)
    own = next(table for table in alone.tables if table.name == "study-predicted-length")
    assert "±" not in own.rows[1].values[0].text
    assert "bootstrap over prompts" in alone.page.read_text()
    assert "sums over them" not in alone.page.read_text()


SPEC = """
name: s
targets: {pocket: {recipe: pocket}}
drafters: [dflash]
objectives: {ce: {recipe: ce}, bv: {recipe: bv}}
"""


def study_of(folder, seeds, spec=SPEC):
    """The summary of a study whose evaluations are these, and its tables by name."""
    folder.mkdir(exist_ok=True)
    (folder / "s.yaml").write_text(f"{spec}seeds: {list(seeds)}\n")
    for seed, found in seeds.items():
        write(folder / "evaluations" / f"pocket-seed{seed}", found)
    summary = summarize(load_study(folder / "s.yaml"), folder)
    return summary, {table.name: table for table in summary.tables}


def test_the_cost_of_training_is_told_by_objective_beside_the_baselines(tmp_path, seeds, monkeypatch):
    assert "study-cost" not in study_of(tmp_path, seeds)[1]  # the runs are not there
    rates = {
        "ce-seed42": [(None, None), (1.0, 2.0), (10.0, 2.0)], "ce-seed43": [(5.0, 3.0), (2.0, 2.5), (4.0, None)],
        "bv-seed43": [(2.0, None)],
    }  # fmt: skip
    monkeypatch.setattr(Run, "is_run", lambda folder: folder.name.removeprefix("pocket-dflash-") in rates)

    def opened(folder):
        logged = rates[folder.name.removeprefix("pocket-dflash-")]
        return SimpleNamespace(metrics=lambda: [{"steps_per_second": a, "peak_memory_gib": b} for a, b in logged])

    monkeypatch.setattr(Run, "open", opened)
    table = study_of(tmp_path, seeds)[1]["study-cost"]
    assert [(row.labels[2], [value.number for value in row.values]) for row in table.rows] == [
        ("CE", [0.25, 1.0, 3.0]), ("BV", [0.5, 2.0, None]),
    ]  # fmt: skip
    assert [column.heads for column in table.columns] == [("Seconds a step",), ("Relative to CE",), ("Peak GiB",)]
    assert "Cells may have run side by side" in table.caption
    assert (tmp_path / "report" / "tables" / "study-cost.csv").exists()
    rates.clear()
    study_of(tmp_path, seeds)
    assert not (tmp_path / "report" / "tables" / "study-cost.csv").exists()


def test_gains_of_one_seed_have_the_intervals_over_prompts_of_its_evaluation(tmp_path, seeds):
    _, one = study_of(tmp_path / "one", {42: seeds[42]})
    table = one["study-acceptance-length-over-ce"]
    assert "one seed" in table.caption
    assert "95% intervals over prompts (bootstrap)." in table.caption
    assert "Student" not in table.caption
    keys = [column.key for column in table.columns]
    for key, rule, choice in (("greedy_paper", "greedy", "paper"), ("block_one_hot", "block", "one-hot")):
        ratio = seeds[42].ratio("dflash-bv", "dflash-ce", rule, choice, "acceptance_length")
        cell = table.rows[0].values[keys.index(key)]
        assert (cell.number, cell.interval) == (pytest.approx(ratio.value - 1), (ratio.low - 1, ratio.high - 1))
        assert cell.text == f"{ratio.value - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"
    lengths = one["study-acceptance-length"]
    assert "95% intervals over prompts" in lengths.caption
    assert lengths.rows[0].values[0].text == "3.52 [3.42, 3.62]"
    three = study_of(tmp_path / "three", seeds)[1]["study-acceptance-length-over-ce"]
    assert "95% intervals over 3 seeds (Student's t)" in three.caption
    ratios = [each.ratio("dflash-bv", "dflash-ce", "greedy", "paper", "acceptance_length") for each in seeds.values()]
    gain = Spread(tuple(ratio.value - 1 for ratio in ratios))
    assert three.rows[0].values[0].interval == pytest.approx(gain.interval)


def predicted_only(found):
    """An evaluation as it is if no prompt is decoded."""
    gone = dict.fromkeys(("acceptance_length", "draft_length", "whole_block_rate", "speedup"))
    gone_cells = gone | {"num_generations": 0, "num_rounds": 0, "num_tokens": 0, "retention": [], "conditional": []}
    gone_cells |= {"tokens_per_second": None, "baseline_tokens_per_second": None, "seconds": {}, "baseline_seconds": {}}
    return found.model_copy(
        update={
            "tasks": [each.model_copy(update={"num_decoded": 0}) for each in found.tasks],
            "cells": [each.model_copy(update=gone_cells) for each in found.cells],
            "averages": [each.model_copy(update=gone) for each in found.averages],
            "comparisons": [each for each in found.comparisons if each.quantity == "predicted_length"],
        }
    )


@pytest.mark.parametrize("num", [1, 3])
def test_a_study_that_decodes_nothing_has_predicted_lengths_only(tmp_path, seeds, num):
    given = {seed: predicted_only(found) for seed, found in list(seeds.items())[:num]}
    summary, found = study_of(tmp_path, given)
    assert list(found) == ["study-predicted-length", "study-predicted-length-over-ce", "study-wins"]
    assert (summary.wins["bv"].predicted.of > 0, summary.wins["bv"].measured) == (True, Count(0, 0))
    assert "Nothing was decoded" in summary.page.read_text()


def test_gains_of_one_seed_over_another_baseline_and_without_a_comparison(tmp_path, seeds):
    turned = study_of(tmp_path / "turned", {42: seeds[42]}, f"{SPEC}baseline: bv\n")[1]["study-speedup-over-bv"]
    ratio = seeds[42].ratio("dflash-bv", "dflash-ce", "greedy", "paper", "speedup")
    assert turned.rows[0].values[0].interval == pytest.approx((1 / ratio.high - 1, 1 / ratio.low - 1))
    assert turned.title == "s: speed-up over BV"
    not_compared = seeds[42].model_copy(update={"comparisons": []})
    table = study_of(tmp_path / "none", {42: not_compared})[1]["study-speedup-over-ce"]
    assert all(value.interval is None for value in table.rows[0].values)
    assert "over prompts (bootstrap) where the evaluation compared the two prompt by prompt." in table.caption
    without_best = {
        name: [item for item in getattr(seeds[42], name) if item.choice != "best"]
        for name in ("cells", "averages", "comparisons")
    }
    table = study_of(tmp_path / "best", {42: seeds[42].model_copy(update=without_best)})[1]["study-speedup-over-ce"]
    keys = [column.key for column in table.columns]
    assert table.rows[0].values[keys.index("block_best")] == table.rows[0].values[keys.index("block_paper")]
    assert table.rows[0].values[keys.index("block_best")].interval is not None


def test_predicted_and_measured_wins_are_counted_apart_and_shown_on_the_page(tmp_path, seeds):
    behind = [
        cell.model_copy(update={"acceptance_length": cell.acceptance_length.model_copy(update={"value": 1.0})})
        if (cell.drafter, cell.task) == ("dflash-bv", "sums")
        else cell.model_copy(update={"num_rounds": 0})
        if (cell.drafter, cell.task) == ("dflash-ce", "talk_2")
        else cell
        for cell in seeds[43].cells
    ]
    given = {42: seeds[42], 43: seeds[43].model_copy(update={"cells": behind})}
    summary, found = study_of(tmp_path, given)
    ahead = summary.wins["bv"]
    assert (ahead.label, ahead.over) == ("BV", "CE")
    assert ahead.predicted == Count(18, 18)  # two seeds, three rules, three tasks
    assert ahead.measured == Count(12, 15)  # one task behind in a seed, and one there that was not decoded
    assert json.loads((tmp_path / "report" / "wins.json").read_text()) == {
        "bv ahead of ce": {"predicted": {"wins": 18, "of": 18}, "measured": {"wins": 12, "of": 15}}
    }
    (row,) = found["study-wins"].rows
    assert (row.labels, [value.text for value in row.values]) == (("BV", "CE"), ["18", "18", "12", "15"])
    page = summary.page.read_text()
    assert '<a href="#study">' in page
    for name, table in found.items():
        assert f'<section id="{name}" class="table">' in page
        assert (tmp_path / "report" / "tables" / f"{name}.tex").read_text() == table.latex()
    assert (
        'href="#study"' not in write_report([tmp_path / "report" / "means" / "pocket"], tmp_path / "r").page.read_text()
    )


def test_rows_of_a_study_have_labels_and_no_two_the_same(tmp_path, seeds):
    drafters = (("dflash", "CE"), ("dflash", "BV"), ("dflash", "BV w/o annealing"), ("dflash", "LK"))
    made = results(drafters=drafters)
    new = {"dflash-bv": "BV (beta over 100%)", "dflash-bv-plain": "BV (beta over 100%)"}
    abouts = [each.model_copy(update={"label": new.get(each.name, each.label)}) for each in made.drafters]
    spec = SPEC.replace("bv: {recipe: bv}", "bv: {recipe: bv}, bv-plain: {recipe: bv}, lk: {recipe: lk}")
    summary, found = study_of(tmp_path, {42: made.model_copy(update={"drafters": abouts})}, spec)
    labels = ["BV (beta over 100%) (bv)", "BV (beta over 100%) (bv-plain)", "LK"]
    assert [row.labels[2] for row in found["study-predicted-length"].rows] == ["CE", *labels]
    assert [row.labels[2] for row in found["study-predicted-length-over-ce"].rows] == labels
    assert [row.labels for row in found["study-wins"].rows] == [(label, "CE") for label in labels]
    assert list(summary.wins) == ["bv", "bv-plain", "lk"]
    _, plain = study_of(tmp_path / "plain", {42: seeds[42]})
    assert [row.labels[2] for row in plain["study-speedup"].rows] == ["CE", "BV"]
