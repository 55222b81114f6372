"""Drafters at work: traces tell the verdict, and conversations end in time."""

import pytest
import torch

from blockdraft.data import Prompt
from blockdraft.evaluation import read_traces
from blockdraft.evaluation.drafting import _texts, converse
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.targets import load_target

from evaluating import bigram_target, evaluate, sharpened_drafter
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
