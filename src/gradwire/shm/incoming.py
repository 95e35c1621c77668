"""Who looks for what a rank receives from one other, and when.

Whoever looks puts messages together, one at a time: the thread that waits for one of them, or asks
whether it is there; the links' thread, which the sender wakes, only where nobody may look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from gradwire.errors import DistributedError, NotSupportedError
from gradwire.shm.arrivals import Arrivals
from gradwire.shm.links import Links
from gradwire.shm.mailbox import Mailbox
from gradwire.shm.message_ring import SLOTS, MessageRing
from gradwire.shm.sync import Deadline
from gradwire.shm.work import ShmWork, wait_until

_POLL_SECONDS = 0.05
_AT_ONCE_SECONDS = 30e-6
"""Of these, torch takes 2 to 10 µs from a receive to its wait."""


class Incoming:
    """The receiving side of one pair of ranks.

    Args:
        source: The sender.
        links: This rank's connections.
        mailbox: Matches messages and receives.
        find_ring: Finds the sender's ring; called once the sender has filled a slot of it.
    """

    def __init__(
        self,
        source: int,
        links: Links,
        mailbox: Mailbox,
        find_ring: Callable[[], MessageRing],
    ) -> None:
        self._source, self._links, self._mailbox = source, links, mailbox
        self._find_ring = find_ring
        self._arrivals = Arrivals(source, links, mailbox)
        self.add_rest = self._arrivals.add_rest
        # A call looks while it holds a lock of its own, which is entered here. `with` gives that
        # back whenever a signal's handler raises, as no lock is with `acquire(blocking=False)`.
        self._turn: threading.Lock | None = None
        self._looking = 0  # the thread whose turn it is
        self._entering = threading.RLock()
        self._again = False  # whether somebody asked to look while another thread did
        # Who wants messages without waiting at the ring. While there is nobody, what arrives is
        # left in the ring until somebody looks: to wake this rank's thread takes longer than a
        # message does.
        self._wanting: set[object] = set()
        self._waits_at_once = False  # whether the last receive was waited for at once

    def wake(self) -> None:
        """Look, as the sender asked for."""
        if self._arrivals.ring is None:
            try:
                ring = self._find_ring()
            except DistributedError as error:
                self._links.lose(self._source, error)
            else:
                with self._entering:
                    self._arrivals.ring = ring
                    self._tell_sender()
        if self._arrivals.ring is not None:
            self._arrivals.ring.woke()
        self.look()

    def close(self) -> None:
        """Let go of the ring's memory: all receives have ended."""
        self._arrivals.ring = None

    def abandon(self, work: ShmWork) -> None:
        """End a receive that is given up while its message arrives; another can take that."""
        self._arrivals.abandon(work)
        self.look()

    def take_now(self, tensor: Tensor, tag: int) -> bool:
        """As `Arrivals.take_now`, of a receive that is not posted; False if another thread looks.

        A receive may be waited for at once, as that of `dist.recv` is, or after much else. If the
        last one was waited for at once, the wait for this one begins here: a message that comes
        before the receive is posted takes half of the steps. If that was wrong, it was only late.
        """
        ring, soon = self._arrivals.ring, self._waits_at_once
        if ring is None:
            return False
        if not ring.seems_filled(soon=soon):
            self._waits_at_once = False  # until `note_wait`
            return False
        turn = threading.Lock()
        try:
            with turn:
                taken = self._enter(turn) and self._arrivals.take_now(tensor, tag)
            if self._again:
                self._look()
        except BaseException:
            self._recover()
            raise
        return taken

    def note_wait(self, posted: float) -> None:
        """Note that a receive is waited for that was posted at this time; see `take_now`."""
        at_once = time.monotonic() - posted < _AT_ONCE_SECONDS
        self._waits_at_once = at_once and posted == self._mailbox.last_post

    def look(self) -> None:
        """Put together what has arrived; returns at once if another thread does, which goes on."""
        try:
            self._look()
        except BaseException:
            self._recover()
            raise

    def _look(self) -> None:
        self._again = True
        while self._again:
            turn = threading.Lock()
            with turn:
                if not self._enter(turn):
                    return
                self._again = False
                self._arrivals.take_all()

    def _recover(self) -> None:
        """After an exception, which a signal's handler may raise anywhere: do what was skipped.

        Others asked this thread to look, or are not told as long as it seems to wait at the ring.
        """
        ring, turn = self._arrivals.ring, threading.Lock()
        if ring is not None:
            ring.interrupted()
            with turn:
                if self._enter(turn):  # nobody else is at the ring
                    ring.stop_listening()
        self._look()

    def _enter(self, turn: threading.Lock) -> bool:
        """Whether nobody else looks; nobody else does then until `turn`, which is held, is not."""
        with self._entering:
            if self._turn is not None and self._turn.locked():
                return False
            # in this order: `wait` reads both without the lock, in the other
            self._looking = threading.get_ident()
            self._turn = turn
            return True

    def wait(self, work: ShmWork, tag: int, deadline: Deadline) -> None:
        """Wait at the ring until a receive of this tag is done or the time is over.

        Raises:
            NotSupportedError: This thread waits at the ring already, which a signal interrupted.
        """
        done = work.is_done
        while not (done() or deadline.over()):
            turn = self._turn
            if turn is not None and turn.locked() and self._looking == threading.get_ident():
                raise NotSupportedError(
                    "this thread is in another receive from the same rank, which a signal "
                    "interrupted: let the signal's handler set a flag, and receive after it"
                )
            turn = threading.Lock()
            try:
                with turn:
                    ring = self._arrivals.ring
                    if waits := ring is not None and self._enter(turn):
                        self._wait_at(ring, work, tag, deadline)
                if self._again:
                    self._look()
            except BaseException:
                self._recover()
                raise
            if not waits:
                self._wait_beside(work, min(_POLL_SECONDS, _left(deadline)))

    def _wait_beside(self, work: ShmWork, seconds: float) -> None:
        """Wait while another thread waits at the ring, or there is none yet."""
        this = object()
        try:
            self.want(this)
            wait_until(work.is_done, seconds)
        finally:
            self.unwant(this)

    def want(self, who: object) -> None:
        """From here on the sender wakes this rank for what it sends, until `unwant`."""
        with self._entering:
            self._wanting.add(who)
            self._tell_sender()
        self.look()

    def unwant(self, who: object) -> None:
        """The opposite of `want`."""
        with self._entering:
            self._wanting.discard(who)
            self._tell_sender()

    def _tell_sender(self) -> None:
        ring, wanted = self._arrivals.ring, bool(self._wanting)
        if ring is not None:
            ring.want(wanted)
            if wanted is not bool(self._wanting):  # since then, in a signal's handler
                self._tell_sender()

    def _wait_at(self, ring: MessageRing, work: ShmWork, tag: int, deadline: Deadline) -> None:
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
                arrivals.get_ready(work, tag)
                ring.wait(min(_POLL_SECONDS, _left(deadline)))
        finally:
            ring.stop_listening()
            # what is filled from here on waits until it is looked for, or the sender tells of it if
            # that is wanted; of a loss, `_again` does
            arrivals.forget_ready()
            if arrivals.is_told() or (self._wanting and ring.head() is not None):
                limit = ring.taken + SLOTS
                arrivals.take_all(lambda: ring.taken >= limit)


def _left(deadline: Deadline) -> float:
    left = deadline.left()
    return _POLL_SECONDS if left is None else left
