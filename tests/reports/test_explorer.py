"""The page in a real browser: what it shows of every round is what the traces say."""

from contextlib import contextmanager

import pytest

from blockdraft.reports import read_evaluations
from blockdraft.reports.page import traced_texts

import synthetic

pytestmark = pytest.mark.browser

SHOWN = """() => [...document.querySelectorAll(".panel")].map(panel => ({
    drafter: panel.dataset.drafter,
    sum: panel.querySelector(".count").textContent,
    byToken: panel.querySelector(".token-count")?.textContent,
    tokens: [...panel.querySelectorAll(".card-token:not(.added)")].map(c => [
        c.dataset.text, c.classList.contains("kept"), c.querySelector(".verdict").textContent,
        c.querySelector(".coin").textContent, c.querySelector(".other")?.textContent ?? ""]),
    added: [...panel.querySelectorAll(".card-token.added")].map(c => [c.dataset.kind, c.dataset.text]),
    soFar: panel.querySelector(".so-far").textContent,
}))"""


@contextmanager
def opened(browser, file, width=1280, height=900, *, dark=False):
    """The report in a window of its own; whatever the page complains about or fetches is a failure."""
    scheme = "dark" if dark else "light"
    phone = width < 600
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, is_mobile=phone)
    page = context.new_page()
    complaints, fetched = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.on("request", lambda request: fetched.append(request.url))
    address = file.resolve().as_uri()
    page.goto(address)
    yield page
    assert page.title().startswith("blockdraft report: pocket")  # hostile texts would change it
    page.wait_for_timeout(50)  # what they would set off comes a moment later
    context.close()
    assert complaints == []
    assert fetched == [address]


@pytest.fixture
def page(browser, report):
    with opened(browser, report.page) as page:
        yield page


@pytest.fixture(scope="module")
def texts(evaluations):
    return traced_texts(read_evaluations(evaluations))


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


def test_the_traces_have_something_of_everything(texts):
    rounds = [r for text in texts for _, trace in text.traces for r in trace.rounds if trace.rule == "block"]
    assert any(r.accepted == len(r.drafted) and r.next_text for r in rounds)
    assert any(r.accepted < len(r.drafted) for r in rounds)
    assert any(r.accepted > r.token_accepted for r in rounds)
    assert any(synthetic.HOSTILE in token.text for r in rounds for token in r.drafted)


def test_buttons_step_through_all_rounds(page, texts):
    total = num_rounds(texts[0], "block")
    for at in range(total):
        assert page.text_content("#x-round") == f"Round {at + 1} of {total}"
        assert shown(page) == expected(texts[0], "block", at)
        if at < total - 1:
            page.click("#x-next")
    assert page.is_disabled("#x-next")
    page.click("#x-back")
    assert shown(page) == expected(texts[0], "block", total - 2)
    page.click("#x-first")
    assert shown(page) == expected(texts[0], "block", 0)
    page.click("#x-last")
    assert shown(page) == expected(texts[0], "block", total - 1)


def test_arrow_keys_step(page, texts):
    for key, at in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        assert shown(page) == expected(texts[0], "block", at)


def test_arrow_keys_in_a_table_are_left_to_it(page, texts):
    page.locator(".scroll").first.focus()
    page.keyboard.press("ArrowRight")
    assert shown(page) == expected(texts[0], "block", 0)


def test_another_prompt_and_another_rule(page, texts):
    page.select_option("#x-prompt", index=1)
    assert page.text_content("#x-text") == texts[1].prompt
    assert shown(page) == expected(texts[1], "block", 0)
    page.click("#x-rules label:nth-child(2)")
    assert shown(page) == expected(texts[1], "token", 0)
    page.keyboard.press("ArrowRight")  # the radio button has the focus, and there arrows choose
    assert page.input_value("#x-rules input:checked") == "block"
    page.select_option("#x-prompt", index=2)
    assert shown(page) == expected(texts[2], "block", 0)
    assert len(shown(page)) == 3


def test_drafters_can_be_left_out(page):
    page.uncheck("#x-drafters label:nth-of-type(2) input")
    assert [p["drafter"] for p in shown(page)] == ["DFlash CE", "DFlash BV", "DSpark CE", "DSpark BV"]


def test_steps_by_keyboard_alone(page, texts):
    page.focus("#x-next")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert shown(page) == expected(texts[0], "block", 2)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_never_scrolls_sideways(browser, report, dark):
    with opened(browser, report.page, 390, 844, dark=dark) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        for at in range(3):
            assert page.evaluate("document.documentElement.scrollWidth") == 390, at
            page.keyboard.press("ArrowRight")
        # nor does anything stick out of its card
        out = """[...document.querySelectorAll(".card-token, .panel, .card")]
            .filter(c => c.scrollWidth > c.clientWidth).map(c => c.outerHTML)"""
        assert page.evaluate(out) == []
        assert page.evaluate("document.querySelector('#main .scroll').scrollWidth") > 390


def test_dark_and_light_differ_also_in_figures(browser, report):
    grounds, inks = set(), set()
    for dark in (False, True):
        with opened(browser, report.page, dark=dark) as page:
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            inks.add(page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill"))
    assert len(grounds) == len(inks) == 2


def test_a_gain_is_large_only_where_it_is_settled(page):
    shown = page.eval_on_selector_all(".card", "cards => cards.map(c => c.querySelector('.gain').textContent)")
    assert shown == ["+25.5%", "+21.8%", "+21.8%"]
    assert page.locator(".card .undecided").count() == 0
