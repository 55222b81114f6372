"""A server that may not be there yet: its address, the model it serves, and how it takes requests."""

import warnings
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from blockdraft.data.completions import Ask, PromptFormat, RequestFormat, UnusableError, check_prompt, gives_ids
from blockdraft.data.engine import EngineError
from blockdraft.data.link import AttemptError, GarbageError, Link, RefusedError

ABOUT_THE_ROW = frozenset({400, 413, 422})
"""Refusals that concern one request; any other concerns them all."""


@dataclass(frozen=True)
class Server:
    """One endpoint.

    url: up to and with ``/v1``.
    model: the name it serves the target by.
    form: of the requests.
    gives_ids: whether its replies hold the sampled token ids.
    """

    url: str
    model: str
    form: RequestFormat
    gives_ids: bool

    @property
    def address(self) -> str:
        """Where requests go."""
        return self.url + self.form.path

    def describe(self) -> dict[str, Any]:
        """How it reads prompts, where token ids come from, and which fields it does not take."""
        return {
            "url": self.url,
            "model": self.model,
            "prompts": self.form.way.value,
            "token_ids": "server" if self.gives_ids else "re-tokenised",
            "generation_config": self.form.config,
            "refused_fields": sorted(self.form.refused),
            "law_left_to_server": list(self.form.unsent),
        }


def base_url(url: str) -> str:
    """A server's URL up to and with ``/v1``."""
    mistake = EngineError(f"{url!r} is not a server's URL, such as http://localhost:8000/v1")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is no port
    except ValueError as error:
        raise mistake from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise mistake
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return base if base.endswith("/v1") else base + "/v1"


def served_model(link: Link, url: str, given: str | None) -> str:
    """The name of the model, the one given or the only one listed; either way the server must be there."""
    listed: Any = None
    try:
        listed = link.attempt(url + "/models")
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
    names = [str(entry.get("id")) for entry in entries or [] if isinstance(entry, dict)]
    if len(names) != 1:
        raise EngineError(f"{url} lists {len(names)} models ({', '.join(names) or 'none'}); name the one to use")
    return names[0]


def probed(link: Link, url: str, model: str, probe: Ask) -> Server:
    """Find out, with requests for one token, how this server takes prompts, and which fields."""
    reasons = []
    for way in PromptFormat:
        form: RequestFormat | None = RequestFormat(way)
        while form is not None:
            try:
                reply = link.ask(url + form.path, form.payload(probe, model))
                check_prompt(reply, way, probe.dialogue.prompt_ids)
            except UnusableError as error:
                reasons.append(f"{way}: {error}")
                break
            except RefusedError as error:
                if error.status in (401, 403):
                    raise EngineError(f"{url} refuses requests: {error}") from error
                form = form.without(error.reason, probe) if error.status in ABOUT_THE_ROW else None
                if form is None:
                    reasons.append(f"{way}: {error}")
            except GarbageError as error:
                raise EngineError(f"{url} returns garbage: {error}") from error
            except AttemptError as error:
                raise EngineError(f"{url} does not answer a first request: {error}") from error
            else:
                return _warned(Server(url, model, form, gives_ids(reply)))
    raise EngineError(f"{url} takes prompts in no way that can be checked ({'; '.join(reasons)})")


def _warned(server: Server) -> Server:
    if server.form.unsent:
        warnings.warn(
            f"{server.url} does not take {', '.join(server.form.unsent)}: its own defaults hold, which may change "
            "what is sampled; check the data with `blockdraft data inspect`",
            stacklevel=2,
        )
    return server
