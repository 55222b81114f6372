"""The laws, by exact enumeration in float64: lossless, and as long as the theory says."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.losses import block_scores
from blockdraft.verification import expected_retention, law
from blockdraft.verification.reference import enumerate_round, reference_law
from blockdraft.verification.rules import acceptance_states, probability_ratio

from toys import DRAFTERS, Toy, chance, toy

CASES = pytest.mark.parametrize(
    ("kind", "zeros", "seed"), [(k, z, s) for k in DRAFTERS for z in (False, True) for s in (0, 1)]
)


def exact(rule: str, case: Toy, **options):
    rule_law = functools.partial(law, rule)
    return enumerate_round(rule_law, case.target, case.drafter, case.vocab_size, case.block_size, **options)


@CASES
@pytest.mark.parametrize("rule", ["token", "block"])
def test_emitted_law_is_the_targets(rule, kind, zeros, seed):
    emitted = exact(rule, toy(kind, zeros=zeros, seed=seed))
    torch.testing.assert_close(emitted.law, emitted.target, atol=1e-12, rtol=0)
    assert emitted.law.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_emits_the_targets_argmax_path(kind):
    case = toy(kind)
    path = []
    for _ in range(case.block_size + 1):
        path.append(int(case.target(tuple(path)).argmax()))
    for x in case.blocks():
        p, q = case.probs(x[None])
        accept, residual = law("greedy", p, q, x[None])
        kept = int(accept[0].argmax())
        assert accept[0, kept] == 1
        emitted = [*x[:kept].tolist(), int(residual[0, kept].argmax())]
        assert emitted == path[: kept + 1]


@CASES
def test_survival_three_ways(kind, zeros, seed):
    """Pr(tau >= i) = E_q[a_i] = E_p[a~_i] = E_p[abar_i]."""
    case = toy(kind, zeros=zeros, seed=seed)
    survival = exact("block", case).survival
    blocks = case.blocks()
    p, q = case.probs(blocks)
    drafted, paths = chance(q, blocks), chance(p, blocks)

    states = acceptance_states(probability_ratio(p[:, :-1], q, blocks))[:, 1:]
    torch.testing.assert_close(drafted @ states, survival, atol=1e-12, rtol=0)

    log_sampled, log_integrated = block_scores(q.log(), p[:, :-1].log(), blocks)
    torch.testing.assert_close(paths @ log_sampled.exp(), survival, atol=1e-12, rtol=0)
    torch.testing.assert_close(paths @ log_integrated.exp(), survival, atol=1e-12, rtol=0)


@CASES
@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
def test_expected_retention_on_drafts_is_the_survival(rule, kind, zeros, seed):
    case = toy(kind, zeros=zeros, seed=seed)
    blocks = case.blocks()
    p, q = case.probs(blocks)
    expected = chance(q, blocks) @ expected_retention(rule, p, q, blocks)
    torch.testing.assert_close(expected, exact(rule, case).survival, atol=1e-12, rtol=0)


@CASES
def test_block_keeps_at_least_as_much_as_token(kind, zeros, seed):
    case = toy(kind, zeros=zeros, seed=seed)
    block, token = exact("block", case).survival, exact("token", case).survival
    assert (block >= token - 1e-12).all()
    if kind == "one-hot":
        torch.testing.assert_close(block, token, atol=1e-12, rtol=0)
    elif not zeros:
        assert block.sum() > token.sum() + 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_blocks_cut_by_kept_tokens_stay_exact(rule, kind):
    """A block may end at EOS (token 2), or where a rule that looks at kept tokens says so."""
    case = toy(kind, seed=3)
    for stop in (lambda prefix: prefix[-1] == 2, lambda prefix: sum(prefix) >= 2):
        emitted = exact(rule, case, stop=stop)
        torch.testing.assert_close(emitted.law, emitted.target, atol=1e-12, rtol=0)


def test_a_longer_block_than_the_vocabulary_allows_to_list_by_hand():
    emitted = exact("block", toy("markov", vocab_size=2, block_size=6, seed=5))
    torch.testing.assert_close(emitted.law, emitted.target, atol=1e-12, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 7),
    length=st.integers(1, 6),
    rule=st.sampled_from(["greedy", "token", "block"]),
)
def test_law_equals_the_loop_reference(seed, vocab_size, length, rule):
    generator = torch.Generator().manual_seed(seed)
    block_size = 6
    p = torch.rand(2, block_size + 1, vocab_size, generator=generator, dtype=torch.float64).softmax(-1)
    q = (3 * torch.rand(2, block_size, vocab_size, generator=generator, dtype=torch.float64)).softmax(-1)
    x = torch.randint(vocab_size, (2, block_size), generator=generator)
    accept, residual = law(rule, p, q, x, torch.tensor([length, block_size]))
    for n, kept in enumerate([length, block_size]):
        expected_accept, expected_residual = reference_law(rule, p[n, : kept + 1], q[n, :kept], x[n, :kept].tolist())
        torch.testing.assert_close(accept[n, : kept + 1], expected_accept, atol=1e-13, rtol=0)
        torch.testing.assert_close(residual[n, : kept + 1], expected_residual, atol=1e-12, rtol=0)
        assert (accept[n, kept + 1 :] == 0).all()
    torch.testing.assert_close(accept.sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(residual.sum(-1), torch.ones(2, block_size + 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("draft", "block_survival"), [((0.3, 0.2), (0.9, 0.83)), ((0.1, 0.2), (0.9, 0.89))], ids=["A", "B"]
)
def test_the_two_token_example_of_the_appendix(draft, block_survival):
    def independent(first, second):
        laws = [torch.tensor([a, 1 - a], dtype=torch.float64) for a in (first, second, 0.5)]
        return lambda prefix: laws[len(prefix)]

    case = Toy(independent(0.2, 0.1), independent(*draft), vocab_size=2, block_size=2)
    block, token = exact("block", case).survival, exact("token", case).survival
    assert block.tolist() == pytest.approx(block_survival, abs=1e-12)
    assert float(block.sum()) == pytest.approx(sum(block_survival), abs=1e-12)
    assert token.tolist() == pytest.approx((0.9, 0.81), abs=1e-12)
    assert float(token.sum()) == pytest.approx(1.71, abs=1e-12)


def test_a_drafter_equal_to_the_target_keeps_every_block():
    case = toy("autoregressive")
    blocks = case.blocks()
    p, _ = case.probs(blocks)
    for rule in ("token", "block"):
        accept, residual = law(rule, p, p[:, :-1], blocks)
        assert (accept[:, -1] == 1).all()
        torch.testing.assert_close(residual[:, -1], p[:, -1])


def test_garbage_beyond_a_blocks_length_is_ignored():
    case = toy("markov")
    blocks = case.blocks()[:4]
    p, q = case.probs(blocks)
    lengths = torch.tensor([0, 1, 2, 3])
    clean = law("block", p, q, blocks, lengths)
    outside = torch.arange(3) >= lengths[:, None]
    dirty_p = torch.cat([p[:, :1], torch.where(outside.unsqueeze(-1), torch.nan, p[:, 1:])], 1)
    dirty = law(
        "block", dirty_p, q.masked_fill(outside.unsqueeze(-1), torch.nan), blocks.masked_fill(outside, -100), lengths
    )
    torch.testing.assert_close(dirty[0], clean[0])
    for n, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(dirty[1][n, : length + 1], clean[1][n, : length + 1])


def test_probabilities_that_rounding_kept_from_summing_to_one():
    """As bfloat16 gives them: the fast law is still the reference's on the same numbers."""
    p = torch.tensor([[0.5, 0.5], [0.9046, 0.0932], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5005, 0.4995], [0.9046, 0.0932]], dtype=torch.float64)
    accept, residual = law("block", p[None], q[None], torch.tensor([[0, 0]]))
    expected = reference_law("block", p, q, [0, 0])
    torch.testing.assert_close(accept[0], expected[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(residual[0], expected[1], atol=1e-12, rtol=0)


def test_an_impossible_draft_token_leaves_the_law_finite():
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    for tokens in ([1, 0], [2, 2], [2, 1]):
        for rule in ("token", "block"):
            accept, residual = law(rule, p, q, torch.tensor([tokens]))
            assert accept.isfinite().all()
            assert residual.isfinite().all()
            torch.testing.assert_close(accept.sum(-1), torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "blok"}, "unknown verification rule"),
        ({"target_probs": torch.rand(2, 3, 4)}, r"target_probs must be \[N, B\+1, V\]"),
        ({"draft_probs": torch.rand(2, 3, 5)}, "needs draft_probs"),
        ({"draft_probs": None}, "needs draft_probs"),
        ({"lengths": torch.tensor([1, 9])}, "lengths must be"),
        ({"target_probs": torch.rand(2, 4, 4)}, "target_probs must be probabilities"),
        ({"draft_probs": torch.rand(2, 3, 4).log_softmax(-1)}, "draft_probs must be probabilities"),
        ({"draft_probs": torch.full((2, 3, 4), torch.nan)}, "draft_probs must be probabilities"),
        ({"draft_tokens": torch.tensor([[0, 1, 2], [0, 1, 7]])}, "outside the vocabulary"),
        ({"draft_tokens": torch.zeros(3, dtype=torch.long)}, r"draft_tokens must be \[N, B\]"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "rule": "block",
        "target_probs": torch.rand(2, 4, 4).softmax(-1),
        "draft_probs": torch.rand(2, 3, 4).softmax(-1),
        "draft_tokens": torch.zeros(2, 3, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        law(**(arguments | change))
