"""Decode speculatively: prefill, then rounds of propose, verify, commit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.decoding.graphs import rounds_for
from blockdraft.decoding.proposals import AdaptiveProposals
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
from blockdraft.decoding.rounds import Plan, RoundRunner
from blockdraft.drafters import Drafter, Proposal, load_drafter
from blockdraft.targets import Target, as_target
from blockdraft.verification import Rule, Verdict

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
    num_proposals: int | AdaptiveProposals | None = None,
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
            many if not given. `AdaptiveProposals`, new for each text, chooses in every round. Every value is lossless.
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
    policy, number = (num_proposals, None) if isinstance(num_proposals, AdaptiveProposals) else (None, num_proposals)
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
        policy: AdaptiveProposals | None,
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
