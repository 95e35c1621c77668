"""Team of a rank: the phases of collectives that stay within a host.

A *piece* is a tensor of equal shares, one for each place that owns one. In a team with more places,
the others help to reduce, and receive the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import DistributedError, MismatchError
from gradwire.shm.algorithms.shared_memory import SharedMemory
from gradwire.shm.memory.header import Call


class Team:
    """Ranks that share memory with this one.

    Args:
        ranks: Ranks of the team in the group; a team of one has no state.
        place: Index of this rank among them.
        owners: Number of places that own a share.
        peers: Connection to each other place.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        owners: int,
        peers: dict[int, Any],
        deadline: Deadline,
    ) -> None:
        self.place, self.size, self.owners = place, len(ranks), owners
        self._ranks = ranks
        self.state: SharedMemory | None = None
        if self.size > 1:
            with self._counted(DistributedError):
                self.state = SharedMemory(
                    place, self.size, peers, lambda *_: None, lambda _: None, deadline
                )
            self.state.links.ranks = ranks
            self.state.links.start()

    # --- used by the context ---

    def begin(self, seconds: float) -> None:
        """Begin an operation with a time limit in seconds."""
        if self.state is not None:
            self.state.begin(0, seconds)

    def take_waits(self) -> dict[int, int] | None:
        """Return the ns that this rank waited for others of the team, by rank in the group."""
        waits = self.state.take_waits() if self.state is not None else None
        return {self._ranks[place]: ns for place, ns in waits.items()} if waits else None

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate bytes in memory that the team shares."""
        if self.state is None:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self.state.allocate(nbytes)

    def report_failure(self, reason: BaseException) -> None:
        """Report a failure to the team, so that none of its ranks waits for this one."""
        if self.state is not None:
            self.state.report_failure(reason)

    def abort(self, error: DistributedError) -> None:
        """Make this rank's waits fail."""
        if self.state is not None:
            self.state.abort(error)

    def close(self) -> None:
        """Leave the team."""
        if self.state is not None:
            self.state.close()

    def close_in_child(self) -> None:
        """Close the inherited sockets in a forked child."""
        if self.state is not None:
            self.state.close_in_child()

    # --- phases ---

    @contextmanager
    def _counted(self, kind: type[DistributedError] = MismatchError) -> Iterator[None]:
        """Add the team's ranks to errors that name places in the team.

        All other errors name the group's ranks: they may come from other hosts.
        """
        try:
            yield
        except kind as error:
            ranks = ", ".join(map(str, self._ranks))
            counted = f"{error} (counted from 0 among ranks {ranks} of this host)"
            raise type(error)(counted) from error

    def reduce_scatter(self, piece: Tensor, op: int) -> None:
        """Reduce a piece over the team, in place: each owner gets its share."""
        if self.state is None:
            return
        if self.owners == 1:
            with self._counted():
                call = Call("reduce", piece.dtype, piece.numel(), op, root=0)
                self.state.reduce(call, piece)
        elif self.owners == self.size:
            shares = piece.view(self.size, -1).unbind(0)
            call = Call("reduce_scatter_single", piece.dtype, shares[0].numel(), op)
            with self._counted():
                self.state.reduce_scatter(call, shares, shares[self.place], base=piece)
        else:
            self.reduce_blocks(self._shares(piece), op, base=piece)

    def reduce_blocks(
        self,
        blocks: Sequence[Tensor],
        op: int,
        *,
        out: Tensor | None = None,
        base: Tensor | None = None,
    ) -> None:
        """Reduce a block for each place; sizes may differ.

        Args:
            blocks: Block for each place.
            op: Number of the reduce op.
            out: Tensor for the result; the block of this place if None.
            base: Contiguous tensor that holds the blocks in order, if there is one.
        """
        own = blocks[self.place]
        out = own if out is None else out
        if self.state is None:
            if out is not own:
                out.copy_(own)
            return
        sends = tuple(block.numel() for block in blocks)
        receives = (own.numel(),) * self.size
        call = Call("reduce_scatter", own.dtype, 0, op, -1, sends, receives)
        with self._counted():
            self.state.reduce_scatter(call, blocks, out, base=base)

    def all_gather(self, piece: Tensor) -> None:
        """Copy each owner's share of a piece to all places."""
        if self.state is None:
            return
        if self.owners == 1:
            self.broadcast(piece, 0)
        elif self.owners == self.size:
            shares = piece.view(self.size, -1).unbind(0)
            call = Call("all_gather_single", piece.dtype, shares[0].numel())
            own = shares[self.place]
            with self._counted():
                self.state.exchange(call, [own], shares, base=own, shared=True)
        else:
            self.gather_blocks(self._shares(piece))

    def gather_blocks(self, blocks: Sequence[Tensor]) -> None:
        """Copy each place's block to all places; sizes may differ."""
        if self.state is not None:
            own = blocks[self.place]
            with self._counted():
                self.state.exchange_blocks("all_gather", [own], blocks, base=own, shared=True)

    def broadcast(self, flat: Tensor, place: int) -> None:
        """Copy a place's tensor to all others."""
        if self.state is not None:
            call = Call("broadcast", flat.dtype, flat.numel(), root=place)
            with self._counted():
                self.state.broadcast(call, flat)

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Exchange a block with each place; sizes may differ."""
        if self.state is not None:
            with self._counted():
                self.state.exchange_blocks("all_to_all", outgoing, incoming)
        elif incoming[0].data_ptr() != outgoing[0].data_ptr():
            incoming[0].copy_(outgoing[0])

    def _shares(self, piece: Tensor) -> list[Tensor]:
        """Return the share of each place; empty for places that own none."""
        shares = [*piece.view(self.owners, -1).unbind(0)]
        return [*shares, *[piece[:0]] * (self.size - self.owners)]
