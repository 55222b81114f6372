"""A reduced draft vocabulary: chosen from the texts, trained exactly, drafted losslessly."""

import numpy as np
import pytest
import torch

from blockdraft.data import Completion, TextDataset
from blockdraft.decoding import generate
from blockdraft.drafters import load_drafter
from blockdraft.evaluation.prediction import Predictor
from blockdraft.recipes import RecipeError
from blockdraft.training.initialization import choose_draft_ids, coverage

from runs import make_data, recipe, target, train, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "d")


def texts(*responses):
    return TextDataset.of([Completion(f"t{i}#0", [0, 1], list(r), "stop") for i, r in enumerate(responses)])


def test_the_most_frequent_tokens_are_chosen_by_number_or_by_share():
    dataset = texts([5, 5, 5, 7, 7, 9], [5, 7, 3, 2])  # four 5, three 7, one each of 2, 3 and 9
    assert choose_draft_ids(dataset, 12, 2).tolist() == [5, 7]
    assert choose_draft_ids(dataset, 12, 3).tolist() == [2, 5, 7]  # of equally frequent ones, the smallest id
    assert choose_draft_ids(dataset, 12, 0.4).tolist() == [5]
    assert choose_draft_ids(dataset, 12, 0.41).tolist() == [5, 7]
    assert choose_draft_ids(dataset, 12, 99).tolist() == list(range(12))


def test_coverage_bounds_the_length_by_the_first_token_that_is_missing():
    found = coverage(texts([1, 1, 2, 1, 1, 1, 1]), np.array([1]), 5, 3)
    assert found.share == pytest.approx(6 / 7)
    # blocks of three after each anchor 0 .. 3: [1 2 1] -> 1, [2 1 1] -> 0, [1 1 1] -> 3, [1 1 1] -> 3
    assert found.longest == pytest.approx((1 + 0 + 3 + 3) / 4)
    assert "1 tokens cover 85.71%" in str(found)


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
@pytest.mark.parametrize("objective", [pytest.param("ce", marks=pytest.mark.slow), "bv"])
def test_all_tokens_as_a_reduced_vocabulary_share_the_trajectory_of_the_whole(tmp_path, data, kind, objective):
    options = [f"drafter.kind={kind}", f"objective.name={objective}"]
    whole = train(data, tmp_path / "whole", *options)
    reduced = train(data, tmp_path / "reduced", *options, "drafter.vocab_size=100000")
    found = weights(reduced)
    assert found.pop("draft_ids").tolist() == list(range(whole.target.vocab_size))
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_fused_plain_online_and_cached_agree_over_fewer_tokens(tmp_path, data, kind):
    options = [f"drafter.kind={kind}", "drafter.vocab_size=12"]
    fused = train(data, tmp_path / "fused", *options)
    assert fused.coverage.num_tokens == 12
    assert fused.drafter.head(fused.target).shape[0] == 12
    plain = train(data, tmp_path / "plain", *options, "runtime.fused=false")
    cached = train(data, tmp_path / "cached", *options, "data.features=cached", f"data.cache={tmp_path / 'cache'}")
    for other in (plain, cached):
        for name, tensor in weights(fused).items():
            torch.testing.assert_close(weights(other)[name], tensor, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_reduced_drafter_decodes_losslessly_and_proposes_only_its_tokens(tmp_path, data, kind):
    model = target()
    trainer = train(data, tmp_path, f"drafter.kind={kind}", "drafter.vocab_size=10")
    drafter = load_drafter(trainer.run.checkpoint("last"), model)
    assert torch.equal(drafter.draft_ids, trainer.drafter.draft_ids)
    alone = generate(model, None, [5, 6, 7], rule="greedy", max_new_tokens=40)
    seen = []
    together = generate(
        model, drafter, [5, 6, 7], rule="greedy", max_new_tokens=40, on_verdict=lambda p, *_: seen.append(p)
    )
    assert together.tokens == alone.tokens
    own = set(drafter.draft_ids.tolist())
    generate(model, drafter, [5, 6, 7], max_new_tokens=40, seed=1, on_verdict=lambda p, *_: seen.append(p))
    assert {token for proposal in seen for token in proposal.tokens.flatten().tolist()} <= own
    for proposal in seen:
        outside = torch.ones(model.vocab_size, dtype=torch.bool)
        outside[drafter.draft_ids] = False
        assert (proposal.probs[..., outside] == 0).all()
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(proposal.probs.shape[:2]))


def test_predictions_know_that_other_tokens_end_a_round(tmp_path, data):
    model = target()
    trainer = train(data, tmp_path, "drafter.vocab_size=1", "optimizer.max_steps=2")
    drafter = load_drafter(trainer.run.checkpoint("last"), model)
    (only,) = drafter.draft_ids.tolist()
    response = [token for token in range(5, 25) if token != only]
    row = Completion("t#0", [5, 6], response, "length")
    predictor = Predictor(model, drafter, 1.0, len(response), 0)
    (rounds,) = predictor.predict(row, {"block": [1.0]})["block"]
    assert rounds.tokens / rounds.num == pytest.approx(1.0, abs=0.02)  # but for what lies beyond the budget


def test_a_number_that_is_no_number_of_tokens_is_refused(data):
    with pytest.raises(RecipeError, match="a whole number of tokens, or a share below 1"):
        recipe(data, "drafter.vocab_size=2.5")
    with pytest.raises(RecipeError, match="greater than 0"):
        recipe(data, "drafter.vocab_size=0")
