"""Take the rounds of a text, draft, verify, decide, commit, as phases, and record these as CUDA graphs.

A round reads from the device once, when all of it is decided: the block, where it ends, how much of it was kept and
the token that follows. Without a drafter blocks are empty, which is autoregressive decoding.

A round of a large target is thousands of kernels that each run for microseconds; asking for them one by one from
Python takes longer than they do. A graph asks for a whole phase at once. It is recorded once for a target, a drafter
and a capacity, and replayed in every text, with and without a drafter alike, so that a speed-up compares like with
like.

No graph is trusted: before it is used, it decodes a little beside the plain rounds on the same device, and if they
disagree, or anything is raised, one warning says so and the plain rounds are used (see `blockdraft.selfcheck`).
``BLOCKDRAFT_CUDA_GRAPHS=0`` turns graphs off.
"""

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from blockdraft.drafters import Drafter, Proposal
from blockdraft.errors import BlockdraftError
from blockdraft.selfcheck import SelfCheckError, compare, passes_check
from blockdraft.targets import Sampling, Target
from blockdraft.verification import Rule, Verdict, verify


class DecodingError(BlockdraftError):
    """`generate` cannot do what it was asked; the message says why, and how to ask."""


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


# Rounds as CUDA graphs

SWITCH = "BLOCKDRAFT_CUDA_GRAPHS"
"""This environment variable, set to 0, turns graphs off where nothing else was asked for."""

PART = "decoding by CUDA graphs"

MIN_CAPACITY = 256
KEPT_BYTES = 2**32
"""Graphs are kept with the target until their KV caches take more bytes than this; the longest unused go first."""

CHECKED_TEXTS = ([1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9, 2, 6, 5])
CHECKED_ROUNDS = 3

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Differences from the plain rounds that rounding explains, as a share of the largest value."""

Phase = Callable[[], None]
Capture = Callable[[Sequence[Phase], Sequence[Generator]], list[Phase]]
"""Record phases that use some random streams; return what replays each."""

_checks = itertools.count()
_recording = threading.Lock()


def capture_cuda(phases: Sequence[Phase], streams: Sequence[Generator]) -> list[Phase]:
    """Record phases as CUDA graphs, which share their memory since they are always replayed in this order."""
    with torch.cuda.device(streams[0].device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up, which no graph may hold
            for _ in range(2):
                for phase in phases:
                    phase()
        torch.cuda.current_stream().wait_stream(side)
        pool, replays = torch.cuda.graph_pool_handle(), []
        for phase in phases:
            graph = torch.cuda.CUDAGraph()
            for stream in streams:
                graph.register_generator_state(stream)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                phase()
            replays.append(graph.replay)
    return replays


CAPTURES: dict[str, Capture] = {"cuda": capture_cuda}
"""How rounds are recorded, by kind of device."""


@contextmanager
def rounds_for(
    target: Target, drafter: Drafter | None, plan: Plan, capacity: int, cuda_graphs: bool | None = None
) -> Iterator[RoundRunner]:
    """Give rounds for a text of up to ``capacity`` tokens: as graphs if wanted and sound, else plain ones.

    Graphs serve one text at a time; one that is begun meanwhile, by another thread for instance, has plain rounds.

    Args:
        target, drafter, plan: what decodes, and how.
        capacity: prompt, new tokens and a block.
        cuda_graphs: False for plain rounds; True makes graphs that fail their check an error; by default graphs are
            used where they can be, unless `SWITCH` turns them off.
    """
    plain = RoundRunner(target, drafter, plan, capacity)
    found = _recorded(plain, cuda_graphs) if _wanted(target, cuda_graphs) else None
    if found is None or not found.lock.acquire(blocking=False):
        yield plain
        return
    try:
        yield found
    finally:
        found.lock.release()


def _recorded(plain: RoundRunner, asked: bool | None) -> RoundRunner | None:
    """Return recorded rounds that do what plain ones do, from those that the target keeps or new; None if none can."""
    target, drafter, kept = plain.target, plain.drafter, plain.target.kept
    block = 0 if drafter is None else drafter.config.num_proposals
    checked = max(map(len, CHECKED_TEXTS)) + (1 + CHECKED_ROUNDS) * (1 + block)
    room = rounded_capacity(max(plain.capacity, checked))
    key: Hashable = (plain.plan, room, target.eos_ids, drafter)
    with _recording:
        _forget_stale(kept, plain)
        if key not in kept:
            kept[key] = _checked(plain, room, strict=True if asked else None)
        found: RoundRunner | None = kept.pop(key)
        kept[key] = found  # now the last one used
        _make_room(kept)
    return found


def rounded_capacity(capacity: int) -> int:
    """Return the capacity that graphs are recorded with: a quarter more at most, so that many texts share them."""
    step = max(MIN_CAPACITY, (1 << (capacity - 1).bit_length()) // 8)
    return -(-capacity // step) * step


def _wanted(target: Target, asked: bool | None) -> bool:
    if asked is False or (asked is None and os.environ.get(SWITCH) == "0"):
        return False
    if target.device.type in CAPTURES and target.decoder is not None:
        return True
    if asked:
        raise DecodingError(
            f"cuda_graphs needs a CUDA device and a target of the families that blockdraft itself decodes; "
            f"{target.name} on {target.device} is decoded without; leave cuda_graphs out"
        )
    return False


def _checked(plain: RoundRunner, room: int, *, strict: bool | None) -> RoundRunner | None:
    """Record rounds and compare them with plain ones; None if they cannot be trusted."""
    made: list[RoundRunner] = []

    @torch.inference_mode()
    def check() -> None:
        target, drafter, plan = plain.target, plain.drafter, plain.plan
        rounds = RoundRunner(target, drafter, plan, room, static=True)
        rounds.start(_checked_texts(target)[0], 0)
        replays = CAPTURES[target.device.type](list(rounds.phases.values()), rounds.streams.all)
        rounds.phases = dict(zip(rounds.phases, replays, strict=True))
        compare_rounds(rounds, RoundRunner(target, drafter, plan, room))
        made.append(rounds)

    if passes_check(PART, plain.target.device, check, key=(next(_checks),), strict=strict):
        return made[0]
    return None


def compare_rounds(rounds: RoundRunner, plain: RoundRunner) -> None:
    """Raise unless both decode alike, phase by phase; the plain rounds are led along the others' choices.

    Rounding may decide a close choice otherwise, so every phase starts from the same values: what the models compute
    may differ by rounding, random numbers and what follows from given values may not.
    """
    tolerance = TOLERANCE[plain.target.dtype]
    both = (rounds, plain)
    for seed, ids in enumerate(_checked_texts(plain.target)):
        for each in both:
            each.start(ids, seed)
        plain.anchor = rounds.anchor.clone()
        num_tokens = len(ids)
        for _ in range(CHECKED_ROUNDS):
            for name in rounds.phases:
                for each in both:
                    each.run(name)
                    if name == "decide":
                        each.read()
                _compare_phase(name, rounds, plain, tolerance)
                _lead(plain, rounds)
            num_tokens += rounds.num_kept
            _same("the text's length", rounds.position, torch.tensor([num_tokens]))
            _same("the anchor", rounds.anchor, plain.anchor)


def _checked_texts(target: Target) -> list[list[int]]:
    return [[token % target.vocab_size for token in text] for text in CHECKED_TEXTS]


def _compare_phase(name: str, rounds: RoundRunner, plain: RoundRunner, tolerance: float) -> None:
    if name == "predict":
        compare("the drafter's hidden state", rounds.draft_hidden, plain.draft_hidden, tolerance)
    elif name == "draft":
        compare("the drafter's distribution", rounds.proposal.probs, plain.proposal.probs, tolerance)
        _same("the block", rounds.proposal.tokens, plain.proposal.tokens)
    elif name == "verify":
        compare("the target's logits", rounds.logits, plain.logits, tolerance)
        if rounds.features is not None and plain.features is not None:
            compare("the target's features", rounds.features, plain.features, tolerance)
    elif name == "decide":
        _same("the coins", rounds.verdict.coins, plain.verdict.coins)
        _same("the verdict", rounds.decision, plain.decision)


def _lead(plain: RoundRunner, rounds: RoundRunner) -> None:
    """Give plain rounds the values that the others have, for the next phase."""
    plain.draft_hidden, plain.logits = rounds.draft_hidden.clone(), rounds.logits.clone()
    plain.features = None if rounds.features is None else rounds.features.clone()
    plain.proposal = Proposal(rounds.proposal.tokens.clone(), rounds.proposal.probs.clone())


def _same(name: str, found: Tensor | None, expected: Tensor) -> None:
    if found is None or found.tolist() != expected.tolist():
        raise SelfCheckError(f"{name} is {None if found is None else found.tolist()} and not {expected.tolist()}")


def _forget_stale(kept: dict[Hashable, RoundRunner | None], plain: RoundRunner) -> None:
    """Drop graphs of weights that are no more."""
    for key, rounds in list(kept.items()):
        if rounds is not None and not rounds.is_current(plain):
            del kept[key]


def _make_room(kept: dict[Hashable, RoundRunner | None]) -> None:
    """Drop the graphs that were not used for the longest time while all take too much."""
    for key in list(kept)[:-1]:
        if sum(rounds.num_bytes for rounds in kept.values() if rounds is not None) <= KEPT_BYTES:
            return
        del kept[key]
