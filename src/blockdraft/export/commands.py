"""How to serve an exported drafter, as commands."""

import json

from blockdraft.drafters import DrafterConfig
from blockdraft.drafters.formats import Format

BLOCK: dict[str, str | int] = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}


def vllm_config(config: DrafterConfig, drafter: str, *, block: bool = False) -> dict[str, str | int]:
    """vLLM's ``--speculative-config``; its default verifies tokens one by one and drafts greedily."""
    plain: dict[str, str | int] = {
        "method": config.kind,
        "model": drafter,
        "num_speculative_tokens": config.num_proposals,
    }
    return plain | BLOCK if block else plain


def vllm_command(config: DrafterConfig, target: str, drafter: str) -> str:
    """Block verification with drafts sampled from the drafter's own law."""
    settings = json.dumps(vllm_config(config, drafter, block=True))
    return f"vllm serve {target} --speculative-config \\\n    '{settings}'"


def sglang_command(config: DrafterConfig, target: str, drafter: str) -> str:
    """SGLang's draft tokens of a DFlash block count the anchor's slot; DSpark's block size does not."""
    width = (
        f"--speculative-num-draft-tokens {config.num_slots}"
        if config.kind == "dflash"
        else f"--speculative-dspark-block-size {config.num_proposals}"
    )
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm {config.kind.upper()} --speculative-draft-model-path {drafter} \\\n    {width}"
    )


def unserved(config: DrafterConfig, flavour: Format) -> dict[str, str]:
    """Engines that cannot serve this folder, with the reason."""
    reasons = {}
    if config.markov_head in ("gated", "rnn"):
        reasons["vLLM"] = f"it has the vanilla Markov head only; this one is {config.markov_head}"
    if flavour == "speculators":
        reasons["SGLang"] = "it does not read this format; `blockdraft export --format flat` writes the one it reads"
    return reasons
