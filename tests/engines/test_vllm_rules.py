"""vLLM's verification kernels, token and block, against our exact laws, on laws that are known."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.verification import law

from vllm_cpu import PYTHON

VERIFY = Path(__file__).with_name("vllm_verify.py")
V, B, N = 5, 3, 600


def blocks():
    """N blocks drawn from q, and the target's logits ``[N, B + 1, V]`` along each, others for every prefix."""
    generator = torch.Generator().manual_seed(0)
    target = [1.5 * torch.randn(V**i, V, generator=generator) for i in range(B + 1)]
    draft_logits = torch.randn(B, V, generator=generator)
    tokens = torch.multinomial(draft_logits.softmax(-1), N, replacement=True, generator=generator).T.contiguous()
    prefix, rows = torch.zeros(N, dtype=torch.long), []
    for i in range(B + 1):
        rows.append(target[i][prefix])
        prefix = prefix * V + tokens[:, i] if i < B else prefix
    return torch.stack(rows, 1), draft_logits.expand(N, B, V), tokens


def z_of(values, laws, taken):
    """Sum of values[taken] over its mean under the laws ``[N, K]``, in standard errors."""
    mean = (laws * values).sum(-1)
    variance = (laws * values.square()).sum(-1) - mean.square()
    return float((values.expand_as(laws).gather(1, taken[:, None])[:, 0] - mean).sum() / variance.sum().sqrt())


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_kernels_follow_the_law_of_their_rule_and_of_no_other(tmp_path, rule):
    target_logits, draft_logits, tokens = blocks()
    given = {"target_logits": target_logits, "draft_logits": draft_logits, "draft_tokens": tokens}
    given["block"] = torch.tensor([int(rule == "block")])
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, tmp_path / "in")
    done = subprocess.run(
        [str(PYTHON), str(VERIFY), str(tmp_path / "in"), str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(tmp_path / "out")
    accepted, next_token = found["num_accepted"], found["next_token"]
    p, q = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    z = {}
    for each in ("token", "block"):
        accept, residual = law(each, p, q, tokens)
        z[each] = z_of(torch.arange(B + 1).double(), accept, accepted)
        if each == rule:
            following = residual[torch.arange(N), accepted]
            assert (following.gather(1, next_token[:, None]) > 0).all()
            z_next = z_of(following.clamp_min(1e-300).log(), following, next_token)
    first = torch.where(accepted > 0, tokens[:, 0], next_token)
    expected = N * p[0, 0]
    chi = float(((torch.bincount(first, minlength=V) - expected).square() / expected).sum())
    length = float(accepted.double().mean())
    other = z["block" if rule == "token" else "token"]
    print(f"\nvLLM, {rule} verification of {N} blocks: {length:.3f} of {B} accepted")
    print(f"  z = {z[rule]:.2f} under our law of it, {other:.2f} under that of the other rule")
    print(f"  next token z = {z_next:.2f}; first token chi-square {chi:.1f} with {V - 1} degrees of freedom")
    assert abs(z[rule]) < 4
    assert abs(z_next) < 4
    assert chi < 23.5  # one in ten thousand
