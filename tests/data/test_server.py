"""The server engine against scripted servers: faults that pass, faults that do not, waiting, and stopping."""

import contextlib
import datetime
import json
import signal
import socket
import threading
import time
from email.utils import format_datetime

import pytest

from blockdraft.data import (
    Conversation,
    DataError,
    EngineError,
    GenerationSettings,
    Prompt,
    ServerEngine,
    endpoint,
    read_manifest,
    regenerate,
)
from blockdraft.data import server as server_module

from scripted import WORDS, after_probe, answered, completion, conversations, engine_for, only
from tiny import EOS, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_requests_under_way_are_bounded_at_each_server(target, serve):
    first, second = serve(hold=0.02), serve(hold=0.02)
    done = answered(target, first, second, count=40, concurrency=3)
    assert sorted(d.index for d in done) == list(range(40))
    assert first.most_under_way <= 3
    assert second.most_under_way <= 3
    assert max(first.most_under_way, second.most_under_way) > 1
    assert len(first.asked) + len(second.asked) == 40
    assert min(len(first.asked), len(second.asked)) > 0


@pytest.mark.parametrize(
    "failure",
    [
        (503, {"error": {"message": "loading"}}),
        (429, "busy", {"Retry-After": "0"}),
        (500, "oops"),
        None,
        "<html>",
        {"choices": []},
    ],
)
def test_what_passes_is_tried_again(failure, target, serve):
    server = serve(after_probe(lambda body, n: failure_as_reply(failure) if n < 3 else completion(body, [7, EOS])))
    assert only(answered(target, server)).completions[0].response_ids == [7, EOS]
    assert len(server.asked) == 3
    assert server.asked[0] == server.asked[2]


def failure_as_reply(failure):
    return (200, failure) if isinstance(failure, str) else failure


@pytest.fixture
def rests(monkeypatch):
    """The pauses, which are not taken."""
    taken = []

    async def sleep(_, seconds):
        taken.append(seconds)

    monkeypatch.setattr(endpoint.Client, "_sleep", sleep)
    return taken


def test_a_server_that_asks_for_time_gets_it(target, serve, rests):
    later = format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=50), usegmt=True)
    answers = [
        (429, "busy", {"Retry-After": "30"}), (503, "busy"), (503, "busy", {"Retry-After": "tomorrow"}),
        (503, "busy", {"Retry-After": later}),
    ]  # fmt: skip
    server = serve(after_probe(lambda body, n: answers[n - 1] if n <= 4 else completion(body, [7, EOS])))
    assert only(answered(target, server, pause=1, retries=4)).dropped is None
    assert rests[0] == 30
    assert 2 <= rests[1] <= 3
    assert 4 <= rests[2] <= 5
    assert 30 <= rests[3] <= 50


def test_a_server_that_asks_for_too_much_time_is_given_up(target, serve, rests):
    server = serve(after_probe(lambda *_: (503, "maintenance", {"Retry-After": "86400"})))
    with pytest.raises(EngineError, match="503: maintenance; it asks for a pause of 86400 s"):
        answered(target, server)
    assert rests == []


def test_pauses_grow_and_are_announced_once(target, serve, rests):
    lines = []
    server = serve(after_probe(lambda body, n: (500, "oops") if n <= 3 else completion(body, [7, EOS])))
    assert only(answered(target, server, pause=2, notify=lines.append)).dropped is None
    assert [int(seconds) // 2 * 2 for seconds in rests] == [2, 4, 8]
    (line,) = lines
    assert line.startswith(f"{server.url}: 500: oops; asking again in ")


def test_waiting_for_a_slow_answer_is_said(target, serve, monkeypatch, capsys):
    monkeypatch.setattr(server_module, "SECONDS_OF_SILENCE", 0.05)
    server = serve(hold=0.3)
    only(answered(target, server, notify=None))
    said = capsys.readouterr().err
    assert f"waiting for a first answer of {server.url} (an attempt may take 20 s, --timeout)" in said
    assert f"waiting for 1 answers of {server.url}: none for 0.05 s (an attempt may take 20 s, --timeout)" in said


@pytest.mark.parametrize("part", ["head", "body"])
def test_an_attempt_has_an_end_even_if_bytes_keep_coming(part, target):
    """A server that answers one byte at a time: no single read takes long, the whole would take for ever."""

    def drip(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if part == "body" else b""))
                    while True:
                        connection.sendall(b"x" if part == "body" else b"X-A: b\r\n")
                        time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"no answer in 0\.3 seconds"):
            engine_for(target, url, timeout=0.3, retries=0)


def test_an_answer_that_is_far_too_large_is_garbage(target, serve, monkeypatch):
    monkeypatch.setattr(endpoint, "LARGEST_REPLY", 10_000)
    server = serve(after_probe(lambda *_: (200, "x" * 20_000)))
    with pytest.raises(EngineError, match="returns garbage: an answer of more than 10000 bytes"):
        answered(target, server, retries=0)


@pytest.mark.parametrize(
    ("garbage", "shown"),
    [("<html>proxy</html>", "not JSON: '<html>proxy</html>'"), ('{"object": "error"}', "without choices")],
)
def test_garbage_is_an_error_that_shows_it(garbage, shown, target, serve):
    server = serve(after_probe(lambda body, n: completion(body, [7, EOS]) if n == 1 else (200, garbage)))
    engine = engine_for(target, server, concurrency=1)
    run = engine.run(conversations(target, 3, ("w10",)))
    assert next(run).completions[0].response_ids == [7, EOS]
    with pytest.raises(EngineError, match=shown) as caught:
        next(run)
    assert server.url in str(caught.value)
    assert "the same command resumes" in str(caught.value)
    assert sum(body == server.asked[1] for body in server.asked) == 4


def test_replies_that_came_before_the_error_was_seen_are_kept(target, serve, monkeypatch):
    """The reply to the first word comes first, then garbage for the second, then the reply to the third."""
    words, turn = ("w10", "w30", "w11"), {10: threading.Event(), 30: threading.Event(), 11: threading.Event()}
    works = []

    class Watched(server_module._Work):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            works.append(self)

    def answer(body, number):
        word = next((word for word in turn if word in body["prompt"]), None)
        if number:
            turn[word].wait(60)
        return (200, "hm") if word == 30 else completion(body, [7, EOS])

    monkeypatch.setattr(server_module, "_Work", Watched)
    asked = [Conversation(Prompt(word, (word,)), target, GenerationSettings()) for word in words]
    run = engine_for(target, serve(answer), concurrency=3, retries=0).run(asked)
    turn[10].set()
    assert next(run).prompt.id == "w10"
    for num, word in enumerate((30, 11), 1):
        turn[word].set()
        while works[0].outcomes.qsize() < num:
            time.sleep(0.01)
    assert next(run).prompt.id == "w11"
    with pytest.raises(EngineError, match="garbage"):
        next(run)


def test_garbage_from_the_start_is_an_error(target, serve):
    with pytest.raises(EngineError, match="returns garbage: not JSON: 'hm'"):
        engine_for(target, serve(lambda *_: (200, "hm")))


def test_an_unreachable_server_is_named_at_once(target, serve):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for urls in ([url], [serve().url, url]):
        with pytest.raises(EngineError, match=f"{url}/v1 cannot be reached: .*refused"):
            engine_for(target, *urls)


def test_a_dying_server_hands_its_work_to_the_other(target, serve):
    died = threading.Event()

    def dies(body, number):
        if number < 3:
            return completion(body, [7, EOS])
        died.set()
        return None

    def waits(body, number):
        if number:
            died.wait(30)
        return completion(body, [*WORDS, EOS])

    done = answered(target, serve(dies), serve(waits), count=20)
    assert sorted(d.index for d in done) == list(range(20))
    assert all(d.dropped is None for d in done)
    assert sum(d.completions[0].response_ids == [7, EOS] for d in done) == 2


def test_when_no_server_is_left_the_finished_conversations_are_kept(target, serve):
    def dies_after(count):
        return lambda body, n: completion(body, [7, EOS]) if n < count else None

    first, second = serve(dies_after(3)), serve(dies_after(3))
    run = engine_for(target, first, second, concurrency=1).run(conversations(target, 9, ("w10",)))
    assert [next(run).dropped for _ in range(4)] == [None] * 4
    with pytest.raises(EngineError, match="no server is left") as caught:
        next(run)
    assert first.url in str(caught.value)
    assert second.url in str(caught.value)


def test_a_row_that_the_server_fails_on_is_dropped(target, serve):
    server = serve(lambda body, _: (500, "too odd") if 30 in body["prompt"] else completion(body, [7, EOS]))
    engine = engine_for(target, server)
    asked = [Conversation(Prompt(word, (word,)), target, GenerationSettings()) for word in ("w10", "w30", "w11")]
    dropped = {each.prompt.id: each.dropped for each in engine.run(asked)}
    assert dropped == {"w10": None, "w11": None, "w30": "the server failed on it: 500: too odd"}


def refusing(status, said, until=10**9):
    """A server that refuses the token 30 until so many requests were made."""
    return lambda body, n: (status, said) if 30 in body["prompt"] and n < until else completion(body, [7, EOS])


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_row_is_asked_again_and_then_dropped_with_the_servers_reason(status, target, serve):
    said = {"error": {"message": "maximum context length is 16 tokens\nand more"}}
    server = serve(refusing(status, said))
    conversation = only(answered(target, server, turns=("w30",)))
    assert conversation.dropped == "refused by the server: maximum context length is 16 tokens"
    assert conversation.failed
    assert sum(30 in body["prompt"] for body in server.asked) == 3


def test_a_refusal_that_passes_drops_nothing(target, serve):
    server = serve(refusing(400, "busy", until=4))
    assert only(answered(target, server, turns=("w30",))).completions[0].response_ids == [7, EOS]


def test_a_server_that_refuses_everything_for_a_while_drops_nothing(target, serve):
    """It does not even answer the first, plain question again: the fault lies with the server, not with the row."""
    server = serve(lambda body, n: (400, "no model yet") if 0 < n < 5 else completion(body, [7, EOS]))
    done = answered(target, server, count=3, concurrency=1)
    assert [each.dropped for each in done] == [None] * 3


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_refuses_everything_for_good_is_an_error(status, target, serve):
    with pytest.raises(EngineError, match=r"no server is left .*: broken\); what is finished is kept; .* resumes"):
        answered(target, serve(after_probe(lambda *_: (status, "broken"))), count=9)


def test_servers_that_fail_leave_no_complete_folder(target, serve, tmp_path):
    """A complete folder without rows, which no later run would ask about again, is no outcome."""
    prompts = [Prompt(f"p{i}", ("w30",)) for i in range(8)]
    settings = GenerationSettings(max_new_tokens=8, max_length=60)
    server = serve(refusing(400, "busy"))
    with pytest.raises(DataError, match=r"failed on 8 of 8 conversations \(refused by the server: busy: 8\)"):
        regenerate(prompts, target, settings, tmp_path, engine=engine_for(target, server))
    assert not read_manifest(tmp_path).complete
    manifest = regenerate(prompts, target, settings, tmp_path, engine=engine_for(target, serve()))
    assert (manifest.complete, manifest.totals.rows, manifest.totals.dropped) == (True, 8, {})


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_concerns_all_rows_is_an_error(status, target, serve):
    with pytest.raises(EngineError, match=f"refuses requests: {status}: no"):
        answered(target, serve(after_probe(lambda *_: (status, {"detail": "no"}))))


def test_a_model_that_is_not_there_is_an_error(target, serve):
    with pytest.raises(EngineError, match="404: no such model"):
        engine_for(target, serve(lambda *_: (404, {"message": "no such model"})), model="other")


def test_the_key_is_sent_and_must_be_there(target, serve, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    server = serve()
    engine = engine_for(target, server, key_variable="A_KEY")
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(engine.describe())
    with pytest.raises(EngineError, match="NO_KEY"):
        engine_for(target, server, key_variable="NO_KEY")
    for odd in ("two\nlines", "schlüssel", "two words"):
        monkeypatch.setenv("A_KEY", odd)
        with pytest.raises(EngineError, match="A_KEY does not hold an API key") as caught:
            engine_for(target, server, key_variable="A_KEY")
        assert odd not in str(caught.value)


def test_the_model_is_the_one_listed_or_the_one_given(target, serve):
    many, none = serve(models=("a", "b")), serve(models=())
    with pytest.raises(EngineError, match=r"lists 2 models \(a, b\)"):
        engine_for(target, many)
    with pytest.raises(EngineError, match=r"lists 0 models \(none\)"):
        engine_for(target, none)
    engine_for(target, many, none, model="b")
    assert {many.requests[0]["model"], none.requests[0]["model"]} == {"b"}
    with pytest.raises(EngineError, match="different names"):
        engine_for(target, serve(models=("a",)), serve(models=("b",)))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://user:pass@host/v1", "http://"])
def test_urls_that_are_none(url, target):
    with pytest.raises(EngineError, match="is not a server's URL"):
        engine_for(target, url)


def test_the_version_may_be_left_out_of_a_url_but_no_url_given_twice(target, serve):
    server = serve()
    assert engine_for(target, server.url.removesuffix("/v1") + "/").servers[0].url == server.url
    with pytest.raises(EngineError, match="once"):
        engine_for(target, server, server.url.removesuffix("/v1"))
    with pytest.raises(EngineError, match="none"):
        engine_for(target)


def test_closing_the_iterator_ends_the_requests_under_way(target, serve):
    let_go = threading.Event()

    def answer(body, number):
        if number > 1:
            let_go.wait(60)
        return completion(body, [7, EOS])

    server = serve(answer)
    engine = engine_for(target, server, concurrency=4)
    before = set(threading.enumerate())
    run = engine.run(conversations(target, 20, ("w10",)))
    next(run)
    run.close()  # it would wait for a server that does not answer, unless its requests were cut short
    left = [thread for thread in threading.enumerate() if thread not in before and "portal" in thread.name]
    assert left == []
    assert len(server.asked) <= 5
    let_go.set()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("moment", ["first", "later"])
def test_ctrl_c_ends_the_requests_under_way(moment, target, serve):
    """The server holds its answers, to the first request or to the later ones, until the test is over."""
    let_go, hung_up = threading.Event(), threading.Event()

    def answer(body, number):
        if number > 0 or moment == "first":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if not let_go.wait(60):
                hung_up.set()
        return completion(body, [7, EOS])

    lines = []
    engine = ServerEngine([serve(answer).url], concurrency=1, notify=lines.append)
    with pytest.raises(KeyboardInterrupt):
        list(engine.run(conversations(target, 20)))
    assert not hung_up.is_set()
    assert lines == []  # an end is no fault to be tried again
    assert not any("portal" in thread.name for thread in threading.enumerate())
    let_go.set()


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, as in a process that a user started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_servers_are_not_spoken_to_if_there_is_nothing_to_ask(target, serve, tmp_path):
    nobody = ServerEngine(["http://127.0.0.1:9"])
    assert list(nobody.run([])) == []
    prompts, settings = [Prompt("p", ("w10",))], GenerationSettings(max_length=60)
    with pytest.raises(EngineError, match="cannot be reached"):
        regenerate(prompts, target, settings, tmp_path / "d", engine=nobody)
    assert not (tmp_path / "d").exists()
    manifest = regenerate(prompts, target, settings, tmp_path / "d", engine=engine_for(target, serve()))
    assert regenerate(prompts, target, settings, tmp_path / "d", engine=nobody) == manifest
    assert manifest.about.engine.model_dump()["servers"][0]["model"] == "tiny"


def test_conversations_that_ask_for_nothing_do_not_end_the_run(target, serve):
    """More of them in a row than are ever open at once."""
    settings = GenerationSettings(max_new_tokens=8, max_length=12)
    long = [Conversation(Prompt(f"p{i}", ("w9 " * 20,)), target, settings) for i in range(9)]
    done = list(engine_for(target, serve(), concurrency=1).run([*long, *conversations(target, 3), *long]))
    assert [each.dropped for each in done].count("prompt too long") == 18
    assert sum(len(each.completions) for each in done) == 3


def test_prompts_are_rendered_as_they_are_needed(target, serve):
    """Hundreds of thousands of prompts need not lie in memory, rendered, from the start."""
    server, drawn = serve(), []

    def each():
        for conversation in conversations(target, 40):
            drawn.append(conversation)
            yield conversation

    run = engine_for(target, server, concurrency=2).run(each())
    next(run)
    assert len(drawn) <= 6
    assert len(list(run)) == 39


def test_without_the_packages(monkeypatch):
    monkeypatch.setattr(server_module, "find_spec", lambda name: None if name == "tenacity" else name)
    with pytest.raises(EngineError, match=r"asking servers needs tenacity: pip install 'blockdraft\[server\]'"):
        ServerEngine(["http://127.0.0.1:9"])


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"timeout": 0}, {"timeout": float("inf")}, {"retries": -1}])
def test_numbers_that_are_none(options):
    with pytest.raises(EngineError, match="must"):
        ServerEngine(["http://127.0.0.1:9"], **options)
