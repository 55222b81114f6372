"""The page: one file, everything escaped, numbers in words."""

import json
import re
from html.parser import HTMLParser

import pytest

from blockdraft.reports import read_evaluations, tables
from blockdraft.reports.headlines import headlines
from blockdraft.reports.page import page

import synthetic


class Tags(HTMLParser):
    """Every start tag with its attributes, and whether tags close in order."""

    VOID = {"meta", "input", "br", "img", "link"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text(report):
    return report.page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tags(text):
    return Tags(text)


def test_tags_close_and_ids_are_unique(tags):
    assert not tags.open
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_from_elsewhere(text, tags):
    for tag, attributes in tags.found:
        assert tag not in {"link", "img", "iframe", "object", "image"}
        for name in ("src", "href", "xlink:href", "data"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "http://" not in text
    assert "https://" not in text


def test_hostile_text_stays_text(text, tags):
    assert synthetic.HOSTILE not in text
    assert text.count("</script>") == 2
    assert not any("onerror" in attributes for _, attributes in tags.found)
    data = re.search(r'<script type="application/json" id="traces">(.*?)</script>', text, re.DOTALL).group(1)
    assert "<" not in data
    prompts = json.loads(data)
    assert [(p["target"], p["task"], p["id"]) for p in prompts] == [
        ("pocket", "Sums", "sums-0"), ("pocket", "Functions", "functions-1"), ("Qwen_3", "Sums", "sums-0"),
    ]  # fmt: skip
    assert synthetic.HOSTILE in prompts[1]["prompt"]
    assert {trace["drafter"] for trace in prompts[0]["traces"]} == {
        "DFlash CE", "DFlash BV w/o annealing", "DFlash BV", "DSpark CE", "DSpark BV",
    }  # fmt: skip
    assert "&lt;host&gt;" in text


def test_tables_figures_and_settings_are_there(text):
    for part in ("Main results", "Annealing", "Training dynamics, pocket", "num_bootstrap", "Recipe of dflash-bv"):
        assert part in text
    assert text.count("<figure ") == 9
    assert "prefers-color-scheme" in text


def test_headlines(evaluations):
    found = headlines(read_evaluations(evaluations))
    assert [(h.target, h.kind) for h in found] == [("pocket", "DFlash"), ("pocket", "DSpark"), ("Qwen_3", "DFlash")]
    assert found[0].sentence == (
        "BV accepts 3.67 tokens per verification call, CE 2.92: +25.7%. "
        "Decoding is 2.50× as fast as without a drafter, with CE 1.99×."
    )
    assert found[0].gain == pytest.approx(0.75 / (3 - 0.25 / 3), abs=1e-12)


@pytest.mark.parametrize(
    ("drafters", "start"),
    [
        ((("dflash", "BV"),), "BV accepts 3.67 tokens per verification call and decodes 2.50× as fast as the target"),
        (
            (("dflash", "CE"), ("dflash", "KL")),
            "KL accepts 3.04 tokens per verification call, CE 2.92: +4.1%. Their 95%",
        ),
        ((("dflash", "CE"),), "CE accepts 2.92 tokens per verification call and decodes 1.99×"),
    ],
)
def test_headlines_of_less(tmp_path, drafters, start):
    folder = synthetic.write(tmp_path, synthetic.results(drafters=drafters))
    (headline,) = headlines(read_evaluations([folder]))
    assert headline.sentence.startswith(start)


def test_a_loss_is_said_too(tmp_path):
    better = synthetic.results(drafters=(("dflash", "CE"),), shift=1.5)
    folders = [
        synthetic.write(tmp_path / "a", better),
        synthetic.write(tmp_path / "b", synthetic.results(drafters=(("dflash", "BV"),))),
    ]
    (headline,) = headlines(read_evaluations(folders))
    assert "BV accepts 3.67 tokens per verification call, CE 4.42: -17.0%." in headline.sentence


def test_without_traces(tmp_path):
    found = read_evaluations([synthetic.write(tmp_path, synthetic.results())])
    text = page(found, tables(found), [])
    assert "recorded no traces" in text
    assert 'id="x-controls"' not in text


def test_differences_are_noted(tmp_path):
    first = synthetic.results(drafters=(("dflash", "CE"),), with_dynamics=False)
    second = synthetic.results(drafters=(("dflash", "BV"),), with_dynamics=False)
    second.settings["seed"] = 7
    folders = [synthetic.write(tmp_path / "a", first), synthetic.write(tmp_path / "b", second)]
    found = read_evaluations(folders)
    assert "Evaluations of pocket differ in seed (a: 0; b: 7)." in page(found, tables(found), [])
