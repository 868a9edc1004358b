"""Several processes of one run, as torchrun starts them: who writes, what each computes, and how all end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crowdnal._utils.distributed import sum_over_processes
from crowdnal.train.config import InputError

T = TypeVar("T")
_FAILED = "crowdnal/failed"
_WAIT = timedelta(days=1)  # for the first process to write; who dies is noticed at once


class OtherProcessFailed(Exception):  # noqa: N818  (the error is the other's, which has told it)
    """Another process of the run ended first."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them; one alone by default.

    Attributes:
        rank: 0 is the first, which alone writes and says anything.
        size: how many.
        store: what all can read.
    """

    rank: int = 0
    size: int = 1
    store: Any = None

    @property
    def first(self) -> bool:
        """Whether this one writes and speaks."""
        return self.rank == 0

    def from_first(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the first process gets of the function, which it alone calls; where that is an error, all raise it."""
        if self.size == 1:
            return function(*arguments)
        told: list[Any] = [None, None]
        if self.first:
            try:
                told[0] = function(*arguments)
            except (InputError, OSError) as error:
                told[1] = error
        torch.distributed.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def tensor_from_first(self, function: Callable[[], Tensor | None]) -> Tensor | None:
        """The same for a large tensor on the CPU."""
        if self.size == 1:
            return function()
        tensor = function() if self.first else None
        like = self.from_first(lambda: None if tensor is None else (tensor.shape, tensor.dtype))
        if like is None:
            return None
        tensor = torch.empty(like[0], dtype=like[1]) if tensor is None else tensor.contiguous()
        torch.distributed.broadcast(tensor, src=0)
        return tensor

    def part(self, length: int, block: int = 1) -> slice:
        """Which of so many rows this process computes, in whole blocks; all of them where there are too few."""
        blocks = -(-length // block)
        if blocks < self.size:
            return slice(0, length)
        first, end = (block * (blocks * rank // self.size) for rank in (self.rank, self.rank + 1))
        return slice(first, min(end, length))

    def joined(self, part: slice, table: Tensor) -> Tensor:
        """The table whose rows each process has computed in its part, the others zero; in place."""
        return table if part == slice(0, len(table)) else sum_over_processes(table)

    def average_buffers(self, module: nn.Module) -> None:
        """What each process has gathered of its items (running statistics) becomes the mean of all."""
        for buffer in module.buffers() if self.size > 1 else ():
            if buffer.is_floating_point():
                sum_over_processes(buffer).div_(self.size)

    def command(self, words: str) -> str:
        """The shell command that starts a run on as many processes."""
        if self.size == 1:
            return words
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or self.size)
        nodes = f"--nnodes {self.size // local} " if local < self.size else ""
        return f"torchrun {nodes}--nproc-per-node {local} -m {words}"

    def failed_elsewhere(self) -> bool:
        """Whether another process has ended with an error."""
        return self.store is not None and _first_to_fail(self.store, None) not in ("", str(self.rank))


@contextmanager
def joined(device: str | None) -> Iterator[Processes]:
    """The processes that torchrun started, joined while the block runs; each with a GPU of its own, if on GPUs.

    The first whose block ends with an error raises it, all others `OtherProcessFailed`.

    Args:
        device: as given to the command.

    Raises:
        InputError: the environment or the device does not fit.
    """
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if size == 1:
        yield Processes()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing or not torch.distributed.is_available():
        why = f"{missing[0]} is not set" if missing else "this torch has no torch.distributed"
        raise InputError(
            f"WORLD_SIZE={size}, but {why}: start several processes with torchrun --nproc-per-node {size} -m crowdnal "
            "train ..., and one without WORLD_SIZE"
        )
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=_WAIT))
    on_gpu = torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("crowdnal/group", store),
        rank=rank,
        world_size=size,
        timeout=_WAIT,
    )
    try:
        if on_gpu:
            _take_gpu(str(device or "cuda"))
        yield Processes(rank, size, store)
    except BaseException as error:
        if _first_to_fail(store, rank) != str(rank):
            raise OtherProcessFailed("another process of this run ended with an error, which it has told") from error
        if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            raise OSError("another process of this run has died: go on with --resume") from error
        raise
    finally:
        torch.distributed.destroy_process_group()


def _take_gpu(device: str) -> None:
    local, count = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
    if torch.device(device).index is not None:
        raise InputError(f"--device {device}: each process has a GPU of its own; give --device cuda")
    if local >= count:
        raise InputError(f"{local + 1} processes or more, but {count} GPUs on this machine: --nproc-per-node {count}")
    torch.cuda.set_device(local)


def _first_to_fail(store: Any, rank: int | None) -> str:
    """The rank of the first process that failed, which this one is if there was none; None only asks."""
    try:
        return store.compare_set(_FAILED, "", "" if rank is None else str(rank)).decode()
    except RuntimeError:  # the store was that of the first process, which is gone
        return "0"
