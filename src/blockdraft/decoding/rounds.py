"""Take the rounds of a text, draft, verify, decide, commit, as phases that a CUDA graph can hold.

A round reads from the device once, when all of it is decided: the block, where it ends, how much of it was kept and
the token that follows. Without a drafter blocks are empty, which is autoregressive decoding.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from blockdraft.decoding.request import DecodingError
from blockdraft.drafters import Drafter, Proposal
from blockdraft.targets import Sampling, Target
from blockdraft.verification import Rule, Verdict, verify


@dataclass(frozen=True)
class Plan:
    """Says how every round of a text is drafted and verified; see `generate`."""

    rule: Rule
    sampling: Sampling
    draft_temperature: float
    num_proposals: int | None = None


@dataclass(frozen=True)
class Decision:
    """Holds what a round decided, read from the device.

    drafted: the block, up to the first end token in it. accepted: how many of these were kept.
    next_token: the correction or bonus token.
    """

    drafted: list[int]
    accepted: int
    next_token: int


class Streams:
    """Holds three random streams: for drafting, for the verifier's coins, for recovery tokens."""

    def __init__(self, device: torch.device) -> None:
        self.draft, self.coins, self.recovery = self.all = [Generator(device) for _ in range(3)]

    def seed(self, seed: int) -> None:
        """Derive the three streams from one seed."""
        seeds = torch.randint(2**62, (3,), generator=Generator().manual_seed(seed)).tolist()
        for stream, each in zip(self.all, seeds, strict=True):
            stream.manual_seed(each)


class RoundRunner:
    """Decode texts, one after the other, by phases that leave what they made for those that follow.

        predict   draft_hidden              the drafter's pass over the block
        draft     proposal                  its tokens and q
        verify    logits, features          the target's pass over the anchor and the block
        decide    target_probs, verdict     and the same in one tensor, to be read at once: decision
        commit    anchor, position          and both caches: the next round can begin

    ``anchor`` ``[1]`` is the last committed token; the caches hold everything before it.

    With ``static``, the anchor's place is a tensor ``[1]`` on the device, and no shape and no address depends on what
    was decided: tokens that were not accepted are overwritten by the next block. Then ``phases`` may be replaced by
    recordings of themselves.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, plan: Plan, capacity: int, *, static: bool = False
    ) -> None:
        device = target.device
        self.target, self.drafter, self.plan, self.capacity = target, drafter, plan, capacity
        self.layers = drafter.config.target_layers if drafter is not None else ()
        self.cache = target.new_cache(capacity)
        self.decoder = target.decoder
        self.draft_cache = drafter.new_cache(capacity) if drafter is not None else None
        self.streams = Streams(device)
        self.ends = torch.tensor(sorted(target.eos_ids), device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device) if static else None
        self.anchor = torch.zeros(1, dtype=torch.long, device=device)
        self.num_kept = 0
        self.lock = threading.Lock()
        empty = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.proposal = self.nothing = Proposal(empty, torch.zeros(1, 0, target.vocab_size, device=device))
        self.draft_hidden = self.logits = self.target_probs = self.decision = empty
        self.features: Tensor | None = None
        self.verdict: Verdict
        drafting = {"predict": self._predict, "draft": self._draft} if drafter is not None else {}
        self.phases: dict[str, Callable[[], None]] = {
            **drafting, "verify": self._verify, "decide": self._decide, "commit": self._commit
        }  # fmt: skip

    def start(self, ids: list[int], seed: int) -> int:
        """Read a prompt, and return the first token after it, drawn from the target alone."""
        self.streams.seed(seed)
        self.cache.rollback(0)
        output = self.target.forward(torch.tensor([ids], device=self.target.device), self.cache, self.layers)
        if self.drafter is not None and self.draft_cache is not None and output.features is not None:
            self.draft_cache.length = 0
            self.drafter.extend(self.draft_cache, output.features)
        logits = self.target.logits(output.hidden[:, -1:])
        if logits.isnan().any():
            raise DecodingError(
                f"{self.target.name} computes NaN: its weights are damaged, or overflow in {self.target.dtype}; "
                "load it again, in float32 if it was not"
            )
        token = self._judge(self.plan.sampling.probs(logits), self.nothing, None).next_token
        if self.position is None:
            self.anchor = token
        else:
            self.anchor.copy_(token)
            self.position.fill_(len(ids))
            for cache in (self.cache, self.draft_cache):
                if cache is not None:
                    cache.clear_behind(len(ids))
        return int(token)

    def is_current(self, newer: "RoundRunner") -> bool:
        """Return whether the weights are those of newer rounds, as far as these are of the same models."""
        if self.decoder is not newer.decoder:
            return False
        if self.draft_cache is None or newer.draft_cache is None or self.drafter is not newer.drafter:
            return True
        return self.draft_cache.weights is newer.draft_cache.weights

    @property
    def num_bytes(self) -> int:
        """Give the memory that both caches take."""
        return sum(cache.num_bytes for cache in (self.cache, self.draft_cache) if cache is not None)

    def run(self, *names: str) -> None:
        """Run some phases; those of drafting are none without a drafter."""
        for name in names:
            if name in self.phases:
                self.phases[name]()

    def read(self) -> Decision:
        """Return what was decided; the host waits for the device here, and nowhere else in a round."""
        *tokens, accepted, next_token, length = self.decision.tolist()
        self.num_kept = 1 + accepted
        return Decision(tokens[:length], accepted, next_token)

    def _predict(self) -> None:
        assert self.drafter is not None
        assert self.draft_cache is not None
        self.draft_hidden = self.drafter.predict(
            self.draft_cache, self.anchor, self.target, self.plan.num_proposals, self.position
        )

    def _draft(self) -> None:
        assert self.drafter is not None
        self.proposal = self.drafter.draft(
            self.draft_hidden, self.anchor, self.target, self.plan.draft_temperature, self.streams.draft
        )

    def _verify(self) -> None:
        tokens = torch.cat([self.anchor[None], self.proposal.tokens], 1)
        output = self.target.forward(tokens, self.cache, self.layers, at=self.position)
        self.logits, self.features = self.target.logits(output.hidden), output.features

    def _decide(self) -> None:
        self.target_probs = self.plan.sampling.probs(self.logits)
        lengths = self._lengths(self.proposal.tokens)
        self.verdict = self._judge(self.target_probs, self.proposal, lengths)
        parts = [self.proposal.tokens[0], self.verdict.num_accepted, self.verdict.next_token, lengths]
        self.decision = torch.cat(parts)

    def _commit(self) -> None:
        """Keep the anchor and the accepted tokens, and hand their features to the drafter.

        The next anchor's features do not exist yet.
        """
        num_kept = None if self.position is not None else self.num_kept
        if self.drafter is not None and self.draft_cache is not None and self.features is not None:
            self.drafter.extend(self.draft_cache, self.features[:, :num_kept], self.position)
        if self.position is None:
            self.cache.rollback(self.cache.length - self.logits.shape[1] + self.num_kept)
            self.anchor = self.verdict.next_token
        else:
            self.position.add_(1 + self.verdict.num_accepted)
            self.anchor.copy_(self.verdict.next_token)

    def _lengths(self, tokens: Tensor) -> Tensor:
        """Return ``[1]``, the tokens of a block ``[1, B]`` up to its first end token: what follows is never read."""
        if not len(self.ends) or not tokens.shape[1]:
            return torch.full((1,), tokens.shape[1], device=tokens.device)
        is_end = (tokens.unsqueeze(-1) == self.ends).any(-1).long()
        return ((is_end.cumsum(-1) - is_end) == 0).sum(-1)

    def _judge(self, target_probs: Tensor, proposal: Proposal, lengths: Tensor | None) -> Verdict:
        return verify(
            self.plan.rule, target_probs, proposal.probs, proposal.tokens, lengths,
            generator=self.streams.coins, recovery_generator=self.streams.recovery, check=False,
        )  # fmt: skip
