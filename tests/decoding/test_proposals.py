"""The number of proposals: the choice on costs and lengths made by hand, and what is measured for it."""

import math
from collections import Counter
from copy import deepcopy
from itertools import product

import pytest
import torch

from blockdraft.decoding import (
    AdaptiveProposals,
    DecodingError,
    RoundCosts,
    best_num_proposals,
    choose_num_proposals,
    generate,
    measure_costs,
)
from blockdraft.decoding.proposals import costs_file, lengths_of, measure_lengths, round_costs, tokens_per_second
from blockdraft.verification import law

from tiny import EOS, tiny_drafter, tiny_target


def costs(*seconds):
    """Rounds that take so long with 0, 1, .. proposals, all of it the target's."""
    none = (0.0,) * len(seconds)
    return RoundCosts(none, tuple(map(float, seconds)), none)


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


def test_lengths_are_one_and_the_sum_of_what_is_kept():
    assert lengths_of([0.5, 0.25, 0.25]) == [1.5, 1.75, 2.0]


@pytest.mark.parametrize(
    ("seconds", "retention", "best"),
    [
        ((1, 1, 1, 1), (0.9, 0.8, 0.7), 3),  # a longer pass costs nothing: propose all
        ((1, 2, 3, 4), (0.9, 0.8, 0.7), 1),  # every token costs as much as a round: speculation does not pay
        ((1, 1.1, 1.2, 1.3), (1.0, 1.0, 1.0), 3),
        ((1, 1.1, 1.2, 1.3), (0.9, 0.1, 0.1), 1),  # 1.9 / 1.1 = 1.727 beats 2.0 / 1.2 and 2.1 / 1.3
        ((1, 1, 5, 1), (0.5, 0.5, 0.1), 3),  # a step in the costs is seen
        ((1, 1, 1, 1), (0.5, 0.0, 0.0), 1),  # of equal speeds the smallest number
    ],
)
def test_the_best_number_by_hand(seconds, retention, best):
    chosen = best_num_proposals(costs(*seconds), lengths_of(retention))
    assert chosen.num_proposals == best
    speeds = [length / took for length, took in zip([1.0, *lengths_of(retention)], seconds, strict=True)]
    assert chosen.tokens_per_second == pytest.approx(speeds)
    assert chosen.speedup == pytest.approx(speeds[best] * seconds[0])


def test_all_phases_count():
    timed = RoundCosts((0.0, 1.0, 1.5), (2.0, 2.0, 3.0), (0.5, 0.5, 0.5))
    assert timed.seconds == (2.5, 3.5, 5.0)
    assert tokens_per_second(timed, [2.0, 3.0]) == pytest.approx((1 / 2.5, 2 / 3.5, 3 / 5))


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(ValueError, match="2 lengths do not belong"):
        best_num_proposals(costs(1, 1, 1, 1), [1.5, 2.0])
    with pytest.raises(ValueError, match="same numbers"):
        RoundCosts((0.0, 1.0), (1.0,), (0.0, 0.0))
    with pytest.raises(ValueError, match="none is negative"):
        RoundCosts((0.0, -1.0), (1.0, 3.0), (0.0, 0.0))
    with pytest.raises(ValueError, match="no time at all"):
        RoundCosts((0.0, 1.0), (0.0, 1.0), (0.0, 0.0))


def test_costs_are_measured_for_every_number(target):
    found = measure_costs(target, tiny_drafter("dflash", target), [[7, 8, 9]], seconds=0.0, min_rounds=1)
    assert found.num_proposals == 4
    assert found.draft[0] < min(found.draft[1:])  # nothing is drafted where nothing is proposed
    assert min(found.verify) > 0


def test_a_target_that_always_ends_at_once_is_said(target):
    with pytest.raises(DecodingError, match="too early"):
        measure_costs(tiny_target(eos=list(range(40))), tiny_drafter("dflash", target), [[7]], max_sweeps=3)
    assert EOS in target.eos_ids


def test_lengths_under_greedy_verification_are_those_of_decoding(target):
    drafter = tiny_drafter("dflash", target)
    out = generate(target, drafter, [7, 8], rule="greedy", max_new_tokens=40)
    found = measure_lengths(target, drafter, [[7, 8]], rule="greedy", max_new_tokens=40)
    for number, length in enumerate(found, 1):
        kept = [min(each.accepted, number) for each in out.rounds]
        assert length == pytest.approx(1 + sum(kept) / len(kept))


def test_costs_are_remembered_per_models_and_machine(target, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drafter, asked = tiny_drafter("dflash", target), []

    def measure(*_, **__):
        asked.append(1)
        return costs(1, 2, 3, 4, 5)

    monkeypatch.setattr("blockdraft.decoding.proposals.measure_costs", measure)
    for _ in range(2):
        assert round_costs(target, drafter, [[7]]) == costs(1, 2, 3, 4, 5)
    assert len(asked) == 1
    others = [
        costs_file(target, drafter, "token"),
        costs_file(target, tiny_drafter("dspark", target), "block"),
        costs_file(tiny_target(dtype=torch.float32, num_layers=7), drafter, "block"),
        costs_file(target, drafter.with_proposals(3), "block"),
    ]
    assert len({costs_file(target, drafter, "block"), *others}) == 5
    for content in ("[]", "3", "[" * 100_000, '{"draft": 3}', '{"draft": [0, 0], "verify": [0, 0], "rest": [0, 0]}'):
        costs_file(target, drafter, "block").write_text(content)
        assert round_costs(target, drafter, [[7]]) == costs(1, 2, 3, 4, 5)  # measured again, and kept
    assert len(asked) == 6
    other_weights = tiny_drafter("dflash", target, seed=2)
    assert costs_file(target, drafter, "block") == costs_file(target, other_weights, "block")


def test_the_choice_from_given_numbers_runs_no_model(target):
    drafter = tiny_drafter("dflash", target)
    chosen = choose_num_proposals(target, drafter, [], lengths=[1.9, 2.0, 2.0, 2.0], costs=costs(1, 1, 1.2, 1.3, 1.4))
    assert chosen.num_proposals == 1


def test_adaptive_proposals_follow_what_was_kept():
    cheap, dear = costs(1, 1.05, 1.1, 1.15, 1.2), costs(1, 1.8, 2.6, 3.4, 4.2)
    assert AdaptiveProposals(cheap).next() == 4
    assert AdaptiveProposals(dear).next() == 1
    policy = AdaptiveProposals(costs(1, 1.3, 1.6, 1.9, 2.2), alpha=0.5, prior=2.0, memory=0.5)
    policy.update(4, 3)
    assert (policy.kept, policy.rejected) == (0.5 + 3, 0.5 + 1)
    policy.update(2, 2)
    assert (policy.kept, policy.rejected) == (1.75 + 2, 0.75)
    found = []
    for accepted in (4, 4, 4, 4, 0, 0, 0, 0):
        policy.update(4, accepted)
        found.append(policy.next())
    assert found[3] == 4
    assert found[-1] == 1
    assert found[4:] == sorted(found[4:], reverse=True)


class Script(AdaptiveProposals):
    """Proposes given numbers in turn, and notes what came of them."""

    def __init__(self, *numbers):
        super().__init__(costs(1, 1, 1, 1, 1))
        self.numbers, self.seen = list(numbers), []

    def next(self):
        return self.numbers[len(self.seen) % len(self.numbers)]

    def update(self, proposed, accepted):
        self.seen.append((proposed, accepted))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_every_round_proposes_what_it_is_told_to(target, kind):
    drafter, lengths = tiny_drafter(kind, target), set()
    for seed in range(6):
        script = Script(3, 1, 4, 2)
        out = generate(target, drafter, [7, 8], max_new_tokens=40, num_proposals=script, seed=seed)
        assert script.seen == [(len(each.drafted), each.accepted) for each in out.rounds]
        for number, each in enumerate(out.rounds):
            asked = script.numbers[number % 4]
            assert len(each.drafted) == asked or (len(each.drafted) < asked and each.drafted[-1] == EOS)
            lengths.add(len(each.drafted))
    assert lengths == {1, 2, 3, 4}
    alone = generate(target, None, [7, 8], rule="greedy", max_new_tokens=40)
    greedy = generate(target, drafter, [7, 8], rule="greedy", max_new_tokens=40, num_proposals=Script(3, 1, 4, 2))
    assert greedy.tokens == alone.tokens


def test_adaptive_proposals_need_a_drafter_that_can_make_them(target):
    with pytest.raises(DecodingError, match="there is none"):
        generate(target, None, [7], num_proposals=Script(1))
    with pytest.raises(DecodingError, match="between 1 and 3, the most that this drafter can propose; it is 4"):
        generate(target, tiny_drafter("dflash", target).with_proposals(3), [7], num_proposals=Script(1))
    with pytest.raises(DecodingError, match="not recorded as CUDA graphs"):
        generate(target, tiny_drafter("dflash", target), [7], num_proposals=Script(1), cuda_graphs=True)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_texts_with_adaptive_proposals_have_the_targets_law(rule):
    """All blocks, coins and next tokens are enumerated; a number that looks at a token it drops is not lossless."""
    torch.manual_seed(0)
    tokens, num_tokens = 2, 3
    p = {prefix: torch.rand(tokens, dtype=torch.float64) for n in range(6) for prefix in product((0, 1), repeat=n)}
    q = {prefix: torch.rand(tokens, dtype=torch.float64) for prefix in p}
    p, q = ({prefix: each / each.sum() for prefix, each in table.items()} for table in (p, q))
    chosen = set()

    def texts(prefix, policy, peeks):
        if len(prefix) >= num_tokens:
            return {prefix[:num_tokens]: 1.0}
        found = Counter()
        for block in product(range(tokens), repeat=2):
            number = policy.next()
            chosen.add(number)
            if peeks:
                number = 1 + (block[1] == 0)
            chance = math.prod(float(q[prefix + block[:i]][block[i]]) for i in range(2))
            rows = [torch.stack([table[prefix + block[:i]] for i in range(number + end)])[None]
                    for table, end in ((p, 1), (q, 0))]  # fmt: skip
            accept, residual = law(rule, *rows, torch.tensor([block[:number]]))
            for k, token in product(range(number + 1), range(tokens)):
                later = deepcopy(policy)
                later.update(number, k)
                weight = chance * float(accept[0, k] * residual[0, k, token])
                for text, after in texts((*prefix, *block[:k], token), later, peeks).items():
                    found[text] += weight * after
        return found

    def distance(peeks):
        begun = AdaptiveProposals(costs(1, 1.5, 2.0), alpha=0.6, prior=1.0)
        found = texts((), begun, peeks)
        wanted = {text: math.prod(float(p[text[:i]][text[i]]) for i in range(num_tokens)) for text in found}
        assert sum(found.values()) == pytest.approx(1)
        return max(abs(found[text] - wanted[text]) for text in wanted)

    assert distance(peeks=False) < 1e-12
    assert chosen == {1, 2}
    assert distance(peeks=True) > 1e-3
