"""Speculative decoding: prefill, then rounds of propose, verify, commit.

``drafter=None`` runs the same loop with empty blocks, which is autoregressive decoding.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from blockdraft.drafters import Drafter, Proposal
from blockdraft.targets import Message, Sampling, Target
from blockdraft.verification import Rule, Verdict, verify

OnVerdict = Callable[[Proposal, Tensor, Verdict], None]


@dataclass(frozen=True)
class Round:
    """One verification call.

    drafted: tokens proposed, up to an end token among them.
    accepted: how many of them were kept.
    next_token: the correction or bonus token; None if the text ended inside the block.
    seconds: by phase: ``draft`` and ``verify``, the two models' passes (the drafter's reading of newly
        committed features included), and ``rest``: the target's law, the verdict, rollback.
    """

    drafted: list[int]
    accepted: int
    next_token: int | None
    seconds: dict[str, float]

    @property
    def tokens(self) -> list[int]:
        """What the round added to the text."""
        return self.drafted[: self.accepted] + ([] if self.next_token is None else [self.next_token])


@dataclass
class Generation:
    """A decoded text.

    prompt: token ids it follows.
    tokens: the new ones, cropped to the budget, an end token included.
    text: the new ones decoded, special tokens skipped; None without a tokenizer.
    rounds: one record per verification call, before cropping.
    prefill_seconds: time until the first token, which no round counts.
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
        """Time of the whole generation."""
        return self.prefill_seconds + sum(sum(r.seconds.values()) for r in self.rounds)


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[Message] | Sequence[int] | str,
    *,
    rule: Rule = "block",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_temperature: float | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    on_round: Callable[[Round], None] | None = None,
    on_verdict: OnVerdict | None = None,
) -> Generation:
    """Decode one text, lossless under every rule.

    Args:
        target, drafter: the models; no drafter is autoregressive decoding.
        prompt: messages of a conversation (any number of turns), one user message, or token ids.
        rule: ``"greedy"`` (the target's argmax, temperature 0), ``"token"`` or ``"block"``.
        temperature, top_k, top_p: the target's law, which the output follows exactly.
        draft_temperature: of the drafter's own law; the target's temperature if not given. Any value is
            lossless, since the verifier is told the law that the tokens were drawn from.
        max_new_tokens: output budget; the last block is cropped to it.
        seed: of all random streams.
        on_round: called with each round's record, and first with one for the prefill token.
        on_verdict: called in each round with the proposal, p ``[1, B + 1, V]`` and the verdict.
    """
    sampling = Sampling(0.0 if rule == "greedy" else temperature, top_k, top_p)
    if sampling.temperature == 0:
        rule = "greedy"
    if draft_temperature is None:
        draft_temperature = sampling.temperature
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    ids = prompt_ids(target, prompt)
    state = _State(target, drafter, ids, rule, sampling, draft_temperature, max_new_tokens, seed, on_verdict)
    with torch.inference_mode():
        state.prefill(on_round)
        while not state.finished:
            state.round(on_round)
    out = state.out
    out.tokens = out.tokens[:max_new_tokens]
    out.text = target.decode(out.tokens) if target.tokenizer is not None else None
    return out


def prompt_ids(target: Target, prompt: Sequence[Message] | Sequence[int] | str) -> list[int]:
    """Token ids of a prompt given in any of the forms `generate` takes."""
    if isinstance(prompt, str):
        return target.render([{"role": "user", "content": prompt}])
    if not prompt:
        raise ValueError("the prompt is empty")
    messages = [item for item in prompt if isinstance(item, dict)]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(messages) < len(prompt) and len(ids) < len(prompt):
        raise ValueError("a prompt is text, messages or token ids")
    return target.render(messages) if messages else ids


@dataclass(frozen=True)
class Streams:
    """Separate generators for drafting, coins and recovery tokens, all from one seed."""

    draft: Generator
    coins: Generator
    recovery: Generator

    @classmethod
    def from_seed(cls, seed: int, device: torch.device) -> "Streams":
        root = Generator().manual_seed(seed)
        seeds = torch.randint(2**62, (3,), generator=root).tolist()
        return cls(*(Generator(device).manual_seed(s) for s in seeds))


class _State:
    """The loop's variables. ``anchor`` is the last committed token; the caches hold everything before it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ids: list[int],
        rule: Rule,
        sampling: Sampling,
        draft_temperature: float,
        max_new_tokens: int,
        seed: int,
        on_verdict: OnVerdict | None = None,
    ) -> None:
        self.on_verdict = on_verdict
        self.target, self.drafter, self.rule, self.sampling = target, drafter, rule, sampling
        self.draft_temperature, self.max_new_tokens = draft_temperature, max_new_tokens
        self.layers = drafter.config.target_layers if drafter is not None else ()
        num_proposals = drafter.config.num_proposals if drafter is not None else 0
        capacity = len(ids) + max_new_tokens + num_proposals + 1
        self.cache = target.new_cache(capacity)
        self.draft_cache = drafter.new_cache(capacity) if drafter is not None else None
        self.streams = Streams.from_seed(seed, target.device)
        self.out = Generation(ids)
        self.anchor = -1
        self.finished = False

    def prefill(self, on_round: Callable[[Round], None] | None) -> None:
        """Read the prompt and draw the first token from the target alone."""
        start = time.perf_counter()
        output = self.target.forward(self._ids(self.out.prompt), self.cache, self.layers)
        self._extend(output.features, len(self.out.prompt))
        probs = self.sampling.probs(self.target.logits(output.hidden[:, -1:]))
        empty = torch.zeros(1, 0, dtype=torch.long, device=self.target.device)
        token = self._verify(probs, Proposal(empty, probs[:, :0]))[1]
        self.out.prefill_seconds = time.perf_counter() - start
        self._commit([token])
        if on_round is not None:
            on_round(Round([], 0, token, {}))

    def round(self, on_round: Callable[[Round], None] | None) -> None:
        """Propose, verify, commit."""
        start = time.perf_counter()
        proposal = self._propose()
        drafted = time.perf_counter()
        block = self._ids([self.anchor, *proposal.tokens[0].tolist()])
        held = self.cache.length
        output = self.target.forward(block, self.cache, self.layers)
        logits = self.target.logits(output.hidden)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # or the verdict would be charged with the target's pass
        verified = time.perf_counter()
        accepted, next_token = self._verify(self.sampling.probs(logits), proposal)
        tokens = proposal.tokens[0].tolist()
        ended = accepted > 0 and tokens[accepted - 1] in self.target.eos_ids
        self.cache.rollback(held + 1 + accepted)
        decided = time.perf_counter()
        self._extend(output.features, 1 + accepted)
        end = time.perf_counter()
        draft_seconds = (drafted - start) + (end - decided)
        seconds = {"draft": draft_seconds, "verify": verified - drafted, "rest": decided - verified}
        record = Round(tokens, accepted, None if ended else next_token, seconds)
        self.out.rounds.append(record)
        self._commit(record.tokens)
        if on_round is not None:
            on_round(record)

    def _propose(self) -> Proposal:
        """A block, cut after the first end token in it: what follows one is never read."""
        if self.drafter is None or self.draft_cache is None:
            empty = torch.zeros(1, 0, dtype=torch.long, device=self.target.device)
            return Proposal(empty, torch.zeros(1, 0, self.target.vocab_size, device=self.target.device))
        return self.drafter.propose(
            self.draft_cache, self.anchor, self.target, self.draft_temperature, self.streams.draft
        ).until(self.target.eos_ids)

    def _verify(self, target_probs: Tensor, proposal: Proposal) -> tuple[int, int]:
        verdict = verify(
            self.rule,
            target_probs,
            proposal.probs,
            proposal.tokens,
            generator=self.streams.coins,
            recovery_generator=self.streams.recovery,
        )
        if self.on_verdict is not None and self.anchor >= 0:
            self.on_verdict(proposal, target_probs, verdict)
        return int(verdict.num_accepted), int(verdict.next_token)

    def _extend(self, features: Tensor | None, num_rows: int) -> None:
        """Hand the features of committed tokens to the drafter; the next anchor's does not exist yet."""
        if self.drafter is not None and self.draft_cache is not None and features is not None:
            self.drafter.extend(self.draft_cache, features[:, :num_rows])

    def _commit(self, tokens: list[int]) -> None:
        self.out.tokens += tokens
        self.anchor = tokens[-1]
        self.finished = self.anchor in self.target.eos_ids or len(self.out.tokens) >= self.max_new_tokens

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self.target.device)
