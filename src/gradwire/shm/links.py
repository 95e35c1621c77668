"""Connections of a rank to its peers: messages, descriptors of shared memory, and lost peers.

The data of collectives does not pass through connections, but the descriptors of their regions do,
and the loss of a peer is detected here. One thread per group polls all connections, delivers what
arrives and wakes the threads that wait for it.
"""

from __future__ import annotations

import array
import contextlib
import copy
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerFailedError, PeerLostError
from gradwire.shm.segment import check_sealed

_HEAD = struct.Struct("<Biq")  # kind, tag, and a number whose meaning depends on the kind
_FD_BYTES = array.array("i").itemsize
_MAX_BYTES = 1 << 17
_FULL = {errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS, errno.ENOBUFS}
"""Errors of a full connection, or of too many descriptors in flight: the peer is not lost."""
_POLL_MS = 50
_JOIN_S = 1.0


class Kind(IntEnum):
    """Kinds of messages, and the meaning of their fields."""

    REGION = 0  # number: the region's number; data: its offset and size; the first has a descriptor
    RELEASE = 1  # number: the region's number
    DATA = 2  # a point-to-point message, or the rest of one: see `outgoing`
    FAILED = 3  # an operation failed at the sender; data: its error; number: 1 if it lost a peer
    LEFT = 4  # the sender left the group regularly
    WAKE = 5  # the sender filled a slot of its ring while no thread of the receiver listened


@dataclass
class Message:
    """One message to a peer or from it."""

    kind: Kind
    # `tag` and `number`: see `Kind`
    tag: int = 0
    number: int = 0
    data: bytes = b""
    # descriptor sent with the message, or -1; a received one is closed after `receive` has returned
    fd: int = -1

    def head(self) -> bytes:
        """Return the bytes that precede the data."""
        return _HEAD.pack(self.kind, self.tag, self.number)


Receive = Callable[[int, Message], Callable[[], None] | None]
"""Handler of a peer's message, called with the lock held; its result is called without the lock."""


class Links:
    """Connections of one rank."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        # held whenever a message is received or a peer is lost
        self.lock = threading.RLock()
        # notified afterwards; a signal handler's exception cannot leave the lock held, unlike the
        # condition
        self.changed = threading.Condition(self.lock)
        # errors that waits for a peer raise, by peer that died, left or failed
        self.lost: dict[int, DistributedError] = {}
        # error with which all waits of this rank fail, once it aborted
        self.aborted: DistributedError | None = None
        # numbers by which errors name the ranks; in a team, those of the group
        self.ranks: Sequence[int] = range(len(peers) + 1)
        self._peers = peers
        # Called in the reading thread, with `lock` held; the result is called in that thread after
        # `lock` is released. `on_lost` is called in the same way.
        self.receive: Receive = lambda peer, message: None
        self.on_lost: Callable[[int], Callable[[], None] | None] = lambda peer: None
        self._later: list[Callable[[], None]] = []  # used only by the reading thread
        self._wake, self._woken = os.pipe()
        for peer in peers.values():
            peer.setblocking(False)
        self._thread = threading.Thread(target=self._read, name="gradwire-shm-links", daemon=True)

    def start(self) -> None:
        """Start to read: from here on `receive` and `on_lost` are called."""
        self._thread.start()

    def send(self, peer: int, message: Message, deadline: Deadline) -> None:
        """Send one message; waits only while the connection is full of unread messages."""
        connection = self._peers[peer]
        parts, extra = [message.head(), message.data], []
        if message.fd >= 0:
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [message.fd]))]
        while True:
            try:
                connection.sendmsg(parts, extra)
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._wait_until_writable(peer, error.errno, deadline)
                    continue
                lost = self.lost.get(peer)
                gone = PeerLostError(f"rank {self.ranks[peer]} is gone ({error.strerror})")
                raise (gone if lost is None else copy.copy(lost)) from error

    def _wait_until_writable(self, peer: int, errno_: int, deadline: Deadline) -> None:
        """Wait a moment for a peer to read earlier messages."""
        self.check([])
        if deadline.over():
            raise CollectiveTimeoutError(
                f"rank {self.ranks[peer]} did not read its messages within {deadline.seconds:g} s"
            )
        if errno_ == errno.ETOOMANYREFS:
            # the limit concerns all processes of this user: there is nothing to poll
            time.sleep(0.001)
        else:
            poll = select.poll()  # select.select takes no descriptor of 1024 or more
            poll.register(self._peers[peer], select.POLLOUT)
            poll.poll(_POLL_MS)

    def send_to_all(self, message: Message, deadline: Deadline) -> None:
        """Send one message to every peer that is not lost."""
        for peer in self._peers:
            with contextlib.suppress(PeerLostError, PeerFailedError):
                self.send(peer, message, deadline)

    def report_failure(self, reason: BaseException) -> None:
        """Send the error with which this rank failed to the peers, so that none waits for it."""
        for connection in self._peers.values():
            _report_failure(connection, reason)

    def disconnect(self, peer: int, reason: BaseException) -> None:
        """Disconnect from a peer to which a message could not be sent: each loses the other."""
        # Messages sent before still arrive.
        with self.lock:
            if peer not in self.lost:
                _report_failure(self._peers[peer], reason)
                self._mark_lost(peer, _as_distributed_error(self.ranks[peer], reason))
                with contextlib.suppress(OSError):  # wakes the reading thread
                    self._peers[peer].shutdown(socket.SHUT_RDWR)

    def lose(self, peer: int, error: BaseException) -> DistributedError:
        """Mark a peer as lost because its message could not be handled; in any thread."""
        with self.lock:
            self._mark_lost(peer, _as_distributed_error(self.ranks[peer], error))
            self.changed.notify_all()
            return copy.copy(self.lost[peer])

    def loss_of(self, peer: int) -> DistributedError | None:
        """Return the error of this rank's abort or of the peer's loss; None if there is none."""
        error = self.aborted or self.lost.get(peer)
        return None if error is None else copy.copy(error)

    def check(self, peers: Sequence[int]) -> None:
        """Raise the error of this rank's abort or of the first lost peer among `peers`."""
        if self.aborted is None and not self.lost:
            return
        for error in (self.aborted, *(self.lost.get(peer) for peer in peers)):
            if error is not None:
                raise copy.copy(error)

    def close(self) -> None:
        """Send `LEFT` to all peers and end the thread."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.send(Message(Kind.LEFT).head())
        os.close(self._woken)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            # with a timeout: a signal handler may call this in a thread that holds `lock`, for
            # which the reading thread waits
            self._thread.join(_JOIN_S)

    def close_in_child(self) -> None:
        """Close the inherited sockets in a forked child: they would hide the parent's death."""
        for connection in self._peers.values():
            connection.close()
        os.close(self._woken)
        os.close(self._wake)

    def _read(self) -> None:
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._peers.items()}
        for fd in (self._wake, *ranks):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._wake in ready:
                break
            with self.lock:
                for fd in ready:
                    if not self._read_one(ranks[fd]):
                        poll.unregister(fd)
                self.changed.notify_all()
            while self._later:
                # on an error, such as lack of memory, the peer was marked as lost
                with contextlib.suppress(Exception):
                    self._later.pop(0)()
        for connection in self._peers.values():
            connection.close()
        os.close(self._wake)

    def _read_one(self, peer: int) -> bool:
        """Receive and handle one message; return False if no more can arrive."""
        space = socket.CMSG_LEN(_FD_BYTES)
        try:
            data, extra, flags, _ = self._peers[peer].recvmsg(
                _MAX_BYTES + _HEAD.size, space, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return True  # the peer closed with messages unread; its own can still be received
        except OSError as error:
            self._mark_lost(
                peer, PeerLostError(f"the connection to rank {self.ranks[peer]} failed ({error})")
            )
            return False
        if not data:  # end-of-file without LEFT
            self._mark_lost(peer, PeerLostError(f"rank {self.ranks[peer]} died"))
            return False
        fd = array.array("i", extra[0][2][:_FD_BYTES])[0] if extra else -1
        try:
            if flags & socket.MSG_CTRUNC:
                raise DistributedError(
                    f"memory that rank {self.ranks[peer]} shares cannot be mapped: this process "
                    "may open no more files (see ulimit -n)"
                )
            if fd >= 0:
                check_sealed(fd)
            self._handle(peer, data, fd)
        except Exception as error:  # the thread goes on: it serves the other peers as well
            self._mark_lost(peer, _as_distributed_error(self.ranks[peer], error))
            return False
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def _handle(self, peer: int, data: bytes, fd: int) -> None:
        (kind, tag, number), rest = _HEAD.unpack_from(data), data[_HEAD.size :]
        if kind == Kind.LEFT:
            self._mark_lost(
                peer, PeerLostError(f"rank {self.ranks[peer]} left the group before this operation")
            )
        elif kind == Kind.FAILED:
            error = PeerLostError if number else PeerFailedError
            text = rest.decode(errors="replace")
            failed = f"an operation failed on rank {self.ranks[peer]}: {text}"
            self._mark_lost(peer, error(failed))
        else:
            later = self.receive(peer, Message(Kind(kind), tag, number, rest, fd))
            if later is not None:
                self._later.append(later)

    def _mark_lost(self, peer: int, error: DistributedError) -> None:
        if peer not in self.lost:
            # keep a copy that is never raised: a traceback keeps its callers' frames alive, and so
            # the memory that they use
            self.lost[peer] = copy.copy(error)
            later = self.on_lost(peer)
            if later is not None:
                self._later.append(later)


def _report_failure(connection: socket.socket, reason: BaseException) -> None:
    text = f"{type(reason).__name__}: {reason}".encode()[:_MAX_BYTES]
    head = Message(Kind.FAILED, number=isinstance(reason, PeerLostError)).head()
    with contextlib.suppress(OSError):  # the peer may have ended
        try:
            connection.sendmsg([head, text])
        except BlockingIOError:  # full: the peer reads all of it, and then end-of-file
            connection.shutdown(socket.SHUT_WR)


def _as_distributed_error(rank: int, error: BaseException) -> DistributedError:
    if isinstance(error, DistributedError):
        return error
    return DistributedError(
        f"a message of rank {rank} could not be handled ({type(error).__name__}: {error})"
    )
