"""Responses from OpenAI-compatible servers: vLLM, SGLang, `transformers serve`."""

import itertools
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from blockdraft.data.completions import Ask, PromptFormat, UnusableError, response_ids
from blockdraft.data.dialogue import Conversation, GenerationSettings
from blockdraft.data.endpoint import ABOUT_THE_ROW, Server, base_url, probed, served_model
from blockdraft.data.engine import Engine, EngineError
from blockdraft.data.link import AttemptError, ClosedError, GarbageError, Link, RefusedError
from blockdraft.data.prompts import Prompt
from blockdraft.targets import Target

RESUME = "what is finished is kept, and the same command goes on once this is mended"


class ServerEngine(Engine):
    """Responses from servers that hold the target's weights, or are said to.

    Several servers share the work. One that stays out of reach hands its work to the others.

    Args:
        urls: of the servers: ``http://host:8000/v1``, or without ``/v1``.
        target: whose tokenizer and end tokens are used; its weights are not.
        settings: what to sample.
        concurrency: requests under way at each server.
        timeout: seconds that one attempt may take.
        retries: attempts after the first.
        pause: seconds before the second attempt, doubled for each further one.
        model: the name that the servers give it, if they do not list exactly one.
        key_variable: the environment variable that holds the servers' API key.
    """

    name: ClassVar[str] = "server"
    by_shard: ClassVar[bool] = False

    def __init__(
        self,
        urls: Sequence[str],
        target: Target,
        settings: GenerationSettings,
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 5,
        pause: float = 1.0,
        model: str | None = None,
        key_variable: str | None = None,
    ) -> None:
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise EngineError("concurrency and timeout must be positive and retries must not be negative")
        self.target, self.settings, self.concurrency = target, settings, concurrency
        self._timeout, self._retries, self._pause, self._key = timeout, retries, pause, _key(key_variable)
        bases = [base_url(url) for url in urls]
        if not bases or len(set(bases)) < len(bases):
            raise EngineError(f"give the URL of every server once: {', '.join(bases) or 'there is none'}")
        link = self._link()
        names = {base: served_model(link, base, model) for base in bases}
        if len(set(names.values())) > 1:
            each = ", ".join(f"{base}: {name}" for base, name in names.items())
            raise EngineError(f"the servers serve models of different names ({each}); serve one model under one name")
        one_token = GenerationSettings(settings.sampling, max_new_tokens=1, max_length=2**20, seed=settings.seed)
        self._probe = self._ask(Conversation(Prompt("probe", ("Hello.",)), 0, target, one_token), as_text=True)
        self.servers = [probed(link, base, name, self._probe) for base, name in names.items()]

    def describe(self) -> dict[str, Any]:
        """The servers, and how each is used."""
        return {"concurrency": self.concurrency, "servers": [server.describe() for server in self.servers]}

    def run(self, dialogues: Sequence[Conversation]) -> Iterator[Conversation]:
        """Answer all of them; closing the iterator ends the requests under way."""
        as_text = any(server.form.way is PromptFormat.TEXT for server in self.servers)
        work = _Work(self._link(), self._probe)
        num_open = 0
        try:
            work.start(self.servers, min(self.concurrency, len(dialogues)))
            for dialogue in dialogues:
                if dialogue.done or not work.hand_out(self._ask(dialogue, as_text=as_text)):
                    yield dialogue
                else:
                    num_open += 1
            while num_open:
                server, dialogue, outcome = work.outcomes.get()
                try:
                    self._take(server, dialogue, outcome, work.given_up)
                except EngineError:
                    yield from self._finished(work)
                    raise
                if dialogue.done or not work.hand_out(self._ask(dialogue, as_text=as_text)):
                    num_open -= 1
                    yield dialogue
        finally:
            work.end()

    def _finished(self, work: "_Work") -> Iterator[Conversation]:
        """Dialogues whose last reply has come, but was not looked at before the end."""
        work.end()
        while not work.outcomes.empty():
            server, dialogue, outcome = work.outcomes.get()
            if not isinstance(outcome, Exception):
                self._take(server, dialogue, outcome, work.given_up)
                if dialogue.done:
                    yield dialogue

    def _take(self, server: Server, dialogue: Conversation, outcome: "Outcome", given_up: dict[str, str]) -> None:
        """Answer or drop the dialogue, or leave it as it is for another server."""
        try:
            if isinstance(outcome, Exception):
                raise outcome
            dialogue.answer(response_ids(outcome, server.form.way, dialogue))
        except UnusableError as error:
            dialogue.drop(str(error))
        except RefusedError as error:
            if error.status not in ABOUT_THE_ROW:
                raise EngineError(f"{server.url} refuses requests: {error}; {RESUME}") from error
            dialogue.drop(f"refused by the server: {error.reason}")
        except GarbageError as error:
            raise EngineError(f"{server.url} returns garbage: {error}; {RESUME}") from error
        except AttemptError as error:
            if len(given_up) == len(self.servers):
                each = "; ".join(f"{url}: {reason}" for url, reason in given_up.items())
                raise EngineError(f"no server is left ({each}); {RESUME}") from error

    def _ask(self, dialogue: Conversation, *, as_text: bool) -> Ask:
        if not as_text:
            return Ask(dialogue)
        text = self.target.decode(dialogue.prompt_ids, skip_special_tokens=False)
        if self.target.encode(text) != dialogue.prompt_ids:
            dialogue.drop("its prompt does not survive as text")
        return Ask(dialogue, text)

    def _link(self) -> Link:
        return Link(timeout=self._timeout, retries=self._retries, pause=self._pause, key=self._key)


Outcome = dict[str, Any] | Exception
"""A reply, or why there is none."""


class _Work:
    """Threads that send requests and nothing else: a tokenizer is not safe to share, so it stays with the caller.

    outcomes: of every request.
    given_up: the servers that stayed out of reach, and why.
    """

    def __init__(self, link: Link, probe: Ask) -> None:
        self.outcomes: queue.SimpleQueue[tuple[Server, Conversation, Outcome]] = queue.SimpleQueue()
        self.given_up: dict[str, str] = {}
        self._todo: queue.PriorityQueue[tuple[int, int, Ask | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._link, self._probe, self._num_threads = link, probe, 0

    def start(self, servers: Sequence[Server], threads_each: int) -> None:
        for server, _ in itertools.product(servers, range(threads_each)):
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
            self._num_threads += 1

    def hand_out(self, ask: Ask) -> bool:
        """Queue a turn, before those of conversations that are not as far. False if there is none to queue."""
        if not ask.dialogue.done:
            self._todo.put((-len(ask.dialogue.rows), next(self._order), ask))
        return not ask.dialogue.done

    def end(self) -> None:
        """Cut short what is under way, and let every thread go."""
        self._link.close()
        for _ in range(self._num_threads):
            self._todo.put((-sys.maxsize, next(self._order), None))

    def _serve(self, server: Server) -> None:
        while True:
            item = self._todo.get()
            ask = item[-1]
            if ask is None or self._link.closed:
                return
            if server.url in self.given_up:
                self._todo.put(item)
                return
            try:
                outcome = self._outcome(server, ask)
            except ClosedError:
                return
            self.outcomes.put((server, ask.dialogue, outcome))

    def _outcome(self, server: Server, ask: Ask) -> Outcome:
        def given_up() -> bool:
            return server.url in self.given_up

        try:
            return self._link.ask(server.address, server.form.payload(ask, server.model), given_up)
        except ClosedError:
            raise
        except GarbageError as error:
            return error
        except AttemptError as error:
            if not given_up() and self._fails_on_this_row(server, error):
                return UnusableError(f"the server failed on it: {error}")
            self.given_up.setdefault(server.url, str(error))
            return error
        except Exception as error:  # raised again where the caller sees it
            return error

    def _fails_on_this_row(self, server: Server, error: AttemptError) -> bool:
        """A server that cannot answer one request, but another, is not out of reach."""
        if error.status is None or error.status < 500:
            return False
        try:
            self._link.attempt(server.address, server.form.payload(self._probe, server.model))
        except (AttemptError, RefusedError):
            return False
        return True


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise EngineError(f"the environment variable {variable}, which should hold the servers' API key, is not set")
    return key
