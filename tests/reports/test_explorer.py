"""The page in a real browser: what it shows of every round is what the traces say."""

import pytest

from blockdraft.reports import read_evaluations

import synthetic
from browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

SHOWN = """[...document.querySelectorAll(".panel")].map(panel => ({
    drafter: panel.dataset.drafter,
    sum: panel.querySelector(".count").textContent,
    byToken: panel.querySelector(".token-count")?.textContent,
    tokens: [...panel.querySelectorAll(".card-token:not(.added)")].map(c => [
        c.dataset.text, c.classList.contains("kept"), c.querySelector(".verdict").textContent,
        c.querySelector(".coin").textContent, c.querySelector(".other")?.textContent ?? ""]),
    added: [...panel.querySelectorAll(".card-token.added")].map(c => [c.dataset.kind, c.dataset.text]),
    soFar: panel.querySelector(".so-far").textContent,
}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(browser, report):
    browser.window(1280, 900)
    browser.open(report.page)
    yield browser
    assert browser.complaints() == []
    assert browser.evaluate("document.title").startswith("blockdraft report: pocket")  # hostile texts change it


@pytest.fixture(scope="module")
def texts(evaluations):
    return read_evaluations(evaluations).texts


def number(value: float) -> str:
    value = float(f"{value:.6g}")  # as the page has it
    if 0 < value < 0.005:
        return "<0.01"
    return ">0.99" if 0.995 < value < 1 else f"{value:.2f}"


def expected(text, rule, at):
    """What the panels must show after ``at`` steps, from the traces themselves."""
    panels = []
    for entry, trace in text.traces:
        if trace.rule != rule:
            continue
        now = min(at, len(trace.rounds) - 1)
        record = trace.rounds[now]
        tokens = []
        for i, token in enumerate(record.drafted):
            kept, success = i < record.accepted, token.coin < token.threshold
            coin = f"coin {number(token.coin)}" + ("✓ < h" if success else "✗ ≥ h")
            by_token = ("token rule" + ("✓" if i < record.token_accepted else "✗")) if rule == "block" else ""
            tokens.append([token.text, kept, "✓ kept" if kept else "✗ dropped", coin, by_token])
        whole = record.accepted == len(record.drafted)
        kind = "end" if record.next_text is None else "bonus" if whole else "correction"
        text_so_far = trace.first_text
        for each in trace.rounds[: now + 1]:
            text_so_far += "".join(t.text for t in each.drafted[: each.accepted]) + (each.next_text or "")
        panels.append(
            {
                "drafter": entry.title,
                "sum": f"{record.accepted} of {len(record.drafted)}",
                "byToken": str(record.token_accepted) if rule == "block" else None,
                "tokens": tokens,
                "added": [[kind, record.next_text or ""]],
                "soFar": text_so_far,
            }
        )
    return panels


def shown(page):
    found = page.evaluate(SHOWN)
    return [{"byToken": None} | panel for panel in found]


def num_rounds(text, rule):
    return max(len(trace.rounds) for _, trace in text.traces if trace.rule == rule)


def choose(page, index):
    change = f"s.value = {index}; s.dispatchEvent(new Event('change'))"
    page.evaluate(f"(s => {{ {change} }})(document.querySelector('#x-prompt'))")


def test_the_traces_have_something_of_everything(texts):
    rounds = [r for text in texts for _, trace in text.traces for r in trace.rounds if trace.rule == "block"]
    assert any(r.accepted == len(r.drafted) and r.next_text for r in rounds)
    assert any(r.accepted < len(r.drafted) for r in rounds)
    assert any(r.accepted > r.token_accepted for r in rounds)
    assert any(synthetic.HOSTILE in token.text for r in rounds for token in r.drafted)


def test_buttons_step_through_all_rounds(page, texts):
    total = num_rounds(texts[0], "block")
    for at in range(total):
        assert page.evaluate("document.querySelector('#x-round').textContent") == f"Round {at + 1} of {total}"
        assert shown(page) == expected(texts[0], "block", at)
        page.click("#x-next")
    assert page.evaluate("document.querySelector('#x-next').disabled")
    page.click("#x-back")
    assert shown(page) == expected(texts[0], "block", total - 2)
    page.click("#x-first")
    assert shown(page) == expected(texts[0], "block", 0)
    page.click("#x-last")
    assert shown(page) == expected(texts[0], "block", total - 1)


def test_arrow_keys_step(page, texts):
    for key, at in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        page.press(key)
        assert shown(page) == expected(texts[0], "block", at)


def test_arrow_keys_in_a_table_are_left_to_it(page, texts):
    page.evaluate("document.querySelector('.scroll').focus()")
    page.press("ArrowRight")
    assert shown(page) == expected(texts[0], "block", 0)


def test_another_prompt_and_another_rule(page, texts):
    choose(page, 1)
    assert page.evaluate("document.querySelector('#x-text').textContent") == texts[1].prompt
    assert shown(page) == expected(texts[1], "block", 0)
    page.click("#x-rules label:nth-child(2)")
    assert shown(page) == expected(texts[1], "token", 0)
    page.press("ArrowRight")  # the radio button has the focus, and there arrows choose
    assert page.evaluate("document.querySelector('#x-rules input:checked').value") == "block"
    choose(page, 2)
    assert shown(page) == expected(texts[2], "block", 0)
    assert len(shown(page)) == 3


def test_drafters_can_be_left_out(page):
    page.click("#x-drafters label:nth-of-type(2) input")
    assert [p["drafter"] for p in shown(page)] == ["DFlash CE", "DFlash BV", "DSpark CE", "DSpark BV"]


def test_steps_by_keyboard_alone(page, texts):
    page.evaluate("document.querySelector('#x-next').focus()")
    page.press("Enter")
    page.press("Enter")
    assert shown(page) == expected(texts[0], "block", 2)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_never_scrolls_sideways(browser, report, dark):
    browser.window(390, 844, dark=dark)
    browser.open(report.page)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for at in range(3):
        assert browser.evaluate("document.documentElement.scrollWidth") == 390, at
        browser.press("ArrowRight")
    # nor does anything stick out of its card
    out = """[...document.querySelectorAll(".card-token, .panel, .card")].filter(c => c.scrollWidth > c.clientWidth)
        .map(c => c.outerHTML)"""
    assert browser.evaluate(out) == []
    assert browser.evaluate("document.querySelector('#main .scroll').scrollWidth") > 390
    assert browser.complaints() == []


def test_dark_and_light_differ_also_in_figures(browser, report):
    grounds, inks = set(), set()
    for dark in (False, True):
        browser.window(1280, 900, dark=dark)
        browser.open(report.page)
        grounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        inks.add(browser.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill"))
    assert len(grounds) == len(inks) == 2
