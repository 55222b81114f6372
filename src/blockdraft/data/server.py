"""Sample responses from OpenAI-compatible servers: vLLM, SGLang, `transformers serve`.

Requests run as tasks of one event loop in a thread of its own, where only bytes are moved; tokenizers
are not safe to share, so they stay with the caller. Leaving the engine cancels every task, which closes
every connection at once.
"""

import asyncio
import itertools
import os
import queue
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from blockdraft.data.completions import PromptFormat, Query, Reply, UnusableError, response_ids
from blockdraft.data.conversation import Conversation, Engine, EngineError, GenerationSettings, Request
from blockdraft.data.endpoint import (
    ABOUT_THE_ROW,
    REFUSALS,
    AttemptError,
    Client,
    GarbageError,
    RefusedError,
    Server,
    base_url,
    probed,
    served_model,
)
from blockdraft.data.prompts import Prompt
from blockdraft.targets import Sampling, Target

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from anyio.from_thread import BlockingPortal

RESUME = "what is finished is kept; once this is mended, the same command resumes"
SECONDS_OF_SILENCE = 30.0
"""After this long without an answer, a line says so."""

Outcome = Reply | Exception
"""A reply, or why there is none."""


class ServerEngine(Engine):
    """Takes responses from servers that hold the target's weights, or claim to.

    Several servers share the work. One that stays out of reach hands its work to the others.
    """

    name: ClassVar[str] = "server"
    repeatable: ClassVar[bool] = False

    def __init__(
        self,
        urls: Sequence[str],
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 5,
        pause: float = 1.0,
        model: str | None = None,
        key_variable: str | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Name the servers; they are first spoken to when there is something to ask.

        Args:
            urls: the servers' addresses, as ``http://host:8000/v1``, or without ``/v1``.
            concurrency: the number of requests under way at each server.
            timeout: the seconds that one attempt may take.
            retries: the number of attempts after the first.
            pause: the seconds before the second attempt, doubled for each further one.
            model: the name by which the servers know the target, if they do not list exactly one.
            key_variable: the environment variable that holds the servers' API key.
            notify: called with a line to show while waiting; by default the line goes to stderr.
        """
        if concurrency < 1 or retries < 0 or not 0 < timeout < float("inf"):
            raise EngineError("concurrency and timeout must be positive numbers, and retries must not be negative")
        missing = [name for name in ("anyio", "httpx2", "tenacity") if find_spec(name) is None]
        if missing:
            raise EngineError(f"asking servers needs {' and '.join(missing)}: pip install 'blockdraft[server]'")
        self.concurrency = concurrency
        self.servers: list[Server] = []
        self._target: Target | None = None
        self._urls = [base_url(url) for url in urls]
        if not self._urls or len(set(self._urls)) < len(self._urls):
            raise EngineError(f"give the URL of every server once: {', '.join(self._urls) or 'there is none'}")
        self._model, self._notify = model, notify or _to_stderr
        key = _key(key_variable)
        self._client = Client(timeout=timeout, retries=retries, pause=pause, key=key, notify=self._notify)

    def prepare(self, target: Target, sampling: Sampling) -> None:
        """Speak to all servers for the first time; any that does not answer, or not as it should, is an error."""
        if target is self._target:
            return
        if self._target is not None:
            raise EngineError(
                f"these servers were asked for {self._target.name}; make another engine for {target.name}"
            )
        one_token = GenerationSettings(sampling, max_new_tokens=1, max_length=2**20)
        hello = Conversation(Prompt("probe", ("Hello.",)), target, one_token)
        if hello.request is None:
            raise EngineError(f"{target.name} cannot be asked anything: {hello.dropped}")
        self._probe = Query(hello.request, _as_text(hello.request))
        with _portal() as portal:
            connecting = portal.start_task_soon(self._connect)
            while not wait([connecting], timeout=SECONDS_OF_SILENCE).done:
                self._notify(f"waiting for a first answer of {', '.join(self._urls)} ({self._limit})")
            self.servers = connecting.result()
        self._target = target
        for server in self.servers:
            if server.form.unsent:
                warnings.warn(
                    f"{server.url} does not take {', '.join(server.form.unsent)}: its own defaults hold, which may "
                    "change what is sampled; check the data with `blockdraft data inspect`",
                    stacklevel=2,
                )

    async def _connect(self) -> list[Server]:
        async with self._client as client:
            names = {url: await served_model(client, url, self._model) for url in self._urls}
            if len(set(names.values())) > 1:
                each = ", ".join(f"{url}: {name}" for url, name in names.items())
                raise EngineError(f"the servers' models have different names ({each}); serve one model under one name")
            return [await probed(client, url, name, self._probe) for url, name in names.items()]

    def describe(self) -> dict[str, Any]:
        """Return the servers, and how each is used."""
        return {"concurrency": self.concurrency, "servers": [server.describe() for server in self.servers]}

    def run(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """Answer all conversations; closing the iterator ends the requests under way."""
        waiting = iter(conversations)
        first = next(waiting, None)
        if first is None:
            return
        self.prepare(first.target, first.settings.sampling)
        waiting = itertools.chain([first], waiting)
        most_open, num_open = 2 * self.concurrency * len(self.servers), 0
        with (
            _portal() as portal,
            portal.wrap_async_context_manager(self._client),
            _Work(portal, self._client, self.servers, self._probe, self.concurrency) as work,
        ):
            while True:
                while num_open < most_open and (fresh := next(waiting, None)) is not None:
                    if self._hand_out(fresh, work):
                        num_open += 1
                    else:
                        yield fresh
                if not num_open:
                    return
                server, conversation, outcome = self._wait_for(work, num_open)
                try:
                    self._take(server, conversation, outcome, work)
                except EngineError:
                    yield from self._finished(work)
                    raise
                if not self._hand_out(conversation, work):
                    num_open -= 1
                    yield conversation

    def _hand_out(self, conversation: Conversation, work: "_Work") -> bool:
        """Queue the next turn; return False if there is none."""
        if conversation.target is not self._target:
            raise EngineError("conversations with different targets cannot be answered by the same servers")
        if conversation.request is None:
            return False
        text = None
        if any(server.form.prompts is PromptFormat.TEXT for server in self.servers):
            text = _as_text(conversation.request)
            if text is None:
                conversation.drop("its prompt does not survive as text")
                return False
        work.put(conversation, Query(conversation.request, text))
        return True

    def _wait_for(self, work: "_Work", num_open: int) -> tuple[Server, Conversation, Outcome]:
        """Return the next outcome, and say so if it takes long."""
        for silences in itertools.count(1):
            try:
                return work.outcomes.get(timeout=SECONDS_OF_SILENCE)
            except queue.Empty:
                self._notify(
                    f"waiting for {num_open} answers of {', '.join(self._urls)}: none for "
                    f"{silences * SECONDS_OF_SILENCE:g} s ({self._limit})"
                )
        raise AssertionError("unreachable")

    @property
    def _limit(self) -> str:
        return f"an attempt may take {self._client.timeout:g} s, --timeout"

    def _finished(self, work: "_Work") -> Iterator[Conversation]:
        """Yield conversations whose last reply came, but was not looked at, before the end."""
        work.end()
        while not work.outcomes.empty():
            server, conversation, outcome = work.outcomes.get()
            if not isinstance(outcome, Exception):
                self._take(server, conversation, outcome, work)
                if conversation.done:
                    yield conversation

    def _take(self, server: Server, conversation: Conversation, outcome: Outcome, work: "_Work") -> None:
        """Answer the conversation, end it, or leave it as it is for another server."""
        assert conversation.request is not None
        try:
            if isinstance(outcome, Exception):
                raise outcome
            conversation.answer(response_ids(outcome, server.form.prompts, conversation.request))
        except UnusableError as error:
            conversation.fail(str(error))
        except RefusedError as error:
            if error.status not in ABOUT_THE_ROW:
                raise EngineError(f"{server.url} refuses requests: {error}; {RESUME}") from error
            conversation.fail(f"refused by the server: {error.reason}")
        except GarbageError as error:
            raise EngineError(f"{server.url} returns garbage: {error}; {RESUME}") from error
        except AttemptError as error:
            if len(work.given_up) == len(self.servers):
                each = "; ".join(f"{url}: {reason}" for url, reason in work.given_up.items())
                raise EngineError(f"no server is left ({each}); {RESUME}") from error


class _Work:
    """Keeps requests under way: some tasks for each server, all of which take queries from one queue.

    outcomes: what came of every request.
    given_up: the servers that stayed out of reach, and why.
    """

    def __init__(
        self, portal: "BlockingPortal", client: Client, servers: Sequence[Server], probe: Query, tasks_each: int
    ) -> None:
        self.outcomes: queue.SimpleQueue[tuple[Server, Conversation, Outcome]] = queue.SimpleQueue()
        self.given_up: dict[str, str] = {}
        self._todo: asyncio.PriorityQueue[tuple[int, int, Conversation, Query]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._portal, self._client, self._probe = portal, client, probe
        self._tasks: list[Future[None]] = [
            portal.start_task_soon(self._serve, server) for server in servers for _ in range(tasks_each)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def put(self, conversation: Conversation, query: Query) -> None:
        """Queue a turn, before those of conversations that are not as far."""
        item = (-len(conversation.completions), next(self._order), conversation, query)
        self._portal.call(self._todo.put_nowait, item)

    def end(self) -> None:
        """Cancel all tasks, and with them the requests under way."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, server: Server) -> None:
        while True:
            item = await self._todo.get()
            if server.url in self.given_up:
                self._todo.put_nowait(item)
                return
            conversation, query = item[2:]
            self.outcomes.put((server, conversation, await self._outcome(server, query)))

    async def _outcome(self, server: Server, query: Query) -> Outcome:
        def wanted() -> bool:
            return server.url not in self.given_up

        try:
            ask = partial(self._ask, server, query)
            return await self._client.persist(server.url, ask, refusals=REFUSALS, wanted=wanted)
        except GarbageError as error:
            return error
        except AttemptError as error:
            if wanted() and (error.status or 0) >= 500 and await self._answers(server):
                return UnusableError(f"the server failed on it: {error}")
            self.given_up.setdefault(server.url, self._reason(error))
            return error
        except Exception as error:  # raised again where the caller sees it
            return error

    async def _ask(self, server: Server, query: Query) -> Reply:
        """Send one request. A server that refuses it, and a plain question as well, is at fault itself."""
        try:
            return await server.ask(self._client, query)
        except RefusedError as error:
            if error.status in ABOUT_THE_ROW and not await self._answers(server):
                raise AttemptError(f"refuses every request: {error}", error.status) from error
            raise

    async def _answers(self, server: Server) -> bool:
        """Tell whether a server answers a plain question; then it fails on single requests only."""
        try:
            await server.ask(self._client, self._probe)
        except (AttemptError, RefusedError):
            return False
        return True

    def _reason(self, error: AttemptError) -> str:
        if error.retry_after > self._client.longest_wait:
            return f"{error}; it asks for a pause of {error.retry_after:.0f} s"
        return str(error)


def _portal() -> "AbstractContextManager[BlockingPortal]":
    """Start an event loop in a thread; if the block is left by an exception, its tasks are cancelled."""
    from anyio.from_thread import start_blocking_portal

    return start_blocking_portal()


def _as_text(request: Request) -> str | None:
    """Return the prompt as text, or None if it does not tokenise to the very prompt."""
    text = request.target.decode(request.prompt_ids, skip_special_tokens=False)
    return text if request.target.encode(text) == request.prompt_ids else None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise EngineError(f"the environment variable {variable}, which should hold the servers' API key, is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EngineError(f"the environment variable {variable} does not hold an API key: keys are plain ASCII")
    return key
