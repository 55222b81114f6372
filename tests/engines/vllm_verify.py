"""Run by the interpreter of .venv-vllm with TRITON_INTERPRET=1: vLLM's own verification kernels, on given laws.

    python vllm_verify.py INPUTS OUTPUTS

INPUTS are tensors: target_logits [N, B + 1, V] along each drafted block, draft_logits [N, B, V], draft_tokens [N, B],
block (one number: 1 is block verification). OUTPUTS get num_accepted [N] and next_token [N]. These are the kernels
of the V2 model runner, which the CPU build does not start; the interpreter runs them as they stand.
"""

import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
import vllm.triton_utils
from safetensors.torch import load_file, save_file

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl  # the CPU build puts placeholders there
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as kernels  # noqa: E402

kernels.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))  # of a GPU's own library, not in the interpreter

given = load_file(sys.argv[1])
target_logits, draft_logits, tokens = given["target_logits"], given["draft_logits"], given["draft_tokens"]
num, width, vocab_size = target_logits.shape
anchors = torch.zeros(num, 1, dtype=tokens.dtype)
requests = torch.arange(num, dtype=torch.int32)
sampled, num_sampled = kernels.rejection_sample(
    target_logits.reshape(num * width, vocab_size).contiguous(),
    draft_logits.contiguous(),
    torch.cat([anchors, tokens], 1).reshape(-1).int().contiguous(),
    torch.arange(num + 1, dtype=torch.int32) * width,
    torch.arange(width, dtype=torch.int64).repeat(num),
    requests,
    requests.repeat_interleave(width),
    torch.arange(width, dtype=torch.int32).repeat(num),
    torch.ones(num),
    torch.randint(2**31, (num,), generator=torch.Generator().manual_seed(1)),
    width - 1,
    use_block_verification=bool(given["block"].item()),
)
accepted = num_sampled.long() - 1
save_file(
    {"num_accepted": accepted, "next_token": sampled.gather(1, accepted[:, None])[:, 0].contiguous()}, sys.argv[2]
)
