"""Collectives over several hosts that move values: broadcast, all_gather, and exchanges.

Each byte enters a host once: one rank receives it, and the team copies it in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.shm.hierarchy.context import Context, Messages
from gradwire.shm.hierarchy.pipeline import Cut, pipelined


class AllGather:
    """An all_gather: ranks send their blocks to one rank of each other team, which forwards them.

    Args:
        context: Context of the group.
        own: Block of this rank.
        incoming: Tensor for each rank's block; sizes may differ.
    """

    def __init__(self, context: Context, own: Tensor, incoming: Sequence[Tensor]) -> None:
        self._context, self._incoming = context, incoming
        longest = max(block.numel() for block in incoming)
        self._spans = Cut.of(longest, 1, own.dtype.itemsize).spans()
        self._messages = Messages(context, 0)
        target = incoming[context.rank]
        if target.data_ptr() != own.data_ptr():
            target.copy_(own)

    def run(self) -> None:
        """Run the all_gather."""
        pipelined(len(self._spans), (self._start, self._finish))

    def _start(self, number: int) -> None:
        lo, hi = self._spans[number]
        teams = self._context.teams
        for other in teams.others:
            members = teams.ranks[other]
            for rank in members[teams.place :: len(teams.own)]:
                self._messages.receive(number, self._incoming[rank][lo:hi], rank)
            own = self._incoming[self._context.rank][lo:hi]
            self._messages.send(number, own, teams.carrier(other, teams.place))

    def _finish(self, number: int) -> None:
        self._messages.wait(number)
        lo, hi = self._spans[number]
        size = self._context.team.size
        for members in self._context.teams.ranks:
            for first in range(0, len(members), size):
                blocks = [self._incoming[rank][lo:hi] for rank in members[first : first + size]]
                blocks += [blocks[0][:0]] * (size - len(blocks))
                self._context.team.gather_blocks(blocks)


class Broadcast:
    """A broadcast: the root's team sends a part to each other team, and these exchange their parts.

    Args:
        context: Context of the group.
        flat: Tensor with the root's values; filled on other ranks.
        root: Rank of the root.
    """

    def __init__(self, context: Context, flat: Tensor, root: int) -> None:
        teams = context.teams
        self._context, self._flat, self._is_root = context, flat, context.rank == root
        self._source = next(i for i, members in enumerate(teams.ranks) if root in members)
        self._place = teams.ranks[self._source].index(root)
        self._parts = teams.count - 1
        self._cut = Cut.of(flat.numel(), teams.owners * self._parts, flat.dtype.itemsize)
        self._spans = self._cut.spans()
        self._first, self._second = Messages(context, 0), Messages(context, 1)
        self._padded: dict[int, Tensor] = {}

    def run(self) -> None:
        """Run the broadcast."""
        pipelined(self._cut.pieces, (self._start, self._forward, self._finish))

    def _piece(self, number: int) -> Tensor:
        start, stop = self._spans[number]
        length = self._cut.blocks[number] * self._cut.parts
        if length == stop - start:
            return self._flat[start:stop]
        if number not in self._padded:
            padded = self._context.scratch(1, length, self._flat.dtype)
            padded[: stop - start].copy_(self._flat[start:stop])
            padded[stop - start :].zero_()
            self._padded[number] = padded
        return self._padded[number]

    def _part(self, number: int, team: int) -> Tensor:
        """Return the part of this owner's share that a team receives from the root's team."""
        teams = self._context.teams
        piece = self._piece(number).view(teams.owners, self._parts, -1)
        return piece[teams.place][(team - self._source) % teams.count - 1]

    def _start(self, number: int) -> None:
        teams = self._context.teams
        if teams.team == self._source:
            self._context.team.broadcast(self._piece(number), self._place)
        if teams.place >= teams.owners:
            return
        if teams.team == self._source:
            for other in teams.others:
                rank = teams.ranks[other][teams.place]
                self._first.send(number, self._part(number, other), rank)
            return
        root = teams.ranks[self._source][teams.place]
        self._first.receive(number, self._part(number, teams.team), root)
        for other in self._receivers():
            rank = teams.ranks[other][teams.place]
            self._second.receive(number, self._part(number, other), rank)

    def _forward(self, number: int) -> None:
        teams = self._context.teams
        self._first.wait(number)
        if teams.place < teams.owners and teams.team != self._source:
            for other in self._receivers():
                rank = teams.ranks[other][teams.place]
                self._second.send(number, self._part(number, teams.team), rank)

    def _finish(self, number: int) -> None:
        self._second.wait(number)
        piece = self._piece(number)
        if self._context.teams.team != self._source:
            self._context.team.all_gather(piece)
        if number in self._padded and not self._is_root:
            start, stop = self._spans[number]
            self._flat[start:stop].copy_(piece[: stop - start])

    def _receivers(self) -> list[int]:
        """Return the teams other than this one and the root's."""
        return [team for team in self._context.teams.others if team != self._source]


def exchange(context: Context, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Exchange a block between every two ranks; sizes may differ."""
    teams, messages = context.teams, Messages(context, 0)
    for i in range(1, context.size):
        source, target = (context.rank - i) % context.size, (context.rank + i) % context.size
        if source not in teams.own:
            messages.receive(0, incoming[source], source)
        if target not in teams.own:
            messages.send(0, outgoing[target], target)
    context.team.all_to_all(
        [outgoing[rank] for rank in teams.own], [incoming[rank] for rank in teams.own]
    )
    messages.wait(0)
