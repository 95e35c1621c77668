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
from datetime import timedelta

from torch.distributed import Store

from gradwire.errors import CollectiveTimeoutError, PeerFailedError

__all__ = ["connect_all", "give_up"]

_FAILED = b"failed: "

_RANK = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the process at the other end


def give_up(store: Store, rank: int, reason: Exception) -> None:
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"\0gradwire-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(size)
        store.set(f"address/{rank}", name[1:])
        for lower in range(rank):
            connection = _connect(store.get(f"address/{lower}"), rank)
            if connection is None:
                break
            peers[lower] = connection
        store.set(f"reached/{rank}", "yes" if len(peers) == rank else "no")
        if not _all_reached_all(store, size):
            return False
        listener.settimeout(timeout.total_seconds())
        _accept(listener, peers, range(rank + 1, size))
        return True


def _all_reached_all(store: Store, size: int) -> bool:
    answers = [store.get(f"reached/{rank}") for rank in range(size)]
    for rank, answer in enumerate(answers):
        if answer.startswith(_FAILED):
            reason = answer.removeprefix(_FAILED).decode(errors="replace")
            raise PeerFailedError(f"rank {rank} could not form the group: {reason}")
    return set(answers) == {b"yes"}


def _connect(name: bytes, rank: int) -> socket.socket | None:
    """A connection to the lower rank that listens there, if it is here and of this user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(b"\0" + name)
        if _is_ours(connection):
            connection.send(_RANK.pack(rank))
            return connection
    except OSError:
        pass  # nobody of that name here: the rank is on another host
    connection.close()
    return None


def _accept(listener: socket.socket, peers: dict[int, socket.socket], higher: range) -> None:
    while not peers.keys() >= set(higher):
        connection, _ = listener.accept()
        connection.settimeout(listener.gettimeout())
        rank = _greeting(connection) if _is_ours(connection) else -1
        if rank in higher and rank not in peers:
            peers[rank] = connection
        else:
            connection.close()


def _greeting(connection: socket.socket) -> int:
    """The rank that a connection says it is; -1 for none."""
    try:
        data = connection.recv(_RANK.size + 1)
    except ConnectionResetError:
        return -1
    return _RANK.unpack(data)[0] if len(data) == _RANK.size else -1


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of the same user is at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid == os.geteuid()
