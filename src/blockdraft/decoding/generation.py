"""Decode speculatively: prefill, then rounds of propose, verify, commit.

What `generate` is asked for is checked before any model runs: the prompt, the sampling, the room in the context.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import cast

import jinja2
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.decoding.rounds import DecodingError, Plan, RoundRunner, rounds_for
from blockdraft.drafters import Drafter, Proposal, load_drafter
from blockdraft.targets import Message, Sampling, Target, as_target
from blockdraft.verification import RULES, Rule, Verdict

PromptLike = str | Sequence[Message] | Sequence[int] | Tensor
"""A user's message (or raw text), the messages of a conversation, or token ids ``[T]``."""

SMALLEST_TEMPERATURE = 1e-6
"""Logits divided by less may overflow; the text is the greedy one long before."""

OnVerdict = Callable[[Proposal, Tensor, Verdict], None]

clock = time.perf_counter
"""What times a round; benchmarks on a shared machine count the thread's own time instead."""


@dataclass(frozen=True)
class Round:
    """Records one verification call.

    drafted: the tokens that were proposed, up to the first end token among them.
    accepted: how many of them were kept.
    next_token: the correction or bonus token; None if the text ended inside the block.
    seconds: by phase: ``draft`` and ``verify`` for the passes of the two models (the drafter's reading of newly
        committed features included), ``rest`` for the target's probabilities, the verdict and the rollback.
    """

    drafted: list[int]
    accepted: int
    next_token: int | None
    seconds: dict[str, float]

    @property
    def tokens(self) -> list[int]:
        """Give the tokens that the round added to the text."""
        return self.drafted[: self.accepted] + ([] if self.next_token is None else [self.next_token])


@dataclass
class Generation:
    """Holds a decoded text and how it came about.

    prompt: the token ids that it follows.
    tokens: the new token ids, cut to the budget, an end token included.
    text: the new tokens decoded, without special tokens; None if the target has no tokenizer.
    rounds: one record per verification call, before the cut.
    prefill_seconds: the time until the first token, which belongs to no round.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Give the tokens kept per verification call, with correction and bonus tokens, without the prefill token."""
        return sum(len(r.tokens) for r in self.rounds) / max(1, len(self.rounds))

    @property
    def seconds(self) -> float:
        """Give the time that the whole generation took."""
        return self.prefill_seconds + sum(sum(r.seconds.values()) for r in self.rounds)


class ProposalPolicy(ABC):
    """Chooses the number of proposals of every round of one text, from what was committed before that round alone."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """Give the largest number that it may choose."""

    @abstractmethod
    def next(self) -> int:
        """Return how many tokens to propose in the next round: at least one."""

    @abstractmethod
    def update(self, proposed: int, accepted: int) -> None:
        """Learn from a round that kept ``accepted`` of its proposals."""


def generate(
    target: Target | PreTrainedModel | str | Path,
    drafter: Drafter | str | Path | None,
    prompt: PromptLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    raw: bool = False,
    rule: Rule = "block",
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_temperature: float | None = None,
    num_proposals: int | ProposalPolicy | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    cuda_graphs: bool | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_verdict: OnVerdict | None = None,
) -> Generation:
    """Decode one text; whatever the drafter, the output is distributed as the target's own.

    Args:
        target: the model whose text is decoded: a target, a plain causal language model of transformers, or what
            `load_target` takes.
        drafter: the model that proposes blocks, or what `load_drafter` takes; None decodes autoregressively.
        prompt: a text, which is one user message; the messages of a conversation, ``{"role": ..., "content": ...}``
            each; or token ids ``[T]``. Texts and messages go through the target's chat template.
        tokenizer: of a plain transformers model; the one found under the model's own name unless given.
        raw: encode a text as it stands, without a chat template.
        rule: ``"block"`` or ``"token"`` to sample, ``"greedy"`` for the target's most probable tokens.
        temperature: of the target; 1 if not given. The rule ``"greedy"`` takes none, or 0.
        top_k: sample from the k most probable tokens only; 0 keeps all.
        top_p: sample from the fewest tokens whose probabilities sum to p; 1 keeps all.
        draft_temperature: of the drafter; the target's if not given. Every value is lossless, since the verifier is
            told the distribution that the drafts were sampled from.
        num_proposals: how many tokens the drafter proposes in each round, at most as many as it was trained to; that
            many if not given. A policy such as `AdaptiveProposals`, new for each text, chooses in every round. Every
            value is lossless.
        max_new_tokens: how many tokens the text may have; the last block is cut to it. Prompt, new tokens and one
            drafted block must fit into the target's ``max_position_embeddings``.
        seed: of all random streams; the same seed gives the same text.
        cuda_graphs: on a CUDA device, replay rounds that were recorded once instead of launching every kernel from
            Python. By default they are, if they first decode as plain rounds do, unless the environment variable
            ``BLOCKDRAFT_CUDA_GRAPHS`` is 0; True makes graphs that cannot be used an error.
        on_round: called with each round's record, and first with one for the prefill token.
        on_verdict: called in each round with the proposal, p ``[1, B + 1, V]`` and the verdict.

    Raises:
        DecodingError: what was asked for contradicts itself, or does not fit the target.
    """
    sampling = sampling_for(rule, temperature, top_k, top_p)
    if draft_temperature is None:
        draft_temperature = sampling.temperature
    check_temperature("draft_temperature", draft_temperature)
    check_seed(seed)
    target = as_target(target, tokenizer)
    if isinstance(drafter, str | Path):
        drafter = load_drafter(drafter, target)
    ids = prompt_ids(target, prompt, raw=raw)
    check_room(target, drafter, len(ids), max_new_tokens)
    check_num_proposals(drafter, num_proposals)
    policy, number = (num_proposals, None) if isinstance(num_proposals, ProposalPolicy) else (None, num_proposals)
    if policy is not None and cuda_graphs:
        raise DecodingError("rounds of an adaptive number of proposals are not recorded as CUDA graphs; leave one out")
    plan = Plan(rule, sampling, draft_temperature, number)
    capacity = len(ids) + max_new_tokens + 1 + (drafter.config.num_proposals if drafter is not None else 0)
    graphs = False if policy is not None else cuda_graphs
    with rounds_for(target, drafter, plan, capacity, graphs) as rounds, torch.inference_mode():
        text = _Text(rounds, ids, max_new_tokens, policy, on_round, on_verdict)
        text.start(seed)
        while not text.finished:
            text.continue_()
    out = text.out
    out.tokens = out.tokens[:max_new_tokens]
    out.text = target.decode(out.tokens) if target.tokenizer is not None else None
    return out


class _Text:
    """Decodes a text, and tells what happens."""

    def __init__(
        self,
        rounds: RoundRunner,
        ids: list[int],
        max_new_tokens: int,
        policy: ProposalPolicy | None,
        on_round: Callable[[Round], None] | None,
        on_verdict: OnVerdict | None,
    ) -> None:
        self.rounds, self.max_new_tokens, self.policy = rounds, max_new_tokens, policy
        self.on_round, self.on_verdict = on_round, on_verdict
        self.device, self.ends = rounds.target.device, rounds.target.eos_ids
        self.out = Generation(ids)
        self.finished = False

    def start(self, seed: int) -> None:
        """Read the prompt and draw the first token."""
        start = self._now()
        token = self.rounds.start(self.out.prompt, seed)
        self.out.prefill_seconds = self._now() - start
        self._append([token])
        if self.on_round is not None:
            self.on_round(Round([], 0, token, {}))

    def continue_(self) -> None:
        """Take a round: propose, verify, commit."""
        rounds, start = self.rounds, self._now()
        if self.policy is not None:
            rounds.plan = replace(rounds.plan, num_proposals=self.policy.next())
        rounds.run("predict", "draft")
        drafted = self._now()
        rounds.run("verify")
        verified = self._now()
        rounds.run("decide")
        decision = rounds.read()
        decided = self._now()
        rounds.run("commit")
        end = self._now()
        draft_seconds = (drafted - start) + (end - decided)
        seconds = {"draft": draft_seconds, "verify": verified - drafted, "rest": decided - verified}
        tokens, accepted = decision.drafted, decision.accepted
        ended = accepted > 0 and tokens[accepted - 1] in self.ends
        record = Round(tokens, accepted, None if ended else decision.next_token, seconds)
        self.out.rounds.append(record)
        self._append(record.tokens)
        if self.policy is not None:
            self.policy.update(len(tokens), accepted)
        if self.on_verdict is not None:
            self.on_verdict(*_shown(rounds, len(tokens)))
        if self.on_round is not None:
            self.on_round(record)

    def _append(self, tokens: list[int]) -> None:
        self.out.tokens += tokens
        self.finished = tokens[-1] in self.ends or len(self.out.tokens) >= self.max_new_tokens

    def _now(self) -> float:
        """Return the time when all that was asked of the device is done, so that each phase is charged with its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return clock()


def _shown(rounds: RoundRunner, length: int) -> tuple[Proposal, Tensor, Verdict]:
    """Return what `OnVerdict` is shown: the block up to its first end token, copied if the next round overwrites it."""
    proposal, verdict = rounds.proposal, rounds.verdict
    block = proposal.tokens[:, :length], proposal.probs[:, :length]
    decided = verdict.num_accepted, verdict.next_token, verdict.coins[:, :length], verdict.thresholds[:, :length]
    probs = rounds.target_probs[:, : length + 1]
    if rounds.position is None:
        return Proposal(*block), probs, Verdict(*decided)
    return Proposal(*(x.clone() for x in block)), probs.clone(), Verdict(*(x.clone() for x in decided))


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


def check_num_proposals(drafter: Drafter | None, asked: int | ProposalPolicy | None) -> None:
    """Refuse a number of proposals that the drafter cannot make; None leaves it to the drafter."""
    if asked is None:
        return
    num_proposals = asked.largest if isinstance(asked, ProposalPolicy) else asked
    if drafter is None:
        raise DecodingError("num_proposals says how many tokens a drafter proposes, and there is none; leave it out")
    if not 1 <= num_proposals <= drafter.config.num_proposals:
        raise DecodingError(
            f"num_proposals must be between 1 and {drafter.config.num_proposals}, the most that this drafter can "
            f"propose; it is {num_proposals}"
        )


def room(target: Target, drafter: Drafter | None, num_prompt_tokens: int) -> int | None:
    """Return how many new tokens fit behind a prompt; None if the target names no limit.

    Prompt, new tokens and one drafted block must fit, since the last block may reach beyond the budget:

        num_prompt_tokens + max_new_tokens + num_proposals <= max_position_embeddings
    """
    limit = target.context_length
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
        f"{target.name} reads at most {target.context_length:,} tokens; {parts} make "
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
