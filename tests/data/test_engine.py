"""The local engine: the right distribution, the right history, the right rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data import Conversation, EngineError, GenerationSettings, LocalEngine, Prompt
from blockdraft.data.conversation import tokens_at
from blockdraft.decoding import generate
from blockdraft.targets import Sampling

from tiny import EOS, tiny_target

WORDS = [f"w{i}" for i in range(5, 40)]


def prompts(num, turns=1):
    return [
        Prompt(
            f"p{i}", tuple(" ".join(WORDS[(i * 7 + t * 3 + k) % 35] for k in range(1 + i % 5)) for t in range(turns))
        )
        for i in range(num)
    ]


def run(target, settings, found, batch_size=4):
    conversations = [Conversation(prompt, target, settings, index=index) for index, prompt in enumerate(found)]
    done = list(LocalEngine(target, batch_size).run(conversations))
    return sorted(done, key=lambda each: each.index)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any), st.integers(0, 2**32))
def test_each_token_has_its_own_share_of_the_unit_interval(counts, seed):
    """The set of uniform numbers that give a token is an interval as long as its probability, in order of tokens."""
    probs = torch.tensor([counts], dtype=torch.float64) / sum(counts)
    ends = probs[0].cumsum(0)
    for token in range(len(counts)):
        if counts[token]:
            width = float(probs[0, token])
            points = float(ends[token]) - width * torch.tensor([1 - 1e-9, 0.5, 1e-9], dtype=torch.float64)
            assert tokens_at(probs.expand(3, -1), points.clamp(0, 1 - 2**-53)).tolist() == [token] * 3
    uniform = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert (probs[0, tokens_at(probs.expand(50, -1), uniform)] > 0).all()


def test_the_ends_of_the_unit_interval_are_tokens_of_positive_probability():
    probs = torch.tensor([[0.0, 0.0, 0.25, 0.0, 0.75, 0.0, 0.0]], dtype=torch.float32)
    assert tokens_at(probs, torch.tensor([0.0], dtype=torch.float64)).tolist() == [2]
    assert tokens_at(probs, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [4]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_greedy_responses_are_those_of_the_decode_loop(batch_size):
    target = tiny_target()
    settings = GenerationSettings(Sampling(0.0), max_new_tokens=20, max_length=80)
    done = run(target, settings, prompts(9), batch_size)
    assert len(done) == 9
    for each in done:
        row = each.completions[0]
        expected = generate(target, None, row.prompt_ids, rule="greedy", max_new_tokens=20).tokens
        assert row.response_ids == expected
        assert row.finish_reason == ("stop" if expected[-1] == EOS else "length")


def test_sampled_responses_do_not_depend_on_what_runs_beside_them():
    target = tiny_target(eos=[0, 3, 4, 5])
    settings = GenerationSettings(max_new_tokens=30, max_length=80)
    found = prompts(12)
    rows = [[each.completions for each in run(target, settings, found, size)] for size in (1, 5, 12)]
    assert rows[0] == rows[1] == rows[2]
    lengths = {len(row.response_ids) for (row,) in rows[0]}
    assert len(lengths) > 3  # some ended, some did not
    other = [
        each.completions for each in run(target, GenerationSettings(max_new_tokens=30, max_length=80, seed=1), found)
    ]
    assert other != rows[0]


def test_each_token_is_drawn_from_the_distribution_of_its_own_prefix():
    """Redo every draw by the definition: one text, one position, the whole distribution function."""
    target = tiny_target()
    settings = GenerationSettings(Sampling(0.8, top_k=9), max_new_tokens=12, max_length=80)
    for each in run(target, settings, prompts(5)):
        row = each.completions[0]
        seed = Conversation(each.prompt, target, settings).request.seed
        uniform = torch.rand(
            settings.max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        for step, token in enumerate(row.response_ids):
            prefix = torch.tensor([row.prompt_ids + row.response_ids[:step]])
            probs = settings.sampling.probs(target.logits(target.forward(prefix).hidden[:, -1]))[0].double()
            ends = probs.cumsum(0)
            assert token == int((ends <= uniform[step] * ends[-1]).sum())


def test_later_turns_stand_on_the_regenerated_history():
    target = tiny_target()
    settings = GenerationSettings(max_new_tokens=40, max_length=200)
    done = run(target, settings, prompts(10, turns=3))
    answered = [each for each in done if len(each.completions) == 3]
    cut = [each for each in done if each.dropped == "cut off before its last turn"]
    assert answered
    assert len(answered) + len(cut) == 10
    for each in answered:
        messages = []
        for turn, row in enumerate(each.completions):
            messages.append({"role": "user", "content": each.prompt.turns[turn]})
            assert row.prompt_ids == target.render(messages)
            assert row.id == f"{each.prompt.id}#{turn}"
            messages.append({"role": "assistant", "content": target.decode(row.response_ids)})
    for each in cut:
        assert each.completions[-1].finish_reason == "length"


def test_limits_and_system_messages():
    target = tiny_target()
    settings = GenerationSettings(max_new_tokens=50, max_length=12)
    long = Prompt("long", (" ".join(WORDS[:20]),))
    short = Prompt("short", ("w5 w6",), system="w7")
    done = run(target, settings, [long, short])
    assert done[0].completions == []
    assert done[0].dropped == "prompt too long"
    row = done[1].completions[0]
    assert row.prompt_ids == target.render([{"role": "system", "content": "w7"}, {"role": "user", "content": "w5 w6"}])
    assert len(row.prompt_ids) + len(row.response_ids) <= 12


def test_a_response_may_end_with_its_first_token():
    target = tiny_target(eos=list(range(3, 40)))
    done = run(target, GenerationSettings(max_new_tokens=5, max_length=40), prompts(6, turns=2), 2)
    assert all(len(row.response_ids) == 1 for each in done for row in each.completions)
    assert [len(each.completions) for each in done] == [2] * 6


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        LocalEngine(tiny_target(), 0)
    with pytest.raises(ValueError, match="max_new_tokens"):
        GenerationSettings(max_new_tokens=0)


def test_probabilities_that_are_not_numbers_are_refused():
    with pytest.raises(EngineError, match="not numbers"):
        tokens_at(torch.tensor([[0.5, torch.nan]]), torch.tensor([0.5], dtype=torch.float64))


def test_a_conversation_that_the_template_refuses_is_dropped_and_the_others_go_on():
    target = tiny_target()
    usual = target.tokenizer.chat_template
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    try:
        target.tokenizer.chat_template = refuse + usual
        done = run(
            target,
            GenerationSettings(max_new_tokens=5, max_length=40),
            [Prompt("a", ("w5",), system="w6"), *prompts(2)],
        )
    finally:
        target.tokenizer.chat_template = usual
    assert done[0].dropped == "refused by the chat template: no system messages"
    assert [len(each.completions) for each in done] == [0, 1, 1]


def test_each_response_follows_the_sampling_of_its_own_request():
    """Greedy, cool and plain conversations side by side give what each of them gives alone."""
    target = tiny_target()
    every = [GenerationSettings(sampling, 15, 80) for sampling in (Sampling(0.0), Sampling(0.5, top_k=3), Sampling())]
    found = prompts(6)
    mixed = [Conversation(prompt, target, every[i % 3], index=i) for i, prompt in enumerate(found)]
    done = sorted(LocalEngine(target, 6).run(mixed), key=lambda each: each.index)
    for i, prompt in enumerate(found):
        (alone,) = run(target, every[i % 3], [prompt])
        assert done[i].completions == alone.completions


def test_conversations_with_another_target_are_refused():
    """The same weights loaded twice are two targets: the manifest names the one of the conversations."""
    engine = LocalEngine(tiny_target())
    (other,) = [Conversation(prompt, tiny_target(seed=1), GenerationSettings()) for prompt in prompts(1)]
    with pytest.raises(EngineError, match="samples from tiny qwen3, but the conversations are for tiny qwen3"):
        next(engine.run([other]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_are_refused_at_any_temperature(temperature):
    target = tiny_target()
    with torch.no_grad():
        target.head[7, 3] = torch.nan
    with pytest.raises(EngineError, match="logits that are not numbers"):
        run(target, GenerationSettings(Sampling(temperature), 5, 40), prompts(2))
