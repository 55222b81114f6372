"""Classes of servers that lie, hang, reset, drip or refuse. They run in threads of the case's own process."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from blockdraft.data import endpoint

from fuzz.bench import REGENERATE
from fuzz.file_classes import BEGUN, RUN
from fuzz.running import Case, Expect
from scripted import WORDS, Scripted, after_probe, completion

ASK = ("--server", "{url}", "--timeout", "1", "--retries", "1", "--concurrency", "4")
COMMAND = (*REGENERATE, "--max-length", "60", "--out", "new", *ASK)
NEEDS = ("target", "prompts.jsonl")

Answer = Callable[[dict[str, Any], int], Any]


def _patient(prepare: Callable[[], str]) -> Callable[[], str]:
    """Let pauses pass at once: how long they are is tested elsewhere."""

    async def at_once(_client: object, _seconds: float) -> None:
        return None

    def do() -> str:
        endpoint.Client._sleep = at_once  # type: ignore[method-assign]
        return prepare()

    return do


def _choice(**changes: Any) -> Answer:
    def answer(body: dict[str, Any], _number: int) -> Any:
        reply = completion(body, WORDS)
        reply["choices"][0] |= changes
        return reply

    return answer


def _status(status: int, text: str = "no", **headers: str) -> Answer:
    return lambda _body, _number: (status, text, {name.replace("_", "-"): value for name, value in headers.items()})


def _body(content: str) -> Answer:
    return lambda _body, _number: (200, content, {})


def _usage(**changes: Any) -> Answer:
    return lambda body, _number: completion(body, WORDS) | {"usage": changes}


LIES: dict[str, Answer] = {
    **{f"status {each}": _status(each) for each in (204, 301, 400, 401, 403, 404, 405, 409, 413, 418, 422, 500, 502,
    503, 599)},
    **{f"429, Retry-After {each}": _status(429, Retry_After=each)
       for each in ("0", "1", "100000", "-5", "soon", "Wed, 21 Oct 2099 07:28:00 GMT", "9" * 400, "1e9")},
    "not JSON": _body("<html>busy</html>"), "empty body": _body(""), "null": _body("null"), "a list": _body("[]"),
    "nested": _body("[" * 100_000), "NaN": _body("NaN"), "not UTF-8": _body("\ud7ff{"), "no choices": _body("{}"),
    "empty choices": _body('{"choices": []}'), "choices of text": _body('{"choices": ["x"]}'),
    "choices null": _body('{"choices": null}'), "a large number": _body('{"choices": [' + "9" * 5000 + "]}"),
    "ids that are booleans": _choice(token_ids=[True, False]), "ids that are floats": _choice(token_ids=[7.0]),
    "ids that are text": _choice(token_ids="789"), "ids in text": _choice(token_ids=["7"]),
    "ids beyond the vocabulary": _choice(token_ids=[40]), "negative ids": _choice(token_ids=[-1]),
    "ids without end": _choice(token_ids=[7] * 500), "no ids at all": _choice(token_ids=[]),
    "ids beyond 64 bits": _choice(token_ids=[2**70]), "nested ids": _choice(token_ids=[[7]]),
    "an end in the middle": _choice(token_ids=[7, 0, 7]), "finish null": _choice(finish_reason=None),
    "finish tool_calls": _choice(finish_reason="tool_calls"), "finish 7": _choice(finish_reason=7),
    "stopped elsewhere": _choice(stop_reason="\n"), "text only": _choice(token_ids=None, text="w7 w8"),
    "half of a character": _choice(token_ids=None, text="w7 \ud800"),
    "text of another type": _choice(token_ids=None, text=7), "a prompt of another length": _usage(prompt_tokens=999),
    "a prompt of other tokens": _choice(prompt_token_ids=[1, 2]), "usage of text": _usage(prompt_tokens="4"),
}  # fmt: skip


def lying(dice: random.Random, scale: int) -> Iterator[Case]:
    """Servers that refuse everything, or answer with what is no completion: at once, or after the first request."""
    for name in dice.sample(list(LIES), 12) if scale == 1 else LIES:
        for late in (dice.random() < 0.5,) if scale == 1 else (False, True):
            answer = after_probe(LIES[name]) if late else LIES[name]
            start = _patient(lambda a=answer: Scripted(a).url)
            odd = name in ("usage of text",) or (late and name == "a prompt of another length")
            yield Case(f"{'after the first, ' if late else ''}{name}", COMMAND, start, needs=NEEDS, leaves=("new",),
                       expect=Expect.EITHER if odd else Expect.REFUSED)  # fmt: skip
    for name, models in (("no model", ()), ("two models", ("a", "b")), ("a model of another name", (7,))):
        start = _patient(lambda m=models: Scripted(_choice(), models=m).url)
        expect = Expect.EITHER if models == (7,) else Expect.REFUSED
        yield Case(f"lists {name}", COMMAND, start, needs=NEEDS, leaves=("new",), expect=expect)


class Raw:
    """A server that treats every connection as ``speak(connection)`` does, without knowing HTTP."""

    def __init__(self, speak: Callable[[socket.socket], None]) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        self.speak = speak
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(20)
            self.speak(connection)


def _models_then(rest: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """List a model as a good server does, and do something else with every other request."""

    def speak(connection: socket.socket) -> None:
        request = connection.recv(2**16)
        if request.startswith(b"GET"):
            body = json.dumps({"data": [{"id": "tiny"}]}).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            rest(connection)

    return speak


def _send(content: bytes, pause: float = 0.0) -> Callable[[socket.socket], None]:
    def speak(connection: socket.socket) -> None:
        for each in [content] if pause == 0 else [bytes([one]) for one in content]:
            connection.sendall(each)
            time.sleep(pause)

    return speak


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def _flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 2**20)


def _chunks(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"1\r\n \r\n")
        time.sleep(0.05)


HEAD = b"HTTP/1.1 200 OK\r\n"
RAW: dict[str, Callable[[socket.socket], None]] = {
    "hangs": lambda _: time.sleep(15), "resets": _reset, "hangs up": lambda _: None,
    "drips": _send(HEAD + b"Content-Length: 99999\r\n\r\n" + b" " * 500, 0.02), "drips its head": _send(HEAD * 50,
    0.02),
    "never ends its chunks": _chunks, "floods": _flood,
    "ends too early": _send(HEAD + b"Content-Length: 500\r\n\r\n{}"),
    "is no HTTP": _send(b"220 smtp ready\r\n"), "speaks bytes": _send(bytes(range(256)) * 4),
    "has a bad length": _send(HEAD + b"Content-Length: x\r\n\r\n{}"),
    "has two lengths": _send(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"),
    "has a bad chunk": _send(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "has a bad status": _send(b"HTTP/1.1 abc OK\r\n\r\n"),
    "has a status of 999": _send(b"HTTP/1.1 999 OK\r\nContent-Length: 2\r\n\r\n{}"),
    "has a head without end": _send(HEAD + b"X: " + b"x" * 10**6),
    "claims gzip": _send(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
    "switches protocols": _send(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
    "continues": _send(b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
    "redirects to itself": _send(b"HTTP/1.1 302 Found\r\nLocation: /v1/completions\r\nContent-Length: 0\r\n\r\n"),
}  # fmt: skip
URLS = (
    "", "x", "http://", "http://:80", "http://[::1", "ftp://localhost", "http://localhost:99999", "http://localhost:x",
    "http://user@localhost", "http://localhost?x", "file:///etc/passwd", "http://127.0.0.1:1", "http://nowhere.invalid",
    "http://\x1b[31m", "http://a b", "//localhost", "http://localhost:8000#x", "http://\udcff", "http://" + "x" * 300,
    "http://xn--a", "https://127.0.0.1:1",
)  # fmt: skip


def broken(dice: random.Random, scale: int) -> Iterator[Case]:
    """Servers that hang, reset, drip, flood, or speak no HTTP; URLs that are none; keys that are not set."""
    for name in dice.sample(list(RAW), 6) if scale == 1 else RAW:
        for listed in (True,) if scale < 3 else (True, False):
            speak = _models_then(RAW[name]) if listed else _always(RAW[name])
            start = _patient(lambda s=speak: Raw(s).url)
            yield Case(f"{name}{'' if listed else ' from the start'}", COMMAND, start, needs=NEEDS, leaves=("new",))
    for url in dice.sample(URLS, 5) if scale == 1 else URLS:
        words = (*REGENERATE, "--out", "new", "--server", url, "--retries", "0", "--timeout", "1")
        yield Case(f"URL {url[:60]}", words, _patient(lambda: ""), needs=NEEDS, leaves=("new",))
    for name, more in (
        ("an unset key", ("--api-key-variable", "NOT_SET")), ("two names", ("--server", "{url}")),
        ("no engine", ("--engine", "remote")), ("a local engine", ("--engine", "local")), ("timeout 0", ("--timeout",
        "0")),
        ("timeout nan", ("--timeout", "nan")), ("timeout inf", ("--timeout", "inf")), ("retries -1", ("--retries",
        "-1")),
    ):  # fmt: skip
        yield Case(name, (*COMMAND, *more), _patient(lambda: Scripted(_choice()).url), needs=NEEDS, leaves=("new",))
    key = {"ODD_KEY": "schlüssel\n"}
    yield Case("an odd key", (*COMMAND, "--api-key-variable", "ODD_KEY"), _patient(lambda: Scripted(_choice()).url),
               needs=NEEDS, leaves=("new",), environment=key)  # fmt: skip
    works = _patient(lambda: Scripted(_choice()).url)
    yield Case("a good one", COMMAND, works, needs=NEEDS, expect=Expect.WORKS)


def _always(rest: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def speak(connection: socket.socket) -> None:
        connection.recv(2**16)
        rest(connection)

    return speak


def journals(dice: random.Random, scale: int) -> Iterator[Case]:
    """A journal with lines that cannot be: said, and their conversations are asked again."""
    from fuzz import damage

    again = (*REGENERATE, "--max-length", "60", "--shard-size", "8", "--out", "begun", *ASK)
    for name, do in damage.of_lines("begun/journal.jsonl", dice, 3 if scale == 1 else 12 * scale):
        start = _patient(lambda d=do: (d(), Scripted(_choice()).url)[1])
        yield Case(f"journal: {name}", again, start, needs=(*NEEDS, "begun"), expect=Expect.EITHER, leaves=("begun",))


def strays(_dice: random.Random, _scale: int) -> Iterator[Case]:
    """What is none of our business: strange files beside ours, which must change nothing."""
    from pathlib import Path

    from fuzz.file_classes import CACHED, DATA, EVALUATION, INSPECT, REPORT, RESUME

    def stray(*places: str) -> Callable[[], None]:
        def do() -> None:
            for place in places:
                Path(place).parent.mkdir(parents=True, exist_ok=True)
                Path(place).write_bytes(b"\xff")

        return do

    steps = (
        "begun-run/steps/notes.txt",
        "begun-run/steps/00000009",
        "begun-run/steps/.DS_Store",
        "begun-run/steps/x/y",
    )
    yield RESUME.case("files in steps", stray(*steps), Expect.WORKS)
    yield RESUME.case("numbers that are none", stray("begun-run/steps/²", "begun-run/steps/٣/x"), Expect.WORKS)
    yield RESUME.case("a folder with a number", stray("begun-run/steps/00000099/x"), Expect.WORKS)
    yield RESUME.case("files in the run", stray("begun-run/notes.txt", "begun-run/.metrics.jsonl.swp"), Expect.WORKS)
    yield RESUME.case("files in a checkpoint", stray(f"{BEGUN}/.DS_Store"), Expect.WORKS)
    yield INSPECT.case(
        "files in the data", stray("data/notes.txt", "data/x/y", "data/shard-x.parquet.bak"), Expect.WORKS
    )
    yield DATA.case("files in the data", stray("data/notes.txt", "data/x/y"), Expect.WORKS)
    yield CACHED.case("files in the cache", stray("features/notes.txt", "features/x.npy"), Expect.WORKS)
    evaluation = (
        "begun-evaluation/notes.txt",
        "begun-evaluation/predictions/x.json",
        "begun-evaluation/texts/greedy/x",
    )
    yield EVALUATION.case("files in the evaluation", stray(*evaluation), Expect.WORKS)
    yield REPORT.case("files in the evaluation", stray("evaluation/x.json"), Expect.WORKS)
    moved = ("train", "recipe.yaml", "data.path=elsewhere", "--out", "begun-run")
    yield Case("the same data by another path", moved, lambda: Path("data").rename("elsewhere"), Expect.WORKS)
    yield EVALUATION.case("files in the drafter", stray(f"{RUN}/README.md"), Expect.WORKS)
