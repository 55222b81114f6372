"""Predicted rounds against the decoding process written out as a tree of all its outcomes."""

import functools

import numpy as np
import pytest
import torch

from blockdraft.data import Completion, Prompt
from blockdraft.decoding import generate
from blockdraft.evaluation import EvaluationError, Protocol, Task
from blockdraft.evaluation.prediction import (
    PredictedText,
    PredictionFile,
    Predictions,
    PredictionSettings,
    Predictor,
    agreement,
    cut_blocks,
    retention,
    walk,
    walk_all,
)
from blockdraft.evaluation.results import write_model
from blockdraft.verification import law

from tiny import tiny_drafter, tiny_target
from toys import toy

END = 0


def tree(toy_, rule, budget, *, one_hot=False):
    """Exact expectation of (rounds, tokens) by following every draft, verdict and correction."""
    size = toy_.block_size

    def draft_probs_of(text):
        found = [toy_.drafter((0,) * (len(text) % 2) + (1,) * i) for i in range(size)]  # depends on where it starts
        return [torch.nn.functional.one_hot(q.argmax(), len(q)).to(q.dtype) for q in found] if one_hot else found

    @functools.cache
    def follow(text):
        if text[-1] == END or len(text) >= budget:
            return np.zeros(2)
        total = np.zeros(2)
        qs = draft_probs_of(text)
        for block in toy_.blocks().tolist():
            chance = float(torch.stack([q[x] for q, x in zip(qs, block, strict=True)]).prod())
            if chance == 0:
                continue
            cut = block.index(END) + 1 if END in block else size
            kept = tuple(block[:cut])
            p = torch.stack([target_law(toy_, text + kept[:i]) for i in range(cut + 1)])[None]
            q = torch.stack(qs[:cut])[None]
            accept, residual = law(rule, p, q, torch.tensor([kept]))
            for k in range(cut + 1):
                weight = chance * float(accept[0, k])
                if weight == 0:
                    continue
                if k and kept[k - 1] == END:
                    total += weight * np.array([1.0, k])
                    continue
                for token in range(toy_.vocab_size):
                    share = weight * float(residual[0, k, token])
                    if share:
                        total += share * (np.array([1.0, k + 1]) + follow((*text, *kept[:k], token)))
        return total

    first = target_law(toy_, ())
    return sum(float(first[token]) * follow((token,)) for token in range(toy_.vocab_size)), draft_probs_of


def target_law(toy_, text):
    return toy_.target(text[-3:])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_expected_rounds_over_all_texts_are_those_of_the_process(rule, zeros, one_hot):
    toy_ = toy("independent", zeros=zeros, seed=3, vocab_size=3, block_size=2)
    budget = 4
    wanted, draft_probs_of = tree(toy_, rule, budget, one_hot=one_hot)
    found = np.zeros(2)

    def texts(text, chance):
        """All texts that the target writes: to the end token, or as far as the last block may reach."""
        if text and (text[-1] == END or len(text) >= budget + toy_.block_size):
            yield text, chance
            return
        for token, p in enumerate(target_law(toy_, text).tolist()):
            if p > 0:
                yield from texts((*text, token), chance * p)

    total = 0.0
    for text, chance in texts((), 1.0):
        total += chance
        num_starts = min(len(text), budget) - 1
        if num_starts < 1:
            continue
        shape = (num_starts, toy_.block_size)
        log_q, log_p, valid = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape, bool)
        agrees = np.zeros(shape, bool)
        for start in range(num_starts):
            qs = draft_probs_of(text[: start + 1])
            for i in range(toy_.block_size):
                at = start + 1 + i
                if at < len(text):
                    valid[start, i] = True
                    agrees[start, i] = int(qs[i].argmax()) == text[at]
                    with np.errstate(divide="ignore"):
                        log_q[start, i] = np.log(float(qs[i][text[at]]))
                    log_p[start, i] = np.log(float(target_law(toy_, text[:at])[text[at]]))
        kept = retention(rule, log_q, log_p, valid)
        if one_hot:  # the general formula says the same
            np.testing.assert_array_equal(kept, agreement(agrees, valid))
        end = len(text) - 1 if text[-1] == END else None
        rounds = walk(kept, end)
        found += chance * np.array([rounds.num, rounds.tokens])
    assert total == pytest.approx(1.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_argmax_drafts_are_kept_up_to_the_first_difference():
    agrees = np.array([[True, False, True], [True, True, True]])
    valid = np.array([[True, True, True], [True, True, False]])
    assert agreement(agrees, valid).tolist() == [[1, 0, 0], [1, 1, 0]]


def test_a_drafter_that_knows_the_text_takes_whole_blocks():
    rounds = walk(np.ones((9, 3)), end=None)  # budget 10: rounds at 0, 4 and 8
    assert (rounds.num, rounds.tokens) == (3, 12)


def test_a_drafter_that_knows_nothing_takes_one_token_a_round():
    rounds = walk(np.zeros((9, 3)), end=9)
    assert (rounds.num, rounds.tokens) == (9, 9)


@pytest.mark.parametrize("end", [None, 0, 3, 8, 9, 11, 12, 40])
def test_many_chains_at_once_are_the_same_chains(end):
    rng = np.random.default_rng(3)
    kept = np.minimum.accumulate(rng.random((5, 9, 4)), 2)
    kept[1], kept[2, 4:, 2:] = 0.0, 0.0
    many = walk_all(kept, end)
    for rounds, each in zip(many, kept, strict=True):
        assert (rounds.num, rounds.tokens) == pytest.approx((walk(each, end).num, walk(each, end).tokens), rel=1e-12)


def test_blocks_cut_to_fewer_proposals_are_shorter_matrices():
    kept = np.minimum.accumulate(np.random.default_rng(4).random((9, 4)), 1)
    for number, rounds in enumerate(walk_all(cut_blocks(kept), 9), 1):
        wanted = walk(kept[:, :number], 9)
        assert (rounds.num, rounds.tokens) == pytest.approx((wanted.num, wanted.tokens), rel=1e-12)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_lengths_of_fewer_proposals_are_those_of_evaluating_again(kind):
    """Where slots do not see each other, a drafter with fewer slots is the same drafter, cut."""
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
    text = generate(target, None, [7, 8, 9], temperature=6.0, max_new_tokens=12, seed=5).tokens  # flat: much is kept
    row = Completion("a#0", [7, 8, 9], text, "length")
    temperatures = {"token": [6.0, 0.0], "block": [6.0, 1.0]}
    found = Predictor(target, drafter, 6.0, 12, 0).predict_cuts(row, temperatures)
    for number in range(1, 5):
        again = Predictor(target, drafter.with_proposals(number), 6.0, 12, 0).predict(row, temperatures)
        for rule, each in found.items():
            cut, whole = each.by_proposals[number - 1], again[rule][0]
            assert (cut.num, cut.tokens) == pytest.approx((whole.num, whole.tokens), rel=1e-9)
    for each in found.values():
        assert each.by_proposals[-1] == each.whole[0]
    assert len({round(cut.num, 1) for cut in found["block"].by_proposals}) == 4  # so that agreement says something


def test_predictions_of_other_weights_or_texts_are_not_reused(tmp_path):
    settings = PredictionSettings(
        drafter="f00d",
        texts="cafe",
        temperature=1.0,
        max_new_tokens=8,
        seed=0,
        draft_temperatures={"block": [0.0, 1.0]},
    )
    file = tmp_path / "f00d-sampled-000.json"
    assert not PredictionFile.is_made(file, settings)
    text = PredictedText(prompt="one/a", rounds={"block": [(3.0, 8.0), (2.5, 8.5)]}, by_proposals={})
    write_model(PredictionFile(settings=settings, texts=[text, text]), file)
    assert PredictionFile.is_made(file, settings)
    for name, other in (("drafter", "beef"), ("texts", "beef"), ("seed", 1), ("draft_temperatures", {"block": [1.0]})):
        assert not PredictionFile.is_made(file, settings.model_copy(update={name: other}))
    task = Task("one", "One", "math", "here", [Prompt("one/a", ("?",))])
    found = Predictions([file], Protocol())
    assert found.of(task, "block", 0.0) == ([16.0], [6.0])  # two turns
    assert found.of(task, "block", 1.0) == ([17.0], [5.0])
    with pytest.raises(EvaluationError, match="the predictions lack one/a"):
        found.of(task, "token", 1.0)


@pytest.mark.parametrize("content", ["{", '{"format": "other"}', '{"settings": {}, "texts": []}'])
def test_damaged_predictions_are_named(tmp_path, content):
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(EvaluationError, match=r"p\.json is damaged"):
        Predictions([file], Protocol())


def test_predictions_that_lack_numbers_are_named():
    settings = PredictionSettings(
        drafter="f00d",
        texts="cafe",
        temperature=1.0,
        max_new_tokens=8,
        seed=0,
        draft_temperatures={"block": [0.0, 1.0]},
    )
    few = PredictedText(prompt="one/a", rounds={"block": [(3.0, 8.0)]}, by_proposals={})
    with pytest.raises(ValueError, match="one/a does not have one prediction for each draft temperature"):
        PredictionFile(settings=settings, texts=[few])
    whole = {"block": [(3.0, 8.0), (2.5, 8.5)]}
    texts = [PredictedText(prompt=f"one/{i}", rounds=whole, by_proposals={"block": [(1.0, 1.0)] * i}) for i in (2, 1)]
    with pytest.raises(ValueError, match="one/1 does not have as many proposals as one/2"):
        PredictionFile(settings=settings, texts=texts)
