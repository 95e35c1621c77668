"""Base of the shm groups: how a rank joins and leaves a group."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import (
    ArgumentError,
    BrokenGroupError,
    DistributedError,
)
from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.algorithms.interface import Algorithms, InSharedMemory
from gradwire.shm.algorithms.known_calls import KnownCalls
from gradwire.shm.group.submission import Submission
from gradwire.shm.meeting.links import Kind, Message
from gradwire.shm.messages.incoming import Incoming
from gradwire.shm.messages.mailbox import Mailbox
from gradwire.shm.messages.outgoing import Outgoing
from gradwire.shm.runtime.operation_queue import Queue

_GROUPS: WeakSet[GroupBase] = WeakSet()
"""All groups of this process, for its handlers at fork and at exit."""


class GroupBase(Submission):
    """One rank of a group, without operations; usable after `_join`."""

    _known: KnownCalls | None = None  # None in groups over several hosts

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        _GROUPS.add(self)

    def _join(self, rank: int, size: int, peers: dict[int, Any], deadline: Deadline) -> None:
        """Form the group with the ranks to which `peers` are connections."""
        self._rank, self._size = rank, size
        self._mailbox = Mailbox(len(peers))
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        state = GroupState(rank, size, peers, self._deliver, self._on_lost, deadline)
        self._state, links = state, state.links
        self._algorithms: Algorithms = InSharedMemory(state)
        self._known = KnownCalls(state)
        for peer in peers:
            find, make = partial(state.find_ring, peer), partial(state.make_ring, peer)
            self._incoming[peer] = Incoming(peer, links, self._mailbox, find)
            self._outgoing[peer] = Outgoing(peer, links, make)
        self._queue = Queue(f"gradwire-shm-{rank}")
        state.is_awaited = self._queue.is_awaited
        links.start()  # not before: a peer may have sent already
        self._broken, self._closed = None, ""

    # --- properties ---

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "shm"

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate bytes in memory that the ranks share."""
        self.check_usable()
        return self._state.allocate(nbytes)

    # --- leaving ---

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this rank get an error."""
        self._leave("the group was destroyed on this rank: make a new one")

    def _leave(self, reason: str) -> None:
        joined, self._closed = not self._closed, reason
        if not joined:
            return
        if self._queue.runs_in_this_thread():
            # a signal handler called this amid an operation of this thread, which still uses the
            # memory. The operation fails when the handler returns, and `_submit` then releases
            self._state.links.aborted = BrokenGroupError(reason)
            self._leaving = True
        else:
            self._release()

    def _release(self) -> None:
        self._leaving = False
        self._queue.close()
        if self._known is not None:
            self._known.clear()
        self._state.close()
        links, error = self._state.links, BrokenGroupError(self._closed)
        links.aborted = links.aborted or error
        self._fail_receives(error)
        # parts of a group refer to each other: without this, rings would stay until garbage is
        # collected
        for peer, outgoing in self._outgoing.items():
            outgoing.close()
            self._incoming[peer].close()

    def abort(self) -> None:
        """Leave the group at once; pending operations fail."""
        if not self._closed:
            error = BrokenGroupError("the group was aborted on this rank")
            self._break(error)
            self._state.links.aborted = error
            self._fail_receives(error)
            self._leave("the group was aborted on this rank: make a new one")

    def _leave_at_exit(self) -> None:
        # an operation in which all ranks take part still ends; a wait for absent ranks must not
        # delay the process's exit
        if not self._closed:
            self._state.links.aborted = BrokenGroupError("the process of this rank ends")
        self.shutdown()

    def _leave_in_child(self) -> None:
        if not self._closed:
            self._closed = "this process was forked from a rank: only the rank can use its groups"
            self._state.links.close_in_child()

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._size:
            raise ArgumentError(f"root is rank {root}: give a rank from 0 to {self._size - 1}")
        return root

    def _check_peer(self, peer: int, name: str) -> None:
        if not 0 <= peer < self._size or peer == self._rank:
            raise ArgumentError(
                f"{name} is rank {peer}: give another rank of the group than this one "
                f"({self._rank}), from 0 to {self._size - 1}"
            )

    def _one_each(self, tensors: list[Tensor], name: str) -> list[Tensor]:
        if len(tensors) != self._size:
            raise ArgumentError(
                f"{name} has {len(tensors)} tensors: give one for each of {self._size} ranks"
            )
        return tensors

    def _check_parts(self, *, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"the larger tensor has {whole.numel()} elements: it needs "
                f"{self._size} times {part.numel()} of the smaller"
            )

    def _deliver(self, peer: int, message: Message) -> Callable[[], None] | None:
        incoming = self._incoming[peer]
        if message.kind == Kind.WAKE:
            return incoming.wake
        incoming.add_rest(message)
        return incoming.poll

    def _on_lost(self, peer: int) -> Callable[[], None] | None:
        return self._incoming[peer].poll

    def _fail_receives(self, error: DistributedError) -> None:
        """Fail all receives, posted or half filled; the links have the same error."""
        with self._state.links.lock:
            self._mailbox.fail_all(error)
        for incoming in self._incoming.values():
            incoming.poll()


def _at_exit() -> None:
    """End the groups' threads: a thread that runs a kernel at the interpreter's exit crashes."""
    for group in list(_GROUPS):
        group._leave_at_exit()


def _in_child() -> None:
    for group in list(_GROUPS):
        group._leave_in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
