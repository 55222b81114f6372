"""Names, options, the schedule of beta, and objectives of a user's own."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from test_fused import leaves_of, plain_logits, problem, with_leaves

from blockdraft.losses import (
    Annealing,
    Objective,
    TokenObjective,
    block_statistics,
    fused_linear_objective,
    objective,
    objective_names,
    register,
)

from batches import OBJECTIVES, batch


def test_the_papers_six_and_their_rivals_are_known():
    rivals = {"dpace", "dspark", "e2e-tv", "lk-hybrid", "token-bv"}
    assert {"ce", "kl", "rkl", "tv", "lk", "bv", "rounds"} | rivals <= set(objective_names())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: objective("bvv"), "unknown objective 'bvv'; did you mean 'bv'"),
        (lambda: objective("bv", bta=1.0), "unknown option of objective 'bv' 'bta'; did you mean 'beta'"),
        (lambda: objective("ce", beta=1.0), "unknown option of objective 'ce' 'beta'"),
        (lambda: objective("ce", drafter="dflsh"), "did you mean 'dflash'"),
        (lambda: objective("bv", form="exp"), "form must be one of linear, log, population"),
        (lambda: objective("bv", estimator="exact"), "estimator must be one of"),
        (lambda: objective("bv", beta=1.5), r"beta must lie in \[0, 1\]"),
        (lambda: objective("bv", form="linear", beta=0.5), "beta belongs to the log form"),
        (lambda: objective("ce", eta=0.0), "eta must be positive"),
        (lambda: objective("token-bv", form="exp"), "token-bv: form must be one of"),
        (lambda: objective("token-bv", estimator="sampled"), "unknown option of objective 'token-bv' 'estimator'"),
        (lambda: objective("rounds", form="population"), "rounds: form must be one of linear, log"),
        (lambda: objective("rounds", start="here"), "rounds: start must be one of round, anywhere"),
        (lambda: objective("rounds", form="linear", beta=0.5), "rounds: beta belongs to the log form"),
        (lambda: objective("dpace", mix=1.5), r"mix must lie in \[0, 1\]"),
        (lambda: objective("lk-hybrid", decay=-1.0), "decay must not be negative"),
        (lambda: objective("dspark", ce_weight=-0.1), "must not be negative"),
        (lambda: objective("dspark", ce_weight=0.0, l1_weight=0.0), "one of them must be positive"),
        (lambda: objective("bv", length_floor=0.0), "length_floor must be positive, or None"),
        (lambda: objective("bv", ramp_floor=-1.0), "ramp_floor must be positive, or None"),
        (lambda: block_statistics(*batch().arguments()).retention("blok"), "unknown verification rule 'blok'"),
        (lambda: register(type("Nameless", (TokenObjective,), {})), "needs a class attribute `name`"),
        (lambda: register(type("Other", (TokenObjective,), {"name": "bv"})), "there is an objective 'bv' already"),
        (lambda: objective("kl", temperature=0.0), "temperature must be positive"),
        (lambda: Annealing(num_steps=10, share=2.0), "share"),
        (lambda: Annealing(num_steps=10, final=2.0), "beta must stay"),
    ],
)
def test_mistakes_are_answered_with_the_nearest_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_papers_settings_per_drafter():
    assert objective("ce", drafter="dflash").eta == 7.0
    assert objective("lk", drafter="dspark").eta == 4.0
    assert objective("bv", drafter="dflash").ramp_floor == 1e-6
    assert objective("bv", drafter="dspark").ramp_floor is None
    assert objective("bv", drafter="dflash", ramp_floor=None).ramp_floor is None


def test_an_objective_describes_itself_completely():
    described = objective("bv", drafter="dflash", beta=0.25).describe()
    assert described == {
        "name": "bv",
        "temperature": 1.0,
        "form": "log",
        "estimator": "integrated",
        "beta": 0.25,
        "summand_floor": -80.0,
        "length_floor": 1e-6,
        "ramp_floor": 1e-6,
        "control_variate": False,
    }


def test_an_objective_is_made_again_from_its_description():
    for name, options in OBJECTIVES:
        made = objective(name, drafter="dspark", temperature=0.7, **options)
        described = made.describe()
        assert described["name"] == name
        assert described["temperature"] == 0.7
        assert options.items() <= described.items()
        assert objective(**described) == made


def test_annealing_is_the_papers_by_default():
    schedule = Annealing(num_steps=12)
    betas = []
    for _ in range(12):
        betas.append(schedule.beta)
        schedule.advance()
    assert betas == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1, 1, 1, 1])
    assert [schedule.beta_at(step) for step in range(12)] == betas


def test_annealing_resumes():
    schedule = Annealing(num_steps=12, share=1.0, final=0.8)
    for _ in range(5):
        schedule.advance()
    resumed = Annealing(num_steps=12, share=1.0, final=0.8)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.beta == schedule.beta == pytest.approx(0.8 * 5 / 12)


def test_annealing_applies_to_every_log_form_with_a_beta():
    schedule = Annealing(num_steps=4, step=1)
    for name in ("bv", "token-bv"):
        assert schedule.apply(objective(name)).beta == pytest.approx(0.5)
    assert Annealing(num_steps=4, share=0.0).apply(objective("bv", beta=0.2)).beta == 1.0
    for other in (objective("ce"), objective("bv", form="linear"), objective("token-bv", form="population")):
        assert schedule.apply(other) is other


@dataclass(frozen=True, kw_only=True)
class JensenShannon(TokenObjective):
    """An objective that no built-in sum expresses, from raw log-probabilities."""

    name: ClassVar[str] = "jsd"

    def position_loss(self, blocks):
        log_q, log_p = blocks.rows.differentiable_draft_log_probs, blocks.rows.target_log_probs
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        jsd = 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)
        return jsd.view_as(blocks.log_q)


@dataclass(frozen=True, kw_only=True)
class Hybrid(Objective):
    """Named sums and raw log-probabilities together, not a position-wise mean."""

    name: ClassVar[str] = "hybrid"

    def sums(self, blocks):
        log_q = blocks.rows.differentiable_draft_log_probs
        entropy = -(log_q.exp() * log_q).sum(-1)
        total = blocks.kl + 0.3 * entropy.view_as(blocks.kl) - blocks.log_integrated
        return blocks.sum_over_valid(total) ** 2, blocks.num_valid


@pytest.mark.parametrize("custom", [JensenShannon(temperature=1.2), Hybrid(temperature=0.9)])
def test_an_objective_of_ones_own_works_plain_and_fused(custom):
    small = batch(num_blocks=3, block_size=3, vocab_size=4).leaf()
    assert torch.autograd.gradcheck(
        lambda draft: custom(draft, small.target, small.labels, small.valid).loss, small.draft, eps=1e-7, atol=1e-6
    )
    data = problem()
    fast, slow = with_leaves(data), with_leaves(data)
    value = fused_linear_objective(custom, **fast, chunk_blocks=2)
    expected = custom(*plain_logits(slow), slow["labels"], slow["valid"])
    torch.testing.assert_close(value.loss.detach(), expected.loss.detach())
    value.loss.backward()
    expected.loss.backward()
    for got, want in zip(leaves_of(fast), leaves_of(slow), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_statistics_against_their_definitions():
    data = batch(num_blocks=20, masked=False, dtype=torch.float64)
    stats = block_statistics(*data.arguments())
    p, q = data.target.softmax(-1), data.draft.softmax(-1)
    greedy, token, block, accuracy, agreement = ([] for _ in range(5))
    for n in range(20):
        alive, kept, r, lowest = True, 1.0, 1.0, 1.0
        for i in range(5):
            y = int(data.labels[n, i])
            alive = alive and int(p[n, i].argmax()) == int(q[n, i].argmax())
            greedy.append(float(alive))
            token.append(kept * float(torch.minimum(p[n, i], q[n, i]).sum()))
            block.append(float(torch.minimum(lowest * p[n, i], r * q[n, i]).sum()))
            accuracy.append(float(int(q[n, i].argmax()) == y))
            agreement.append(float(int(p[n, i].argmax()) == int(q[n, i].argmax())))
            ratio = float(q[n, i, y] / p[n, i, y])
            kept, r = kept * min(1.0, ratio), r * ratio
            lowest = min(lowest, r)
    for rule, values in (("greedy", greedy), ("token", token), ("block", block)):
        retention = torch.tensor(values).view(20, 5).mean(0)
        torch.testing.assert_close(stats.retention(rule).float(), retention)
        assert float(stats.expected_length(rule)) == pytest.approx(float(retention.sum()), rel=1e-5)
    assert float(stats.token_accuracy) == pytest.approx(sum(accuracy) / 100)
    assert float(stats.argmax_agreement) == pytest.approx(sum(agreement) / 100)


def test_statistics_add_up():
    data = batch(num_blocks=6)
    whole = block_statistics(*data.arguments())
    halves = [
        block_statistics(data.draft[s], data.target[s], data.labels[s], data.valid[s]) for s in (slice(2), slice(2, 6))
    ]
    total = halves[0] + halves[1]
    for rule in ("greedy", "token", "block"):
        torch.testing.assert_close(total.retention(rule), whole.retention(rule))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 200])
def test_ties_in_the_argmax_go_to_the_first(vocab_size):
    draft = torch.randint(0, 3, (7, 4, vocab_size)).double()
    labels = draft.argmax(-1)
    assert float(block_statistics(draft, draft, labels).token_accuracy) == 1
