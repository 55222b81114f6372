"""Check what `generate` is asked for before any model runs: the prompt, the sampling, the room in the context."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import cast

import jinja2
from torch import Tensor

from blockdraft.decoding.proposals import AdaptiveProposals
from blockdraft.drafters import Drafter
from blockdraft.errors import BlockdraftError
from blockdraft.targets import Message, Sampling, Target
from blockdraft.verification import RULES, Rule

PromptLike = str | Sequence[Message] | Sequence[int] | Tensor
"""A user's message (or raw text), the messages of a conversation, or token ids ``[T]``."""

SMALLEST_TEMPERATURE = 1e-6
"""Logits divided by less may overflow; the text is the greedy one long before."""


class DecodingError(BlockdraftError):
    """`generate` cannot do what it was asked; the message says why, and how to ask."""


def prompt_ids(target: Target, prompt: PromptLike, *, raw: bool = False) -> list[int]:
    """Return the token ids of a prompt: text becomes one user message under the chat template unless it is ``raw``."""
    if isinstance(prompt, Tensor):
        prompt = cast(list[int], prompt.tolist())
    if len(prompt) == 0:
        raise DecodingError("the prompt is empty; give a text, messages or token ids")
    if raw:
        if not isinstance(prompt, str):
            raise DecodingError("only a text can be raw; leave raw out for messages and token ids")
        _refuse_undecodable(prompt)
        ids = target.encode(prompt)
        if not ids:
            raise DecodingError("the prompt has no tokens; a raw text is encoded as it stands, without a template")
        return ids
    if isinstance(prompt, str):
        return _render(target, [{"role": "user", "content": prompt}])
    if all(isinstance(item, dict) for item in prompt):
        return _render(target, cast(Sequence[Message], prompt))
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
        ids = [int(item) for item in cast(Sequence[int], prompt)]
        outside = next((token for token in ids if not 0 <= token < target.vocab_size), None)
        if outside is not None:
            raise DecodingError(
                f"token id {outside} is not one of the {target.vocab_size:,} of {target.name}; "
                "was the prompt encoded with another tokenizer?"
            )
        return ids
    raise DecodingError("a prompt is a text, a list of messages or a list of token ids, and never a mixture of them")


def sampling_for(rule: Rule, temperature: float | None, top_k: int, top_p: float) -> Sampling:
    """Return what is sampled from the target; a rule and a temperature that contradict each other are refused.

    The temperature is 1 if not given, and 0 for the rule ``"greedy"``, which has no other.
    """
    if rule not in RULES:
        raise DecodingError(f"unknown verification rule {rule!r}; known: {', '.join(RULES)}")
    if temperature is None:
        temperature = 0.0 if rule == "greedy" else 1.0
    check_temperature("temperature", temperature)
    if rule == "greedy" and temperature != 0:
        raise DecodingError(
            f"greedy verification always takes the target's most probable token, so the temperature {temperature:g} "
            "would have no effect; leave the temperature out, or choose the rule token or block to sample"
        )
    if rule != "greedy" and temperature == 0:
        raise DecodingError(
            f"at temperature 0 there is nothing to sample for the rule {rule}; choose the rule greedy, "
            "or a temperature above 0"
        )
    try:
        return Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise DecodingError(str(error)) from error


def check_temperature(name: str, value: float) -> None:
    """Refuse a temperature that is not a number, infinite, negative, or too close to 0 to divide by."""
    if not math.isfinite(value) or value < 0:
        raise DecodingError(f"{name} must be a finite number and not negative; it is {value:g}")
    if 0 < value < SMALLEST_TEMPERATURE:
        raise DecodingError(f"{name} {value:g} is too small to divide by; use 0 for greedy choices")


def check_seed(seed: int) -> None:
    """Refuse a seed that does not fit into 64 bits, as random generators need it."""
    if not -(2**63) <= seed < 2**64:
        raise DecodingError(f"the seed must fit into 64 bits; it is {seed}")


def check_num_proposals(drafter: Drafter | None, asked: int | AdaptiveProposals | None) -> None:
    """Refuse a number of proposals that the drafter cannot make; None leaves it to the drafter."""
    if asked is None:
        return
    num_proposals = asked.costs.num_proposals if isinstance(asked, AdaptiveProposals) else asked
    if drafter is None:
        raise DecodingError("num_proposals says how many tokens a drafter proposes, and there is none; leave it out")
    if not 1 <= num_proposals <= drafter.config.num_proposals:
        raise DecodingError(
            f"num_proposals must be between 1 and {drafter.config.num_proposals}, which this drafter was trained for; "
            f"it is {num_proposals}"
        )


def context_limit(target: Target) -> int | None:
    """Return how many tokens the target can read, its ``max_position_embeddings``; None if it does not say."""
    return target.context_length


def room(target: Target, drafter: Drafter | None, num_prompt_tokens: int) -> int | None:
    """Return how many new tokens fit behind a prompt; None if the target names no limit.

    Prompt, new tokens and one drafted block must fit, since the last block may reach beyond the budget:

        num_prompt_tokens + max_new_tokens + num_proposals <= max_position_embeddings
    """
    limit = context_limit(target)
    return None if limit is None else limit - num_prompt_tokens - _block_length(drafter)


def check_room(target: Target, drafter: Drafter | None, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a text that the target's context cannot hold; see `room`."""
    if max_new_tokens < 1:
        raise DecodingError(f"max_new_tokens must be at least 1; it is {max_new_tokens}")
    fits = room(target, drafter, num_prompt_tokens)
    if fits is None or max_new_tokens <= fits:
        return
    block = _block_length(drafter)
    parts = f"{num_prompt_tokens:,} of the prompt and {max_new_tokens:,} new ones"
    if drafter is not None:
        parts = f"{num_prompt_tokens:,} of the prompt, {max_new_tokens:,} new ones and a drafted block of {block}"
    advice = "shorten the prompt"
    if fits > 0:
        advice = f"set max_new_tokens to at most {fits:,}, or {advice}"
    raise DecodingError(
        f"{target.name} reads at most {context_limit(target):,} tokens; {parts} make "
        f"{num_prompt_tokens + max_new_tokens + block:,}: {advice}"
    )


def _block_length(drafter: Drafter | None) -> int:
    return 0 if drafter is None else drafter.config.num_proposals


def _render(target: Target, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation under the target's chat template."""
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DecodingError(f'a message needs "role" and "content", both of them text; got {message!r}')
        _refuse_undecodable(message["content"])
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise DecodingError(f"{target.name} has no chat template; give the prompt as raw text, or as token ids")
    try:
        ids = target.render(messages)
    except jinja2.TemplateError as error:
        raise DecodingError(f"the chat template of {target.name} refuses these messages: {error}") from error
    if not ids:
        raise DecodingError(f"the messages have no tokens under the chat template of {target.name}")
    return ids


def _refuse_undecodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DecodingError(f"the prompt is not valid Unicode at character {error.start}; write it in UTF-8") from error
