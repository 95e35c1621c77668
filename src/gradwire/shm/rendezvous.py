"""Agreement on which ranks form a group, and connections between those of a host.

PyTorch names a group by a counter of each process. If ranks make different groups, one name stands
for several groups, whose keys in the store would be mixed up. So the keys begin with the global
ranks of the group, and each rank publishes under the name alone which group it is forming: a rank
that waits for a member of another group raises instead of waiting.

Then each rank connects to every other over a unix socket, which does not leave the host: ranks that
connect can share memory, and form a team. The sockets' names are random and abstract (in no file
system). Only processes of the same user are accepted.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from time import sleep
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from gradwire._groups import values_of_ranks
from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, MismatchError, PeerFailedError

_JOIN = "join the group"
_LINGER_S = 2.0  # four times the interval at which ranks look for claims
_MISMATCH = b"mismatch: "


def identity_of(*parts: object) -> int:
    """Return a number of 64 bits that is the same on all processes for equal parts."""
    digest = sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class Forming:
    """One rank's part in forming a group, until the ranks are known to form the same one."""

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._named, self._rank, self._members = store, rank, list(members)
        own = PrefixStore(f"ranks {identity_of(self._members)}", store)
        # a store may outlive a group: torchrun's still has the keys of a destroyed one of this name
        time = own.add(f"times/{rank}", 1)
        # identity and store are of this group and attempt alone, and equal on all of its ranks
        self.identity = identity_of(self._members, time)
        self.store = self._store_of(self._members, time)
        self._claim: dict[str, Any] = {"members": self._members, "time": time, "forming": True}
        self._publish()

    def __enter__(self) -> Forming:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._claim["forming"] = False
        with suppress(dist.DistError):  # the store may be gone
            if error is not None:  # raised by `connect_all` of the others, which wait for this rank
                for step in ("address", "reached"):
                    self.store.set(f"{step}/{self._rank}", _FAILED.decode() + str(error))
            if isinstance(error, MismatchError):
                sleep(_LINGER_S)  # ranks that wait for this one still find its claim
            self._publish()

    def all_available(self, available: bool, timeout: timedelta) -> bool:
        """Return True if shm is available on all ranks."""
        self.store.set(f"available/{self._rank}", "yes" if available else "no")
        size = len(self._members)
        answers = values_of_ranks(
            self.store, "available", size, _JOIN, timeout=timeout, check=self._check_members
        )
        for answer in answers:
            if answer.startswith(_MISMATCH):
                raise MismatchError(answer.removeprefix(_MISMATCH).decode())
        return all(answer == b"yes" for answer in answers)

    def _store_of(self, members: list[int], time: int) -> Store:
        return PrefixStore(f"ranks {identity_of(members)} time {time}", self._named)

    def _publish(self) -> None:
        self._named.set(f"forms/{self._members[self._rank]}", json.dumps(self._claim))

    def _check_members(self) -> None:
        """Raise on all ranks concerned if a member is forming another group."""
        own = self._members[self._rank]
        for member in self._members:
            key = f"forms/{member}"
            claim = json.loads(self._named.get(key)) if self._named.check([key]) else self._claim
            # one that is not forming is perhaps of an earlier life of a store that outlives groups
            if claim["members"] == self._members or not claim["forming"]:
                continue
            theirs = claim["members"]
            text = (
                f"ranks form different groups under one name: rank {own} with ranks "
                f"{self._members}, rank {member} with ranks {theirs}. Call new_group with the same "
                "ranks in the same order on all ranks"
            )
            # for the members of both groups that wait for one of these two
            failed = _MISMATCH.decode() + text
            self.store.set(f"available/{self._members.index(member)}", failed)
            if own in theirs:
                store = self._store_of(theirs, claim["time"])
                store.set(f"available/{theirs.index(own)}", failed)
            raise MismatchError(text)


_FAILED = b"failed: "

_GREETING = struct.Struct("<qi")
"""Identity of the group, and rank."""
_NO_GREETING = None, 0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the peer, from SO_PEERCRED


def connect_all(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    identity: int,
    host: str = "",
    *,
    check: Callable[[], None] = lambda: None,
    poll: float = 0.5,
) -> tuple[dict[int, socket.socket], tuple[tuple[int, ...], ...]]:
    """Return connections to the other ranks of this team, and all teams, equal on all ranks."""
    # While ranks are missing, `check` is called every `poll` seconds; its exceptions propagate.
    deadline, peers = Deadline(timeout.total_seconds()), dict[int, socket.socket]()
    wait = partial(values_of_ranks, store, doing=_JOIN, timeout=timeout, check=check, poll=poll)
    # ranks with another host name count as being on another host
    label = f"/{host}".encode()
    try:
        # an OSError is a system limit that was reached, such as that on open files
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"gradwire-{secrets.token_hex(16)}"  # this address ends with the socket
            listener.bind(f"\0{name}")
            listener.listen(socket.SOMAXCONN)
            store.set(f"address/{rank}", name + label.decode())
            for lower, address in enumerate(wait("address", rank)):
                theirs, _, of_host = address.partition(b"/")
                if b"/" + of_host == label and (found := _connect_to(theirs, identity, rank)):
                    peers[lower] = found
            store.set(f"reached/{rank}", ",".join(map(str, sorted(peers))) or "none")
            teams = find_teams([_reached(*pair) for pair in enumerate(wait("reached", size))])
            own = next(team for team in teams if rank in team)
            for lower in peers.keys() - set(own):
                peers.pop(lower).close()
            # the higher ranks have connected before they wrote whom they have reached
            while not peers.keys() >= {*own} - {rank}:
                listener.settimeout(_left(deadline))
                connection, _ = listener.accept()
                connection.settimeout(_left(deadline))
                group, other = _greeting(connection) if _same_user(connection) else _NO_GREETING
                if group == identity and other in own and other not in peers:
                    peers[other] = connection
                else:
                    connection.close()
            return peers, teams
    except BaseException as error:
        for connection in peers.values():
            connection.close()
        if not isinstance(error, TimeoutError) or isinstance(error, CollectiveTimeoutError):
            raise
        missing = sorted(set(range(size)) - set(peers) - {rank})
        raise CollectiveTimeoutError(
            f"ranks {missing} did not answer within {timeout.total_seconds():g} s while the "
            "group was formed"
        ) from error


def _reached(rank: int, answer: bytes) -> list[int]:
    """Return the lower ranks to which a rank connected."""
    if answer.startswith(_FAILED):
        reason = answer.removeprefix(_FAILED).decode(errors="replace")
        raise PeerFailedError(f"rank {rank} could not form the group: {reason}")
    return [] if answer == b"none" else [*map(int, answer.split(b","))]


def _left(deadline: Deadline) -> float | None:
    """Return the seconds until a deadline, never 0, which would make the socket non-blocking."""
    left = deadline.left()
    return None if left is None else max(left, 1e-3)


def _connect_to(name: bytes, identity: int, rank: int) -> socket.socket | None:
    """Connect to a listener; return None if it is not on this host, or of another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):  # no socket of that name: the rank is on another host, or has ended
        connection.connect(b"\0" + name)
        if _same_user(connection):
            connection.send(_GREETING.pack(identity, rank))
            return connection
    connection.close()
    return None


def _greeting(connection: socket.socket) -> tuple[int | None, int]:
    """Return identity and rank that a new connection sends; `_NO_GREETING` if it sends none."""
    try:
        data = connection.recv(_GREETING.size + 1)
    except ConnectionResetError:
        return _NO_GREETING
    return _GREETING.unpack(data) if len(data) == _GREETING.size else _NO_GREETING


def process_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user of a connection's peer; pid 0 if it has none in this namespace."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _same_user(connection: socket.socket) -> bool:
    """Return True if the peer's process belongs to the same user."""
    return process_of(connection)[1] == os.geteuid()


def find_teams(reached: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the teams, equal on all ranks: in each, every rank is connected to every other."""
    # A rank joins the first team to all of whose ranks so far it is connected.
    teams: list[list[int]] = []
    for rank, lower in enumerate(reached):
        team = next((team for team in teams if set(team) <= set(lower)), None)
        if team is None:
            teams.append([rank])
        else:
            team.append(rank)
    return tuple(map(tuple, teams))


class Teams:
    """Teams of a group, as one of its ranks sees them."""

    def __init__(self, ranks: tuple[tuple[int, ...], ...], rank: int) -> None:
        self.ranks, self.count = ranks, len(ranks)
        self.team = next(i for i, members in enumerate(ranks) if rank in members)
        self.own = ranks[self.team]
        self.place = self.own.index(rank)
        # the next first: no two teams begin with the same one
        self.others = [(self.team + i) % self.count for i in range(1, self.count)]
        # number of ranks per team that own a share of reduced data: size of the smallest
        self.owners = min(map(len, ranks))
