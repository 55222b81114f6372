import functools

import pytest
import torch

from blockdraft.verification import law, verify
from blockdraft.verification.sampler import spawn

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
