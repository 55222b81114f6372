"""JSON over HTTP: attempts, back-off, and a way for another thread to cut all of them short."""

import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 60.0
"""Seconds between two attempts, unless the server asks for more."""

AGAIN = frozenset({408, 425, 429})
"""Statuses that another attempt may change, besides 5xx."""


class AttemptError(Exception):
    """An attempt that another one may repair. `status` is the server's answer, or None without one."""

    def __init__(self, reason: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.retry_after = status, retry_after


class GarbageError(AttemptError):
    """An answer that is not what was asked for."""


class RefusedError(Exception):
    """An answer that another attempt would not change."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason = status, reason


class ClosedError(Exception):
    """The link was closed while something was under way."""


class Link:
    """Requests of many threads, which `close` ends at once.

    timeout: seconds that one attempt may take.
    retries: attempts after the first.
    pause: seconds before the second attempt; doubled for each further one, and spread at random by half.
    """

    def __init__(self, *, timeout: float, retries: int, pause: float, key: str | None = None) -> None:
        self.timeout, self.retries, self.pause = timeout, retries, pause
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    @property
    def closed(self) -> bool:
        """True once nothing may be sent any more."""
        return self._closed.is_set()

    def close(self) -> None:
        """End every request under way; the servers see their clients leave."""
        with self._lock:
            self._closed.set()
            for sock in self._open:
                _hang_up(sock)

    def attempt(self, url: str, payload: dict[str, Any] | None = None) -> Any:
        """The JSON that one request is answered with: POST if there is a payload, else GET.

        Raises:
            AttemptError: no answer, or one that a further attempt may change.
            RefusedError: any other answer than 2xx.
        """
        try:
            status, retry_after, body = self._exchange(url, payload)
        except TimeoutError as error:
            raise AttemptError(f"no answer in {self.timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            raise AttemptError(str(error) or type(error).__name__) from error
        if status in AGAIN or status >= 500:
            raise AttemptError(f"{status}: {reason_of(body)}", status, retry_after)
        if not 200 <= status < 300:
            raise RefusedError(status, reason_of(body))
        try:
            return json.loads(body)
        except ValueError as error:
            raise GarbageError(f"not JSON: {excerpt(body)}") from error

    def ask(self, url: str, payload: dict[str, Any], give_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """A completion: `attempt` until an answer has choices, the attempts are used up, or `give_up` says so."""
        for number in range(self.retries + 1):
            try:
                return _with_choices(self.attempt(url, payload))
            except AttemptError as error:
                if self.closed:
                    raise ClosedError from error
                if number == self.retries or give_up():
                    raise
                pause = min(self.pause * 2**number, LONGEST_PAUSE) * random.uniform(0.5, 1.5)
                self._rest(max(pause, error.retry_after))
        raise AssertionError("unreachable")

    def _rest(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise ClosedError

    def _exchange(self, url: str, payload: dict[str, Any] | None) -> tuple[int, float, bytes]:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(self.timeout, CONNECT_SECONDS))
        connection.connect()
        sock = connection.sock
        try:
            self._register(sock)
            sock.settimeout(self.timeout)
            body = None if payload is None else json.dumps(payload).encode()
            connection.request("GET" if body is None else "POST", parts.path, body, self._headers)
            response = connection.getresponse()
            return response.status, _seconds(response.headers.get("Retry-After")), response.read()
        finally:
            with self._lock:
                self._open.discard(sock)
            connection.close()

    def _register(self, sock: socket.socket) -> None:
        with self._lock:
            if self.closed:
                raise ClosedError
            self._open.add(sock)


def reason_of(body: bytes) -> str:
    """The first line of what a server says of an error, in any of the usual envelopes."""
    try:
        said = json.loads(body)
    except ValueError:
        said = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    text = said if isinstance(said, str) else json.dumps(said)
    return (text.strip().splitlines() or ["no reason given"])[0][:1000]


def excerpt(body: bytes | str) -> str:
    """The first 100 characters, quoted."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    return repr(text[:100])


def _with_choices(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return dict(answer)
    raise GarbageError(f"JSON without choices: {excerpt(json.dumps(answer))}")


def _seconds(retry_after: str | None) -> float:
    """Only the form in seconds; a date is left to the usual pauses."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else 0.0


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server was faster
        # of the bare socket: TLS would first want to say goodbye, in a thread that is reading
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
