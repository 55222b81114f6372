"""Run in one process or many: the device, the process group, and modules replicated or sharded over it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from blockdraft.errors import BlockdraftError, first_line

T = TypeVar("T")


class DeviceError(BlockdraftError):
    """The device that was asked for is not there."""


def default_device() -> str:
    """Return the accelerator of this machine if there is one, the CPU otherwise."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device of this name, or the default one; `DeviceError` if nothing can be put there."""
    wanted = name if name is not None else default_device()
    try:
        if bool((torch.ones(1, device=wanted) + 1 != 2).any()):
            raise RuntimeError("it computes 1 + 1 wrongly")
        return torch.device(wanted)
    except Exception as error:  # backends raise whatever they like
        raise DeviceError(
            f"device {str(wanted)!r} cannot be used: {first_line(error)}; choose another with --device, or "
            "runtime.device in a recipe"
        ) from error


def _variable(name: str, least: int, default: int | None = None) -> int:
    """Return a number that torchrun has set for its processes; `DeviceError` if it is none."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise DeviceError(
            f"the environment variable {name} is {'not set' if text is None else repr(text)}; torchrun sets it for "
            f"each of its processes to a number of at least {least}: start with torchrun, or unset WORLD_SIZE"
        )
    return int(text)


def _check_variables() -> None:
    """Refuse at once what the process group would wait for in vain, or raise about in its own words."""
    rank, size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if rank >= size:
        raise DeviceError(f"RANK is {rank} and WORLD_SIZE {size}; torchrun numbers its processes from 0")
    _variable("MASTER_PORT", 1)
    if not os.environ.get("MASTER_ADDR"):
        raise DeviceError("the environment variable MASTER_ADDR is not set; torchrun sets it for its processes")


class Distributed:
    """Joins the process group that torchrun made, or stands for this process alone.

    device: where this process computes.
    rank, world_size: which process this is, and how many there are.
    """

    def __init__(self, device: str | None = None) -> None:
        self.is_distributed = _variable("WORLD_SIZE", 1, default=1) > 1
        if self.is_distributed:
            _check_variables()
        chosen = choose_device(device)
        if self.is_distributed and chosen.type == "cuda" and chosen.index is None:
            chosen = choose_device(f"cuda:{_variable('LOCAL_RANK', 0)}")
            torch.cuda.set_device(chosen)
        self.device = chosen
        if self.is_distributed and not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(hours=6))  # one may check a cache, or decode
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.world_size = dist.get_world_size() if self.is_distributed else 1

    @property
    def is_main(self) -> bool:
        """Tell whether this is the one process that writes files and shows progress."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, in double precision."""
        values = values.detach().double().to(self.device)
        if self.is_distributed:
            dist.all_reduce(values)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Return the plain objects of all processes, in the order of their ranks."""
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, values: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what it holds in the process ``source``."""
        if self.is_distributed:
            dist.broadcast(values, source)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.is_distributed:
            dist.barrier()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the processes of a node run the body one after the other, where each needs much of the host's memory.

        On CPUs they run at once: what they load stays in the host's memory anyway.
        """
        alone = not self.is_distributed or self.device.type == "cpu"
        turns = 1 if alone else _variable("LOCAL_WORLD_SIZE", 1, default=1)
        mine = _variable("LOCAL_RANK", 0, default=0) if turns > 1 else 0
        for _ in range(mine):
            self.barrier()
        try:
            yield
        finally:
            for _ in range(turns - mine if turns > 1 else 0):
                self.barrier()

    def wrap(
        self, module: nn.Module, parallel: str, layers: list[nn.Module], precision: torch.dtype = torch.float32
    ) -> nn.Module:
        """Replicate (``ddp``) or shard (``fsdp``) a module over the processes.

        Sharded weights are gathered in ``precision``; gradients are summed in float32 either way.
        """
        if not self.is_distributed:
            return module
        if parallel == "fsdp":
            shard(module, layers, precision)
            return module
        devices = [self.device.index] if self.device.type == "cuda" else None
        # gradients live in the buckets that are sent, and no buffer changes, so none need be sent
        return DistributedDataParallel(
            module, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
        )

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
        """Leave the process group."""
        if self.is_distributed and dist.is_initialized():
            dist.destroy_process_group()


def shard(module: nn.Module, layers: list[nn.Module], precision: torch.dtype = torch.float32) -> None:
    """Shard a module with FSDP2: each layer is a group of its own, the rest belongs to the root."""
    policy = MixedPrecisionPolicy()
    if precision != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy)


def shard_frozen(module: nn.Module, layers: list[nn.Module]) -> None:
    """Shard the layers of a module that does not train; what else it holds stays whole in every process.

    The module is the root, so that a layer is gathered for its own pass and given up after it. A layer that is a root
    itself would stay gathered after its first pass.
    """
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(module, ignored_params={parameter for parameter in module.parameters() if parameter not in inside})
