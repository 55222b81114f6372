"""Wrong verifiers that look right. Enumeration must tell each of them from the real one."""

import functools

import pytest
import torch

from blockdraft.verification import law
from blockdraft.verification.reference import enumerate_round
from blockdraft.verification.rules import Coins, coins, drafted, probability_ratio, residual_law

from toys import DRAFTERS, Toy, toy


def residuals(blocks, state):
    counts = torch.arange(blocks.p.shape[1]).expand(blocks.p.shape[0], -1)
    return residual_law("block", blocks, state, counts)


def mutant(decide):
    """A law whose coins ``decide(blocks, true_coins)`` replaces."""

    def wrong(p, q, tokens, lengths):
        blocks = drafted("block", p, q, tokens, lengths)
        decided = decide(blocks, coins("block", blocks))
        return decided.accept_law(), residuals(blocks, decided.state)

    return wrong


def state_as_coin(blocks, true):
    """Coins a_i in place of h_i."""
    return Coins(torch.where(blocks.inside, true.state[:, 1:], 0), true.state, last_success=True)


def stop_at_first_failure(_, true):
    """Right coins, but no scanning on after a failed one."""
    return Coins(true.threshold, true.state, last_success=False)


def no_clip(blocks, _):
    """a_i = prod p/q, clipped only at the end."""
    ratio = probability_ratio(blocks.p[:, :-1], blocks.q, blocks.tokens)
    product = torch.nn.functional.pad(ratio.cumprod(-1), (1, 0), value=1.0)
    a = product[:, 1:]
    mass = (a[:, :-1].unsqueeze(-1) * blocks.p[:, 1:-1] - blocks.q[:, 1:]).clamp(min=0).sum(-1)
    h = a.clamp(max=1).clone()
    h[:, :-1] = (mass / (mass + 1 - a[:, :-1])).nan_to_num(1.0).clamp(0, 1)
    return Coins(torch.where(blocks.inside, h, 0), product, last_success=True)


def shared_uniform(p, q, tokens, lengths):
    """One uniform for all coins: Pr(tau >= k) = max over i >= k of h_i."""
    blocks = drafted("block", p, q, tokens, lengths)
    true = coins("block", blocks)
    at_least = true.threshold.flip(-1).cummax(-1).values.flip(-1)
    at_least = torch.nn.functional.pad(torch.nn.functional.pad(at_least, (1, 0), value=1.0), (0, 1))
    return at_least[:, :-1] - at_least[:, 1:], residuals(blocks, true.state)


def token_residual(p, q, tokens, lengths):
    """Block acceptance followed by the residual of token verification."""
    accept, _ = law("block", p, q, tokens, lengths)
    _, residual = law("token", p, q, tokens, lengths)
    return accept, residual


def mass_at_own_position(blocks, true):
    """Z_i from position i in place of the position ahead."""
    a = true.state[:, 1:]
    mass = (a.unsqueeze(-1) * blocks.p[:, :-1] - blocks.q).clamp(min=0).sum(-1)
    h = (mass / (mass + 1 - a)).nan_to_num(1.0)
    h[:, -1] = a[:, -1]
    return Coins(torch.where(blocks.inside, h, 0), true.state, last_success=True)


def error(wrong, case: Toy, **options) -> float:
    emitted = enumerate_round(wrong, case.target, case.drafter, case.vocab_size, case.block_size, **options)
    return float((emitted.law - emitted.target).abs().sum())


MUTANTS = {
    "coins a instead of h": mutant(state_as_coin),
    "stop at the first failed coin": mutant(stop_at_first_failure),
    "no clip at every step": mutant(no_clip),
    "one uniform for all coins": shared_uniform,
    "token residual with the block tau": token_residual,
    "Z at its own position": mutant(mass_at_own_position),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("kind", [k for k in DRAFTERS if k != "one-hot"])
def test_enumeration_catches(name, kind):
    assert error(MUTANTS[name], toy(kind, seed=1)) > 5e-4


def test_the_scaffold_of_the_mutants_is_exact_when_nothing_is_mutated():
    assert error(mutant(lambda _, true: true), toy("markov", seed=1)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_enumeration_catches_q_reported_at_another_temperature(rule):
    case = toy("markov", seed=1)

    def cooler(prefix):
        return (case.drafter(prefix).log() / 0.7).softmax(-1)

    assert error(functools.partial(law, rule), case, reported=cooler) > 2e-2


@pytest.mark.parametrize("rule", ["token", "block"])
def test_enumeration_catches_a_cut_that_looked_at_the_dropped_token(rule):
    """The block is cut before token 2, which one knows only by having drawn it."""

    def wrong(p, q, tokens, lengths):
        is_dropped = (tokens[0] == 2).nonzero().flatten()
        length = int(is_dropped[0]) if len(is_dropped) else int(lengths[0])
        return law(rule, p, q, tokens, torch.tensor([length]))

    assert error(wrong, toy("markov", seed=1)) > 2e-2


def test_one_draw_for_a_token_and_its_coin_is_biased():
    """Why the streams are separate: token verification with the token's own uniform as its coin emits another law."""
    p, q = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.tensor([0.6, 0.4], dtype=torch.float64)
    grid = (torch.arange(6000, dtype=torch.float64) + 0.5) / 6000
    tokens = (grid >= q[0]).long()
    keep = grid < (p / q)[tokens].clamp(max=1)
    residual = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    emitted = torch.stack(
        [(keep & (tokens == v)).double().mean() + (~keep).double().mean() * residual[v] for v in (0, 1)]
    )
    assert (emitted - p).abs().sum() > 0.05
