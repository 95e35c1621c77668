"""all_reduce and reduce_scatter over several hosts.

all_reduce does this for each piece. The team reduces it, so that each owner has its share of the
team's sum. Each owner sends every other team its block of that share, and reduces the blocks that
it receives, in the order of the teams. It sends the result to the owners with the same place. The
team gathers the shares. A host thus sends and receives 2 (H - 1) / H bytes for each byte that is
reduced. Between teams, one rank reduces each element; with two teams, one rank of each computes the
same sum. All ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire.shm.algorithms.arithmetic import HALF, SUM, number_of, reduce_into
from gradwire.shm.hierarchy.context import Context, Messages
from gradwire.shm.hierarchy.pipeline import LAG, Cut, pipelined
from gradwire.shm.memory.header import Call

_AVG = number_of(ReduceOp.AVG)


def within(op: int, dtype: torch.dtype) -> int:
    """Return the reduce op within a team for an op over all ranks.

    An average is the sum, divided at the end. In half precision, where that sum might overflow, it
    is the weighted average of the teams' averages.
    """
    return SUM if op == _AVG and dtype not in HALF else op


def combine(context: Context, out: Tensor, parts: Sequence[Tensor], op: int) -> None:
    """Set `out` to the reduction of the teams' results, in their order.

    Half precision is accumulated in float32: a result is rounded twice, in its team and here.

    Args:
        context: Context of the group.
        out: Tensor for the result; may be one of the parts.
        parts: Result of each team.
        op: Reduce op over all ranks.
    """
    if out.numel() == 0:
        return
    if op != _AVG:
        reduce_into(out, parts, op)
    elif out.dtype in HALF:
        total = torch.zeros(out.numel(), dtype=torch.float32)
        for part, members in zip(parts, context.teams.ranks, strict=True):
            total.add_(part, alpha=len(members))
        out.copy_(total.div_(context.size))
    else:
        reduce_into(out, parts, SUM)
        out.div_(context.size)


class _InPieces:
    """Reduction of a tensor in place, in pieces.

    Args:
        flat: 1-d contiguous tensor, reduced in place.
        parts: Number of equal blocks in a piece.
    """

    def __init__(self, context: Context, flat: Tensor, op: int, parts: int) -> None:
        self._context, self._flat, self._op = context, flat, op
        teams = context.teams
        self._cut = Cut.of(flat.numel(), parts, flat.dtype.itemsize)
        self._is_owner = teams.place < teams.owners
        self._spans = self._cut.spans()
        block = max(self._cut.blocks)
        slots = context.scratch(0, (LAG + 1) * teams.count * block, flat.dtype)
        self._slots = slots.view(LAG + 1, teams.count, block)
        self._last: Tensor | None = None

    def _piece(self, number: int) -> Tensor:
        """Return a piece; the last one in separate memory if it needs padding."""
        start, stop = self._spans[number]
        padded = self._cut.blocks[number] * self._cut.parts
        if padded == stop - start:
            return self._flat[start:stop]
        if self._last is None:
            self._last = self._context.scratch(1, padded, self._flat.dtype)
            self._last[: stop - start].copy_(self._flat[start:stop])
            self._last[stop - start :].zero_()
        return self._last

    def _reduce_in_team(self, number: int) -> None:
        piece = self._piece(number)
        self._context.team.reduce_scatter(piece, within(self._op, piece.dtype))

    def _combine_parts(self, number: int, own: Tensor) -> None:
        """Reduce the other teams' blocks, received in the slots, and this team's, in place."""
        parts = [slot[: own.numel()] for slot in self._slots[number % (LAG + 1)]]
        parts[self._context.teams.team] = own
        combine(self._context, own, parts, self._op)

    def _gather_in_team(self, number: int) -> None:
        piece = self._piece(number)
        self._context.team.all_gather(piece)
        if piece is self._last:
            start, stop = self._spans[number]
            self._flat[start:stop].copy_(piece[: stop - start])


class AllReduceOfTwo(_InPieces):
    """An all_reduce between two teams: each sends its sums to the other, and both add them up.

    This moves as many bytes as if each team reduced a half for both, in one message instead of two
    in a row. Both get the same bits: they add the same numbers in the same order.
    """

    def __init__(self, context: Context, flat: Tensor, op: int) -> None:
        super().__init__(context, flat, op, context.teams.owners)
        self._messages = Messages(context, 0)

    def run(self) -> None:
        """Run the all_reduce."""
        pipelined(self._cut.pieces, (self._start, self._finish))

    def _share(self, number: int) -> Tensor:
        teams = self._context.teams
        return self._piece(number).view(teams.owners, -1)[teams.place]

    def _start(self, number: int) -> None:
        self._reduce_in_team(number)
        if self._is_owner:
            share, teams = self._share(number), self._context.teams
            (other,) = teams.others
            rank = teams.ranks[other][teams.place]
            slot = self._slots[number % (LAG + 1)][other][: share.numel()]
            self._messages.receive(number, slot, rank)
            self._messages.send(number, share, rank)

    def _finish(self, number: int) -> None:
        if self._is_owner:
            self._messages.wait(number)
            self._combine_parts(number, self._share(number))
        self._gather_in_team(number)


class AllReduce(_InPieces):
    """An all_reduce between any number of teams."""

    def __init__(self, context: Context, flat: Tensor, op: int) -> None:
        super().__init__(context, flat, op, context.teams.owners * context.teams.count)
        self._partials, self._results = Messages(context, 0), Messages(context, 1)

    def run(self) -> None:
        """Run the all_reduce."""
        pipelined(self._cut.pieces, (self._start, self._combine, self._finish))

    def _blocks(self, number: int) -> list[Tensor]:
        """Return the blocks of this owner's share of a piece, one for each team."""
        teams = self._context.teams
        piece = self._piece(number).view(teams.owners, teams.count, -1)
        return list(piece[teams.place].unbind(0))

    def _start(self, number: int) -> None:
        self._reduce_in_team(number)
        if not self._is_owner:
            return
        teams, blocks = self._context.teams, self._blocks(number)
        for other in teams.others:
            rank = teams.ranks[other][teams.place]
            slot = self._slots[number % (LAG + 1)][other][: blocks[other].numel()]
            self._partials.receive(number, slot, rank)
            self._partials.send(number, blocks[other], rank)

    def _combine(self, number: int) -> None:
        if not self._is_owner:
            return
        teams, own = self._context.teams, self._blocks(number)[self._context.teams.team]
        self._partials.wait(number)
        self._combine_parts(number, own)
        for other in teams.others:
            rank = teams.ranks[other][teams.place]
            self._results.receive(number, self._blocks(number)[other], rank)
            self._results.send(number, own, rank)

    def _finish(self, number: int) -> None:
        self._results.wait(number)
        self._gather_in_team(number)


def all_reduce(context: Context, flat: Tensor, op: int) -> None:
    """Reduce a tensor over all ranks, in place, with the fewest waits."""
    (AllReduceOfTwo if context.teams.count == 2 else AllReduce)(context, flat, op).run()


class ReduceScatter:
    """A reduce_scatter: each team reduces all ranks' blocks, and sends them to their ranks.

    Args:
        call: Call with the op.
        out: Tensor for the reduction of the blocks that all ranks have for this one.
    """

    def __init__(self, context: Context, call: Call, blocks: Sequence[Tensor], out: Tensor) -> None:
        self._context, self._op, self._blocks, self._out = context, call.op, blocks, out
        longest = max(block.numel() for block in blocks)
        self._cut = Cut.of(longest, 1, out.dtype.itemsize)
        self._spans = self._cut.spans()
        self._messages = Messages(context, 0)
        block = max(self._cut.blocks, default=0)
        slots = context.scratch(0, (LAG + 1) * context.teams.count * block, out.dtype)
        self._slots = slots.view(LAG + 1, context.teams.count, block)
        self._sent: dict[int, list[Tensor]] = {}

    def run(self) -> None:
        """Run the reduce_scatter."""
        pipelined(self._cut.pieces, (self._start, self._combine))

    def _start(self, number: int) -> None:
        lo, hi = self._spans[number]
        teams, slots = self._context.teams, self._slots[number % (LAG + 1)]
        length = self._out[lo:hi].numel()
        for other in teams.others:
            source = teams.carrier(other, teams.place)
            self._messages.receive(number, slots[other][:length], source)
        for team in (*teams.others, teams.team):
            self._reduce_for(number, team, lo, hi)

    def _reduce_for(self, number: int, team: int, lo: int, hi: int) -> None:
        """Reduce a piece of the blocks for all ranks of a team, over this rank's team."""
        context, members = self._context, self._context.teams.ranks[team]
        size = context.team.size
        for first in range(0, len(members), size):
            targets = members[first : first + size]
            pieces = [self._blocks[rank][lo:hi] for rank in targets]
            pieces += [self._out[:0]] * (size - len(pieces))
            own = pieces[context.teams.place]
            if team == context.teams.team:
                into = self._slots[number % (LAG + 1)][team][: own.numel()]
            else:
                into = torch.empty_like(own)
            context.team.reduce_blocks(pieces, within(self._op, own.dtype), out=into)
            if team != context.teams.team and own.numel():
                self._messages.send(number, into, targets[context.teams.place])

    def _combine(self, number: int) -> None:
        lo, hi = self._spans[number]
        self._messages.wait(number)
        out = self._out[lo:hi]
        parts = [slot[: out.numel()] for slot in self._slots[number % (LAG + 1)]]
        combine(self._context, out, parts, self._op)
