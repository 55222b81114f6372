"""What only a GPU can show; `make test-gpu` runs it and writes one JSON file. Without a device it is skipped by name.

Each test records what it measured, beside passing or failing, so that the file can be sent to the project.
"""

import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch
from test_shared_rows import expanded, overlapping

from blockdraft.decoding import generate
from blockdraft.drafters.attention import Anchors, FlexAttention, ReferenceAttention
from blockdraft.losses import fused_linear_objective, objective, objective_names
from blockdraft.losses.head_products import TargetIndex
from blockdraft.losses.kernel_choice import LogitKind, check_kernels
from blockdraft.training import Trainer, estimate
from blockdraft.training.step import check_compiled

from runs import make_data, recipe, train, weights
from tiny import tiny_drafter, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]
FOUND: dict[str, object] = {}


@pytest.fixture(scope="module", autouse=True)
def _report():
    """Write what was measured to the file that BLOCKDRAFT_GPU_REPORT names."""
    yield
    path = os.environ.get("BLOCKDRAFT_GPU_REPORT")
    if path:
        device = torch.cuda.get_device_properties(0)
        machine = {
            "device": device.name, "memory": device.total_memory, "capability": [device.major, device.minor],
            "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        }  # fmt: skip
        Path(path).write_text(json.dumps({"machine": machine, **FOUND}, indent=1) + "\n")


def relative(found, expected):
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def test_flex_attention_forward_and_backward():
    torch.manual_seed(0)
    position = torch.tensor([5, 70, 140, 260], device="cuda")
    anchors = Anchors.of(torch.zeros_like(position), position)
    shapes = [(4, 8, 16, 64), (4, 2, 16, 64), (4, 2, 16, 64), (1, 2, 300, 64), (1, 2, 300, 64)]
    inputs = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    results = []
    for attend in (FlexAttention(anchors, 16, 1, 300), ReferenceAttention(anchors)):
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    errors = [relative(*pair) for pair in zip(*results, strict=True)]
    FOUND["flex_attention_errors"] = errors
    assert max(errors) < 1e-2


@pytest.mark.parametrize("name", objective_names())
def test_an_objective_on_the_gpu_is_that_on_the_cpu(name):
    data, rows = overlapping(dtype=torch.float32)
    made = []
    for device, given in (("cuda", data), ("cpu", expanded(data, rows))):
        moved = {k: tuple(y.to(device) for y in x) if isinstance(x, tuple) else x.to(device) for k, x in given.items()}
        moved["draft_hidden"].requires_grad_()
        index = TargetIndex(rows.to(device)) if device == "cuda" else None
        value = fused_linear_objective(objective(name), **moved, target_index=index)
        value.loss.backward()
        made.append((value.loss, moved["draft_hidden"].grad))
    errors = [relative(*pair) for pair in zip(*made, strict=True)]
    FOUND[f"objective {name}"] = errors
    assert max(errors) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernels_and_compiled_layers_pass_their_checks(dtype):
    device = torch.device("cuda", 0)
    for name in objective_names():
        check_kernels(objective(name), LogitKind(dtype, dtype, 151_936, device, is_indexed=True))
    check_compiled(device, dtype)


def _two(rank, port, data, out):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for parallel in ("ddp", "fsdp"):
        options = ["runtime.device=cuda", "runtime.precision=float32", f"runtime.parallel={parallel}"]
        target = tiny_target(dtype=torch.float32)
        target.model.to("cuda")
        train(data, out / parallel, *options, model=target)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_nccl_processes_are_one(tmp_path):
    import socket

    from safetensors.torch import load_file

    data = make_data(tmp_path / "d")
    alone = train(data, tmp_path / "alone", "runtime.device=cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_two, (port, data, tmp_path), nprocs=2)
    for parallel in ("ddp", "fsdp"):
        found = load_file(tmp_path / parallel / "checkpoint" / "model.safetensors")
        FOUND[f"two processes, {parallel}"] = max(relative(found[n], w) for n, w in weights(alone).items())
        assert FOUND[f"two processes, {parallel}"] < 5e-2


def on_gpu(kind, dtype=torch.float32, **changes):
    target = tiny_target(dtype=dtype)
    target.model.to("cuda")
    return target, None if kind is None else tiny_drafter(kind, target, **changes).to("cuda")


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_greedy_text_is_the_same_with_and_without_a_drafter(kind, cuda_graphs):
    target, drafter = on_gpu(kind)
    options = {"rule": "greedy", "max_new_tokens": 40, "cuda_graphs": cuda_graphs}
    texts = [generate(target, each, [5, 6, 7], **options).tokens for each in (drafter, None)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
@pytest.mark.parametrize("kind", [None, "dflash", "dspark"])
def test_cuda_graphs_decode_as_plain_rounds_do(kind, rule):
    """Round by round in `compare_rounds`, which an error in the graphs makes fail here; then whole texts, by time."""
    target, drafter = on_gpu(kind)
    seconds = {}
    for cuda_graphs in (True, False, True, False):
        out = generate(target, drafter, [5, 6, 7], rule=rule, max_new_tokens=60, seed=1, cuda_graphs=cuda_graphs)
        seconds[cuda_graphs] = sum(sum(each.seconds.values()) for each in out.rounds) / max(1, len(out.rounds))
        FOUND[f"tokens, {kind}, {rule}, graphs {cuda_graphs}"] = out.tokens
    FOUND[f"seconds a round, {kind}, {rule}"] = {"graphs": seconds[True], "plain": seconds[False]}
    assert FOUND[f"tokens, {kind}, {rule}, graphs True"] == FOUND[f"tokens, {kind}, {rule}, graphs False"]


@pytest.mark.parametrize("kind", [None, "dflash", "dspark"])
def test_cuda_graphs_in_bfloat16_pass_their_check(kind):
    target, drafter = on_gpu(kind, torch.bfloat16)
    for prompt in ([5, 6, 7], [5] * 300):
        out = generate(target, drafter, prompt, max_new_tokens=40, cuda_graphs=True)
        assert out.tokens


def test_twenty_steps_beside_the_estimate(tmp_path):
    data = make_data(tmp_path / "d")
    target = tiny_target(dtype=torch.bfloat16)
    target.model.to("cuda")
    made = recipe(data, "runtime.device=cuda", "optimizer.num_train_epochs=10", "logging.logging_steps=10")
    run = Trainer(made, target, tmp_path / "run")
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for batches in run.loader.steps(0, 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        metrics = run.take_step(batches)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    said = estimate(
        made.model_copy(update={"target": made.target.model_copy(update={"shape": target.config.to_dict()})}),
        num_devices=1, num_texts=len(run.sampler.dataset), tokens_per_text=run.sampler.dataset.lengths.mean(),
    )  # fmt: skip
    FOUND["twenty steps"] = {
        "seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated(), "estimated_bytes": said.device_bytes,
        "loss": metrics["loss"],
    }  # fmt: skip
    assert metrics["loss"] == metrics["loss"]
