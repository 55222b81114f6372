"""Progress on a terminal and in a pipe, with a clock that the test turns."""

import io
import re
import time

import pytest
from rich.console import Console
from rich.text import Text

from blockdraft.cli.progress import Pace, Stages, clock_time

NOTE = "loss 1.234, accepted 3.21, 1,234 blocks/s, lr 6.0e-04, waiting 3%"


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def pipe():
    return io.StringIO()


def lines(pipe):
    return pipe.getvalue().splitlines()


def screen(pipe):
    """The lines that a terminal was sent, without what moves its cursor."""
    plain = [Text.from_ansi(line).plain for line in pipe.getvalue().splitlines()]
    return [line for line in plain if line.strip()]


def test_times():
    times = [clock_time(seconds) for seconds in (0, 7.4, 59.6, 125, 3725, 90061)]
    assert times == ["0:00", "0:07", "1:00", "2:05", "1:02:05", "25:01:01"]


def test_speed_and_time_left(clock):
    pace = Pace("data", 0, 100, clock)
    assert (pace.count, pace.rate, pace.left) == ("0/100", "", "")
    for done in range(1, 51):
        clock.now += 2
        pace.update(done, 100, tokens=300)
    assert (pace.count, pace.rate, pace.left) == ("50/100", "150 tokens/s", "1:40")
    assert pace.line == "data: 50/100 (50%), 150 tokens/s, 1:40 so far, 1:40 left"
    clock.now += 100  # nothing happens: the time left grows
    assert (pace.rate, pace.left) == ("75 tokens/s", "3:20")


def test_the_time_left_follows_the_last_two_minutes(clock):
    pace = Pace("data", 0, 1000, clock)
    for _ in range(600):  # ten quick minutes, then slow ones
        clock.now += 1
        pace.update(pace.done + 1, 1000, 0)
    for _ in range(20):
        clock.now += 10
        pace.update(pace.done + 1, 1000, 0)
    assert pace.rate == "0.1/s"
    assert pace.left == clock_time(380 * 10)


def test_slow_work_is_counted_by_the_minute(clock):
    pace = Pace("dynamics", 0, 10, clock)
    for done in (1, 2, 3):
        clock.now += 240
        pace.update(done, 10, 0)
    assert pace.rate == "0.2/min"
    assert pace.left == clock_time(7 * 240)


def test_a_finished_stage_stands_still(clock):
    pace = Pace("data", 0, 10, clock)
    clock.now += 20
    pace.update(10, 10, 1000)
    shown = pace.rate, pace.line, pace.time
    assert shown == ("50 tokens/s", "data: 10/10 in 0:20, 50 tokens/s", "in 0:20")
    clock.now += 500
    assert (pace.rate, pace.line, pace.time) == shown


def test_what_an_earlier_run_did_says_nothing_about_the_speed(clock, pipe):
    with Stages(console=Console(file=pipe), clock=clock) as stages:
        stages.show("data", 500, 1000, fresh=False)
        clock.now += 5  # reading what is there
        stages.show("data", 900, 1000, fresh=False)
        clock.now += 10
        stages.show("data", 910, 1000, 50)
    assert lines(pipe)[0] == "data: 500/1,000 (50%)"
    assert lines(pipe)[-1] == "data: 910/1,000 (91%), 5 tokens/s, 0:10 so far, 1:30 left"


def test_a_pipe_gets_a_line_when_a_stage_begins_and_ends(clock, pipe):
    with Stages(console=Console(file=pipe), clock=clock) as stages:
        for done in range(5):
            stages.show("answers", done, 4, 8)
            clock.now += 3
        stages.show("training with BV", 2, 9, note="loss 0.5")
        stages.show("nothing to do", 3, 3)
    assert lines(pipe) == [
        "answers: 0/4 (0%)",
        "answers: 4/4 in 0:12, 3 tokens/s",
        "training with BV: 2/9 (22%), loss 0.5",
        "nothing to do: 3/3 in 0:00",
        "training with BV: 2/9 (22%), loss 0.5",  # how far it was when the work was stopped
    ]
    assert "\x1b" not in pipe.getvalue()


def test_a_pipe_gets_lines_while_nothing_else_happens(pipe):
    with Stages(console=Console(file=pipe), interval=0.01) as stages:
        stages.show("one", 1, 4)
        stages.show("two", 4, 8)
        give_up = time.monotonic() + 60
        while pipe.getvalue().count("one: 1/4") < 4 and time.monotonic() < give_up:
            time.sleep(0.01)
    assert pipe.getvalue().count("one: 1/4") >= 4
    assert pipe.getvalue().count("two: 4/8") >= 3


def test_nothing_is_shown_by_other_processes(pipe):
    with Stages(shown=False, console=Console(file=pipe)) as stages:
        stages.show("data", 1, 2)
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_cuts_names_and_notes_and_no_numbers(clock, pipe, width, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=pipe, force_terminal=True, width=width, color_system=None)
    with Stages(console=console, clock=clock) as stages:
        stages.show("a-run-with-quite-a-long-name", 0, 10_000)
        clock.now += 100
        stages.show("a-run-with-quite-a-long-name", 1234, 10_000, note=NOTE)
    last = screen(pipe)[-1]
    assert len(last) <= width
    assert re.search(r"1,234/10,000 +11:50 left +12\.3/s", last), last
    assert "a-run" in last
    assert "loss" in last or width < 80


def test_a_terminal_shows_one_bar_for_each_stage(clock, pipe, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=pipe, force_terminal=True, width=120, color_system=None)
    with Stages(console=console, clock=clock) as stages:
        stages.show("one", 0, 2, 0)
        clock.now += 4
        stages.show("one", 2, 2, 400)
        stages.show("two", 0, 3, 0)
        clock.now += 60
    one, two = screen(pipe)[-2:]
    assert "2/2" in one
    assert re.search(r"in 0:04 +100 tokens/s", one)
    assert "0/3" in two
    assert "-:-- left" in two
