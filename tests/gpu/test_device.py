"""What only a GPU can show; `make test-gpu` runs it and writes one JSON file. Without a device it is skipped by name.

Each test records what it measured, beside passing or failing, so that the file can be sent to the project. These tests
have never met a GPU, so those that can are rehearsed on a CPU (``BLOCKDRAFT_REHEARSAL=1``; see `test_report.py`).
"""

import os
import socket
import time

import pytest
import torch
from safetensors.torch import load_file
from test_shared_rows import expanded, overlapping

from blockdraft.data import Completion, TextDataset
from blockdraft.decoding import generate, rounds
from blockdraft.drafters.attention import Anchors, FlexAttention, ReferenceAttention, check_flex
from blockdraft.losses import fused_linear_objective, objective, objective_names
from blockdraft.losses.fused import LogitKind, check_kernels
from blockdraft.losses.head_products import TargetIndex
from blockdraft.selfcheck import STRICT
from blockdraft.training import Trainer, estimate, trainer
from blockdraft.training.measuring import peak_memory
from blockdraft.training.step import check_compiled

from recording import record
from runs import make_data, recipe, train, weights
from tiny import tiny_drafter, tiny_target

REHEARSAL = os.environ.get("BLOCKDRAFT_REHEARSAL") == "1"
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
NO_DEVICE = "needs a CUDA device, and there is none"
NUM_DEVICES = 2 if REHEARSAL else torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REHEARSAL and not torch.cuda.is_available(), reason=NO_DEVICE),
    pytest.mark.filterwarnings("default", "error::blockdraft.selfcheck.SelfCheckWarning"),
]
only_there = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_DEVICE)


@pytest.fixture(autouse=True)
def _strictly(monkeypatch):
    """A part that fails its check is an error here; in a rehearsal, recordings stand in for CUDA graphs."""
    monkeypatch.setenv(STRICT, "1")
    if REHEARSAL:
        monkeypatch.setitem(rounds.CAPTURES, "cpu", record)


def now():
    """Return the time when all that was asked of the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def relative(found, expected):
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@only_there
def test_flex_attention_forward_and_backward(found):
    torch.manual_seed(0)
    position = torch.tensor([5, 70, 140, 260], device=DEVICE)
    anchors = Anchors.of(torch.zeros_like(position), position)
    shapes = [(4, 8, 16, 64), (4, 2, 16, 64), (4, 2, 16, 64), (1, 2, 300, 64), (1, 2, 300, 64)]
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    results = []
    for attend in (FlexAttention(anchors, 16, 1, 300), ReferenceAttention(anchors)):
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    errors = found["errors"] = [relative(*pair) for pair in zip(*results, strict=True)]
    assert max(errors) < 1e-2


@only_there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)])
def test_flex_attention_passes_its_check(heads, dtype):
    check_flex(DEVICE, 16, heads, dtype)


@pytest.mark.parametrize("name", objective_names())
def test_an_objective_on_the_gpu_is_that_on_the_cpu(name, found):
    data, rows = overlapping(dtype=torch.float32)
    made = []
    for device, given in ((DEVICE, data), ("cpu", expanded(data, rows))):
        moved = {k: tuple(y.to(device) for y in x) if isinstance(x, tuple) else x.to(device) for k, x in given.items()}
        moved["draft_hidden"].requires_grad_()
        index = TargetIndex(rows.to(device)) if device is DEVICE else None
        value = fused_linear_objective(objective(name), **moved, target_index=index)
        value.loss.backward()
        made.append((value.loss, moved["draft_hidden"].grad))
    errors = found["errors"] = [relative(*pair) for pair in zip(*made, strict=True)]
    assert max(errors) < 1e-3


@only_there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", objective_names())
def test_triton_kernels_pass_their_check(name, dtype):
    for is_indexed in (False, True):
        check_kernels(objective(name), LogitKind(dtype, dtype, 151_936, DEVICE, is_indexed=is_indexed))


@only_there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_pass_their_check(dtype):
    check_compiled(DEVICE, dtype)


def target_there(dtype=torch.float32, **changes):
    """A target on the device, with heads as wide as kernels want them."""
    target = tiny_target(dtype=dtype, head_dim=32, **changes)
    target.model.to(DEVICE)
    return target


SHARED_BY_TWO = [(parallel, optimizer) for parallel in ("ddp", "fsdp") for optimizer in ("adamw", "muon")]


def _two(rank, port, data, out):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
    for parallel, optimizer in SHARED_BY_TWO:
        options = [f"runtime.device={DEVICE.type}", "runtime.precision=float32", f"runtime.parallel={parallel}"]
        train(data, out / f"{parallel}-{optimizer}", *options, f"optimizer.name={optimizer}", model=target_there())
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices")
def test_two_nccl_processes_are_one(tmp_path, found):
    alone_on_a_cpu = tiny_target(dtype=torch.float32, head_dim=32)
    data = make_data(tmp_path / "d", alone_on_a_cpu)
    alone = {
        name: train(data, tmp_path / name, "runtime.device=cpu", f"optimizer.name={name}", model=alone_on_a_cpu)
        for name in ("adamw", "muon")
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_two, (port, data, tmp_path), nprocs=2)
    for parallel, optimizer in SHARED_BY_TWO:
        name = f"{parallel}-{optimizer}"
        there = load_file(tmp_path / name / "checkpoint" / "model.safetensors")
        found[name] = max(relative(there[n], w) for n, w in weights(alone[optimizer]).items())
        assert found[name] < 5e-2


def on_gpu(kind, dtype=torch.float32, **changes):
    target = target_there(dtype)
    return target, None if kind is None else tiny_drafter(kind, target, **changes).to(DEVICE)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_greedy_text_is_the_same_with_and_without_a_drafter(kind, cuda_graphs):
    target, drafter = on_gpu(kind)
    options = {"rule": "greedy", "max_new_tokens": 40, "cuda_graphs": cuda_graphs}
    texts = [generate(target, each, [5, 6, 7], **options).tokens for each in (drafter, None)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
@pytest.mark.parametrize("kind", [None, "dflash", "dspark"])
def test_cuda_graphs_decode_as_plain_rounds_do(kind, rule, found):
    """Round by round in `compare_rounds`, which an error in the graphs makes fail here; then whole texts, by time."""
    target, drafter = on_gpu(kind)
    seconds = {}
    for cuda_graphs in (True, False, True, False):
        out = generate(target, drafter, [5, 6, 7], rule=rule, max_new_tokens=60, seed=1, cuda_graphs=cuda_graphs)
        seconds[cuda_graphs] = sum(sum(each.seconds.values()) for each in out.rounds) / max(1, len(out.rounds))
        found[f"tokens, {'graphs' if cuda_graphs else 'plain'}"] = out.tokens
    found["seconds a round"] = {"graphs": seconds[True], "plain": seconds[False]}
    assert found["tokens, graphs"] == found["tokens, plain"]


@pytest.mark.parametrize("kind", [None, "dflash", "dspark"])
def test_cuda_graphs_in_bfloat16_pass_their_check(kind):
    target, drafter = on_gpu(kind, torch.bfloat16)
    for prompt in ([5, 6, 7], [5] * 300):
        out = generate(target, drafter, prompt, max_new_tokens=40, cuda_graphs=True)
        assert out.tokens


LARGE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8,
}  # fmt: skip
SHAPE, TOKENS, BLOCKS = ({}, 60, 30) if REHEARSAL else (LARGE, 512, 512)


def test_twenty_steps_beside_the_estimate(tmp_path, found, monkeypatch):
    """A target as wide as Qwen3-0.6B with six layers; logits and activations are what takes the memory."""
    target = target_there(torch.bfloat16, tokenizer=False, mask_token_id=2, **SHAPE)
    text = [5 + i % 30 for i in range(TOKENS)]
    dataset = TextDataset.of([Completion(str(i), text[:10], text[10:], "stop") for i in range(24)])
    monkeypatch.setattr(trainer, "open_dataset", lambda *_: dataset)
    made = recipe(
        "there", f"runtime.device={DEVICE.type}", "optimizer.num_train_epochs=10", "logging.logging_steps=10",
        "runtime.precision=bfloat16", f"batch.num_anchors={BLOCKS}",
    )  # fmt: skip
    run = Trainer(made, target, tmp_path / "run")
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for batches in run.loader.steps(0, 20):
        start = now()
        metrics = run.take_step(batches)
        seconds.append(now() - start)
    shape = made.target.model_copy(update={"shape": target.config.to_dict()})
    said = estimate(
        made.model_copy(update={"target": shape}), num_devices=1, num_texts=len(run.sampler.dataset),
        tokens_per_text=run.sampler.dataset.lengths.mean(),
    )  # fmt: skip
    peak = peak_memory(DEVICE)
    found |= {"seconds": seconds, "peak_bytes": peak, "estimated_bytes": said.device_bytes, "loss": metrics["loss"]}
    assert metrics["loss"] == metrics["loss"]
    assert len(seconds) == 20
    if DEVICE.type == "cuda":
        assert 0.5 < peak / said.device_bytes < 1.5
