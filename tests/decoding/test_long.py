"""Long texts, and many of them in one process."""

import gc
import os
from pathlib import Path

import pytest
import torch

from blockdraft.decoding import generate, room

from tiny import tiny_drafter, tiny_target

NUM_TOKENS = 2000


def long_target(num_positions):
    return tiny_target(
        eos=None, tokenizer=False, mask_token_id=2, max_position_embeddings=num_positions, num_layers=4,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_text_of_2000_tokens_fills_the_context_and_is_the_targets_own(kind):
    """Prompt, text and the last block take the context to its last position; the text is the greedy one."""
    prompt = [7, 3, 9, 30, 12]
    target = long_target(len(prompt) + NUM_TOKENS + 4)
    drafter = tiny_drafter(kind, target, num_features=1)
    assert room(target, drafter, len(prompt)) == NUM_TOKENS
    fast = generate(target, drafter, prompt, rule="greedy", max_new_tokens=NUM_TOKENS)
    assert len(fast.tokens) == NUM_TOKENS
    whole = torch.tensor([prompt + fast.tokens])
    greedy = target.logits(target.forward(whole).hidden[0, len(prompt) - 1 : -1]).argmax(-1)
    assert fast.tokens == greedy.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_a_prompt_that_leaves_room_for_one_token_is_answered(rule):
    target = long_target(NUM_TOKENS)
    drafter = tiny_drafter("dflash", target, num_features=1)
    prompt = torch.randint(5, 40, (NUM_TOKENS - 4 - 1,)).tolist()
    out = generate(target, drafter, prompt, rule=rule, max_new_tokens=1)
    assert len(out.tokens) == 1
    if rule == "greedy":
        assert out.tokens == [int(target.logits(target.forward(torch.tensor([prompt])).hidden[0, -1]).argmax())]


def resident():
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux tells it")
def test_the_memory_of_200_generations_stays_flat():
    target = long_target(512)
    drafter = tiny_drafter("dspark", target, num_features=1)

    def decode(num):
        for seed in range(num):
            generate(target, drafter, [7, 3, 9], max_new_tokens=40, seed=seed)

    decode(50)  # allocators take what they need
    before = resident()
    decode(200)
    assert resident() - before < 8 * 2**20
