import functools

import pytest
import torch

from blockdraft.verification import law, verify
from blockdraft.verification.rules import acceptance_states
from blockdraft.verification.sampler import DRAW_BLOCK, draw, spawn

from toys import toy


def blocks_of(case, num_copies):
    x = torch.tensor([[0, 1, 2], [2, 2, 0], [1, 0, 1]])
    p, q = case.probs(x)
    return p.repeat(num_copies, 1, 1), q.repeat(num_copies, 1, 1), x.repeat(num_copies, 1)


@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
@pytest.mark.parametrize("lengths", [None, (3, 2, 1)])
def test_samples_follow_the_law(rule, lengths):
    """Joint frequencies of (num_accepted, next_token) against the law: chi-square at the 1e-6 level."""
    num_copies = 20_000
    p, q, x = blocks_of(toy("markov", seed=2), num_copies)
    cut = None if lengths is None else torch.tensor(lengths).repeat(num_copies)
    verdict = verify(rule, p, q, x, cut, generator=torch.Generator().manual_seed(7))
    accept, residual = law(rule, p[:3], q[:3], x[:3], None if cut is None else cut[:3])
    for n in range(3):
        cells = verdict.num_accepted[n::3] * 3 + verdict.next_token[n::3]
        observed = torch.bincount(cells, minlength=12).double()
        expected = (accept[n, :, None] * residual[n]).flatten() * num_copies
        assert (observed[expected == 0] == 0).all()
        chi_square = ((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
        assert chi_square < 48  # 11 degrees of freedom at most: Pr < 1e-6


def test_the_same_generator_gives_the_same_verdict():
    p, q, x = blocks_of(toy("markov"), 50)
    first, second = (verify("block", p, q, x, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.num_accepted, second.num_accepted)
    assert torch.equal(first.next_token, second.next_token)


def test_coins_and_recovery_are_separate_streams():
    p, q, x = blocks_of(toy("markov"), 200)
    verdicts = [
        verify(
            "block",
            p,
            q,
            x,
            generator=torch.Generator().manual_seed(3),
            recovery_generator=torch.Generator().manual_seed(s),
        )
        for s in (1, 2)
    ]
    assert torch.equal(verdicts[0].num_accepted, verdicts[1].num_accepted)
    assert not torch.equal(verdicts[0].next_token, verdicts[1].next_token)


def test_recovery_draws_do_not_move_the_coins():
    """The n-th call throws the same coins whatever the recovery stream did in between."""
    p, q, x = blocks_of(toy("markov"), 10)
    coins, recovery = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    run = functools.partial(verify, "block", p, q, x, generator=coins, recovery_generator=recovery)
    before = [run().num_accepted for _ in range(3)]
    coins.manual_seed(3)
    torch.rand(1000, generator=recovery)
    assert all(torch.equal(run().num_accepted, b) for b in before)


def test_by_default_the_recovery_stream_is_spawned_and_not_the_coins_own():
    """After one call the coin generator has moved by the coins and one seed, however many tokens were drawn."""
    p, q, x = blocks_of(toy("markov"), 50)
    used, expected = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    verify("block", p, q, x, generator=used)
    torch.rand(x.shape, generator=expected, dtype=p.dtype)
    torch.randint(2**62, (), generator=expected)
    assert torch.equal(used.get_state(), expected.get_state())


def test_spawned_streams_differ():
    parent = torch.Generator().manual_seed(0)
    first, second = (torch.rand(8, generator=spawn(parent, torch.device("cpu"))) for _ in range(2))
    assert not torch.equal(first, second)


def test_greedy_needs_no_draft_probabilities():
    p, _, x = blocks_of(toy("markov"), 1)
    verdict = verify("greedy", p, None, x)
    accept, residual = law("greedy", p, None, x)
    assert torch.equal(verdict.num_accepted, accept.argmax(-1))
    assert torch.equal(verdict.next_token, residual[torch.arange(3), verdict.num_accepted].argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_probabilities_of_equal_models_keep_the_whole_block(dtype):
    p = torch.randn(4, 6, 1000).softmax(-1).to(dtype)
    x = torch.multinomial(p[:, :-1].float().flatten(0, 1), 1).view(4, 5)
    assert (verify("block", p, p[:, :-1], x).num_accepted == 5).all()


def test_an_empty_block_draws_from_the_target():
    p = torch.tensor([[[0.0, 1.0, 0.0]]])
    verdict = verify("block", p, torch.zeros(1, 0, 3), torch.zeros(1, 0, dtype=torch.long))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [1]


def test_a_draw_inverts_the_distribution_function():
    """Against the definition, row by row: the first token whose cumulated probability exceeds the uniform number."""
    probs = torch.rand(5, 400, 9, generator=torch.Generator().manual_seed(0))
    probs[..., [0, 4, 8]] = 0
    probs /= probs.sum(-1, keepdim=True)
    tokens = draw(probs, torch.Generator().manual_seed(1))
    uniform = torch.rand(5, 400, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    below = probs.double().cumsum(-1)
    expected = (below <= uniform * below[..., -1:]).sum(-1)
    assert torch.equal(tokens, expected)
    assert set(tokens.unique().tolist()) == {1, 2, 3, 5, 6, 7}
    frequency = torch.bincount(draw(probs[:1, :1].expand(1, 40_000, 9)).flatten(), minlength=9) / 40_000
    torch.testing.assert_close(frequency, probs[0, 0], atol=0.015, rtol=0)


def test_a_draw_at_the_upper_end_is_a_token_that_can_be(monkeypatch):
    """The largest uniform number, times a sum that is rounded, must not fall off the end or on an impossible token."""
    probs = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.0, 1.0, 0.0, 0.0]])
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2**-53, dtype=torch.float64))
    assert draw(probs).tolist() == [2, 1]
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape, dtype=torch.float64))
    assert draw(probs).tolist() == [0, 1]


def test_a_draw_from_a_large_vocabulary_inverts_the_distribution_function_too():
    size = 2 * DRAW_BLOCK**2 + 17
    probs = torch.rand(100, size, generator=torch.Generator().manual_seed(0)) ** 40
    probs[:, : DRAW_BLOCK + 3] = 0
    probs[:, 5 * DRAW_BLOCK : 7 * DRAW_BLOCK] = 0
    probs[:, -20:] = 0
    probs /= probs.sum(-1, keepdim=True)
    tokens = draw(probs, torch.Generator().manual_seed(1))
    uniform = torch.rand(100, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    below = probs.double().cumsum(-1)
    assert torch.equal(tokens, (below <= uniform * below[:, -1:]).sum(-1))
    assert len(tokens.unique()) > 66


@pytest.mark.parametrize("share", [0.0, 1 - 2**-53])
def test_a_draw_at_either_end_of_a_large_vocabulary(share, monkeypatch):
    size = 2 * DRAW_BLOCK**2
    probs = torch.zeros(2, size)
    probs[0, [700, 701, 90_000]] = torch.tensor([0.1, 0.2, 0.7])
    probs[1, size - 1] = 1
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, share, dtype=torch.float64))
    assert draw(probs).tolist() == ([700, size - 1] if share == 0 else [90_000, size - 1])


def test_acceptance_states_are_those_of_the_recursion():
    ratio = torch.rand(50, 12, generator=torch.Generator().manual_seed(0)) * 2
    ratio[::5, 3] = 0
    ratio[1::5, 4] = 1e38
    ratio[1::5, 5] = 1e38
    ratio[1::5, 7] = 0  # behind a product that overflows
    states = [torch.ones(50)]
    for i in range(12):
        states.append((states[-1] * ratio[:, i]).clamp(max=1))
    torch.testing.assert_close(acceptance_states(ratio), torch.stack(states, 1))
    assert acceptance_states(ratio[:, :0]).tolist() == [[1]] * 50


@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
def test_after_an_empty_block_the_next_token_follows_the_target(rule):
    p = torch.rand(40, 1, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    x = torch.zeros(40, 0, dtype=torch.long)
    verdict = verify(rule, p, p[:, :0], x, recovery_generator=torch.Generator().manual_seed(2))
    _accept, residual = law(rule, p, p[:, :0], x)
    expected = residual[:, 0].argmax(-1) if rule == "greedy" else draw(p[:, 0], torch.Generator().manual_seed(2))
    assert torch.equal(verdict.next_token, expected)
    assert not verdict.num_accepted.any()
    assert verdict.coins.shape == verdict.thresholds.shape == (40, 0)
