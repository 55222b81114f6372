"""What is sent to an OpenAI-compatible server for one response, and how its reply becomes token ids."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blockdraft.data.dialogue import Conversation
from blockdraft.targets import Target

ESSENTIAL = frozenset({"temperature", "top_p", "max_tokens"})
"""Fields without which nothing is asked."""

LAW = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields that change the law, and that some servers do not take by name."""

LARGEST_SEED = 2**31


class PromptFormat(StrEnum):
    """How the prompt reaches the target, most exact first."""

    IDS = "token ids"
    TEXT = "text"
    CHAT = "messages"


class UnusableError(Exception):
    """A reply that cannot become a row, with the reason."""


@dataclass(frozen=True)
class Ask:
    """A dialogue's next turn, as far as it needs the tokenizer: that stays in one thread.

    text: the prompt as text, which tokenises to the very prompt; None if it does not, or is not needed.
    """

    dialogue: Conversation
    text: str | None = None


@dataclass(frozen=True)
class RequestFormat:
    """How one server is spoken to.

    way: of the prompt.
    refused: fields that it does not take.
    config: send transformers' generation_config, which carries top_k for servers that refuse it by name.
    """

    way: PromptFormat
    refused: frozenset[str] = frozenset()
    config: bool = False

    @property
    def path(self) -> str:
        return "/chat/completions" if self.way is PromptFormat.CHAT else "/completions"

    @property
    def unsent(self) -> tuple[str, ...]:
        """Fields of the law that the server takes in no form, so that its own defaults hold."""
        return () if self.config else tuple(name for name in LAW if name in self.refused)

    def payload(self, ask: Ask, model: str) -> dict[str, Any]:
        """The whole request: no sampling field is left to the server's defaults."""
        fields: dict[str, Any] = {"model": model} | _prompt(self.way, ask)
        fields |= {name: value for name, value in _sampling(self.way, ask).items() if name not in self.refused}
        if self.config:
            fields["generation_config"] = json.dumps(_generation_config(ask))
        return fields

    def without(self, reason: str, ask: Ask) -> "RequestFormat | None":
        """The form to try after a refusal: less the fields it names, or less all that it may mean."""
        sent = set(_sampling(self.way, ask)) - self.refused - ESSENTIAL
        named = frozenset(name for name in sent if re.search(rf"\b{name}\b", reason))
        if self.config and "generation_config" in reason:
            return RequestFormat(self.way, self.refused)
        if named or sent:
            refused = self.refused | (named or sent)
            return RequestFormat(self.way, refused, self.config or "top_k" in refused - self.refused)
        return RequestFormat(self.way, self.refused) if self.config else None


def _prompt(way: PromptFormat, ask: Ask) -> dict[str, Any]:
    if way is PromptFormat.IDS:
        return {"prompt": ask.dialogue.prompt_ids}
    if way is PromptFormat.TEXT:
        return {"prompt": ask.text}
    return {"messages": ask.dialogue.messages}


def _sampling(way: PromptFormat, ask: Ask) -> dict[str, Any]:
    """Every field by which one of the known servers changes the law, the end or the form of a response."""
    dialogue, law = ask.dialogue, ask.dialogue.settings.sampling
    fields: dict[str, Any] = {
        "temperature": law.temperature,
        "top_p": law.top_p,
        "top_k": law.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "use_beam_search": False,
        "watermarking": False,  # a vLLM that watermarks does so unless told not to
        "seed": dialogue.seed % LARGEST_SEED,
        "n": 1,
        "max_tokens": dialogue.budget,
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": sorted(dialogue.target.eos_ids),
        "ignore_eos": False,
        "stream": False,
        "logprobs": False if way is PromptFormat.CHAT else None,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "no_stop_trim": True,
        "return_token_ids": True,
    }
    if way is PromptFormat.CHAT:
        return fields | {
            "add_generation_prompt": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "separate_reasoning": False,
        }
    return fields | {"echo": False, "add_special_tokens": False}


def _generation_config(ask: Ask) -> dict[str, Any]:
    """For `transformers serve`: what is missing here is filled in from the model's own defaults."""
    law = ask.dialogue.settings.sampling
    return {
        "do_sample": law.temperature > 0,
        "temperature": law.temperature or 1.0,
        "top_k": law.top_k,
        "top_p": law.top_p,
        "min_p": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "min_new_tokens": 0,
        "max_new_tokens": ask.dialogue.budget,
        "eos_token_id": sorted(ask.dialogue.target.eos_ids),
    }


def check_prompt(reply: dict[str, Any], way: PromptFormat, prompt_ids: Sequence[int]) -> None:
    """The server must have read the prompt that we rendered."""
    read = reply["choices"][0].get("prompt_token_ids") or reply.get("prompt_token_ids")
    count = _usage(reply, "prompt_tokens")
    if read is not None:
        if list(read) != list(prompt_ids):
            raise UnusableError("the server read other prompt tokens")
    elif count is not None:
        if count != len(prompt_ids):
            raise UnusableError("the server read another number of prompt tokens")
    elif way is not PromptFormat.IDS:
        raise UnusableError("the server does not say how many prompt tokens it read")


def gives_ids(reply: dict[str, Any]) -> bool:
    """Whether the sampled token ids are in the reply."""
    return reply["choices"][0].get("token_ids") is not None


def response_ids(reply: dict[str, Any], way: PromptFormat, dialogue: Conversation) -> list[int]:
    """The sampled tokens, an end token included. UnusableError if they cannot be told for certain."""
    check_prompt(reply, way, dialogue.prompt_ids)
    choice, target = reply["choices"][0], dialogue.target
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise UnusableError(f"finish reason {finish!r}")
    ids = choice.get("token_ids") if gives_ids(reply) else target.encode(_text(choice))
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise UnusableError("its token ids are not integers")
    ended = bool(ids) and ids[-1] in target.eos_ids
    whole = [*ids, _end_token(choice, target)] if finish == "stop" and not ended else ids
    if not gives_ids(reply):
        _check_round_trip(choice, ids, whole, _usage(reply, "completion_tokens"), target)
    _check_response(whole, dialogue)
    if whole != ids and not ids and _usage(reply, "completion_tokens") != 1:
        raise UnusableError("empty response")
    return whole


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    if isinstance(message, dict):
        if message.get("reasoning_content") or message.get("reasoning") or message.get("tool_calls"):
            raise UnusableError("the server took the text apart")
        return str(message.get("content") or "")
    return str(choice.get("text") or "")


def _end_token(choice: dict[str, Any], target: Target) -> int:
    """The end token that a server left out: the one it names, or the only one there is.

    vLLM names none (``stop_reason`` is there, and null) where the tokenizer's own ended the text.
    """
    named = choice.get("stop_reason")
    if named is None:
        named = choice.get("matched_stop")
    if named is not None:
        if isinstance(named, int) and named in target.eos_ids:
            return named
        raise UnusableError(f"stopped at {named!r}, which is no end token")
    if len(target.eos_ids) == 1:
        return next(iter(target.eos_ids))
    usual = None if target.tokenizer is None else target.tokenizer.eos_token_id
    if "stop_reason" in choice and isinstance(usual, int) and usual in target.eos_ids:
        return usual
    raise UnusableError("stopped at an end token that cannot be told")


def _check_round_trip(
    choice: dict[str, Any], ids: Sequence[int], whole: Collection[int], count: int | None, target: Target
) -> None:
    """Text that stands for other tokens than were sampled shows in its spelling or, mostly, in its length."""
    if target.decode(ids, skip_special_tokens=False) != _text(choice):
        raise UnusableError("its text does not survive tokenisation")
    if count is None:
        raise UnusableError("neither token ids nor their number came with its text")
    if count != len(whole):
        raise UnusableError("its text has another number of tokens than were sampled")


def _check_response(ids: Sequence[int], dialogue: Conversation) -> None:
    target = dialogue.target
    if not ids:
        raise UnusableError("empty response")
    if len(ids) > dialogue.budget:
        raise UnusableError("longer than its budget")
    if not all(0 <= token < target.vocab_size for token in ids):
        raise UnusableError("token ids outside the vocabulary")
    if any(token in target.eos_ids for token in ids[:-1]):
        raise UnusableError("goes on after an end token")


def _usage(reply: dict[str, Any], name: str) -> int | None:
    usage = reply.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None
