"""The collectives of the compressing hooks, as futures, with a count of the bytes given to them."""

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
    """What a hook has given to collectives on this rank.

    Attributes:
        collectives: How many.
        given_bytes: The bytes of the tensors given to them.
        sent_bytes: The bytes that leave this rank for them, with the algorithms that send the
            fewest: 2 N (W - 1) / W of an all_reduce of N bytes, N (W - 1) of an all_gather and
            N (W - 1) / W of an all_to_all.
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
    """Starts collectives on a group.

    Args:
        group: The group.
        traffic: Where they are counted.

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
        """Sum over ranks, in place: a future of the tensor."""
        self._traffic.add(tensor.nbytes, 2 * tensor.nbytes * (self.size - 1) / self.size)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return after(work, lambda: tensor)

    def all_gather(self, own: Tensor) -> torch._C.Future[Tensor]:
        """A future of all ranks' tensors, of shape (W, *own.shape)."""
        self._traffic.add(own.nbytes, own.nbytes * (self.size - 1))
        received = own.new_empty(self.size, *own.shape)
        work = dist.all_gather(list(received.unbind()), own, group=self.group, async_op=True)
        return after(work, lambda: received)

    def all_to_all(self, rows: Tensor) -> torch._C.Future[Tensor]:
        """Row i goes to rank i; a future of the rows that the ranks sent here, in their order."""
        self._traffic.add(rows.nbytes, rows.nbytes * (self.size - 1) / self.size)
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)
        return after(work, lambda: received)


def values_in(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """What (n, b) bytes among others are in a dtype: (n, b / its size)."""
    # always a copy: one row of many counts as contiguous, wherever in memory it begins
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def looked_up(table: Tensor, columns: Tensor) -> Tensor:
    """(n, b) bytes, each replaced by its row of a table of 256: (n, b * the row's length)."""
    index = columns.reshape(-1).int()
    if table[0].nbytes == 8:  # half the time of a row of two
        found = table.view(torch.int64).view(-1).index_select(0, index).view(table.dtype)
    else:
        found = table.index_select(0, index)
    return found.view(len(columns), -1)
