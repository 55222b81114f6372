"""Static rounds and graphs against plain rounds: the same tokens, the same verdicts, and wrong graphs are not used."""

import itertools
import warnings

import pytest
import torch

from blockdraft import selfcheck
from blockdraft.decoding import DecodingError, generate, rounds
from blockdraft.decoding.rounds import SWITCH, rounded_capacity
from blockdraft.selfcheck import STRICT, SelfCheckError, SelfCheckWarning

from recording import record
from tiny import tiny_drafter, tiny_target

DRAFTERS = [(None, {}), ("dflash", {}), ("dflash", {"draft_vocab_size": 20}), ("dspark", {}),
            ("dspark", {"markov_head": "rnn"}),
            ("dspark", {"markov_head": "gated", "draft_vocab_size": 20})]  # fmt: skip
RULES = ["greedy", "token", "block"]
PROMPT = [7, 3, 9, 30, 12]


def eagerly(phases, _streams):
    """Run the phases themselves, in the place of a recording."""
    return list(phases)


@pytest.fixture
def _captured(monkeypatch):
    """Treat the CPU as a device with graphs, and a failed check as an error."""
    monkeypatch.setitem(rounds.CAPTURES, "cpu", record)
    monkeypatch.setenv(STRICT, "1")


def models(kind, changes, family="qwen3", **options):
    target = tiny_target(family, tokenizer=False, mask_token_id=2, **options)
    return target, None if kind is None else tiny_drafter(kind, target, **changes)


def told(out):
    return out.tokens, [(each.drafted, each.accepted, each.next_token) for each in out.rounds]


def both(target, drafter, prompt=PROMPT, **options):
    """Decode by static rounds and by plain ones."""
    return [generate(target, drafter, prompt, cuda_graphs=static, **options) for static in (True, False)]


@pytest.mark.slow
@pytest.mark.usefixtures("_captured")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kind", "changes"), DRAFTERS, ids=str)
def test_static_rounds_give_the_tokens_of_plain_ones(kind, changes, rule):
    """Over texts that end by themselves and texts that do not, one after the other through the same rounds."""
    target, drafter = models(kind, changes)
    for end in (frozenset([0, 11]), frozenset()):
        target.eos_ids = end
        for seed, prompt in enumerate((PROMPT * 9, [5])):
            static, plain = both(target, drafter, prompt, rule=rule, max_new_tokens=30, seed=seed)
            assert told(static) == told(plain)
            assert len(plain.tokens) == 30 or end
    assert len(target.kept) == 2


@pytest.mark.usefixtures("_captured")
@pytest.mark.parametrize("capture", [eagerly, record])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_every_family_and_sampling(family, capture, monkeypatch):
    monkeypatch.setitem(rounds.CAPTURES, "cpu", capture)
    target, drafter = models("dflash", {}, family, dtype=torch.float32, eos=None)
    for options in ({"temperature": 0.7, "top_k": 7}, {"top_p": 0.8, "draft_temperature": 2.0, "num_proposals": 2}):
        static, plain = both(target, drafter, max_new_tokens=30, seed=3, **options)
        assert told(static) == told(plain)


@pytest.mark.usefixtures("_captured")
@pytest.mark.parametrize("kind", [None, pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_texts_fill_the_capacity_to_the_last_place(kind, monkeypatch):
    """Here graphs have no room beyond what was asked for; the last block reaches its end."""
    monkeypatch.setattr(rounds, "rounded_capacity", lambda capacity: capacity)
    target, drafter = models(kind, {}, eos=None)
    for max_new_tokens in (60, 61, 64):
        static, plain = both(target, drafter, max_new_tokens=max_new_tokens)
        assert told(static) == told(plain)


def test_capacities_are_shared_by_many_texts_and_waste_little():
    for capacity in range(1, 70_000, 37):
        assert capacity <= rounded_capacity(capacity) <= max(256, 1.25 * capacity + 256)
    assert len({rounded_capacity(capacity) for capacity in range(1, 70_000)}) < 36


@pytest.mark.usefixtures("_captured")
def test_what_is_shown_of_a_round_outlives_it():
    target, drafter = models("dspark", {}, eos=0)
    seen = []
    for static in (True, False):
        kept = []
        generate(
            target, drafter, PROMPT, seed=4, cuda_graphs=static, on_verdict=lambda *each, kept=kept: kept.append(each)
        )
        seen.append(kept)
    for (proposal, probs, verdict), (other, other_probs, other_verdict) in zip(*seen, strict=True):
        torch.testing.assert_close(proposal.probs, other.probs)
        torch.testing.assert_close(probs, other_probs)
        assert torch.equal(proposal.tokens, other.tokens)
        assert torch.equal(verdict.coins, other_verdict.coins)
        assert torch.equal(verdict.next_token, other_verdict.next_token)


@pytest.mark.usefixtures("_captured")
def test_graphs_are_recorded_once_and_dropped_with_their_weights_or_for_room(monkeypatch):
    target, drafter = models("dflash", {}, eos=None)
    for seed in range(3):
        generate(target, drafter, PROMPT, seed=seed, max_new_tokens=9)
        generate(target, None, PROMPT, seed=seed, max_new_tokens=9)
    first, alone = target.kept.values()
    generate(target, drafter, PROMPT, rule="token", max_new_tokens=9)
    assert len(target.kept) == 3
    with torch.no_grad():
        drafter.fc.weight.mul_(0.5)
    static, plain = both(target, drafter, max_new_tokens=9)
    assert told(static) == told(plain)
    assert first not in target.kept.values()
    assert alone in target.kept.values()
    with torch.no_grad():
        target.head.mul_(0.5)
    static, plain = both(target, drafter, max_new_tokens=9)
    assert told(static) == told(plain)
    assert len(target.kept) == 1
    monkeypatch.setattr(rounds, "KEPT_BYTES", 0)
    generate(target, None, PROMPT, max_new_tokens=9)
    assert len(target.kept) == 1


@pytest.mark.usefixtures("_captured")
def test_a_text_begun_while_another_is_decoded_leaves_it_alone():
    target, drafter = models("dflash", {}, eos=None)
    options = {"max_new_tokens": 12}
    expected = [generate(target, drafter, PROMPT, seed=seed, cuda_graphs=False, **options) for seed in (1, 2)]
    inner = []

    def begin(_round):
        inner.append(generate(target, drafter, PROMPT, seed=2, **options))

    outer = generate(target, drafter, PROMPT, seed=1, on_round=begin, **options)
    assert told(outer) == told(expected[0])
    assert all(told(each) == told(expected[1]) for each in inner)
    (kept,) = target.kept.values()
    assert not kept.lock.locked()


def changed(which, change):
    """Return a recorder whose replay of one phase is not what it should be."""

    def wrong(phases, streams):
        replays = record(phases, streams)
        index = which % len(replays)
        replays[index] = change(replays[index], streams)
        return replays

    return wrong


def not_run(_replay, _streams):
    return lambda: None


def run_twice(replay, _streams):
    return lambda: (replay(), replay())


def with_frozen_numbers(replay, streams):
    """A graph that does not know its random streams repeats its numbers."""
    states = [stream.get_state() for stream in streams]

    def again():
        for stream, state in zip(streams, states, strict=True):
            stream.set_state(state)
        replay()

    return again


def raising(_phases, _streams):
    raise RuntimeError("operation not permitted when stream is capturing")


WRONG = [
    *(changed(phase, not_run) for phase in range(5)),
    *(changed(phase, run_twice) for phase in (1, 3, 4)),
    *(changed(phase, with_frozen_numbers) for phase in (1, 3)),
    raising,
]


@pytest.mark.parametrize("wrong", WRONG, ids=itertools.count())
def test_a_wrong_graph_is_reported_once_and_not_used(wrong, monkeypatch):
    monkeypatch.setattr(selfcheck, "_failures", {})
    monkeypatch.setitem(rounds.CAPTURES, "cpu", wrong)
    target, drafter = models("dflash", {})
    plain = generate(target, drafter, PROMPT, max_new_tokens=20, seed=5, cuda_graphs=False)
    with pytest.warns(
        SelfCheckWarning, match="decoding by CUDA graphs cannot be used on cpu: .* the plain path is used"
    ):
        first = generate(target, drafter, PROMPT, max_new_tokens=20, seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = generate(target, drafter, PROMPT, max_new_tokens=20, seed=5)
    assert told(first) == told(second) == told(plain)
    for strict in ({"cuda_graphs": True}, {}):
        monkeypatch.setenv(STRICT, "1")
        target.kept.clear()
        with pytest.raises(SelfCheckError, match="decoding by CUDA graphs"):
            generate(target, drafter, PROMPT, max_new_tokens=20, seed=5, **strict)


def test_graphs_can_be_turned_off_and_are_refused_where_there_are_none(monkeypatch):
    target, drafter = models("dflash", {})
    with pytest.raises(DecodingError, match="cuda_graphs needs a CUDA device"):
        generate(target, drafter, PROMPT, cuda_graphs=True)
    monkeypatch.setitem(rounds.CAPTURES, "cpu", record)
    monkeypatch.setenv(SWITCH, "0")
    generate(target, drafter, PROMPT, max_new_tokens=9)
    assert not target.kept
    monkeypatch.delenv(SWITCH)
    generate(target, drafter, PROMPT, max_new_tokens=9)
    assert target.kept
    target.use_decoder = False
    before = len(target.kept)
    generate(target, drafter, PROMPT, max_new_tokens=9, seed=1)
    assert len(target.kept) == before
