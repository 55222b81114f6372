"""Figures are there, can be read by machines, say what they show, and come out the same every time."""

import struct
from xml.etree import ElementTree

import pytest

from blockdraft.reports import read_evaluations
from blockdraft.reports.comparison import Retention
from blockdraft.reports.figures import figures
from blockdraft.reports.style import INKS, styles

import synthetic

EXPECTED = {
    "figure-3": ["Kept up to i", "Kept i, given i-1", "position i in the block", "CE", "BV"],
    "figure-4": ["Token accuracy", "Accepted draft length", "epoch", "CE", "BV"],
    "retention-pocket-dflash": [
        "Sums",
        "Talk & 100% chat",
        "All tasks pooled",
        "kept i, given i-1",
        "BV w/o annealing",
    ],
    "retention-pocket-dspark": ["Functions", "All tasks pooled", "kept up to i", "position i in the block", "CE"],
    "tasks-pocket": ["Talk & 100% chat", "DSpark, T=1 (block verification)", "tokens per verification call, τ"],
    "seconds-pocket": ["Autoregressive", "DFlash BV", "milliseconds per token", "verify", "prefill", "11.11"],
    "temperature-pocket": ["draft temperature", "predicted τ", "DFlash, token verification", "0.0"],
    "learning-pocket": ["DFlash, block verification", "DSpark, greedy verification", "blocks trained on", "45k"],
    "dynamics-pocket": ["DFlash: token accuracy", "DSpark: accepted draft length", "epoch"],
    "retention-qwen-3-dflash": ["Sums", "KL"],
    "tasks-qwen-3": ["DFlash, T=0 (greedy)"],
    "seconds-qwen-3": ["DFlash KL"],
    "temperature-qwen-3": ["KL"],
    "learning-qwen-3": ["DFlash, token verification", "KL"],
}


@pytest.mark.slow
def test_all_that_have_something_to_show_are_written(report):
    assert [file.name for file in report.figure_files] == [
        f"{name}.{end}" for name in EXPECTED for end in ("png", "svg")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_png_and_svg_are_valid(report, name):
    folder = report.page.parent / "figures"
    png = (folder / f"{name}.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert width > 1200
    assert height > 300
    svg = ElementTree.parse(folder / f"{name}.svg")
    texts = {element.text.strip() for element in svg.iter("{http://www.w3.org/2000/svg}text") if element.text}
    assert texts >= set(EXPECTED[name])


@pytest.mark.slow
def test_the_same_every_time_and_undated(evaluations):
    first, second = (next(iter(figures(read_evaluations(evaluations)))) for _ in range(2))
    assert first.svg() == second.svg()
    assert first.png() == second.png()
    assert "dc:date" not in first.svg()


def drawn(evaluations, name):
    return next(drawing for drawing in figures(read_evaluations(evaluations)) if drawing.name == name)


def test_retention_is_drawn_task_by_task_and_pooled_last(evaluations):
    drawing = drawn(evaluations, "retention-pocket-dflash")
    entry = next(e for e in read_evaluations(evaluations).entries if e.title == "DFlash CE")
    panels = drawing.figure.axes
    assert [panel.get_title(loc="left") for panel in panels[:4]] == [
        "Sums", "Functions", "Talk & 100% chat", "All tasks pooled",
    ]  # fmt: skip
    for number, task in enumerate(("sums", "functions", "talk_2")):
        cell = entry.cell("block", "paper", task)
        assert panels[number].lines[0].get_ydata() == pytest.approx(cell.retention, abs=1e-12)
        assert panels[4 + number].lines[0].get_ydata() == pytest.approx(cell.conditional, abs=1e-6)  # stored in 32 bits
    pooled = entry.retention("block")
    assert panels[3].lines[0].get_ydata() == pytest.approx(pooled.kept, abs=1e-12)
    assert "The last panels pool the rounds of all tasks." in drawing.caption
    assert "Decoded prompts: 40 of Sums, 30 of Functions, 20 of Talk & 100% chat." in drawing.caption
    assert drawing.caption.endswith("Evaluated checkpoints: the final ones.")
    assert drawing.caption.startswith("T=1 (block verification). ")


def test_figure_3_is_ce_and_bv_on_gsm8k_or_the_first_task(evaluations, tmp_path):
    drawing = drawn(evaluations, "figure-3")
    entries = {e.title: e for e in read_evaluations(evaluations).entries if e.target == "pocket"}
    left, right = drawing.figure.axes
    for number, title in enumerate(("DFlash CE", "DFlash BV")):
        cell = entries[title].cell("block", "paper", "sums")
        assert left.lines[number].get_ydata() == pytest.approx(cell.retention, abs=1e-12)
        assert right.lines[number].get_ydata() == pytest.approx(cell.conditional, abs=1e-6)
    assert len(left.lines) == len(right.lines) == 2
    assert drawing.title == "Retention by position, pocket, DFlash, Sums"
    assert "on 40 prompts of Sums, T=1 (block verification)." in drawing.caption
    assert drawing.caption.endswith("Evaluated checkpoints: the final ones.")
    made = synthetic.results()
    named = {"name": "gsm8k", "title": "GSM8K", "num_decoded": 12}
    renamed = {
        "tasks": [synthetic.TASKS[0], synthetic.TASKS[1].model_copy(update=named), synthetic.TASKS[2]],
        "cells": [c.model_copy(update={"task": "gsm8k"}) if c.task == "functions" else c for c in made.cells],
    }
    drawing = drawn([synthetic.write(tmp_path, made.model_copy(update=renamed))], "figure-3")
    assert "on 12 prompts of GSM8K" in drawing.caption


@pytest.mark.parametrize(
    ("drafters", "rules"),
    [
        ((("dflash", "CE"), ("dspark", "BV")), ("block",)),
        ((("dflash", "CE"), ("dflash", "KL")), ("block",)),
        ((("dflash", "CE"), ("dflash", "BV")), ("greedy", "token")),
    ],
)
def test_figure_3_needs_ce_and_bv_of_one_kind_under_block_verification(tmp_path, drafters, rules):
    folder = synthetic.write(tmp_path, synthetic.results(drafters=drafters, rules=rules))
    assert "figure-3" not in [drawing.name for drawing in figures(read_evaluations([folder]))]


def test_figure_4_is_ce_and_bv_of_the_first_kind_that_has_the_dynamics_of_both(evaluations, tmp_path):
    drawing = drawn(evaluations, "figure-4")
    entries = {e.title: e for e in read_evaluations(evaluations).entries if e.target == "pocket"}
    left, right = drawing.figure.axes
    assert len(left.lines) == len(right.lines) == 2
    for number, title in enumerate(("DFlash CE", "DFlash BV")):
        points = entries[title].dynamics.points
        assert list(left.lines[number].get_xdata()) == [point.epoch for point in points]
        assert list(left.lines[number].get_ydata()) == [point.accuracy for point in points]
        assert list(right.lines[number].get_ydata()) == [point.draft_length for point in points]
    assert drawing.title == "Training dynamics, pocket, DFlash"
    assert "on the same 512 blocks of 64 training texts." in drawing.caption
    ends = [1 + (0.4 + loss / 3) * 6**0.5 for loss in (0, 0.75)]
    assert drawing.caption.endswith(
        f"At the last checkpoint: 60.00% and {ends[0]:.2f} with CE, 51.00% and {ends[1]:.2f} with BV."
    )
    made = synthetic.results()
    without = {"dynamics": [each for each in made.dynamics if each.drafter != "dflash-ce"]}
    other = drawn([synthetic.write(tmp_path / "a", made.model_copy(update=without))], "figure-4")
    assert other.title == "Training dynamics, pocket, DSpark"
    folder = synthetic.write(tmp_path / "b", synthetic.results(with_dynamics=False))
    assert "figure-4" not in [drawing.name for drawing in figures(read_evaluations([folder]))]


@pytest.mark.slow
def test_retention_of_seven_tasks_and_of_one(tmp_path):
    """Panels wrap after four; a single task is not pooled with itself."""
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV")))
    tasks = [synthetic.TASKS[0].model_copy(update={"name": f"t{i}", "title": f"Task {i}"}) for i in range(7)]
    cells = [
        cell.model_copy(update={"task": task.name}) for cell in made.cells if cell.task == "sums" for task in tasks
    ]
    for number in (7, 1):
        named = {task.name for task in tasks[:number]}
        kept = {"tasks": tasks[:number], "cells": [cell for cell in cells if cell.task in named]}
        folder = synthetic.write(tmp_path / str(number), made.model_copy(update=kept))
        drawing = drawn([folder], "retention-pocket-dflash")
        titles = [title for panel in drawing.figure.axes if (title := panel.get_title(loc="left"))]
        assert titles == [f"Task {i}" for i in range(number)] + ["All tasks pooled"] * (number > 1)
        ElementTree.fromstring(drawing.svg())
    assert "pool" not in drawing.caption
    assert "Decoded prompts: 40 of Task 0." in drawing.caption


def test_retention_is_pooled_over_rounds(evaluations):
    entry = read_evaluations(evaluations).entries[0]
    pooled = entry.retention("block")
    cells = entry.cells("block", "paper")
    assert pooled.num_rounds == 600
    expected = sum(c.retention[2] * n for c, n in zip(cells, (100, 200, 300), strict=True)) / 600
    assert pooled.kept[2] == pytest.approx(expected, abs=1e-12)
    assert len({cell.retention[2] for cell in cells}) == 3  # so pooling is not just any of them


def test_conditional_retention_needs_rounds():
    found = Retention(100, (0.5, 0.1, 0.04, 0.02))
    assert found.conditional(10) == [0.5, pytest.approx(0.2), pytest.approx(0.4), None]
    assert found.conditional() == [0.5, pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.5)]
    assert Retention(10, (0.2, 0.0, 0.0)).conditional() == [0.2, 0.0, None]
    assert Retention.pooled([]).conditional() == []


def test_one_hot_drafts_are_open_markers_at_zero(evaluations):
    drawing = drawn(evaluations, "temperature-pocket")
    assert "Open markers at 0 are argmax drafts." in drawing.caption
    entry = next(e for e in read_evaluations(evaluations).entries if e.title == "DFlash CE")
    expected = entry.average("token", "one-hot").predicted_length.value
    found = [(x, y) for each in drawing.figure.axes[0].lines for x, y in zip(*each.get_data(), strict=True) if x == 0]
    assert (0.0, pytest.approx(expected)) in found
    assert len(found) == 3


def test_learning_curves_are_drawn_by_rule_over_the_blocks_trained_on(evaluations, tmp_path):
    found = read_evaluations(evaluations)
    drawing = drawn(evaluations, "learning-pocket")
    entries = found.of("pocket", "DFlash")
    for panel, rule in zip(drawing.figure.axes[:3], ("greedy", "token", "block"), strict=True):
        for line, entry in zip(panel.lines, entries, strict=True):
            assert list(line.get_xdata()) == [0, 256 * 88, 256 * 176]
            assert list(line.get_ydata()) == [point.draft_length[rule] + 1 for point in entry.about.learning_curve]
    made = synthetic.results()
    alone = [about.model_copy(update={"learning_curve": about.learning_curve[:1]}) for about in made.drafters]
    folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": alone}))
    assert "learning-pocket" not in [each.name for each in figures(read_evaluations([folder]))]


def test_inks_are_the_objectives(evaluations, tmp_path):
    look = styles(read_evaluations(evaluations))
    seen = {(e.about.label, look(e).ink, look(e).marker) for e in read_evaluations(evaluations).entries}
    assert {(label, ink) for label, ink, _ in seen} == {
        ("CE", "ce"), ("KL", "kl"), ("BV", "bv"), ("BV w/o annealing", "bv-plain"),
    }  # fmt: skip
    assert len({marker for *_, marker in seen}) == 4
    assert len({light for light, _ in INKS.values()}) == len(INKS)
    only = (("dflash", "BV"),)
    folders = [synthetic.write(tmp_path / name, synthetic.results(drafters=only)) for name in ("a", "b")]
    found = read_evaluations(folders)
    first, second = (styles(found)(e) for e in found.entries)
    assert (first.ink, second.ink) == ("bv", "bv")
    assert first.dash != second.dash


def test_variants_are_drawn_as_their_objective_and_many_others_apart(tmp_path):
    labels = ["CE", "BV (beta to 0.5)", *(f"objective {number}" for number in range(8))]
    folder = synthetic.write(tmp_path, synthetic.results(drafters=tuple(("dflash", label) for label in labels)))
    found = read_evaluations([folder])
    inks = {entry.about.label: styles(found)(entry).ink for entry in found.entries}
    assert (inks["CE"], inks["BV (beta to 0.5)"]) == ("ce", "bv")
    assert len(set(inks.values())) == len(labels)


def test_a_long_legend_stays_within_the_figure_and_takes_nothing_from_the_panels(tmp_path):
    def drawn(*labels):
        folder = synthetic.write(
            tmp_path / str(len(labels)), synthetic.results(drafters=tuple(("dflash", label) for label in labels))
        )
        drawing = next(d for d in figures(read_evaluations([folder])) if d.name.startswith("temperature"))
        drawing.figure.draw_without_rendering()
        (legend,) = drawing.figure.legends
        return drawing.figure, legend.get_window_extent()

    few, _ = drawn("CE", "BV")
    many, extent = drawn(*(f"an objective with a long name, number {number}" for number in range(12)))
    assert extent.x0 >= 0
    assert extent.x1 <= many.bbox.x1
    heights = [figure.axes[0].get_window_extent().height for figure in (few, many)]
    assert heights[1] >= 0.9 * heights[0]


def test_a_drawing_for_a_page_depends_on_nothing(evaluations):
    drawing = drawn(evaluations, "retention-pocket-dflash")
    inline = drawing.inline()
    assert "http" not in inline
    assert "<style" not in inline
    assert "var(--ink-bv)" in inline
    assert INKS["bv"][0] not in inline
    ids = [part.split('"')[0] for part in inline.split(' id="')[1:]]
    assert ids
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("retention-pocket-dflash-") for name in ids)


def test_odd_labels_do_not_break_a_figure(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"),))
    odd = made.drafters[0].model_copy(update={"label": r"$\frac{ & <b>", "temperatures": [], "learning_curve": []})
    folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": [odd]}))
    drawings = {drawing.name: drawing for drawing in figures(read_evaluations([folder]))}
    assert list(drawings) == ["retention-pocket-dflash", "tasks-pocket", "seconds-pocket", "dynamics-pocket"]
    ElementTree.fromstring(drawings["retention-pocket-dflash"].svg())


def test_drafters_that_answered_other_tasks_leave_gaps(tmp_path):
    first, second = (synthetic.results(drafters=(("dflash", label),)) for label in ("CE", "BV"))
    fewer = {"tasks": second.tasks[:1], "cells": [cell for cell in second.cells if cell.task == "sums"]}
    folders = [
        synthetic.write(tmp_path / "a", first),
        synthetic.write(tmp_path / "b", second.model_copy(update=fewer)),
    ]
    drawing = drawn(folders, "retention-pocket-dflash")
    assert [len(line.get_xdata()) for panel in drawing.figure.axes[:4] for line in panel.lines] == [
        6, 6, 6, 0, 6, 0, 6, 6,
    ]  # fmt: skip
    ElementTree.fromstring(drawing.svg())
