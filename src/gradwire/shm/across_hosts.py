"""State of a group over several hosts: a team in shared memory on each, an engine between them.

Every collective begins by sending each rank's *row*, a header with its call and short data, to all
ranks: within the team, between the first ranks of the teams, and within the teams again. All ranks
then hold the same rows, and reach the same decision on whether their calls match. A short
all_reduce, reduce or broadcast ends there: each rank reduces or selects from the rows itself.

all_reduce does this for each piece. The team reduces it, so that each owner has its share of the
team's sum. Each owner sends every other team its block of that share, and reduces the blocks that
it receives, in the order of the teams. It sends the result to the owners with the same place. The
team gathers the shares. A host thus sends and receives 2 (H - 1) / H bytes for each byte that is
reduced. Between teams, one rank reduces each element; with two teams, one rank of each computes the
same sum. All ranks get the same bits. Collectives that move other values go to the engine, in
which all ranks are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire._processes import Deadline
from gradwire.errors import DistributedError, MismatchError
from gradwire.shm.engine import Transfer, Transport
from gradwire.shm.header import (
    INLINE,
    Call,
    Location,
    check_consistent,
    check_tables,
    header_bytes,
    packed,
)
from gradwire.shm.reduction import HALF, SUM, SharedMemory, number_of, reduce_into
from gradwire.shm.rendezvous import Teams
from gradwire.shm.tensors import checksum_of

LAG = 1
"""Number of pieces by which a phase is behind the previous one, while the link transfers them."""
END_BYTES = 512 << 10
"""Block size of the first and last piece, when the link waits for the team or vice versa."""
LARGE_BYTES = 2 << 20
"""Maximum block size of other pieces: without a limit of the link, 26 MB took 68 ms, with half of
this 79."""
SMALL_BYTES = 512 << 10
"""Minimum block size: shorter blocks cost more in waits and messages than they gain, on 1 Gbit/s as
well. Without a limit of the link, 1 MB took 5 ms in one block, in four 13."""
FRACTION = 4
"""Maximum part of the data in a block, as 1 / this, unless it is small: phases must overlap."""

_PACK_BYTES = 4 << 20
"""Maximum size of packed tensors of a list; larger tensors are sent separately."""
_ROW_BYTES = 256
_HEADER_BYTES = header_bytes(0)
_BESIDE_HEADER = _ROW_BYTES - _HEADER_BYTES
SHORT_BYTES = 4096
"""Maximum size of a rank's data that is sent to all ranks. This takes W times the bytes of the
other algorithms, and W times fewer waits."""
_ROWS = 7  # tag of rows; the phases of the other algorithms are numbered from 0
_AVG = number_of(ReduceOp.AVG)


class Team(SharedMemory):
    """Ranks of this host, with the phases of collectives that stay within it."""

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        owners: int,
        peers: dict[int, Any],
        deadline: Deadline,
    ) -> None:
        # `ranks` are those in the group, by place; `self.rank` and `self.size` are those in the
        # team
        self._ranks, self._owners = ranks, owners
        try:
            super().__init__(place, len(ranks), peers, deadline)
        except DistributedError as error:  # names places, unlike all later errors
            own = ", ".join(map(str, ranks))
            counted = f"{error} (counted from 0 among ranks {own} of this host)"
            raise type(error)(counted) from error
        self.links.ranks = ranks
        self.links.start()

    def take_waits(self) -> dict[int, int] | None:
        """Return the ns that this rank waited for others of the team, by rank in the group."""
        waits = super().take_waits()
        return {self._ranks[place]: ns for place, ns in waits.items()} if waits else None

    # A piece is a tensor of equal shares, one for each of the first `owners` places. The other
    # places help to reduce, and receive the results.
    def reduce_shares(self, piece: Tensor, op: int) -> None:
        """Reduce a piece over the team, in place: each owner gets its share."""
        if self.size == 1:
            return
        if self._owners == 1:
            self.reduce(Call("reduce", piece.dtype, piece.numel(), op, root=0), piece)
            return
        shares = self._shares(piece)
        own = shares[self.rank]
        sends = tuple(share.numel() for share in shares)
        receives = (own.numel(),) * self.size
        call = Call("reduce_scatter", piece.dtype, 0, op, -1, sends, receives)
        self.reduce_scatter(call, shares, own, base=piece)

    def gather_shares(self, piece: Tensor) -> None:
        """Copy each owner's share of a piece to all places."""
        if self.size == 1:
            return
        if self._owners == 1:
            self.broadcast_from(0, piece)
            return
        shares = self._shares(piece)
        own = shares[self.rank]
        self.exchange_blocks("all_gather", [own], shares, base=own, shared=True)

    def broadcast_from(self, place: int, flat: Tensor) -> None:
        """Copy a place's tensor to all others."""
        if self.size > 1:
            self.broadcast(Call("broadcast", flat.dtype, flat.numel(), root=place), flat)

    def _shares(self, piece: Tensor) -> list[Tensor]:
        """Return the share of each place; empty for places that own none."""
        shares = [*piece.view(self._owners, -1).unbind(0)]
        return [*shares, *[piece[:0]] * (self.size - self._owners)]


@dataclass(frozen=True)
class Cut:
    """Division into pieces of equal blocks: short at both ends of the pipeline, longer between."""

    count: int
    # blocks in a piece
    parts: int
    # elements of a block in each piece; the last piece may need padding
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, count: int, parts: int, itemsize: int) -> Cut:
        """Divide `count` elements into pieces of `parts` blocks."""
        # 10,000,001 float32 in 4 parts: blocks of 512, 1024, 1673 (four times), 1024 and 512 KiB
        left = -(-count // parts)
        small = max(1, SMALL_BYTES // itemsize)
        largest = min(LARGE_BYTES // itemsize, max(small, left // FRACTION))
        end: list[int] = []
        size = max(1, min(END_BYTES // itemsize, largest))
        while size < largest and 2 * (sum(end) + size) <= left:
            end.append(size)
            size *= 2
        middle = left - 2 * sum(end)
        number = -(-middle // max(1, largest))
        blocks = [middle // number + (i < middle % number) for i in range(number)]
        return cls(count, parts, (*end, *blocks, *end[::-1]))

    def spans(self) -> list[tuple[int, int]]:
        """Return start and end of each piece."""
        stops = [self.parts * stop for stop in accumulate(self.blocks)]
        return [(start, min(stop, self.count)) for start, stop in zip([0, *stops], stops)]  # noqa: B905


def pipelined(pieces: int, phases: Sequence[Callable[[int], None]]) -> None:
    """Call each phase with each piece, in a pipeline: later phases work on earlier pieces."""
    # All ranks of a team call the phases in the same order, as those within the team are
    # collectives.
    for step in range(pieces + LAG * (len(phases) - 1)):
        for i, phase in enumerate(phases):
            piece = step - LAG * i
            if 0 <= piece < pieces:
                phase(piece)


class AcrossHosts:
    """State of a group over several hosts on one rank, with its collectives."""

    def __init__(self, rank: int, teams: Teams, team: Team, transport: Transport) -> None:
        self.rank, self.size = rank, sum(map(len, teams.ranks))
        self.teams, self.team, self.transport = teams, team, transport
        self.take_waits, self.allocate = team.take_waits, team.allocate
        self.close_in_child = team.close_in_child
        self.deadline = Deadline(None)
        self._mark = 0
        self._scratch: dict[int, Tensor] = {}

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation; see `GroupState.begin`."""
        self._mark, self.deadline = mark, Deadline(seconds)
        self.team.begin(0, seconds)

    def is_agreed(self, error: MismatchError) -> bool:
        """Return True: unlike in `GroupState`, signal handlers' errors are not distinguished."""
        return True

    def report_failure(self, reason: BaseException) -> None:
        """Report to all ranks that this one failed, so that none waits for it."""
        self.team.report_failure(reason)
        self.transport.report_failure(reason)

    def abort(self, error: DistributedError) -> None:
        """Make all waits of this rank fail."""
        self.team.abort(error)
        self.transport.cut()

    def close(self) -> None:
        """Leave the group."""
        self.team.close()
        self.transport.close()
        self._scratch.clear()

    def scratch(self, use: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for one purpose within an operation, kept for later ones."""
        nbytes = count * dtype.itemsize
        kept = self._scratch.get(use)
        if kept is None or kept.numel() < nbytes:
            with torch.inference_mode(False):
                kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._scratch[use] = kept
        return kept[:nbytes].view(dtype)

    # --- the rows ---

    def announce(
        self, call: Call, data: Tensor | None = None, nbytes: int = SHORT_BYTES + 1
    ) -> list[Tensor] | None:
        """Begin a collective: compare all ranks' calls, and exchange short data."""
        row = torch.zeros(_ROW_BYTES, dtype=torch.uint8)
        described = call._replace(sends=(), receives=())
        header = bytearray(packed(described, Location(INLINE), self._mark))
        self._mark = 0
        row[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        if data is not None and nbytes <= _BESIDE_HEADER:
            row[_HEADER_BYTES : _HEADER_BYTES + nbytes] = data.view(torch.uint8)
        rows = self.gather_rows(row)
        headers = [memoryview(bytes(r[:_HEADER_BYTES].tolist())) for r in rows]
        check_consistent(headers, self.rank, tables=False)
        if call.sends:
            table = torch.tensor([*call.sends, *call.receives], dtype=torch.int64)
            tables = self.gather_rows(table.view(torch.uint8)).view(torch.int64).tolist()
            size = self.size
            check_tables([call._replace(sends=t[:size], receives=t[size:]) for t in tables])
        if nbytes <= _BESIDE_HEADER:
            return [r[_HEADER_BYTES : _HEADER_BYTES + nbytes] for r in rows]
        if nbytes <= SHORT_BYTES:
            row = torch.zeros(nbytes, dtype=torch.uint8) if data is None else data.view(torch.uint8)
            return list(self.gather_rows(row))
        return None

    def gather_rows(self, row: Tensor) -> Tensor:
        """Return every rank's row of bytes, in rank order; all rows have the same length."""
        teams = self.teams
        rows = torch.empty(self.size, row.numel(), dtype=torch.uint8)
        blocks = rows.split([len(members) for members in teams.ranks])
        own = blocks[teams.team]
        own[teams.place] = row
        places = list(own.unbind(0))
        if self.team.size > 1:
            mine = places[teams.place]
            self.team.exchange_blocks("all_gather", [mine], places, base=mine, shared=True)
        if teams.place == 0:
            messages = _Phase(self, _ROWS)
            for other in teams.others:
                leader = teams.ranks[other][0]
                messages.receive(0, blocks[other].view(-1), leader)
                messages.send(0, own.view(-1), leader)
            messages.wait(0)
        self.team.broadcast_from(0, rows.view(-1))
        order = [rank for members in teams.ranks for rank in members]
        if order != sorted(order):
            rows = rows[torch.tensor(order, dtype=torch.int64).argsort()]
        return rows

    # --- collectives in shared memory and between the teams ---

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""
        self.announce(Call(kind))

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's values to all ranks' tensors."""
        at_root = self.rank == call.root
        rows = self.announce(call, flat if at_root else None, flat.nbytes)
        if rows is None:
            _Broadcast(self, flat, call.root).run()
        elif not at_root and flat.numel():
            flat.copy_(rows[call.root].view(flat.dtype))

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """Copy a list of the root's tensors to all ranks."""
        total, checksum = sum(flat.nbytes for flat in flats), checksum_of(flats)
        self.announce(Call("broadcast_coalesced", numel=total, root=root, checksum=checksum))
        for pack in _packs(flats):
            parts = [flat.view(torch.uint8) for flat in pack]
            together = parts[0] if len(parts) == 1 else torch.cat(parts)
            _Broadcast(self, together, root).run()
            if len(parts) > 1 and self.rank != root:
                torch.split_with_sizes_copy(together, [len(part) for part in parts], out=parts)

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce a tensor in place; to one root, it moves as many bytes as to all ranks."""
        rows = self.announce(call, flat, flat.nbytes)
        gets_result = call.root in (-1, self.rank)
        if rows is None:
            _AllReduce(self, flat if gets_result else flat.clone(), call.op).run()
        elif gets_result:
            reduce_into(flat, [row.view(flat.dtype) for row in rows], call.op)

    def reduce_scatter(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor, *, base: Tensor | None = None
    ) -> None:
        """Reduce the blocks that all ranks have for this one: an all_reduce, as Gloo does it."""
        self.announce(call)
        together = torch.cat(list(blocks))
        if together.numel():
            _AllReduce(self, together, call.op).run()
        out.copy_(together.split([block.numel() for block in blocks])[self.rank])

    # --- collectives of the engine ---

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
        self.announce(call)
        into = [block for block in incoming if block is not None]
        assert len(into) == self.size  # only a broadcast would have fewer
        sent = [block.view(torch.uint8) for block in outgoing]
        sizes = [block.nbytes for block in into]
        if not shared:
            received = torch.empty(sum(sizes), dtype=torch.uint8)
            counts = [block.numel() for block in sent]
            self.transport.all_to_all(received, torch.cat(sent), sizes, counts, self.deadline)
            parts = received.split(sizes)
        elif longest := max(sizes):
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: sent[0].numel()] = sent[0]
            parts = torch.empty(self.size, longest, dtype=torch.uint8).unbind(0)
            self.transport.all_gather(list(parts), padded, self.deadline)
        else:
            return
        for block, part in zip(into, parts, strict=True):
            if block.numel():
                block.view(torch.uint8).copy_(part[: block.nbytes])

    def exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        base: Tensor | None = None,
        shared: bool = False,
        root: int = -1,
    ) -> None:
        """Exchange blocks whose sizes may differ."""
        sends = tuple(block.numel() for block in outgoing) * (self.size if shared else 1)
        receives = tuple(block.numel() for block in incoming)
        call = Call(kind, incoming[0].dtype, root=root, sends=sends, receives=receives)
        self.exchange(call, outgoing, incoming, shared=shared)

    def gather(self, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
        """Copy each rank's values to the root."""
        outgoing = [source[:0]] * self.size
        outgoing[root] = source
        incoming = into or [source[:0]] * self.size
        self.exchange_blocks("gather", outgoing, incoming, root=root)

    def scatter(self, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
        """Copy the root's block for each rank to that rank."""
        incoming = [out[:0]] * self.size
        incoming[root] = out
        self.exchange_blocks("scatter", blocks or [out[:0]] * self.size, incoming, root=root)


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


class _Phase:
    """Transfers of one phase, by the number of their piece."""

    def __init__(self, state: AcrossHosts, tag: int) -> None:
        self._state, self._tag = state, tag
        self._pending: dict[int, list[Transfer]] = {}

    def send(self, number: int, flat: Tensor, rank: int) -> None:
        transfer = self._state.transport.send(flat, rank, self._tag)
        self._pending.setdefault(number, []).append(transfer)

    def receive(self, number: int, flat: Tensor, rank: int) -> None:
        transfer = self._state.transport.receive(flat, rank, self._tag)
        self._pending.setdefault(number, []).append(transfer)

    def wait(self, number: int) -> None:
        """Wait for all transfers of a piece."""
        for transfer in self._pending.pop(number, ()):
            transfer.wait(self._state.deadline)


class _InPieces:
    """A collective on a tensor in pieces of equal blocks; the last one is padded if necessary."""

    def __init__(self, state: AcrossHosts, flat: Tensor, parts: int) -> None:
        self._state, self._teams, self._team = state, state.teams, state.team
        self._flat = flat
        self._cut = Cut.of(flat.numel(), parts, flat.dtype.itemsize)
        self._spans = self._cut.spans()
        self._is_owner = state.teams.place < state.teams.owners
        self._last: Tensor | None = None
        self._first, self._second = _Phase(state, 0), _Phase(state, 1)

    def _piece(self, number: int) -> Tensor:
        """Return a piece; the last one in separate memory if it needs padding."""
        start, stop = self._spans[number]
        length = self._cut.blocks[number] * self._cut.parts
        if length == stop - start:
            return self._flat[start:stop]
        if self._last is None:
            self._last = self._state.scratch(1, length, self._flat.dtype)
            self._last[: stop - start].copy_(self._flat[start:stop])
            self._last[stop - start :].zero_()
        return self._last

    def _write_back(self, number: int) -> None:
        """Copy a padded piece to the tensor."""
        if self._last is not None and number == len(self._spans) - 1:
            start, stop = self._spans[number]
            self._flat[start:stop].copy_(self._last[: stop - start])


class _AllReduce(_InPieces):
    """All_reduce between teams; with two, each sends its sums to the other, and both add them."""

    def __init__(self, state: AcrossHosts, flat: Tensor, op: int) -> None:
        teams = state.teams
        # Between two teams this moves as many bytes as if each reduced a half for both, in one
        # message instead of two in a row. Both get the same bits: they add the same numbers in the
        # same order.
        self._divides = teams.count > 2
        super().__init__(state, flat, teams.owners * (teams.count if self._divides else 1))
        self._op = op
        block = max(self._cut.blocks)
        slots = state.scratch(0, (LAG + 1) * teams.count * block, flat.dtype)
        self._slots = slots.view(LAG + 1, teams.count, block)

    def run(self) -> None:
        if self._divides:
            pipelined(len(self._spans), (self._start, self._combine, self._finish))
        else:  # nothing is sent in between
            pipelined(len(self._spans), (self._start, self._combine_and_finish))

    def _blocks(self, number: int) -> list[Tensor]:
        """Return the block of this owner's share of a piece for each team; of two, all of it."""
        teams = self._teams
        share = self._piece(number).view(teams.owners, -1)[teams.place]
        return list(share.view(teams.count, -1).unbind(0)) if self._divides else [share, share]

    def _start(self, number: int) -> None:
        piece = self._piece(number)
        # An average is the sum, divided at the end. In half precision, where that sum might
        # overflow, it is the weighted average of the teams' averages.
        within = SUM if self._op == _AVG and piece.dtype not in HALF else self._op
        self._team.reduce_shares(piece, within)
        if self._is_owner:
            teams, blocks = self._teams, self._blocks(number)
            for other in teams.others:
                rank = teams.ranks[other][teams.place]
                slot = self._slots[number % (LAG + 1)][other][: blocks[other].numel()]
                self._first.receive(number, slot, rank)
                self._first.send(number, blocks[other], rank)

    def _combine(self, number: int) -> None:
        """Reduce the other teams' blocks, received in the slots, and this team's, in place."""
        if not self._is_owner:
            return
        teams, blocks = self._teams, self._blocks(number)
        own = blocks[teams.team]
        self._first.wait(number)
        parts = [slot[: own.numel()] for slot in self._slots[number % (LAG + 1)]]
        parts[teams.team] = own
        self._reduce_parts(own, parts)
        if self._divides:
            for other in teams.others:
                rank = teams.ranks[other][teams.place]
                self._second.receive(number, blocks[other], rank)
                self._second.send(number, own, rank)

    def _reduce_parts(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Set `out` to the reduction of the teams' results, in their order."""
        # Half precision is accumulated in float32: a result is rounded twice, in its team and here.
        if self._op != _AVG:
            reduce_into(out, parts, self._op)
        elif out.dtype in HALF:
            total = torch.zeros(out.numel(), dtype=torch.float32)
            for part, members in zip(parts, self._teams.ranks, strict=True):
                total.add_(part, alpha=len(members))
            out.copy_(total.div_(self._state.size))
        else:
            reduce_into(out, parts, SUM)
            out.div_(self._state.size)

    def _finish(self, number: int) -> None:
        self._second.wait(number)
        self._team.gather_shares(self._piece(number))
        self._write_back(number)

    def _combine_and_finish(self, number: int) -> None:
        self._combine(number)
        self._finish(number)


class _Broadcast(_InPieces):
    """Broadcast: the root's team sends each other team a part, and these exchange their parts."""

    def __init__(self, state: AcrossHosts, flat: Tensor, root: int) -> None:
        teams = state.teams
        self._root = root
        self._source = next(i for i, members in enumerate(teams.ranks) if root in members)
        self._place = teams.ranks[self._source].index(root)
        self._parts = teams.count - 1
        super().__init__(state, flat, teams.owners * self._parts)

    def run(self) -> None:
        pipelined(len(self._spans), (self._start, self._forward, self._finish))

    def _part(self, number: int, team: int) -> Tensor:
        """Return the part of this owner's share that a team receives from the root's team."""
        teams = self._teams
        piece = self._piece(number).view(teams.owners, self._parts, -1)
        return piece[teams.place][(team - self._source) % teams.count - 1]

    def _start(self, number: int) -> None:
        teams = self._teams
        if teams.team == self._source:
            self._team.broadcast_from(self._place, self._piece(number))
        if not self._is_owner:
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
        teams = self._teams
        self._first.wait(number)
        if self._is_owner and teams.team != self._source:
            for other in self._receivers():
                rank = teams.ranks[other][teams.place]
                self._second.send(number, self._part(number, teams.team), rank)

    def _finish(self, number: int) -> None:
        self._second.wait(number)
        if self._teams.team != self._source:
            self._team.gather_shares(self._piece(number))
        if self._state.rank != self._root:
            self._write_back(number)

    def _receivers(self) -> list[int]:
        """Return the teams other than this one and the root's."""
        return [team for team in self._teams.others if team != self._source]
