"""Interface between a group's operations and the algorithms that move their data.

`Reductions` and `Movement` check a caller's tensors and convert them to 1-d contiguous tensors. All
forms of the operations then reduce to the nine methods of `Algorithms`. `InSharedMemory` implements
them for ranks that all share memory, `hierarchy` for ranks on several hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from gradwire.shm.algorithms import exchange, reduce, rooted, stream
from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.memory.header import Call


class Algorithms(Protocol):
    """One rank's part of each collective; tensors are 1-d and contiguous."""

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's values to all ranks' tensors; see `exchange.broadcast`."""

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """Copy a list of the root's tensors to all ranks; see `stream.broadcast`."""

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


class InSharedMemory:
    """Algorithms of a group whose ranks all share memory.

    Args:
        state: State of the group on this rank.
    """

    def __init__(self, state: GroupState) -> None:
        self.barrier = partial(exchange.barrier, state)
        self.broadcast = partial(exchange.broadcast, state)
        self.broadcast_list = partial(stream.broadcast, state)
        self.exchange = partial(exchange.exchange, state)
        self.exchange_blocks = partial(exchange.exchange_blocks, state)
        self.gather = partial(rooted.gather, state)
        self.scatter = partial(rooted.scatter, state)
        self.reduce = partial(reduce.reduce, state)
        self.reduce_scatter = partial(reduce.reduce_scatter, state)
