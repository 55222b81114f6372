"""Speak to one server: its address, the model it serves, how it wants to be asked, JSON over HTTP with retries."""

import asyncio
import datetime
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from blockdraft.data.completions import (
    PromptFormat,
    Query,
    Reply,
    RequestFormat,
    UnusableError,
    check_prompt,
    gives_ids,
    has_choices,
)
from blockdraft.data.conversation import EngineError

if TYPE_CHECKING:
    import ssl

    import tenacity

CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 60.0
"""Seconds between two attempts, unless the server asks for more."""

LARGEST_REPLY = 2**26
"""Bytes; no completion is as long."""

SECONDS_BETWEEN_NOTICES = 10.0

PASSING = frozenset({408, 425, 429})
"""Statuses that another attempt may change, besides 5xx."""

ABOUT_THE_ROW = frozenset({400, 413, 422})
"""Refusals that concern one request; any other concerns them all."""

REFUSALS = 2
"""How often a request is repeated after such a refusal."""


class AttemptError(Exception):
    """An attempt failed, and another one may succeed. `status` is the server's answer, or None without one."""

    def __init__(self, reason: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.retry_after = status, retry_after


class GarbageError(AttemptError):
    """The server sent something other than a completion."""


class RefusedError(Exception):
    """The server refused a request, and is likely to refuse it again."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason = status, reason


class Client:
    """Sends requests from the tasks of one event loop; cancelling a task ends its request at once.

    timeout: the seconds that one attempt may take, from connecting to the last byte.
    retries: the number of attempts after the first.
    pause: the seconds before the second attempt, doubled for each further one.
    key: the servers' API key.
    notify: called with a line to show when an attempt has failed and a pause begins.
    """

    def __init__(
        self, *, timeout: float, retries: int, pause: float, key: str | None, notify: Callable[[str], None]
    ) -> None:
        self.timeout, self.retries, self.pause, self.notify = timeout, retries, pause, notify
        self._headers = {"Accept": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._noticed: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        import httpx2

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        times = httpx2.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS), pool=None)
        self._http = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=times, verify=_certificates())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def attempt(self, url: str, payload: dict[str, Any] | None = None) -> Any:
        """Return the JSON that one request is answered with: a POST if there is a payload, else a GET.

        Raises:
            AttemptError: there was no answer, or one that another attempt may change.
            RefusedError: there was any other answer than 2xx.
        """
        import httpx2

        try:
            async with asyncio.timeout(self.timeout):
                status, retry_after, body = await self._exchange(url, payload)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise AttemptError(f"no answer in {self.timeout:g} seconds") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise AttemptError(_cause(error)) from error
        if status in PASSING or status >= 500:
            raise AttemptError(f"{status}: {_reason(body)}", status, retry_after)
        if not 200 <= status < 300:
            raise RefusedError(status, _reason(body))
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise GarbageError(f"not JSON: {_excerpt(body)}") from error

    async def completion(self, url: str, payload: dict[str, Any]) -> Reply:
        """Return the completion that one request is answered with."""
        answer = await self.attempt(url, payload)
        if not has_choices(answer):
            raise GarbageError(f"JSON without choices: {_excerpt(json.dumps(answer).encode())}")
        return dict(answer)

    async def persist(
        self,
        url: str,
        ask: Callable[[], Awaitable[Reply]],
        *,
        refusals: int = 0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Reply:
        """Repeat ``ask`` with growing pauses until it succeeds or the attempts are used up.

        Args:
            url: the server, for notices.
            ask: one attempt.
            refusals: how often to repeat a request that the server refused.
            wanted: tells whether another attempt is still of use.
        """
        import tenacity

        backoff = tenacity.wait_exponential(multiplier=self.pause, max=LONGEST_PAUSE)
        backoff_with_jitter = backoff + tenacity.wait_random(0, self.pause)

        def is_passing(error: BaseException) -> bool:
            if isinstance(error, RefusedError):
                return error.status in ABOUT_THE_ROW and wanted()
            return isinstance(error, AttemptError) and error.retry_after <= self.longest_wait and wanted()

        def is_enough(state: "tenacity.RetryCallState") -> bool:
            allowed = min(refusals, self.retries) if isinstance(_error(state), RefusedError) else self.retries
            return state.attempt_number > allowed

        def seconds(state: "tenacity.RetryCallState") -> float:
            return max(backoff_with_jitter(state), getattr(_error(state), "retry_after", 0.0))

        def announce(state: "tenacity.RetryCallState") -> None:
            self._announce(url, f"{url}: {_error(state)}; asking again in {state.upcoming_sleep:.0f} s")

        retrying = tenacity.AsyncRetrying(
            sleep=self._sleep, stop=is_enough, wait=seconds, retry=tenacity.retry_if_exception(is_passing),
            before_sleep=announce, reraise=True,
        )  # fmt: skip

        async def attempt() -> Reply:  # tenacity looks at the function to know whether it must be awaited
            return await ask()

        reply: Reply = await retrying(attempt)
        return reply

    @property
    def longest_wait(self) -> float:
        """Give the longest pause, in seconds, that is granted to a server that asks for one."""
        return max(self.timeout, LONGEST_PAUSE)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _announce(self, url: str, line: str) -> None:
        """Show a line, unless one about the same server was shown a moment ago."""
        now = time.monotonic()
        if now - self._noticed.get(url, -SECONDS_BETWEEN_NOTICES) >= SECONDS_BETWEEN_NOTICES:
            self._noticed[url] = now
            self.notify(line)

    async def _exchange(self, url: str, payload: dict[str, Any] | None) -> tuple[int, float, bytes]:
        body = bytearray()
        async with self._http.stream("GET" if payload is None else "POST", url, json=payload) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LARGEST_REPLY:
                    raise GarbageError(f"an answer of more than {LARGEST_REPLY} bytes: {_excerpt(bytes(body[:200]))}")
            return response.status_code, _seconds(response.headers.get("Retry-After")), bytes(body)


@dataclass(frozen=True)
class Server:
    """Describes a server that takes our requests.

    url: its address up to and with ``/v1``.
    model: the name by which it serves the target.
    form: how it wants to be asked.
    gives_ids: whether its replies hold the sampled token ids.
    """

    url: str
    model: str
    form: RequestFormat
    gives_ids: bool

    async def ask(self, client: Client, query: Query) -> Reply:
        """Send one request for a completion."""
        return await client.completion(self.url + self.form.path, self.form.payload(query, self.model))

    def describe(self) -> dict[str, Any]:
        """Return how it reads prompts, where token ids come from, and which fields it does not take."""
        return {
            "url": self.url,
            "model": self.model,
            "prompts": self.form.prompts.value,
            "token_ids": "server" if self.gives_ids else "re-tokenised",
            "generation_config": self.form.config,
            "refused_fields": sorted(self.form.refused),
            "sampling_left_to_server": list(self.form.unsent),
        }


def base_url(url: str) -> str:
    """Return a server's URL up to and with ``/v1``."""
    mistake = EngineError(f"{url!r} is not a server's URL; one looks like http://localhost:8000/v1")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is no port
    except ValueError as error:
        raise mistake from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise mistake
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return base if base.endswith("/v1") else base + "/v1"


async def served_model(client: Client, url: str, given: str | None) -> str:
    """Return the name of the model: the one given or the only one listed. Either way the server must be there."""
    listed: Any = None
    try:
        listed = await client.attempt(url + "/models")
    except RefusedError as error:
        if given is None or error.status in (401, 403):
            raise EngineError(f"{url} refuses to list its models: {error}") from error
    except GarbageError as error:
        if given is None:
            raise EngineError(f"{url} returns garbage instead of a list of models: {error}") from error
    except AttemptError as error:
        if given is None or error.status is None:
            raise EngineError(f"{url} cannot be reached: {error}; is the server up, and the URL right?") from error
    if given is not None:
        return given
    entries = listed.get("data") if isinstance(listed, dict) else None
    entries = entries if isinstance(entries, list) else []
    names = [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]
    if len(names) != 1:
        raise EngineError(
            f"{url} lists {len(names)} models ({', '.join(names) or 'none'}); name the one to use: --model"
        )
    return names[0]


async def probed(client: Client, url: str, model: str, probe: Query) -> Server:
    """Find out, with requests for one token, how this server takes prompts, and which fields."""
    reasons = []
    for prompts in PromptFormat:
        if prompts is PromptFormat.TEXT and probe.text is None:
            continue
        form: RequestFormat | None = RequestFormat(prompts)
        while form is not None:
            server = Server(url, model, form, gives_ids=False)
            try:
                reply = await client.persist(url, partial(server.ask, client, probe))
                check_prompt(reply, prompts, probe.request.prompt_ids)
            except UnusableError as error:
                reasons.append(f"{prompts}: {error}")
                break
            except RefusedError as error:
                if error.status in (401, 403):
                    raise EngineError(f"{url} refuses requests: {error}") from error
                form = form.without(error.reason, probe) if error.status in ABOUT_THE_ROW else None
                if form is None:
                    reasons.append(f"{prompts}: {error}")
            except GarbageError as error:
                raise EngineError(f"{url} returns garbage: {error}") from error
            except AttemptError as error:
                raise EngineError(f"{url} does not answer a first request: {error}") from error
            else:
                return Server(url, model, form, gives_ids(reply))
    raise EngineError(f"{url} takes prompts in no way that can be checked ({'; '.join(reasons)})")


@cache
def _certificates() -> "ssl.SSLContext":
    """Return the certificates that https servers are checked against; they take a moment to load."""
    import httpx2

    return httpx2.create_ssl_context()


def _error(state: "tenacity.RetryCallState") -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def _cause(error: BaseException) -> str:
    """Return what went wrong at the bottom of a chain of exceptions, in the system's own words where it has any."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    if isinstance(error, OSError) and error.errno is not None:
        return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return str(error) or type(error).__name__


def _reason(body: bytes) -> str:
    """Return the first line of what a server says about an error, in any of the usual envelopes."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    text = said if isinstance(said, str) else json.dumps(said)
    return (text.strip().splitlines() or ["no reason given"])[0][:1000]


def _excerpt(body: bytes) -> str:
    """Return the first 100 characters, quoted."""
    return repr(body.decode(errors="replace")[:100])


def _seconds(retry_after: str | None) -> float:
    """Return the pause that a server asks for, in seconds or until a date; 0 if it cannot be read."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
        return max(0.0, (date - datetime.datetime.now(date.tzinfo)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
