"""How the ranks of a group find out that they share a host: each one reaches every other.

Unix sockets do not leave a host, so whoever answers there can share memory. The names are random,
live in no file system and are gone with their sockets; only processes of the same user are let
in. If any rank cannot reach any other, all of them learn it and none uses shared memory.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from gradwire.errors import CollectiveTimeoutError, PeerFailedError, PeerLostError
from gradwire.shm.sync import Deadline

__all__ = ["Listener", "connect_all", "connect_by_name", "report_failure"]

_FAILED = b"failed: "

_GREETING = struct.Struct("<qi")  # which forming of the group, and a rank; ~rank if it gave up
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the process at the other end


def report_failure(store: Store, rank: int, reason: Exception) -> None:
    """Let no rank wait in `connect_all` for this one."""
    for step in ("address", "reached"):
        store.set(f"{step}/{rank}", _FAILED.decode() + str(reason))


def connect_all(
    store: Store, rank: int, size: int, timeout: timedelta
) -> dict[int, socket.socket] | None:
    """A connection to every other rank, or None on all ranks if they are not on one host.

    Raises:
        CollectiveTimeoutError: A rank that was reached did not answer.
        PeerFailedError: A rank gave up.
        OSError: The system refuses, for instance to open as many files.
    """
    peers: dict[int, socket.socket] = {}
    everywhere = False
    try:
        everywhere = _connect_or_not(store, rank, size, timeout, peers)
    except TimeoutError as error:
        missing = sorted(set(range(size)) - set(peers) - {rank})
        raise CollectiveTimeoutError(
            f"ranks {missing} did not answer within {timeout.total_seconds():g} s while the "
            "group was formed"
        ) from error
    finally:
        if not everywhere:
            for connection in peers.values():
                connection.close()
    return peers if everywhere else None


def _connect_or_not(
    store: Store, rank: int, size: int, timeout: timedelta, peers: dict[int, socket.socket]
) -> bool:
    """Fill `peers`; whether every rank reached every other."""
    with Listener() as listener:
        store.set(f"address/{rank}", listener.name)
        for lower in range(rank):
            connection = _connect(store.get(f"address/{lower}"), 0, rank)
            if connection is None:
                break
            peers[lower] = connection
        store.set(f"reached/{rank}", "yes" if len(peers) == rank else "no")
        if not _all_reached_all(store, size):
            return False
        listener.accept(peers, range(rank + 1, size), 0, Deadline(timeout.total_seconds()))
        return True


def _all_reached_all(store: Store, size: int) -> bool:
    answers = [store.get(f"reached/{rank}") for rank in range(size)]
    for rank, answer in enumerate(answers):
        if answer.startswith(_FAILED):
            reason = answer.removeprefix(_FAILED).decode(errors="replace")
            raise PeerFailedError(f"rank {rank} could not form the group: {reason}")
    return set(answers) == {b"yes"}


class Listener:
    """Where other processes of this user on this host reach this one.

    Attributes:
        name: Random, and gone with the process; others need it to connect.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name = f"gradwire-{secrets.token_hex(16)}"
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(socket.SOMAXCONN)
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()

    def accept(
        self, peers: dict[int, socket.socket], ranks: range, forming: int, deadline: Deadline
    ) -> None:
        """Fill `peers` with a connection from each of these ranks.

        Args:
            peers: Connections that there are, by rank.
            ranks: Whose connections are awaited.
            forming: The number that they give; whoever gives another is turned away.
            deadline: When to give up.

        Raises:
            PeerFailedError: One of them gave up.
            TimeoutError: They did not connect in time.
        """
        while not peers.keys() >= set(ranks):
            self._socket.settimeout(_left(deadline))
            connection, _ = self._socket.accept()
            connection.settimeout(_left(deadline))
            theirs, rank = _greeting(connection) if _same_user(connection) else (None, 0)
            if theirs == forming and rank in ranks and rank not in peers:
                peers[rank] = connection
                continue
            connection.close()
            if theirs == forming and rank < 0:
                raise PeerFailedError(f"rank {~rank} of the new group could not form it")


def connect_by_name(
    listener: Listener, names: Sequence[str], rank: int, forming: int, deadline: Deadline
) -> dict[int, socket.socket]:
    """A connection to every other rank, each of which listens under a name that all know.

    Args:
        listener: This rank's, under its own name.
        names: All ranks' names.
        rank: This rank.
        forming: A number that all ranks give, and gave never before.
        deadline: When to give up.

    Raises:
        PeerLostError: Nobody of this user on this host listens under a name.
        PeerFailedError: Another rank gave up.
        CollectiveTimeoutError: Another rank did not answer in time.
    """
    peers: dict[int, socket.socket] = {}
    try:
        for lower in range(rank):
            connection = _connect(names[lower].encode(), forming, rank)
            if connection is None:
                raise PeerLostError(f"rank {lower} of the new group has ended, or is elsewhere")
            peers[lower] = connection
        listener.accept(peers, range(rank + 1, len(names)), forming, deadline)
    except (PeerLostError, PeerFailedError, TimeoutError) as error:
        for connection in peers.values():
            connection.close()
        for name in names:  # so that none waits for this rank
            told = None if name == listener.name else _connect(name.encode(), forming, ~rank)
            if told is not None:
                told.close()
        if isinstance(error, TimeoutError):
            missing = sorted(set(range(len(names))) - set(peers) - {rank})
            raise CollectiveTimeoutError(
                f"ranks {missing} of the new group did not answer within {deadline.seconds:g} s"
            ) from error
        raise
    return peers


def _left(deadline: Deadline) -> float | None:
    """Seconds until a deadline, never 0, which would mean not to wait at all."""
    left = deadline.left()
    return None if left is None else max(left, 1e-3)


def _connect(name: bytes, forming: int, rank: int) -> socket.socket | None:
    """A connection to the rank that listens there, if it is here and of this user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(b"\0" + name)
        if _same_user(connection):
            connection.send(_GREETING.pack(forming, rank))
            return connection
    except OSError:
        pass  # nobody of that name here: the rank is on another host, or has ended
    connection.close()
    return None


def _greeting(connection: socket.socket) -> tuple[int | None, int]:
    """What a connection says it is: the forming's number and the rank; None for nothing."""
    try:
        data = connection.recv(_GREETING.size + 1)
    except ConnectionResetError:
        return None, 0
    return _GREETING.unpack(data) if len(data) == _GREETING.size else (None, 0)


def _same_user(connection: socket.socket) -> bool:
    """Whether a process of the same user is at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid == os.geteuid()
