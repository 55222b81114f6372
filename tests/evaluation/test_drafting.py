"""Drafters at work: traces tell the verdict, conversations end in time, dynamics are those of fixed blocks."""

import numpy as np
import pytest
import torch

from blockdraft.data import Completion, Prompt, TextDataset, open_dataset
from blockdraft.evaluation import (
    Evaluation,
    EvaluationError,
    Protocol,
    load_candidates,
    read_results,
    read_traces,
)
from blockdraft.evaluation.drafting import _texts, converse, fixed_blocks, measure_checkpoint, training_dynamics
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.targets import load_target

import runs
from evaluating import B, bigram_target, equal_drafter, evaluate, sharpened_drafter, tasks
from tiny import EOS, tiny_target


@pytest.mark.slow
def test_traces_tell_the_verdict(tmp_path):
    target = bigram_target(eos=EOS)
    evaluate(target, {"sure": sharpened_drafter(target, 2.0)}, tmp_path)
    traces = read_traces(tmp_path)
    assert [prompt.task for prompt in traces.prompts] == ["one", "two"]
    seen = 0
    for prompt in traces.prompts:
        assert {trace.rule for trace in prompt.traces} == {"token", "block"}
        for trace in prompt.traces:
            tokens, text = [], trace.first_text
            for each in trace.rounds:
                text += "".join(token.text for token in each.drafted[: each.accepted]) + (each.next_text or "")
                tokens += [token.id for token in each.drafted[: each.accepted]]
                tokens += [] if each.next_id is None else [each.next_id]
            assert text.endswith(target.decode(tokens, skip_special_tokens=False))
            for each in trace.rounds:
                successes = [token.coin < token.threshold for token in each.drafted]
                if trace.rule == "block":
                    assert each.accepted == max((i + 1 for i, good in enumerate(successes) if good), default=0)
                    alpha = 1.0
                    for token in each.drafted:
                        alpha = min(1.0, alpha * token.p / token.q)
                        assert token.alpha == pytest.approx(alpha, rel=1e-4)
                else:
                    assert each.accepted == each.token_accepted
                    assert each.accepted == ([*successes, False]).index(False)
                kept = [token.coin < token.token_threshold for token in each.drafted]
                assert each.token_accepted == ([*kept, False]).index(False)
                for token in each.drafted:
                    assert token.token_threshold == pytest.approx(min(1.0, token.p / token.q), rel=1e-4)
                assert (each.next_id is None) == (each.accepted > 0 and each.drafted[each.accepted - 1].id == EOS)
                seen += 1
    assert seen > 10


def test_pieces_of_a_character_wait_for_its_last_one():
    target = load_target("pocket")
    tokens = target.encode("a 🦙 b")
    assert any("\N{REPLACEMENT CHARACTER}" in target.decode([token]) for token in tokens)
    texts = _texts(target, [], tokens)
    assert "".join(texts) == "a 🦙 b"
    assert "" in texts
    for cut in range(len(tokens)):
        assert "".join(_texts(target, [], tokens[:cut]) + _texts(target, tokens[:cut], tokens[cut:])) == "a 🦙 b"


def test_a_conversation_that_outgrows_the_target_ends_early():
    target = tiny_target(dtype=torch.float32, eos=None)
    long = Prompt("p", ("w5 w6", "w7 " * 20, "w8"))
    way = DecodingSetup(None, "greedy", 0.0)
    answers = converse(target, None, long, way, temperature=1.0, max_new_tokens=24, max_length=64, seed=0)
    assert len(answers) == 1


def test_what_stands_against_dynamics_is_said_and_no_more(tmp_path, capsys):
    data = runs.make_data(tmp_path / "data")
    trainer = runs.train(data, tmp_path / "run", "logging.keep_epoch_checkpoints=true")
    next(data.glob("*.parquet")).unlink()
    candidates = load_candidates([str(tmp_path / "run")], trainer.target)
    few = Protocol(rules=("greedy",), max_new_tokens=8, num_bootstrap=5, num_traces=0, dynamics_texts=4)
    results = Evaluation(trainer.target, candidates, tasks(2), few, tmp_path / "out").run()
    assert results.dynamics == []
    assert read_results(tmp_path / "out") == results
    assert "no training dynamics of run: " in capsys.readouterr().err
    assert results.drafters[0].checkpoint in ("best", "last")


def test_dynamics_of_a_run_that_kept_its_epochs(tmp_path):
    data = runs.make_data(tmp_path / "data")
    trainer = runs.train(data, tmp_path / "run", "logging.keep_epoch_checkpoints=true")
    target = trainer.target
    found = load_candidates([str(tmp_path / "run")], target)[0]
    assert (found.name, found.label, found.objective) == ("run", "BV", "bv")
    dynamics = training_dynamics("run", found.run, target, num_texts=9, blocks_per_text=3, seed=1)
    again = training_dynamics("run", found.run, target, num_texts=9, blocks_per_text=3, seed=1)
    assert dynamics == again
    other = training_dynamics("run", found.run, target, num_texts=9, blocks_per_text=3, seed=2)
    accuracies, others = ([point.accuracy for point in each.points] for each in (dynamics, other))
    assert accuracies == others, "the contexts are the same, whatever the seed"
    assert [point.epoch for point in dynamics.points] == [1.0, 2.0]
    assert (dynamics.num_texts, dynamics.num_blocks) == (9, 27)
    assert all(0 <= point.accuracy <= 1 and 0 <= point.draft_length <= B for point in dynamics.points)


def test_dynamics_take_full_blocks_of_as_many_texts_as_asked_for_or_none():
    lengths = [3, 4, 6, 7, 9, 30]  # with blocks of 4: -, 0, 2, 3, 5 and 26 anchors
    texts = TextDataset.of([Completion(f"t{i}#0", [5] * 7, [6] * length, "stop") for i, length in enumerate(lengths)])
    chosen = fixed_blocks(texts, 3, 3, B, seed=0)
    assert [each.text for each in chosen] == [3, 4, 5]
    for each in chosen:
        assert len(set(each.anchors.tolist())) == 3
        assert each.anchors.min() >= 7
        assert each.anchors.max() + B <= 7 + lengths[each.text] - 1
    with pytest.raises(EvaluationError, match="3 of 6 training texts have 3 full blocks of 4 tokens, and 4 are asked"):
        fixed_blocks(texts, 4, 3, B, seed=0)
    with pytest.raises(EvaluationError, match=r"0 of 6 .* --dynamics-texts 0 leaves it out"):
        fixed_blocks(texts, 1, 99, B, seed=0)


def test_dynamics_of_a_drafter_equal_to_its_target(tmp_path):
    """One draw per block keeps all of it; accuracy is that of the likeliest token."""
    target = bigram_target()
    texts = open_dataset(runs.make_data(tmp_path / "data", target), target)
    chosen = fixed_blocks(texts, 8, 3, B, seed=0)
    accuracy, length = measure_checkpoint(target, equal_drafter(target), texts, chosen, seed=0)
    assert length == B
    hits = total = 0
    for each in chosen:
        text = torch.tensor(texts[each.text].astype(np.int64))
        best = target.logits(target.forward(text[None]).hidden)[0].argmax(-1)
        for anchor in each.anchors.tolist():
            hits += int((best[anchor : anchor + B] == text[anchor + 1 : anchor + 1 + B]).sum())
            total += B
    assert accuracy == pytest.approx(hits / total)
