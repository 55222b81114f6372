"""What two processes hold of a sharded target: after a pass its layers are shards again, and the pass is the same."""

import os
import socket

import pytest
import torch
import torch.multiprocessing
from torch.distributed.tensor import DTensor

from blockdraft.distributed import Distributed, shard_frozen

from tiny import tiny_target


def _process(rank, port, out):
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    distributed = Distributed("cpu")
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


@pytest.mark.slow
def test_layers_are_shards_again_after_a_pass_and_processes_load_in_turn(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port, tmp_path), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]
