"""Ask an OpenAI-compatible server for one response, and turn its reply into token ids.

Nothing is left to a server's defaults, and nothing is believed that can be checked: a reply whose
tokens cannot be told for certain is an `UnusableError`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blockdraft.data.conversation import Request
from blockdraft.targets import Target

ESSENTIAL = frozenset({"temperature", "top_p", "max_tokens"})
"""Fields that a server must take to be used at all."""

SAMPLING_FIELDS = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields that change the distribution, and that some servers do not take by name."""

LARGEST_SEED = 2**31

Reply = dict[str, Any]
"""The JSON of a completion, with at least one choice."""


class PromptFormat(StrEnum):
    """Says how the prompt reaches the target, most exact first."""

    IDS = "token ids"
    TEXT = "text"
    CHAT = "messages"


class UnusableError(Exception):
    """A reply cannot become a completion; the message says why."""


@dataclass(frozen=True)
class Query:
    """Holds a request with everything that needs the tokenizer, which stays in one thread.

    text: the prompt as text that tokenises to the very prompt; None if it is not needed.
    """

    request: Request
    text: str | None = None


@dataclass(frozen=True)
class RequestFormat:
    """Says how one server wants to be asked.

    prompts: how prompts are written.
    refused: the fields that it does not take.
    config: whether to send transformers' generation_config, which carries top_k for servers that refuse it by name.
    """

    prompts: PromptFormat
    refused: frozenset[str] = frozenset()
    config: bool = False

    @property
    def path(self) -> str:
        """Give the endpoint, below the server's URL."""
        return "/chat/completions" if self.prompts is PromptFormat.CHAT else "/completions"

    @property
    def unsent(self) -> tuple[str, ...]:
        """Give the fields of the distribution that the server takes in no form, so that its own defaults hold."""
        return () if self.config else tuple(name for name in SAMPLING_FIELDS if name in self.refused)

    def payload(self, query: Query, model: str) -> dict[str, Any]:
        """Return the body of a request, in which no sampling field is left to the server's defaults."""
        sent = {name: value for name, value in self._fields(query.request).items() if name not in self.refused}
        fields = {"model": model} | self._prompt(query) | sent
        if self.config:
            fields["generation_config"] = json.dumps(_generation_config(query.request))
        return fields

    def without(self, reason: str, query: Query) -> "RequestFormat | None":
        """Return the format to try after a refusal: without the fields it names, or without all that it may mean."""
        sent = set(self._fields(query.request)) - self.refused - ESSENTIAL
        named = frozenset(name for name in sent if re.search(rf"\b{name}\b", reason))
        if self.config and "generation_config" in reason:
            return RequestFormat(self.prompts, self.refused)
        if named or sent:
            refused = self.refused | (named or sent)
            return RequestFormat(self.prompts, refused, self.config or "top_k" in refused - self.refused)
        return RequestFormat(self.prompts, self.refused) if self.config else None

    def _prompt(self, query: Query) -> dict[str, Any]:
        if self.prompts is PromptFormat.IDS:
            return {"prompt": query.request.prompt_ids}
        if self.prompts is PromptFormat.TEXT:
            return {"prompt": query.text}
        return {"messages": list(query.request.messages)}

    def _fields(self, request: Request) -> dict[str, Any]:
        """Return every field by which a known server changes the distribution, the end or the form of a response."""
        chat = self.prompts is PromptFormat.CHAT
        fields: dict[str, Any] = {
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "use_beam_search": False,
            "watermarking": False,  # a vLLM that watermarks does so unless told not to
            "seed": request.seed % LARGEST_SEED,
            "n": 1,
            "max_tokens": request.max_new_tokens,
            "min_tokens": 0,
            "stop": None,
            "stop_token_ids": sorted(request.eos_ids),
            "ignore_eos": False,
            "stream": False,
            "logprobs": False if chat else None,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "no_stop_trim": True,
            "return_token_ids": True,
        }
        if chat:
            return fields | {
                "add_generation_prompt": True,
                "chat_template_kwargs": {"enable_thinking": False},
                "separate_reasoning": False,
            }
        return fields | {"echo": False, "add_special_tokens": False}


def _generation_config(request: Request) -> dict[str, Any]:
    """Return a generation_config for `transformers serve`, which fills in what is missing from the model's own."""
    sampling = request.sampling
    return {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or 1.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "min_new_tokens": 0,
        "max_new_tokens": request.max_new_tokens,
        "eos_token_id": sorted(request.eos_ids),
    }


def has_choices(reply: object) -> bool:
    """Tell whether JSON is a completion at all."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    return isinstance(choices, list) and bool(choices) and isinstance(choices[0], dict)


def gives_ids(reply: Reply) -> bool:
    """Tell whether a reply holds the sampled token ids."""
    return reply["choices"][0].get("token_ids") is not None


def check_prompt(reply: Reply, prompts: PromptFormat, prompt_ids: Sequence[int]) -> None:
    """Raise unless the server read the prompt that we rendered."""
    read = reply["choices"][0].get("prompt_token_ids")
    if read is None:
        read = reply.get("prompt_token_ids")
    count = _usage(reply, "prompt_tokens")
    if read is not None:
        if read != list(prompt_ids):
            raise UnusableError("the server read other prompt tokens")
    elif count is not None:
        if count != len(prompt_ids):
            raise UnusableError("the server read another number of prompt tokens")
    elif prompts is not PromptFormat.IDS:
        raise UnusableError("the server does not say how many prompt tokens it read")


def response_ids(reply: Reply, prompts: PromptFormat, request: Request) -> list[int]:
    """Return the sampled tokens, an end token included; raise `UnusableError` if they cannot be told for certain."""
    check_prompt(reply, prompts, request.prompt_ids)
    choice, target = reply["choices"][0], request.target
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise UnusableError(f"finish reason {finish!r:.60}")
    ids = choice["token_ids"] if gives_ids(reply) else target.encode(_text(choice))
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):  # a bool is an int, too
        raise UnusableError("its token ids are not integers")
    ended = bool(ids) and ids[-1] in request.eos_ids
    whole = [*ids, _end_token(choice, target)] if finish == "stop" and not ended else ids
    count = _usage(reply, "completion_tokens")
    if not gives_ids(reply):
        _check_round_trip(_text(choice), ids, len(whole), count, target)
    _check_response(whole, request)
    if not ids and count != 1:
        raise UnusableError("empty response")
    return whole


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a choice, of whichever endpoint."""
    text, message = choice.get("text"), choice.get("message")
    if isinstance(message, dict):
        if message.get("reasoning_content") or message.get("reasoning") or message.get("tool_calls"):
            raise UnusableError("the server took the text apart")
        text = message.get("content")
    if not isinstance(text, str | None):
        raise UnusableError("its text is not text")
    return text or ""


def _end_token(choice: dict[str, Any], target: Target) -> int:
    """Return the end token that a server left out: the one it names, or the only one there is.

    vLLM names none (``stop_reason`` is there, and null) where the tokenizer's own ended the text.
    """
    named = choice.get("stop_reason")
    if named is None:
        named = choice.get("matched_stop")
    if named is not None:
        if type(named) is int and named in target.eos_ids:
            return named
        raise UnusableError(f"stopped at {named!r:.60}, which is no end token")
    if len(target.eos_ids) == 1:
        return next(iter(target.eos_ids))
    usual = None if target.tokenizer is None else target.tokenizer.eos_token_id
    if "stop_reason" in choice and isinstance(usual, int) and usual in target.eos_ids:
        return usual
    raise UnusableError("stopped at an end token that cannot be told")


def _check_round_trip(text: str, ids: Sequence[int], length: int, count: int | None, target: Target) -> None:
    """Raise if text stands for other tokens than were sampled: its spelling shows it or, mostly, its length."""
    if target.decode(ids, skip_special_tokens=False) != text:
        raise UnusableError("its text does not survive tokenisation")
    if count is None:
        raise UnusableError("neither token ids nor their number came with its text")
    if count != length:
        raise UnusableError("its text has another number of tokens than were sampled")


def _check_response(ids: Sequence[int], request: Request) -> None:
    if not ids:
        raise UnusableError("empty response")
    if len(ids) > request.max_new_tokens:
        raise UnusableError("longer than its budget")
    if not all(0 <= token < request.target.vocab_size for token in ids):
        raise UnusableError("token ids outside the vocabulary")
    if any(token in request.eos_ids for token in ids[:-1]):
        raise UnusableError("goes on after an end token")


def _usage(reply: Reply, name: str) -> int | None:
    usage = reply.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else None
