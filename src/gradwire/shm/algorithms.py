"""What moves a group's data: the seam between the operations' many forms and how they are done.

`Reductions` and `Movement` check a caller's tensors and make 1-d contiguous ones of them; what is
left of all their forms are the nine methods here. `InSharedMemory` is for ranks that all share
memory, `hierarchy` for ranks on several hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from gradwire.shm import exchange_algorithms, reduce_algorithms, rooted, stream
from gradwire.shm.group_state import GroupState
from gradwire.shm.header import Call


class Algorithms(Protocol):
    """How a rank does its part of a collective; tensors are 1-d and contiguous."""

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """As `exchange_algorithms.broadcast`."""

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """As `stream.broadcast`."""

    def exchange(
        self,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """As `exchange_algorithms.exchange`."""

    def exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """As `exchange_algorithms.exchange_blocks`."""

    def gather(self, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
        """As `rooted.gather`."""

    def scatter(self, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
        """As `rooted.scatter`."""

    def reduce(self, call: Call, flat: Tensor) -> None:
        """As `reduce_algorithms.reduce`."""

    def reduce_scatter(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor, *, base: Tensor | None = None
    ) -> None:
        """As `reduce_algorithms.reduce_scatter`."""


class InSharedMemory:
    """The algorithms of a group whose ranks all share memory.

    Args:
        state: This rank's state of the group.
    """

    def __init__(self, state: GroupState) -> None:
        self.barrier = partial(exchange_algorithms.barrier, state)
        self.broadcast = partial(exchange_algorithms.broadcast, state)
        self.broadcast_list = partial(stream.broadcast, state)
        self.exchange = partial(exchange_algorithms.exchange, state)
        self.exchange_blocks = partial(exchange_algorithms.exchange_blocks, state)
        self.gather = partial(rooted.gather, state)
        self.scatter = partial(rooted.scatter, state)
        self.reduce = partial(reduce_algorithms.reduce, state)
        self.reduce_scatter = partial(reduce_algorithms.reduce_scatter, state)
