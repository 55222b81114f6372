"""What two processes hold and exchange: shards, gradients as views of buckets, one sum for a step."""

import os
import signal
import socket
from collections import Counter

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor

from blockdraft.distributed import Distributed, shard_frozen
from blockdraft.training import StoppedError, Trainer

import runs
from runs import make_data, recipe
from tiny import tiny_target


def _join(rank, port):
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return Distributed("cpu")


def _process(rank, port, out):
    distributed = _join(rank, port)
    target = tiny_target(dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    whole = target.forward(tokens, layers=(1, 3))
    decoder = target.model.model
    sizes = {name: parameter.numel() for name, parameter in decoder.layers.named_parameters()}
    shard_frozen(decoder, list(decoder.layers))
    held = []
    for _ in range(2):
        sharded = target.forward(tokens, layers=(1, 3))
        torch.testing.assert_close(sharded.hidden, whole.hidden)
        torch.testing.assert_close(sharded.features, whole.features)
        shards = dict(decoder.layers.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in shards.values())
        held.append(sum(parameter.to_local().untyped_storage().nbytes() // 4 for parameter in shards.values()))
    assert held[0] == held[1] <= 0.6 * sum(sizes.values())  # a half, and what does not divide evenly
    assert not any(isinstance(each, DTensor) for each in (target.head, target.embedding, decoder.norm.weight))
    distributed.device = torch.device("cuda")  # where processes load one after the other
    with distributed.in_turn():
        (out / f"in-{rank}").touch()
        assert not any((out / f"in-{other}").exists() for other in range(2) if other != rank)
        (out / f"in-{rank}").unlink()
        (out / f"done-{rank}").touch()
    torch.distributed.destroy_process_group()


def _spawn(process, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(process, (port, tmp_path), nprocs=2)


@pytest.mark.slow
def test_layers_are_shards_again_after_a_pass_and_processes_load_in_turn(tmp_path):
    _spawn(_process, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]


class Noting(nn.Linear):
    """Notes the dtype in which it multiplies."""

    def forward(self, x):
        self.seen = self.weight.dtype
        return super().forward(x.to(self.weight.dtype))


class Two(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Noting(6, 6), Noting(6, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum()


def _exchange(rank, port, out):
    distributed = _join(rank, port)
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    alone = Two()
    alone(x).backward()

    replica = Two()
    replica.load_state_dict(alone.state_dict())
    module = distributed.wrap(replica, "ddp", list(replica.layers))
    module(x).backward()
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in replica.parameters()}
    assert len(storages) == 1  # of the bucket, whose views all gradients are
    for ours, expected in zip(replica.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)

    sharded = Two()
    sharded.load_state_dict(alone.state_dict())
    module = distributed.wrap(sharded, "fsdp", list(sharded.layers), torch.bfloat16)
    module(x).backward()
    assert {layer.seen for layer in sharded.layers} == {torch.bfloat16}
    for (name, parameter), expected in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=0.05, atol=0.3)

    data = out / "data"
    if rank == 0:
        make_data(data)
    distributed.barrier()
    run = Trainer(recipe(data, "logging.logging_steps=50", "logging.save_steps=50"), runs.target(), out / "run")
    calls = Counter()
    for name in ("all_reduce", "all_gather_object", "broadcast", "barrier", "broadcast_object_list"):
        real = getattr(torch.distributed, name)
        count = lambda *args, name=name, real=real, **options: (calls.update([name]), real(*args, **options))[1]  # noqa: E731
        setattr(torch.distributed, name, count)
    found = []

    def see(progress):
        found.append(dict(calls))
        calls.clear()
        if progress.step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="stopped at step 4 of"):
        run.train(see)
    assert found[1] == found[2] == {"all_reduce": 1}  # the step's own sums, in which the wish to stop travels
    (out / f"done-{rank}").touch()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_gradients_are_views_of_buckets_weights_gather_in_low_precision_and_a_step_sums_once(tmp_path):
    """DDP's buckets, FSDP2's policy, and no collective only to ask whether some process was told to stop."""
    _spawn(_exchange, tmp_path)
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}
