"""Collectives of a group over several hosts, and those of their algorithms that move values.

Each byte enters a host once: one rank receives it, and the team copies it in shared memory.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.shm.algorithms.arithmetic import reduce_into
from gradwire.shm.hierarchy.context import Context, Messages
from gradwire.shm.hierarchy.pipeline import Cut, pipelined
from gradwire.shm.hierarchy.reducing import ReduceScatter, all_reduce
from gradwire.shm.memory.copying import overwrites
from gradwire.shm.memory.header import NUMBERS, Call

_PACK_BYTES = 4 << 20
"""Maximum size of packed tensors of a list; larger tensors are sent separately."""


class AcrossHosts(Context):
    """State of ranks on several hosts, with their collectives."""

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""
        self.announce(Call(kind))

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's values to all ranks' tensors."""
        data = [flat] if self.rank == call.root else []
        rows = self.announce(call, data, flat.nbytes)
        if rows is not None:
            if not data:
                _copy(flat, rows[call.root].view(flat.dtype))
        else:
            Broadcast(self, flat, call.root).run()

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """Copy a list of the root's tensors to all ranks."""
        numbers = [n for flat in flats for n in (NUMBERS[flat.dtype], flat.numel())]
        total, checksum = sum(flat.nbytes for flat in flats), zlib.crc32(array("q", numbers))
        self.announce(Call("broadcast_coalesced", numel=total, root=root, checksum=checksum))
        for packed in _packs(flats):
            if len(packed) == 1:
                Broadcast(self, packed[0].view(torch.uint8), root).run()
                continue
            parts = [flat.view(torch.uint8) for flat in packed]
            together = torch.cat(parts)
            Broadcast(self, together, root).run()
            if self.rank != root:
                torch.split_with_sizes_copy(together, [len(part) for part in parts], out=parts)

    def exchange(
        self,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Fetch the block that each other rank has for this one."""
        into = [block for block in incoming if block is not None]
        assert len(into) == self.size  # only a broadcast would have fewer
        # without tables, the blocks' sizes are in the call, and equal on all ranks
        nbytes = sum(block.nbytes for block in outgoing)
        known = () if call.sends else (outgoing, nbytes)
        rows = self.announce(call, *known)
        own = outgoing[0 if shared else self.rank]
        if rows is not None:
            start = 0 if shared else self.rank * own.nbytes
            for target, row in zip(into, rows, strict=True):
                target.copy_(row[start : start + own.nbytes].view(own.dtype))
            return
        if overwrites(outgoing, into, self.rank, own):
            outgoing = [block.clone() for block in outgoing]
            own = outgoing[0 if shared else self.rank]
        if shared:
            AllGather(self, own, into).run()
        else:
            _exchange(self, outgoing, into)

    def exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Exchange blocks whose sizes may differ."""
        self._exchange_blocks(kind, outgoing, incoming, -1, shared=shared)

    def _exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        root: int,
        *,
        shared: bool = False,
    ) -> None:
        sends = tuple(block.numel() for block in outgoing) * (self.size if shared else 1)
        receives = tuple(block.numel() for block in incoming)
        call = Call(kind, incoming[0].dtype, root=root, sends=sends, receives=receives)
        self.exchange(call, outgoing, incoming, shared=shared)

    def gather(self, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
        """Copy each rank's values to the root."""
        outgoing = [source[:0]] * self.size
        outgoing[root] = source
        incoming = into or [source.new_empty(0)] * self.size
        self._exchange_blocks("gather", outgoing, incoming, root)

    def scatter(self, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
        """Copy the root's block for each rank to that rank."""
        incoming = [out[:0]] * self.size
        incoming[root] = out
        self._exchange_blocks("scatter", blocks or [out[:0]] * len(incoming), incoming, root)

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce a tensor in place; to one root, it moves as many bytes as to all ranks."""
        rows = self.announce(call, [flat], flat.nbytes)
        is_root = call.root == self.rank
        if rows is not None:
            if call.root < 0 or is_root:
                reduce_into(flat, [row.view(flat.dtype) for row in rows], call.op)
            return
        gets_result = call.root < 0 or is_root
        all_reduce(self, flat if gets_result else flat.clone(), call.op)

    def reduce_scatter(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor, *, base: Tensor | None = None
    ) -> None:
        """Reduce the blocks that all ranks have for this one."""
        nbytes = sum(block.nbytes for block in blocks)
        known = () if call.sends else (blocks, nbytes)
        rows = self.announce(call, *known)
        rank = self.rank
        if rows is not None:
            start = rank * out.nbytes
            parts = [row[start : start + out.nbytes].view(out.dtype) for row in rows]
            reduce_into(out, parts, call.op)
            return
        if overwrites(blocks, [out if r == rank else None for r in range(len(blocks))], rank, None):
            blocks = [block.clone() for block in blocks]
        ReduceScatter(self, call, blocks, out).run()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.numel():
        target.copy_(source)


def _packs(flats: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists of some MiB together or of one large tensor."""
    pack: list[Tensor] = []
    for flat in flats:
        if flat.numel() == 0:
            continue
        if pack and sum(f.nbytes for f in pack) + flat.nbytes > _PACK_BYTES:
            yield pack
            pack = []
        pack.append(flat)
    if pack:
        yield pack


class AllGather:
    """An all_gather: ranks send their blocks to one rank of each team, which forwards them."""

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
        flat: Tensor with the root's values; filled on other ranks.
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


def _exchange(context: Context, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
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
