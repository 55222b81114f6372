"""Speculative decoding: prefill, then rounds of propose, verify, commit.

``drafter=None`` runs the same loop with empty blocks, which is autoregressive decoding. A round reads from the device
once, when all of it is decided: the block, where it ends, how much of it was kept and the token that follows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.decoding.request import (
    DecodingError,
    PromptLike,
    check_num_proposals,
    check_room,
    check_seed,
    check_temperature,
    prompt_ids,
    sampling_for,
)
from blockdraft.drafters import Drafter, Proposal, load_drafter
from blockdraft.targets import Sampling, Target, as_target
from blockdraft.verification import Rule, Verdict, verify

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
        """The tokens that the round added to the text."""
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
        """Tokens retained per verification call, correction and bonus tokens included, the prefill token excluded."""
        return sum(len(r.tokens) for r in self.rounds) / max(1, len(self.rounds))

    @property
    def seconds(self) -> float:
        """The time that the whole generation took."""
        return self.prefill_seconds + sum(sum(r.seconds.values()) for r in self.rounds)


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
    num_proposals: int | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
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
            many if not given. Every value is lossless.
        max_new_tokens: how many tokens the text may have; the last block is cut to it. Prompt, new tokens and one
            drafted block must fit into the target's ``max_position_embeddings``.
        seed: of all random streams; the same seed gives the same text.
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
    state = _State(
        target, drafter, ids, rule, sampling, draft_temperature, num_proposals, max_new_tokens, seed, on_verdict
    )
    with torch.inference_mode():
        state.prefill(on_round)
        while not state.finished:
            state.round(on_round)
    out = state.out
    out.tokens = out.tokens[:max_new_tokens]
    out.text = target.decode(out.tokens) if target.tokenizer is not None else None
    return out


@dataclass(frozen=True)
class Streams:
    """Holds three random streams of one seed: for drafting, for the verifier's coins, for recovery tokens."""

    draft: Generator
    coins: Generator
    recovery: Generator

    @classmethod
    def from_seed(cls, seed: int, device: torch.device) -> "Streams":
        """Derive the three streams from one seed."""
        root = Generator().manual_seed(seed)
        seeds = torch.randint(2**62, (3,), generator=root).tolist()
        return cls(*(Generator(device).manual_seed(s) for s in seeds))


class _State:
    """The loop's variables. ``anchor`` ``[1]`` is the last committed token; the caches hold everything before it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ids: list[int],
        rule: Rule,
        sampling: Sampling,
        draft_temperature: float,
        num_proposals: int | None,
        max_new_tokens: int,
        seed: int,
        on_verdict: OnVerdict | None = None,
    ) -> None:
        self.on_verdict = on_verdict
        self.target, self.drafter, self.rule, self.sampling = target, drafter, rule, sampling
        self.draft_temperature, self.max_new_tokens = draft_temperature, max_new_tokens
        self.layers = drafter.config.target_layers if drafter is not None else ()
        self.options = {} if num_proposals is None else {"num_proposals": num_proposals}
        capacity = len(ids) + max_new_tokens + 1 + (drafter.config.num_proposals if drafter is not None else 0)
        self.cache = target.new_cache(capacity)
        self.draft_cache = drafter.new_cache(capacity) if drafter is not None else None
        self.streams = Streams.from_seed(seed, target.device)
        self.out = Generation(ids)
        self.ends = torch.tensor(sorted(target.eos_ids), device=target.device)
        self.anchor = torch.empty(0, dtype=torch.long, device=target.device)  # [1] once there is one
        self.finished = False

    def prefill(self, on_round: Callable[[Round], None] | None) -> None:
        """Read the prompt and draw the first token from the target alone."""
        start = clock()
        tokens = torch.tensor([self.out.prompt], device=self.target.device)
        output = self.target.forward(tokens, self.cache, self.layers)
        self._extend(output.features, len(self.out.prompt))
        logits = self.target.logits(output.hidden[:, -1:])
        if logits.isnan().any():
            raise DecodingError(
                f"{self.target.name} computes NaN: its weights are damaged, or overflow in {self.target.dtype}; "
                "load it again, in float32 if it was not"
            )
        verdict = self._verify(self.sampling.probs(logits), self._nothing(), None)
        self.anchor = verdict.next_token
        token = int(verdict.next_token)
        self.out.prefill_seconds = clock() - start
        self._commit([token])
        if on_round is not None:
            on_round(Round([], 0, token, {}))

    def round(self, on_round: Callable[[Round], None] | None) -> None:
        """Propose, verify, commit."""
        start = self._now()
        proposal = self._propose()
        drafted = self._now()
        held = self.cache.length
        output = self.target.forward(torch.cat([self.anchor[None], proposal.tokens], 1), self.cache, self.layers)
        logits = self.target.logits(output.hidden)
        verified = self._now()
        target_probs = self.sampling.probs(logits)
        lengths = self._lengths(proposal.tokens)
        verdict = self._verify(target_probs, proposal, lengths)
        parts = [proposal.tokens[0], verdict.num_accepted, verdict.next_token, *([] if lengths is None else [lengths])]
        *tokens, accepted, next_token, length = torch.cat(parts).tolist() + ([] if lengths is not None else [None])
        tokens = tokens[:length]
        ended = accepted > 0 and tokens[accepted - 1] in self.target.eos_ids
        self.anchor = verdict.next_token
        self.cache.rollback(held + 1 + accepted)
        decided = self._now()
        self._extend(output.features, 1 + accepted)
        end = self._now()
        draft_seconds = (drafted - start) + (end - decided)
        seconds = {"draft": draft_seconds, "verify": verified - drafted, "rest": decided - verified}
        record = Round(tokens, accepted, None if ended else next_token, seconds)
        self.out.rounds.append(record)
        self._commit(record.tokens)
        if self.on_verdict is not None:
            self.on_verdict(*_cut(len(tokens), proposal, target_probs, verdict))
        if on_round is not None:
            on_round(record)

    def _propose(self) -> Proposal:
        if self.drafter is None or self.draft_cache is None:
            return self._nothing()
        return self.drafter.propose(
            self.draft_cache, self.anchor, self.target, self.draft_temperature, self.streams.draft, **self.options
        )

    def _nothing(self) -> Proposal:
        device = self.target.device
        empty = torch.zeros(1, 0, dtype=torch.long, device=device)
        return Proposal(empty, torch.zeros(1, 0, self.target.vocab_size, device=device))

    def _lengths(self, tokens: Tensor) -> Tensor | None:
        """Return ``[1]``, the tokens of a block ``[1, B]`` up to its first end token: what follows is never read."""
        if not len(self.ends) or not tokens.shape[1]:
            return None
        is_end = (tokens.unsqueeze(-1) == self.ends).any(-1).long()
        return ((is_end.cumsum(-1) - is_end) == 0).sum(-1)

    def _verify(self, target_probs: Tensor, proposal: Proposal, lengths: Tensor | None) -> Verdict:
        return verify(
            self.rule,
            target_probs,
            proposal.probs,
            proposal.tokens,
            lengths,
            generator=self.streams.coins,
            recovery_generator=self.streams.recovery,
            check=False,
        )

    def _now(self) -> float:
        """Return the time when all that was asked of the device is done, so that each phase is charged with its own."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return clock()

    def _extend(self, features: Tensor | None, num_rows: int) -> None:
        """Hand the features of committed tokens to the drafter; the next anchor's does not exist yet."""
        if self.drafter is not None and self.draft_cache is not None and features is not None:
            self.drafter.extend(self.draft_cache, features[:, :num_rows])

    def _commit(self, tokens: list[int]) -> None:
        self.out.tokens += tokens
        self.finished = tokens[-1] in self.target.eos_ids or len(self.out.tokens) >= self.max_new_tokens


def _cut(length: int, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> tuple[Proposal, Tensor, Verdict]:
    """Return what `OnVerdict` is shown: the block up to its first end token."""
    shown = Verdict(verdict.num_accepted, verdict.next_token, verdict.coins[:, :length], verdict.thresholds[:, :length])
    return Proposal(proposal.tokens[:, :length], proposal.probs[:, :length]), target_probs[:, : length + 1], shown
