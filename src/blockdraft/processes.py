"""One process or many: who we are, sums over all, and drafters that are replicated or sharded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


class DeviceError(ValueError):
    """A device that is not there."""


class Processes:
    """The process group that torchrun made, or this process alone."""

    def __init__(self, device: str | None = None) -> None:
        self.distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.empty(0, device=kind)
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"device {kind}: {str(error).splitlines()[0]}") from error
        if self.distributed and kind == "cuda":
            kind = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(kind)
        self.device = torch.device(kind)
        if self.distributed and not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(hours=6))  # one process may fill a cache meanwhile
        self.rank = dist.get_rank() if self.distributed else 0
        self.num = dist.get_world_size() if self.distributed else 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes, in double precision."""
        values = values.detach().double().to(self.device)
        if self.distributed:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until all are here."""
        if self.distributed:
            dist.barrier()

    def wrap(self, module: nn.Module, parallel: str, layers: list[nn.Module]) -> nn.Module:
        """Replicate (``ddp``) or shard (``fsdp``) a module over the processes."""
        if not self.distributed:
            return module
        if parallel == "fsdp":
            shard(module, layers)
            return module
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices)

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Exchange gradients only in the last backward pass of a step."""
        if isinstance(module, DistributedDataParallel) and not last:
            with module.no_sync():
                yield
        else:
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
            yield

    def close(self) -> None:
        if self.distributed and dist.is_initialized():
            dist.destroy_process_group()


def shard(module: nn.Module, layers: list[nn.Module]) -> None:
    """FSDP2: each layer a group of its own, the rest the root's."""
    for layer in layers:
        fully_shard(layer)
    fully_shard(module)
