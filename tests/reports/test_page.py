"""The page: one file, everything escaped, numbers in words."""

import json
import re
from html.parser import HTMLParser

import pytest

from blockdraft.reports import read_evaluations, tables
from blockdraft.reports.figures import figures
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
def text(evaluations):
    """The page of both, without the files of figures and tables beside it, which take longer."""
    comparison = read_evaluations(evaluations)
    return page(comparison, tables(comparison), list(figures(comparison)))


@pytest.mark.slow
def test_the_written_page_is_whole(report):
    tags = Tags(report.page.read_text(encoding="utf-8"))
    assert not tags.open
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(ids) == len(set(ids))


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
    for part in (
        "Main results",
        "Annealing",
        "Training dynamics, pocket",
        "Learning curves, pocket",
        "num_bootstrap",
        "Recipe of dflash-bv",
        "<h4>Evaluation</h4>",
    ):
        assert part in text
    assert text.count("<figure ") == 14
    assert "prefers-color-scheme" in text


def test_cards_say_what_was_shown(text):
    cards = re.findall(r'<article class="card">(.*?)</article>', text, re.DOTALL)
    assert len(cards) == 3
    assert '<p class="gain">+25.5%</p>' in cards[0]
    assert '<p class="basis">95% interval +23.5% to +27.5%</p>' in cards[0]
    assert "<td>3.70 <small>3.65–3.75</small></td><td>2.95 <small>2.90–3.00</small></td>" in cards[0]
    assert "<td>2.50× <small>2.40–2.60</small></td>" in cards[0]


def test_an_undecided_card_has_no_gain(tmp_path):
    drafters = (("dflash", "CE"), ("dflash", "BV"))
    made = synthetic.paired(synthetic.results(drafters=drafters), "dflash-bv", "dflash-ce", spread=0.3)
    found = read_evaluations([synthetic.write(tmp_path, made)])
    card = re.search(r'<article class="card">(.*?)</article>', page(found, tables(found), []), re.DOTALL).group(1)
    assert '<p class="gain undecided">undecided</p>' in card
    assert "+25" not in card


def test_the_table_of_drafters_has_the_steps_of_the_checkpoint_and_of_its_run(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV")))
    drafters = [made.drafters[0].model_copy(update={"step": 264, "num_steps": 20_000}), made.drafters[1]]
    found = read_evaluations([synthetic.write(tmp_path, made.model_copy(update={"drafters": drafters}))])
    section = re.search(r'<section id="drafters".*?</section>', page(found, tables(found), []), re.DOTALL).group()
    assert "<td>264 of 20,000</td>" in section
    assert "<td>176</td>" in section


def test_without_traces(tmp_path):
    found = read_evaluations([synthetic.write(tmp_path, synthetic.results())])
    text = page(found, tables(found), [])
    assert "recorded no traces" in text
    assert 'id="x-controls"' not in text


def test_what_stood_in_the_way_of_training_dynamics_is_said_below_the_figures(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV"), ("dspark", "BV")))
    obstacles = {"dflash-ce": "its data is <gone>", "dflash-bv": "its data is <gone>", "dspark-bv": "no epochs"}
    found = read_evaluations([synthetic.write(tmp_path, made.model_copy(update={"dynamics_obstacles": obstacles}))])
    figures = re.search(r'<section id="figures">(.*?)</section>', page(found, tables(found), []), re.DOTALL).group(1)
    assert re.findall(r'<p class="note">(.*?)</p>', figures) == [
        "Training dynamics, pocket, were not measured for DFlash CE, DFlash BV: its data is &lt;gone&gt;.",
        "Training dynamics, pocket, were not measured for DSpark BV: no epochs.",
    ]


def test_differences_are_noted(tmp_path):
    first = synthetic.results(drafters=(("dflash", "CE"),), with_dynamics=False)
    second = synthetic.results(drafters=(("dflash", "BV"),), with_dynamics=False)
    second.settings["seed"] = 7
    folders = [synthetic.write(tmp_path / "a", first), synthetic.write(tmp_path / "b", second)]
    found = read_evaluations(folders)
    assert "Evaluations of pocket differ in seed (a: 0; b: 7)." in page(found, tables(found), [])
