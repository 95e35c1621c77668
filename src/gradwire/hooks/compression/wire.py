"""Collectives of the compressing hooks, as futures, with counters of their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.hooks.result import after

Collective: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class Message:
    """A collective.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of a rank's input tensor.
    """

    collective: Collective
    nbytes: float


@dataclass
class Traffic:
    """Counters of a hook's collectives on this rank.

    Attributes:
        collectives: Number of collectives.
        given_bytes: Bytes of their input tensors.
        sent_bytes: Bytes that this rank sends with bandwidth-optimal algorithms: 2 N (W - 1) / W
            for an all_reduce of N bytes, N (W - 1) for an all_gather and N (W - 1) / W for an
            all_to_all.
    """

    collectives: int = 0
    given_bytes: int = 0
    sent_bytes: float = 0.0

    def add(self, nbytes: int, sent: float) -> None:
        """Count a collective."""
        self.collectives += 1
        self.given_bytes += nbytes
        self.sent_bytes += sent


class Wire:
    """Collectives on a group that are counted.

    Args:
        group: Process group.
        traffic: Counters.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     traffic = Traffic()
        ...     wire = Wire(dist.group.WORLD, traffic)
        ...     total = wire.all_reduce(torch.ones(4)).wait()
        ...     return total.tolist(), traffic.given_bytes, traffic.sent_bytes
        >>> run_ranks(main, world_size=2)[0]
        ([2.0, 2.0, 2.0, 2.0], 16, 16.0)
    """

    def __init__(self, group: ProcessGroup, traffic: Traffic) -> None:
        self.group, self._traffic = group, traffic
        self.size, self.rank = group.size(), group.rank()

    def all_reduce(self, tensor: Tensor) -> torch._C.Future[Tensor]:
        """Sum over ranks in place; return a future of the tensor."""
        self._traffic.add(tensor.nbytes, 2 * tensor.nbytes * (self.size - 1) / self.size)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return after(work, lambda: tensor, tensor.device)

    def all_gather(self, own: Tensor) -> torch._C.Future[Tensor]:
        """Return a future of all ranks' tensors, of shape (W, *own.shape)."""
        self._traffic.add(own.nbytes, own.nbytes * (self.size - 1))
        received = own.new_empty(self.size, *own.shape)
        work = dist.all_gather(list(received.unbind()), own, group=self.group, async_op=True)
        return after(work, lambda: received, received.device)

    def all_to_all(self, rows: Tensor) -> torch._C.Future[Tensor]:
        """Send row i to rank i; return a future of the received rows, in rank order."""
        self._traffic.add(rows.nbytes, rows.nbytes * (self.size - 1) / self.size)
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)
        return after(work, lambda: received, received.device)


def values_in(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret (n, b) bytes, columns of a larger tensor, in a dtype: (n, b / itemsize)."""
    # always a copy: a single row is contiguous even if its offset is not aligned to the dtype
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def looked_up(table: Tensor, columns: Tensor) -> Tensor:
    """Replace each of (n, b) bytes by its row of a table of 256: (n, b * row length)."""
    index = columns.reshape(-1).int()
    if table[0].nbytes == 8:  # as one int64: half the time of selecting rows of two
        found = table.view(torch.int64).view(-1).index_select(0, index).view(table.dtype)
    else:
        found = table.index_select(0, index)
    return found.view(len(columns), -1)
