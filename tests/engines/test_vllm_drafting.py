"""An exported DFlash drafter in vLLM on a CPU, serving smollm2: the target's greedy text, and our acceptance length.

A trained drafter may be given: BLOCKDRAFT_DRAFTER=runs/smollm2-dflash-bv make test-engines; then the prompts are
held-out ones of pocket's three tasks. It must be DFlash, since vLLM's CPU build does not run DSpark. Otherwise it is a
drafter of one layer that knows six of eight answers by heart.
"""

import os

import pytest

from blockdraft.decoding import generate
from blockdraft.drafters import load_drafter
from blockdraft.evaluation import load_tasks
from blockdraft.export import export_drafter, export_target
from blockdraft.export.engines import vllm_config
from blockdraft.targets import load_target

from overfitting import overfit_drafter
from vllm_cpu import QUESTIONS, run_vllm

NUM_TOKENS = 48


@pytest.mark.parametrize("draft_vocab_size", [None, 4096], ids=["whole vocabulary", "reduced vocabulary"])
def test_text_is_the_targets_and_the_acceptance_length_is_ours(tmp_path, draft_vocab_size):
    target = load_target("smollm2")
    given = os.environ.get("BLOCKDRAFT_DRAFTER")
    if given and draft_vocab_size is not None:
        pytest.skip("the drafter that was given has the vocabulary that it has")
    heldout = [prompt.turns[0] for task in load_tasks(["pocket"], num_prompts=8) for prompt in task.prompts]
    questions = heldout if given else QUESTIONS
    prompts = [target.render([{"role": "user", "content": question}]) for question in questions]
    if given:
        drafter = load_drafter(given, target)
    else:
        shape = {"num_layers": 1, "num_proposals": 4, "num_features": 2, "draft_vocab_size": draft_vocab_size}
        drafter = overfit_drafter(target, prompts[:6], num_tokens=NUM_TOKENS, num_steps=500, **shape)
    export_target(target, tmp_path / "target")
    is_reduced = drafter.draft_ids is not None  # which only speculators' format can say
    export_drafter(drafter, target, tmp_path / "drafter", "speculators" if is_reduced else "flat")
    settings = vllm_config(drafter.config, str(tmp_path / "drafter"))
    options = {"one_by_one": True, "temperature": 0.0, "max_tokens": NUM_TOKENS}
    plain, fast = (run_vllm(tmp_path, tmp_path / "target", each, prompts, **options) for each in (None, settings))
    assert isinstance(plain, dict), plain[-3000:]
    assert isinstance(fast, dict), fast[-3000:]
    ours = [generate(target, drafter, ids, rule="greedy", max_new_tokens=NUM_TOKENS) for ids in prompts]
    num_rounds = sum(len(out.rounds) for out in ours)
    here = 1 + sum(r.accepted for out in ours for r in out.rounds) / num_rounds
    there = 1 + fast["accepted_tokens"] / fast["drafts"]
    num_tokens = sum(map(len, fast["tokens"]))
    print(f"\n{len(prompts)} greedy texts, {num_tokens} tokens: {given or 'a drafter overfitted for this test'}")
    print(f"  {drafter.config.num_draft_tokens:,} draft tokens of {target.vocab_size:,}")
    print(f"  the same in vLLM with and without it, and here: {fast['tokens'] == plain['tokens']}")
    print(f"  mean acceptance length {there:.3f} in vLLM ({fast['drafts']} rounds), {here:.3f} here ({num_rounds})")
    plain_rate, fast_rate = (
        sum(len(tokens) - 1 for tokens in each["tokens"]) / sum(each["seconds"]) for each in (plain, fast)
    )
    print(f"  one at a time, after the first token: {plain_rate:.1f} tokens/s without it, {fast_rate:.1f} with it")
    print(f"  by vLLM's own clock, one run after the other: {fast_rate / plain_rate:.2f} times as fast")
    assert fast["tokens"] == plain["tokens"] == [out.tokens for out in ours]
    assert given or here > 1.3
    assert there == pytest.approx(here, rel=0.05)
