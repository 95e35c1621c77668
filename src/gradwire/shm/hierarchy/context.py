"""State of a group over several hosts on one rank, and the exchange of a row from each rank.

Every collective begins by sending each rank's *row*, a header with its call and short data, to all
ranks: within the team, between the first ranks of the teams, and within the teams again. All ranks
then hold the same rows, and reach the same decision on whether their calls match. A collective with
short data ends there: each rank reduces or selects from the rows itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import DistributedError, MismatchError
from gradwire.shm.hierarchy.engine import Transfer, Transport
from gradwire.shm.hierarchy.team import Team
from gradwire.shm.meeting.rendezvous import Teams
from gradwire.shm.memory.header import INLINE, Call, Location, check_consistent, header_bytes, write

_ROW_BYTES = 256
_HEADER_BYTES = header_bytes(0)
_BESIDE_HEADER = _ROW_BYTES - _HEADER_BYTES
SHORT_BYTES = 4096
"""Maximum size of a rank's data that is sent to all ranks. This takes W times the bytes of the
other algorithms, and W times fewer waits."""
_ROWS = 7  # tag of rows; the phases of the other algorithms are numbered from 0


class Messages:
    """Transfers of one phase, by the number of their piece."""

    def __init__(self, context: Context, tag: int) -> None:
        self._context, self._tag = context, tag
        self._pending: dict[int, list[Transfer]] = {}

    def send(self, number: int, flat: Tensor, rank: int) -> None:
        """Start to send a tensor that belongs to a piece."""
        if flat.numel():
            transfer = self._context.transport.send(flat, rank, self._tag)
            self._pending.setdefault(number, []).append(transfer)

    def receive(self, number: int, flat: Tensor, rank: int) -> None:
        """Start to receive a tensor that belongs to a piece."""
        if flat.numel():
            transfer = self._context.transport.receive(flat, rank, self._tag)
            self._pending.setdefault(number, []).append(transfer)

    def wait(self, number: int) -> None:
        """Wait for all transfers of a piece."""
        for transfer in self._pending.pop(number, ()):
            transfer.wait(self._context.deadline)


class Context:
    """State of a group over several hosts, used by its algorithms.

    Attributes:
        deadline: Deadline of the running operation.
    """

    def __init__(self, rank: int, teams: Teams, team: Team, transport: Transport) -> None:
        self.rank, self.size = rank, sum(map(len, teams.ranks))
        self.teams, self.team, self.transport = teams, team, transport
        self.deadline = Deadline(None)
        self._mark = 0
        self._scratch: dict[int, Tensor] = {}

    # --- used by the group ---

    def abort(self, error: DistributedError) -> None:
        """Make all waits of this rank fail."""
        self.team.abort(error)
        self.transport.cut()

    def report_failure(self, reason: BaseException) -> None:
        """Report to all ranks that this one failed, so that none waits for it."""
        self.team.report_failure(reason)
        self.transport.report_failure(reason)

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation; see `GroupState.begin`."""
        self._mark, self.deadline = mark, Deadline(seconds)
        self.team.begin(seconds)

    def take_waits(self) -> dict[int, int] | None:
        """Return the waits for ranks of the team; see `GroupState.take_waits`."""
        return self.team.take_waits()

    def allocate(self, size: int) -> Tensor:
        """Allocate bytes in memory that the team shares."""
        return self.team.allocate(size)

    def close(self) -> None:
        """Leave the group."""
        self.team.close()
        self.transport.close()
        self._scratch.clear()

    def close_in_child(self) -> None:
        """Close the inherited sockets in a forked child."""
        self.team.close_in_child()

    # --- used by the algorithms ---

    def scratch(self, use: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for one purpose within an operation, kept for later ones."""
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
        """Begin a collective: compare all ranks' calls, and exchange short data.

        Args:
            call: Call of this rank.
            data: Data of this rank, concatenated.
            nbytes: Bytes of the data of each rank that has some; determined by the call.

        Returns:
            Data of all ranks, as bytes; None if it is not short.

        Raises:
            MismatchError: The calls of the ranks do not match; raised on all ranks.
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

    def is_agreed(self, error: MismatchError) -> bool:
        """Return True; unlike in `Meeting`, errors from signal handlers are not distinguished."""
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
        """Return every rank's row of bytes, in rank order; all rows have the same length."""
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
