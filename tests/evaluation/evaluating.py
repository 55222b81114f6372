"""Tiny evaluations that the tests of evaluation share: tasks, drafters whose lengths are known, protocols."""

from pathlib import Path

import torch

from blockdraft.data import Prompt
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.evaluation import Candidate, Evaluation, Protocol, Task

from tiny import tiny_target

B = 4


FEW = Protocol(max_new_tokens=24, num_bootstrap=50, num_traces=1, draft_temperatures=(0.6, 1.0))
LEAST = Protocol(
    rules=("block",), max_new_tokens=8, num_bootstrap=20, num_traces=0, draft_temperatures=(), one_hot=False
)


def prompts(num, turns=1):
    return [Prompt(f"p{i}", tuple(f"w{5 + (i + t) % 30} w{6 + i % 7}" for t in range(turns))) for i in range(num)]


def tasks(num=4):
    return [
        Task("one", "One", "math", "here", prompts(num)),
        Task("two", "Two", "chat", "here", prompts(num - 1, turns=2)),
    ]


def candidate(name, drafter):
    return Candidate(name, Path("nowhere"), drafter)


def bigram_target(eos=None):
    """A target whose next token depends on the last token alone: its layers add nothing."""
    target = tiny_target(eos=eos, dtype=torch.float32)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target.eos_ids = frozenset() if eos is None else frozenset([eos])  # the tokenizer has one anyway
    return target


def equal_drafter(target):
    """A drafter with q = p for a bigram target: all of it in the Markov head."""
    config = DrafterConfig.for_target(
        "dspark", target, num_layers=1, num_proposals=B, num_features=3, markov_rank=target.hidden_size
    )
    drafter = build_drafter(config).to(target.dtype).eval()
    with torch.no_grad():
        drafter.norm.weight.zero_()
        every = torch.arange(target.vocab_size)[:, None]
        drafter.markov_head.markov_w1.weight.copy_(target.forward(every).hidden[:, 0])
        drafter.markov_head.markov_w2.weight.copy_(target.head)
    return drafter


def sharpened_drafter(target, scale=1.5):
    """As `equal_drafter`, with q a power of p: too sure of itself above 1, not sure enough below."""
    drafter = equal_drafter(target)
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.mul_(scale)
    return drafter


def evaluate(target, drafters, out, protocol=FEW, given=None, **options):
    candidates = [candidate(name, drafter) for name, drafter in drafters.items()]
    return Evaluation(target, candidates, given or tasks(), protocol, out, **options).run()
