"""One rank's state of a group over several hosts, and how all ranks come to know something of each.

Before anything else of a collective moves, each rank's *row*, a header with its call and short
data, goes to all ranks: within the team, between the first ranks of the teams, and within the teams
again. All ranks then hold the same rows, and decide alike whether their calls fit each other. What
is short enough is done with that: each rank reduces or picks from the rows itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import DistributedError, MismatchError
from gradwire.shm.header import INLINE, Call, Location, check_consistent, header_bytes, write
from gradwire.shm.hierarchy.engine import Transfer, Transport
from gradwire.shm.hierarchy.team import Team
from gradwire.shm.sync import Deadline
from gradwire.shm.teams import Teams

_ROW_BYTES = 256
_HEADER_BYTES = header_bytes(0)
_BESIDE_HEADER = _ROW_BYTES - _HEADER_BYTES
SHORT_BYTES = 4096
"""A rank's data up to this go to all ranks: W times the bytes of the ways for more, W times fewer
waits."""
_ROWS = 7  # the tag of rows; the phases of the other algorithms are numbered from 0


class Messages:
    """The transfers of one phase, by the number of their piece.

    Args:
        context: The group's.
        tag: Of the phase.
    """

    def __init__(self, context: Context, tag: int) -> None:
        self._context, self._tag = context, tag
        self._pending: dict[int, list[Transfer]] = {}

    def send(self, number: int, flat: Tensor, rank: int) -> None:
        """Start to send what belongs to a piece."""
        if flat.numel():
            transfer = self._context.transport.send(flat, rank, self._tag)
            self._pending.setdefault(number, []).append(transfer)

    def receive(self, number: int, flat: Tensor, rank: int) -> None:
        """Start to receive what belongs to a piece."""
        if flat.numel():
            transfer = self._context.transport.receive(flat, rank, self._tag)
            self._pending.setdefault(number, []).append(transfer)

    def wait(self, number: int) -> None:
        """Wait for all that belongs to a piece."""
        for transfer in self._pending.pop(number, ()):
            transfer.wait(self._context.deadline)


class Context:
    """What the algorithms of a group over several hosts work with.

    Args:
        rank: This rank.
        teams: The group's.
        team: This rank's.
        transport: To the ranks of other teams.

    Attributes:
        deadline: Of the operation under way.
    """

    def __init__(self, rank: int, teams: Teams, team: Team, transport: Transport) -> None:
        self.rank, self.size = rank, sum(map(len, teams.ranks))
        self.teams, self.team, self.transport = teams, team, transport
        self.deadline = Deadline(None)
        self._mark = 0
        self._aborted: DistributedError | None = None
        self._scratch: dict[int, Tensor] = {}

    # --- as the group's base asks for them ---

    @property
    def links(self) -> Context:
        """What the group's base calls the connections."""
        return self

    @property
    def aborted(self) -> DistributedError | None:
        """The error with which all waits of this rank fail, once it is set."""
        return self._aborted

    @aborted.setter
    def aborted(self, error: DistributedError | None) -> None:
        if error is not None:
            self._aborted = error
            self.team.abort(error)
            self.transport.cut()

    def report_failure(self, reason: BaseException) -> None:
        """Tell all ranks that this one failed, so that none waits for it."""
        self.team.report_failure(reason)
        self.transport.report_failure(reason)

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation; see `GroupState.begin`."""
        self._mark, self.deadline = mark, Deadline(seconds)
        self.team.begin(seconds)

    def take_waits(self) -> dict[int, int] | None:
        """See `GroupState.take_waits`: the waits for ranks of the team."""
        return self.team.take_waits()

    def allocate(self, nbytes: int) -> Tensor:
        """Bytes in memory that the team shares."""
        return self.team.allocate(nbytes)

    def close(self) -> None:
        """Leave the group."""
        self.team.close()
        self.transport.close()
        self._scratch.clear()

    def close_in_child(self) -> None:
        """In a forked child: close the inherited sockets."""
        self.team.close_in_child()

    # --- what the algorithms use ---

    def scratch(self, use: int, count: int, dtype: torch.dtype) -> Tensor:
        """Memory for one use within an operation, kept for the next: new memory costs its pages."""
        nbytes = count * dtype.itemsize
        kept = self._scratch.get(use)
        if kept is None or kept.numel() < nbytes:
            with torch.inference_mode(False):
                kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._scratch[use] = kept
        return kept[:nbytes].view(dtype)

    def announce(
        self, call: Call, data: Sequence[Tensor] = (), nbytes: int = SHORT_BYTES + 1
    ) -> list[Tensor] | None:
        """Begin a collective: compare all ranks' calls, and exchange data that are short.

        Args:
            call: What this rank calls.
            data: Of this rank, to put one after the other.
            nbytes: Of the data of a rank that has some, which the call determines.

        Returns:
            All ranks' data, as bytes; None if they are not short.

        Raises:
            MismatchError: On all ranks, if the calls do not fit each other.
            PeerLostError, PeerFailedError, CollectiveTimeoutError: A rank does not take part.
        """
        row = torch.zeros(_ROW_BYTES, dtype=torch.uint8)
        header = bytearray(_HEADER_BYTES)
        described = call._replace(sends=(), receives=())
        write(memoryview(header), described, Location(INLINE), self._mark)
        self._mark = 0
        row[:_HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
        if nbytes <= _BESIDE_HEADER:
            _fill(row[_HEADER_BYTES:], data)
        rows = self.gather_rows(row)
        headers = [memoryview(bytes(r[:_HEADER_BYTES].tolist())) for r in rows]
        check_consistent(headers, self.rank, tables=False)
        if call.sends:
            self._compare_tables(call)
        if nbytes <= _BESIDE_HEADER:
            return [r[_HEADER_BYTES : _HEADER_BYTES + nbytes] for r in rows]
        if nbytes <= SHORT_BYTES:
            row = torch.zeros(nbytes, dtype=torch.uint8)
            _fill(row, data)
            return list(self.gather_rows(row))
        return None

    def is_agreed(self, _: MismatchError) -> bool:
        """As of `GroupState`; here, one that a signal's handler has raised is not told apart."""
        return True

    def _compare_tables(self, call: Call) -> None:
        table = torch.tensor([*call.sends, *call.receives], dtype=torch.int64)
        tables = self.gather_rows(table.view(torch.uint8)).view(torch.int64).tolist()
        size = self.size
        headers = []
        for each in tables:
            buffer = memoryview(bytearray(header_bytes(size)))
            its_call = call._replace(sends=tuple(each[:size]), receives=tuple(each[size:]))
            write(buffer, its_call, Location(INLINE), 0)
            headers.append(buffer)
        check_consistent(headers, self.rank, tables=True)

    def gather_rows(self, row: Tensor) -> Tensor:
        """Every rank's row, in the order of the ranks: equally long on all, bytes."""
        teams, length = self.teams, row.numel()
        rows = torch.empty(self.size, length, dtype=torch.uint8)
        starts, start = [], 0
        for members in teams.ranks:
            starts.append(start)
            start += len(members)
        blocks = [rows[s : s + len(m)] for s, m in zip(starts, teams.ranks, strict=True)]
        own = blocks[teams.team]
        own[teams.place] = row
        self.team.gather_blocks(list(own.unbind(0)))
        if teams.place == 0:
            messages = Messages(self, _ROWS)
            for other in teams.others:
                leader = teams.ranks[other][0]
                messages.receive(0, blocks[other].view(-1), leader)
                messages.send(0, own.view(-1), leader)
            messages.wait(0)
        self.team.broadcast(rows.view(-1), 0)
        order = [rank for members in teams.ranks for rank in members]
        if order != sorted(order):
            rows = rows[torch.tensor(order, dtype=torch.int64).argsort()]
        return rows


def _fill(row: Tensor, data: Sequence[Tensor]) -> None:
    start = 0
    for block in data:
        row[start : start + block.nbytes] = block.view(torch.uint8)
        start += block.nbytes
