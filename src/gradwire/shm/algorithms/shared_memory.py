"""Interface between a group's operations and the state that moves their data.

The operations check a caller's tensors and convert them to 1-d contiguous tensors. All their forms
then reduce to the nine collectives of `State`. `SharedMemory` implements them for ranks that all
share memory, `AcrossHosts` in `hierarchy` for ranks on several hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradwire.errors import DistributedError, MismatchError
from gradwire.shm.algorithms import exchange as moving
from gradwire.shm.algorithms import reduce as reducing
from gradwire.shm.algorithms import rooted
from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.memory.header import Call


class State(Protocol):
    """State of a group on one rank, and its part of each collective, on 1-d contiguous tensors."""

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's values to all ranks' tensors; see `exchange.broadcast`."""

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """Copy a list of the root's tensors to all ranks; see `rooted.broadcast_list`."""

    def exchange(
        self,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Fetch the block that each other rank has for this one; see `exchange`."""

    def exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Exchange blocks whose sizes may differ; see `exchange`."""

    def gather(self, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
        """Copy each rank's values to the root; see `rooted.gather`."""

    def scatter(self, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
        """Copy the root's block for each rank to that rank; see `rooted.scatter`."""

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce a tensor over all ranks, in place; see `reduce.reduce`."""

    def reduce_scatter(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor, *, base: Tensor | None = None
    ) -> None:
        """Reduce the blocks that all ranks have for this one; see `reduce.reduce_scatter`."""

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation with a mark in its first header and a limit for all of its waits."""

    def is_agreed(self, error: MismatchError) -> bool:
        """Return True if all ranks raise this error, before any data was moved."""

    def take_waits(self) -> dict[int, int] | None:
        """Return the ns that this rank waited for each other since the last call, or None."""

    def allocate(self, size: int) -> Tensor:
        """Allocate bytes that the ranks of this host share."""

    def report_failure(self, reason: BaseException) -> None:
        """Report to the other ranks that this one failed, so that none waits for it."""

    def abort(self, error: DistributedError) -> None:
        """Make all waits of this rank fail; the first error counts."""

    def close(self) -> None:
        """Leave the group."""

    def close_in_child(self) -> None:
        """Close inherited sockets in a forked child."""


class SharedMemory(GroupState):
    """State of ranks that all share memory; the functions of this package are its methods."""

    barrier = moving.barrier
    broadcast = moving.broadcast
    exchange = moving.exchange
    exchange_blocks = moving.exchange_blocks
    reduce = reducing.reduce
    reduce_scatter = reducing.reduce_scatter
    broadcast_list = rooted.broadcast_list
    gather = rooted.gather
    scatter = rooted.scatter
