"""Receiving side of a pair of ranks: which thread polls the ring, and when.

One thread at a time polls and assembles messages: a thread that waits for one of them, or asks
whether it has arrived. The links' thread, which the sender wakes, polls only if no other thread
may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import DistributedError, NotSupportedError
from gradwire.shm.arrivals import Arrivals, Mailbox
from gradwire.shm.links import Links
from gradwire.shm.message_ring import SLOTS, MessageRing
from gradwire.shm.work import ShmWork, wait_until

_POLL_SECONDS = 0.05
_AT_ONCE_SECONDS = 30e-6
"""A wait within this time after its receive counts as immediate; torch takes 2 to 10 µs of it."""


class Incoming:
    """Receiving side of one pair of ranks."""

    def __init__(
        self, source: int, links: Links, mailbox: Mailbox, find_ring: Callable[[], MessageRing]
    ) -> None:
        self._source, self._links, self._mailbox = source, links, mailbox
        # called once the sender has filled a slot
        self._find_ring = find_ring
        self._arrivals = Arrivals(source, links, mailbox)
        self.add_rest = self._arrivals.add_rest
        # A call polls while it holds a lock of its own, which is stored here. `with` releases that
        # lock if a signal handler raises; `acquire(blocking=False)` would not be safe.
        self._polling: threading.Lock | None = None
        self._poller = 0  # identifier of the polling thread
        self._entering = threading.RLock()
        self._again = False  # whether a poll was requested while another thread polled
        # Those that want messages without waiting at the ring. If there are none, messages stay in
        # the ring until some thread polls: waking this rank's thread takes longer than a message.
        self._wanting: set[object] = set()
        self._waits_at_once = False  # whether the last receive was waited for at once

    def wake(self) -> None:
        """Poll on the sender's request."""
        if self._arrivals.ring is None:
            try:
                ring = self._find_ring()
            except DistributedError as error:
                self._links.lose(self._source, error)
            else:
                with self._entering:
                    self._arrivals.ring = ring
                    self._update_sender()
        if self._arrivals.ring is not None:
            self._arrivals.ring.woke()
        self.poll()

    def close(self) -> None:
        """Release the ring's memory after all receives have ended."""
        self._arrivals.ring = None

    def abandon(self, work: ShmWork) -> None:
        """End a receive that timed out while its message arrives; a later receive can take it."""
        self._arrivals.abandon(work)
        self.poll()

    def take_now(self, tensor: Tensor, tag: int) -> bool:
        """Take the next message for a receive that is not posted, unless another thread polls."""
        # The caller may wait for a receive at once, as `dist.recv` does, or much later. If it
        # waited at once for the last one, the wait for this one begins here: a message that arrives
        # before the receive is posted takes half of the steps. A wrong guess costs 30 µs.
        ring, soon = self._arrivals.ring, self._waits_at_once
        if ring is None:
            return False
        if not ring.seems_filled(soon=soon):
            self._waits_at_once = False  # until `note_wait`
            return False
        lock = threading.Lock()
        try:
            with lock:
                taken = self._enter(lock) and self._arrivals.take_now(tensor, tag)
            if self._again:
                self._poll()
        except BaseException:
            self._recover()
            raise
        return taken

    def note_wait(self, posted: float) -> None:
        """Record a wait for the receive that was posted at this time; see `take_now`."""
        at_once = time.monotonic() - posted < _AT_ONCE_SECONDS
        self._waits_at_once = at_once and posted == self._mailbox.last_post

    def poll(self) -> None:
        """Assemble what has arrived; if another thread is polling, let it poll again and return."""
        try:
            self._poll()
        except BaseException:
            self._recover()
            raise

    def _poll(self) -> None:
        self._again = True
        while self._again:
            lock = threading.Lock()
            with lock:
                if not self._enter(lock):
                    return
                self._again = False
                self._arrivals.take_all()

    def _recover(self) -> None:
        """Do what was skipped by an exception, which a signal handler may raise at any point."""
        # Other threads may have asked this one to poll, and the sender wakes nobody as long as this
        # thread seems to wait at the ring.
        ring, lock = self._arrivals.ring, threading.Lock()
        if ring is not None:
            ring.interrupted()
            with lock:
                if self._enter(lock):  # no other thread is at the ring
                    ring.stop_listening()
        self._poll()

    def _enter(self, lock: threading.Lock) -> bool:
        """Return True if no other thread polls; then none does until `lock`, held, is released."""
        with self._entering:
            if self._polling is not None and self._polling.locked():
                return False
            # in this order: `wait` reads both without the lock, in the opposite order
            self._poller = threading.get_ident()
            self._polling = lock
            return True

    def wait(self, work: ShmWork, deadline: Deadline) -> None:
        """Wait at the ring until a receive is done or the deadline has passed."""
        done = work.is_done
        while not (done() or deadline.over()):
            polling = self._polling
            if polling and polling.locked() and self._poller == threading.get_ident():
                raise NotSupportedError(
                    "this thread is in another receive from the same rank, which a signal "
                    "interrupted: let the signal's handler set a flag, and receive after it"
                )
            lock = threading.Lock()
            try:
                with lock:
                    ring = self._arrivals.ring
                    if waits := ring is not None and self._enter(lock):
                        self._wait_at(ring, work, deadline)
                if self._again:
                    self._poll()
            except BaseException:
                self._recover()
                raise
            if not waits:
                # another thread waits at the ring, or there is no ring yet
                try:
                    self.want(lock)
                    wait_until(work.is_done, min(_POLL_SECONDS, _left(deadline)))
                finally:
                    self.unwant(lock)

    def want(self, waiter: object) -> None:
        """Have the sender wake this rank for each message, until `unwant`."""
        with self._entering:
            self._wanting.add(waiter)
            self._update_sender()
        self.poll()

    def unwant(self, waiter: object) -> None:
        """Undo `want`."""
        with self._entering:
            self._wanting.discard(waiter)
            self._update_sender()

    def _update_sender(self) -> None:
        ring, wanted = self._arrivals.ring, bool(self._wanting)
        if ring is not None:
            ring.want(wanted)
            if wanted is not bool(self._wanting):  # a signal handler has changed it meanwhile
                self._update_sender()

    def _wait_at(self, ring: MessageRing, work: ShmWork, deadline: Deadline) -> None:
        arrivals = self._arrivals

        def over() -> bool:
            return work.is_done() or deadline.over() or self._links.aborted is not None

        try:
            ring.listen()
            while True:
                self._again = False
                arrivals.take_all(over)
                if over():
                    return
                ring.wait(min(_POLL_SECONDS, _left(deadline)))
        finally:
            ring.stop_listening()
            # messages from here on wait for the next poll, or the sender wakes this rank if it is
            # wanted; a loss sets `_again`
            if arrivals.has_notices() or (self._wanting and ring.head() is not None):
                limit = ring.taken + SLOTS
                arrivals.take_all(lambda: ring.taken >= limit)


def _left(deadline: Deadline) -> float:
    left = deadline.left()
    return _POLL_SECONDS if left is None else left
