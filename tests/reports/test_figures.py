"""Figures are there, can be read by machines, say what they show, and come out the same every time."""

import struct
from xml.etree import ElementTree

import pytest

from blockdraft.reports import read_evaluations
from blockdraft.reports.figures import figures, pooled_retention
from blockdraft.reports.inks import INKS, styles

import synthetic

EXPECTED = {
    "retention-pocket": ["DFlash: kept through position i", "DSpark: kept if i-1 was", "BV w/o annealing", "CE"],
    "tasks-pocket": ["Talk & 100% chat", "DSpark, T=1 (block verification)", "tokens per verification call, τ"],
    "seconds-pocket": ["Autoregressive", "DFlash BV", "milliseconds per token", "verify", "prefill", "11.11"],
    "temperature-pocket": ["draft temperature", "predicted τ", "DFlash, token verification"],
    "dynamics-pocket": ["DFlash: token accuracy", "DSpark: accepted draft length", "epoch"],
    "retention-qwen-3": ["DFlash: kept through position i", "KL"],
    "tasks-qwen-3": ["DFlash, T=0 (greedy)"],
    "seconds-qwen-3": ["DFlash KL"],
    "temperature-qwen-3": ["KL"],
}


def test_all_that_have_something_to_show_are_written(report):
    assert [file.name for file in report.figure_files] == [
        f"{name}.{end}" for name in EXPECTED for end in ("png", "svg")
    ]


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


def test_the_same_every_time_and_undated(evaluations):
    first, second = (next(iter(figures(read_evaluations(evaluations)))) for _ in range(2))
    assert first.svg() == second.svg()
    assert first.png() == second.png()
    assert "dc:date" not in first.svg()


def test_retention_is_pooled_over_rounds(evaluations):
    entry = read_evaluations(evaluations).entries[0]
    kept = pooled_retention(entry, "block")
    cells = entry.cells("block", "paper")
    assert kept[0] == 1
    expected = sum(c.retention[2] * n for c, n in zip(cells, (100, 200, 300), strict=True)) / 600
    assert kept[3] == pytest.approx(expected, abs=1e-12)


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


def test_a_drawing_for_a_page_depends_on_nothing(evaluations):
    drawing = next(iter(figures(read_evaluations(evaluations))))
    inline = drawing.inline()
    assert "http" not in inline
    assert "<style" not in inline
    assert "var(--ink-bv)" in inline
    assert INKS["bv"][0] not in inline
    ids = [part.split('"')[0] for part in inline.split(' id="')[1:]]
    assert ids
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("retention-pocket-") for name in ids)


def test_odd_labels_do_not_break_a_figure(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"),))
    odd = made.drafters[0].model_copy(update={"label": r"$\frac{ & <b>", "temperatures": []})
    folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": [odd]}))
    drawings = {drawing.name: drawing for drawing in figures(read_evaluations([folder]))}
    assert list(drawings) == ["retention-pocket", "tasks-pocket", "seconds-pocket", "dynamics-pocket"]
    ElementTree.fromstring(drawings["retention-pocket"].svg())
