"""Record rounds as CUDA graphs, once for a target, a drafter and a capacity, and replay them in every text.

A round of a large target is thousands of kernels that each run for microseconds; asking for them one by one from
Python takes longer than they do. A graph asks for a whole phase at once. With and without a drafter rounds are
recorded alike, so that a speed-up compares like with like.

No graph is trusted: before it is used, it decodes a little beside the plain rounds on the same device, and if they
disagree, or anything is raised, one warning says so and the plain rounds are used (see `blockdraft.selfcheck`).
``BLOCKDRAFT_CUDA_GRAPHS=0`` turns graphs off.
"""

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from blockdraft.decoding.request import DecodingError
from blockdraft.decoding.rounds import Plan, RoundRunner
from blockdraft.drafters import Drafter, Proposal
from blockdraft.selfcheck import SelfCheckError, compare, passes_check
from blockdraft.targets import Target

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
