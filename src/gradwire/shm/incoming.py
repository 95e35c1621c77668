"""What a rank receives from one other: messages put together from the ring and the connection.

Messages are put together one at a time, in the order in which they were sent, by whoever looks: the
thread that waits for one of them, or else the links' thread, which the sender wakes. If a receive
that matches was posted before, straight into its tensor.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import CollectiveTimeoutError, DistributedError, NotSupportedError
from gradwire.shm import segment
from gradwire.shm.assembly import Assembly
from gradwire.shm.header import DTYPES
from gradwire.shm.links import Links, Message
from gradwire.shm.mailbox import Envelope, Mailbox
from gradwire.shm.message_ring import SLOT_BYTES, SLOTS, Head, MessageRing
from gradwire.shm.outgoing import REST
from gradwire.shm.sync import Deadline
from gradwire.shm.work import ShmWork, wait_until

__all__ = ["Incoming"]

_POLL_SECONDS = 0.05
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Rest(NamedTuple):
    head: Head
    content: Tensor


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
        self._ring: MessageRing | None = None
        self._rests: dict[int, _Rest] = {}
        self._expected = 0
        self._assembly: Assembly | None = None
        # A call looks while it holds a lock of its own, which is entered here. `with` gives that
        # back whenever a signal's handler raises, as no lock is with `acquire(blocking=False)`.
        self._turn: threading.Lock | None = None
        self._looking = 0  # the thread whose turn it is
        self._entering = threading.RLock()
        self._again = False  # whether somebody asked to look while another thread did
        self._abandoned: deque[ShmWork] = deque()

    def add_rest(self, message: Message) -> None:
        """Keep what came over the connection until the ring has brought what is before it.

        Raises:
            DistributedError: It is not what a peer sends.
        """
        head = Head(*REST.unpack_from(message.data))
        _check(head, self._source)
        if head.message < self._expected:
            return  # sent again after an interruption
        data = bytearray(message.data[REST.size :])
        if message.fd >= 0:
            content = segment.map_tensor(message.fd)
        else:
            content = torch.frombuffer(data, dtype=torch.uint8) if data else _EMPTY
        if content.nbytes < head.nbytes:
            raise DistributedError(f"rank {self._source} sent {content.nbytes} bytes for {head}")
        self._rests[head.message] = _Rest(head, content)

    def wake(self) -> None:
        """Look, as the sender asked for."""
        if self._ring is None:
            try:
                self._ring = self._find_ring()
            except DistributedError as error:
                self._links.lose(self._source, error)
        if self._ring is not None:
            self._ring.woke()
        self.look()

    def abandon(self, work: ShmWork) -> None:
        """End a receive that is given up while its message arrives; another can take that."""
        self._abandoned.append(work)
        self.look()

    def look(self) -> None:
        """Put together what has arrived; returns at once if another thread does, which goes on."""
        self._again = True
        while self._again:
            turn = threading.Lock()
            with turn:
                if not self._enter(turn):
                    return
                self._again = False
                self._take_all()

    def _enter(self, turn: threading.Lock) -> bool:
        """Whether nobody else looks; nobody else does then until `turn`, which is held, is not."""
        with self._entering:
            if self._turn is not None and self._turn.locked():
                return False
            self._turn, self._looking = turn, threading.get_ident()
            return True

    def wait(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Wait at the ring until `done` is true or the time is over.

        Raises:
            NotSupportedError: This thread waits at the ring already, which a signal interrupted.
        """
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
                    if waits := self._ring is not None and self._enter(turn):
                        self._wait_at(self._ring, done, deadline)
            finally:
                if self._again:
                    self.look()
            if not waits:
                wait_until(done, min(_POLL_SECONDS, _left(deadline)))

    def _wait_at(self, ring: MessageRing, done: Callable[[], bool], deadline: Deadline) -> None:
        def over() -> bool:
            return done() or deadline.over() or self._links.aborted is not None

        try:
            ring.listen()
            while True:
                self._again = False
                self._take_all(over)
                if over():
                    return
                try:
                    ring.wait(min(_POLL_SECONDS, _left(deadline)))
                except BaseException:  # of a signal's handler
                    ring.interrupted()
                    raise
        finally:
            ring.stop_listening()
            # of what is filled from here on, the sender tells; of a loss, `_again`
            if self._rests or self._abandoned or ring.head() is not None:
                limit = ring.taken + SLOTS
                self._take_all(lambda: ring.taken >= limit)

    def _take_all(self, enough: Callable[[], bool] = lambda: False) -> None:
        # read before the rest: what the sender sent before it was lost still counts
        lost = self._links.aborted or self._links.lost.get(self._source)
        try:
            if self._abandoned:
                self._detach_abandoned()
            # rests are taken in any case: they have been told of, and nobody tells of them again
            while (self._rests and self._take_rest()) or (not enough() and self._take_slot()):
                pass
        except DistributedError as error:
            lost = self._links.lose(self._source, error)
        except BaseException as error:
            # no memory, or a signal's handler raised: the next piece may be half taken
            self._fail(self._links.lose(self._source, error))
            raise
        if lost is not None:
            self._fail(lost)

    def _take_rest(self) -> bool:
        wanted = self._expected if self._assembly is None else self._assembly.head.message
        rest = self._rests.get(wanted)
        if rest is None or rest.head.offset > (self._assembly.arrived if self._assembly else 0):
            return False
        assembly = self._begin(rest.head)
        if rest.head.offset + rest.head.nbytes != assembly.nbytes:
            raise DistributedError(f"rank {self._source} sent {rest.head} as a message's rest")
        target = assembly.address + rest.head.offset
        ctypes.memmove(target, rest.content.data_ptr(), rest.head.nbytes)
        del self._rests[wanted]
        self._arrived(assembly, assembly.nbytes)
        return True

    def _take_slot(self) -> bool:
        ring = self._ring
        head = None if ring is None else ring.head()
        if ring is None or head is None:
            return False
        _check(head, self._source)
        if head.message < self._expected:  # it came over the connection, after an interruption
            ring.take(head._replace(nbytes=0), 0)
            return True
        if head.message > (self._assembly.head.message if self._assembly else self._expected):
            return False  # the connection has not brought yet what is before it
        assembly = self._begin(head)
        end = head.offset + head.nbytes
        if end > assembly.nbytes or head.offset > assembly.arrived or head.nbytes > SLOT_BYTES:
            raise DistributedError(
                f"rank {self._source} sent a piece outside of its message: {head}"
            )
        ring.take(head, assembly.address + head.offset)
        self._arrived(assembly, end)
        return True

    def _begin(self, head: Head) -> Assembly:
        """The message that a piece belongs to."""
        assembly = self._assembly
        if assembly is None:
            assembly = self._assembly = Assembly(head)
            self._match(assembly)
        if assembly.data is None:
            assembly.place()
        return assembly

    def _match(self, assembly: Assembly) -> None:
        """Find a message's receive, which `_fail` finishes wherever this is interrupted."""
        with self._links.lock:
            receive = assembly.receive = self._mailbox.find(self._source, assembly.head.tag)
            if receive is not None:
                self._mailbox.take(receive)

    def _detach_abandoned(self) -> None:
        while self._abandoned:
            work, assembly = self._abandoned.popleft(), self._assembly
            if assembly and assembly.receive and assembly.receive.work is work:
                assembly.detach()
                work.finish(CollectiveTimeoutError("not all of the message arrived in time"))

    def _arrived(self, assembly: Assembly, end: int) -> None:
        """Note that a message has arrived up to a byte, and complete it if that is its end."""
        assembly.arrived = max(assembly.arrived, end)
        if assembly.arrived < assembly.nbytes or assembly.data is None:
            return
        envelope = Envelope(self._source, assembly.head.tag, assembly.data)
        if assembly.receive is None:
            with self._links.lock:
                self._match(assembly)
                if assembly.receive is None:
                    self._mailbox.keep(envelope)
        if assembly.receive is not None:
            assembly.receive.complete(envelope)
        self._assembly, self._expected = None, assembly.head.message + 1

    def _fail(self, error: DistributedError) -> None:
        """Fail the receives that the lost sender will not fill."""
        assembly, self._assembly = self._assembly, None
        receive = None if assembly is None else assembly.receive
        if receive is not None and not receive.work.is_completed():
            receive.work.finish(error)
        with self._links.lock:
            self._mailbox.fail(self._source, error, others_left=not self._links.all_lost())


def _check(head: Head, source: int) -> None:
    """Raise unless the numbers, which a peer wrote, are those of a message's piece."""
    message, _, dtype, elements, offset, nbytes = head
    if message < 0 or elements < 0 or offset < 0 or nbytes < 0 or not 0 <= dtype < len(DTYPES):
        raise DistributedError(f"rank {source} sent a piece of a message that cannot be: {head}")


def _left(deadline: Deadline) -> float:
    left = deadline.left()
    return _POLL_SECONDS if left is None else left
