"""Data sampled otherwise than at temperature 1 over the whole vocabulary is caught, and named."""

import pytest
import torch

from blockdraft.data import (
    Conversation,
    GenerationSettings,
    LocalEngine,
    Prompt,
    TextDataset,
    check_sampling,
    open_dataset,
    regenerate,
)
from blockdraft.targets import Sampling

from tiny import tiny_target


def sampled(target, sampling, num=160):
    settings = GenerationSettings(sampling, max_new_tokens=25, max_length=60)
    prompts = [Prompt(f"p{i}", (f"w{5 + i % 35} w{5 + i * 3 % 35}",)) for i in range(num)]
    asked = [Conversation(prompt, target, settings, index=index) for index, prompt in enumerate(prompts)]
    done = sorted(LocalEngine(target, num).run(asked), key=lambda each: each.index)
    return TextDataset.of([row for each in done for row in each.completions])


def test_z_is_that_of_the_definition():
    """Sum over positions, one at a time, in float64."""
    target = tiny_target(eos=[0, 3, 4])
    dataset = sampled(target, Sampling(), 8)
    distance = variance = 0.0
    for text in range(len(dataset)):
        ids = torch.from_numpy(dataset[text].astype("int64"))
        for at in range(int(dataset.prompt_lengths[text]), len(ids)):
            log_p = target.logits(target.forward(ids[None, :at]).hidden[0, -1]).log_softmax(-1)
            entropy = -float((log_p.exp() * log_p).sum())
            distance += float(log_p[ids[at]]) + entropy
            variance += float((log_p.exp() * log_p.square()).sum()) - entropy**2
    assert check_sampling(dataset, target).z == pytest.approx(distance / variance**0.5, rel=1e-4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
def test_data_sampled_as_it_should_be_passes(seed):
    target = tiny_target(seed=seed)
    check = check_sampling(sampled(target, Sampling()), target)
    assert check.plain
    assert abs(check.z) < 4
    assert check.verdict == "as sampled at temperature 1 over the whole vocabulary"


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(0.7), "most like temperature 0.7"),
        pytest.param(Sampling(1.3), "most like temperature 1.3", marks=pytest.mark.slow),
        (Sampling(top_k=6), "most like temperature 1, top-k 6"),
        pytest.param(Sampling(0.7, top_k=6), "most like temperature 0.7, top-k 6", marks=pytest.mark.slow),
        pytest.param(Sampling(top_p=0.8), "most like temperature 1, top-p 0.8", marks=pytest.mark.slow),
        (Sampling(0.0), "most like greedily, temperature 0"),
    ],
)
def test_other_distributions_are_caught_and_named(sampling, named):
    target = tiny_target()
    check = check_sampling(sampled(target, sampling), target)
    assert not check.plain
    assert named in check.verdict


def test_text_of_another_model_is_caught():
    check = check_sampling(sampled(tiny_target(seed=1), Sampling()), tiny_target())
    assert not check.plain
    assert check.z < -4


def test_only_so_many_tokens_are_looked_at():
    target = tiny_target()
    dataset = sampled(target, Sampling())
    assert 300 <= check_sampling(dataset, target, num_tokens=300).num_tokens < 330


def test_few_tokens_are_said_to_tell_little():
    target = tiny_target()
    few = check_sampling(sampled(target, Sampling(), 2), target)
    assert few.plain
    assert few.verdict.endswith(f"but {few.num_tokens} tokens are too few to tell that from temperature 0.7")


def test_the_power_is_that_of_the_definition():
    """The mean gain in log-likelihood of tokens at temperature 0.7 over temperature 1, position by position."""
    target = tiny_target()
    dataset = sampled(target, Sampling(), 4)
    expected = 0.0
    for text in range(len(dataset)):
        ids = torch.from_numpy(dataset[text].astype("int64"))
        for at in range(int(dataset.prompt_lengths[text]), len(ids)):
            logits = target.logits(target.forward(ids[None, :at]).hidden[0, -1])
            cooler, plain = (logits / 0.7).log_softmax(-1), logits.log_softmax(-1)
            expected += float((cooler.exp() * (cooler - plain)).sum())
    assert check_sampling(dataset, target).power == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("num", [2, pytest.param(160, marks=pytest.mark.slow)])
def test_data_whose_manifest_states_another_distribution_does_not_pass(num, tmp_path):
    """However few its tokens are, and however plain they look."""
    target = tiny_target()
    settings = GenerationSettings(Sampling(0.7), max_new_tokens=25, max_length=60)
    prompts = [Prompt(f"p{i}", (f"w{5 + i % 35}",)) for i in range(num)]
    regenerate(prompts, target, settings, tmp_path)
    check = check_sampling(open_dataset(tmp_path), target)
    assert not check.plain
    assert check.verdict.startswith(
        "sampled with temperature 0.7, as the manifest states; BV loss assumes temperature 1"
    )
