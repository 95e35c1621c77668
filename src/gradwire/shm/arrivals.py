"""Mailbox of a rank, and assembly of the messages from one other rank, in their order.

The mailbox holds messages without a matching receive, and receives without a message. As in MPI,
they match by source and tag, in the order in which the messages were sent. A message goes straight
into the tensor of a receive that was posted before it arrived.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import CollectiveTimeoutError, DistributedError, MismatchError
from gradwire.shm import segment
from gradwire.shm.header import DTYPES, NUMBERS
from gradwire.shm.links import Links, Message
from gradwire.shm.message_ring import REST, SLOT_BYTES, Head, MessageRing
from gradwire.shm.tensors import count_write
from gradwire.shm.work import ShmWork


@dataclass(eq=False, slots=True)
class Envelope:
    """A message that has arrived."""

    source: int
    tag: int
    data: Tensor


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive that waits for its message; a source of None means any rank."""

    source: int | None
    tag: int
    tensor: Tensor
    work: ShmWork

    def fits(self, source: int, tag: int) -> bool:
        """Return True if the receive matches a message of this source and tag."""
        return self.tag == tag and self.source in (source, None)

    def complete(self, envelope: Envelope) -> None:
        """Copy the message and finish the receive."""
        # Nothing else finishes the receive of a matched message, so every path here must.
        try:
            self._fill(envelope)
        except (MismatchError, RuntimeError) as error:
            self.work.finish(error)  # of the tensor: the group stays usable
        else:
            self.work.finish(source=envelope.source)

    def _fill(self, envelope: Envelope) -> None:
        tensor, data = self.tensor, envelope.data
        if (tensor.numel(), tensor.dtype) != (data.numel(), data.dtype):
            raise MismatchError(
                f"rank {envelope.source} sent {data.numel()} elements of {data.dtype} (tag "
                f"{envelope.tag}), but recv was given a tensor of "
                f"{tensor.numel()} elements of {tensor.dtype}"
            )
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(data.view(tensor.shape))


class Mailbox:
    """Unexpected messages and posted receives of a rank; used with the links' lock held."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        # time of the last post of a receive, by `time.monotonic`; 0 if a message was sent since
        # then
        self.last_post = 0.0
        self._silent: set[int] = set()  # peers from which no message can arrive any more
        self._unexpected: deque[Envelope] = deque()
        self._posted: deque[PostedReceive] = deque()

    def holds_any(self) -> bool:
        """Return True if there are messages or receives; without the lock, as of some moment."""
        return bool(self._posted or self._unexpected)

    # The thread that matches a message and a receive removes both under the lock and copies after
    # releasing it. The copy of a large message must delay neither other receives nor the errors of
    # receives whose peer is lost.
    def post(self, receive: PostedReceive) -> Envelope | None:
        """Return the first matching message that has arrived; keep the receive if there is none."""
        for envelope in self._unexpected:
            if receive.fits(envelope.source, envelope.tag):
                self._unexpected.remove(envelope)
                return envelope
        self._posted.append(receive)
        return None

    def find(self, source: int, tag: int) -> PostedReceive | None:
        """Return the first matching posted receive, if any; it stays posted."""
        for receive in self._posted:
            if receive.fits(source, tag):
                return receive
        return None

    def take(self, receive: PostedReceive) -> bool:
        """Remove a receive, which the caller then finishes; False if it is no longer posted."""
        posted = self._posted
        if receive not in posted:
            return False
        posted.remove(receive)
        return True

    def keep(self, envelope: Envelope) -> None:
        """Keep a message without a matching receive."""
        self._unexpected.append(envelope)

    def fail(self, error: DistributedError, source: int | None = None) -> None:
        """Fail the receives from a lost peer, after all of its messages were taken; or all."""
        # If all peers are lost, fail the receives from any rank as well.
        if source is not None:
            self._silent.add(source)
        every = source is None or len(self._silent) == self._peers
        for receive in list(self._posted):
            if source in (None, receive.source) or (receive.source is None and every):
                self._posted.remove(receive)
                if not receive.work.is_done():
                    receive.work.finish(error)

    def cancel(self, work: ShmWork) -> bool:
        """Remove a receive; return False if a message had matched it."""
        kept = deque(w for w in self._posted if w.work is not work)
        cancelled = len(kept) < len(self._posted)
        self._posted = kept
        return cancelled


class Assembly:
    """A message that has not arrived completely."""

    __slots__ = ("address", "arrived", "data", "dtype", "head", "nbytes", "receive")

    def __init__(self, head: Head) -> None:
        self.head, self.dtype = head, DTYPES[head.dtype]
        self.nbytes = head.elements * self.dtype.itemsize
        # the matching one, once found
        self.receive: PostedReceive | None = None
        # in bytes
        self.arrived = 0
        # the receive's tensor if possible, else separate memory; None before `allocate`
        self.data: Tensor | None = None
        self.address = 0

    def allocate(self) -> None:
        """Set `data`."""
        elements = self.head.elements
        if self.receive is not None:
            x = self.receive.tensor
            plain = x.is_contiguous() and not (x.is_conj() or x.is_neg())
            if plain and x.dtype == self.dtype and x.numel() == elements:
                self._put_into(x)
                return
        try:
            self._put_into(torch.empty(elements, dtype=self.dtype, device="cpu"))
        except (RuntimeError, MemoryError) as error:  # torch raises either
            raise DistributedError(
                f"there is no memory for a message of {self.nbytes} bytes ({error})"
            ) from error

    def detach(self) -> None:
        """Continue without the receive, as if it had not been posted."""
        self.receive = None
        if self.data is not None:
            self._put_into(self.data.clone())

    def _put_into(self, data: Tensor) -> None:
        self.data, self.address = data, data.data_ptr()


def _never() -> bool:
    return False


class Arrivals:
    """Messages that have arrived from one rank."""

    def __init__(self, source: int, links: Links, mailbox: Mailbox) -> None:
        self._source, self._links, self._mailbox = source, links, mailbox
        # ring of the sender, once this rank has found it
        self.ring: MessageRing | None = None
        self._rests: dict[int, tuple[Head, Tensor]] = {}
        self._expected = 0
        self._assembly: Assembly | None = None
        self._abandoned: deque[ShmWork] = deque()

    def add_rest(self, message: Message) -> None:
        """Keep data from the connection until all earlier data has arrived; in any thread."""
        head = Head(*REST.unpack_from(message.data))
        _check(head, self._source)
        if head.message < self._expected:
            return  # sent again after an interruption
        data = bytearray(message.data[REST.size :])
        if message.fd >= 0:
            content = segment.Mapping(message.fd).flat
        elif data:
            content = torch.frombuffer(data, dtype=torch.uint8)
        else:
            content = torch.empty(0, dtype=torch.uint8, device="cpu")
        if content.nbytes < head.nbytes:
            raise DistributedError(f"rank {self._source} sent {content.nbytes} bytes for {head}")
        self._rests[head.message] = head, content

    def abandon(self, work: ShmWork) -> None:
        """Give up a receive at the next `take_all`; in any thread."""
        self._abandoned.append(work)

    def has_notices(self) -> bool:
        """Return True if there is work that was announced once and is not announced again."""
        return bool(self._rests or self._abandoned)

    def take_all(self, enough: Callable[[], bool] = _never) -> None:
        """Assemble what has arrived, until `enough()` is true or nothing is left."""
        # read the loss first: everything that the sender sent before it was lost still counts, as
        # `_fail` fails every remaining receive
        lost = self._links.loss_of(self._source)
        if lost is not None:
            enough = _never
        try:
            while self._abandoned:
                work, assembly = self._abandoned.popleft(), self._assembly
                if assembly and assembly.receive and assembly.receive.work is work:
                    assembly.detach()
                    work.finish(CollectiveTimeoutError("not all of the message arrived in time"))
            # rests are always taken: they are not announced again
            while (self._rests and self._take_rest()) or (not enough() and self._take_slot()):
                pass
        except DistributedError as error:
            lost = self._links.lose(self._source, error)
        except BaseException as error:
            # out of memory, or a signal handler raised: the next piece may be half taken
            self._fail(self._links.lose(self._source, error))
            raise
        if lost is not None:
            self._fail(lost)

    def take_now(self, tensor: Tensor, tag: int) -> bool:
        """Copy the next message into an ordinary tensor, if it matches and has arrived."""
        # Return False otherwise. The mailbox must be empty, so that neither posted receives nor
        # kept messages can match. This takes a third of the time of a posted receive.
        ring = self.ring
        if ring is None or self._assembly is not None or self.has_notices():
            return False
        head, nbytes = ring.head(), tensor.nbytes
        expected = self._expected, tag, NUMBERS[tensor.dtype], tensor.numel(), 0, nbytes
        if head is None or head != expected or nbytes > SLOT_BYTES or self._mailbox.holds_any():
            return False
        try:
            ring.take(head, tensor.data_ptr())
            self._expected += 1
        except BaseException as error:  # as in `take_all`
            self._fail(self._links.lose(self._source, error))
            raise
        count_write(tensor)
        return True

    def _take_rest(self) -> bool:
        wanted = self._expected if self._assembly is None else self._assembly.head.message
        if (rest := self._rests.get(wanted)) is None:
            return False
        head, content = rest
        if head.offset > (self._assembly.arrived if self._assembly else 0):
            return False
        assembly = self._begin(head)
        if head.offset + head.nbytes != assembly.nbytes:
            raise DistributedError(f"rank {self._source} sent {head} as a message's rest")
        ctypes.memmove(assembly.address + head.offset, content.data_ptr(), head.nbytes)
        del self._rests[wanted]
        self._arrived(assembly, assembly.nbytes)
        return True

    def _take_slot(self) -> bool:
        ring = self.ring
        head = None if ring is None else ring.head()
        if ring is None or head is None:
            return False
        _check(head, self._source)
        if head.message < self._expected:  # the connection delivered it, after an interruption
            ring.take(head._replace(nbytes=0), 0)
            return True
        if head.message > (self._assembly.head.message if self._assembly else self._expected):
            return False  # the connection has not delivered yet what precedes it
        assembly = self._begin(head)
        end = head.offset + head.nbytes
        if end > assembly.nbytes or head.offset > assembly.arrived or head.nbytes > SLOT_BYTES:
            raise DistributedError(
                f"rank {self._source} sent a fragment outside of its message: {head}"
            )
        ring.take(head, assembly.address + head.offset)
        self._arrived(assembly, end)
        return True

    def _begin(self, head: Head) -> Assembly:
        """Return the message that a piece belongs to."""
        assembly = self._assembly
        if assembly is None:
            assembly = self._assembly = Assembly(head)
            self._match(assembly)
        if assembly.data is None:
            assembly.allocate()
        return assembly

    def _match(self, assembly: Assembly) -> None:
        """Find a message's receive, which `_fail` finishes if this is interrupted."""
        with self._links.lock:
            receive = assembly.receive = self._mailbox.find(self._source, assembly.head.tag)
            if receive is not None:
                self._mailbox.take(receive)

    def _arrived(self, assembly: Assembly, end: int) -> None:
        """Record that a message has arrived up to byte `end`, and complete it if that is all."""
        assembly.arrived = max(assembly.arrived, end)
        if assembly.arrived < assembly.nbytes or assembly.data is None:
            return
        receive = assembly.receive
        if receive is not None and assembly.data is receive.tensor:
            count_write(receive.tensor)
            receive.work.finish(source=self._source)
        else:
            envelope = Envelope(self._source, assembly.head.tag, assembly.data)
            if receive is None:
                with self._links.lock:
                    self._match(assembly)
                    if assembly.receive is None:
                        self._mailbox.keep(envelope)
            if assembly.receive is not None:
                assembly.receive.complete(envelope)
        self._assembly, self._expected = None, assembly.head.message + 1

    def _fail(self, error: DistributedError) -> None:
        """Fail the receives that the lost sender cannot fill any more."""
        assembly, self._assembly = self._assembly, None
        receive = None if assembly is None else assembly.receive
        if receive is not None and not receive.work.is_done():
            receive.work.finish(error)
        with self._links.lock:
            self._mailbox.fail(error, self._source)


def _check(head: Head, source: int) -> None:
    """Raise unless the numbers, which a peer wrote, describe a piece of a message."""
    message, _, dtype, elements, offset, nbytes = head
    if message < 0 or elements < 0 or offset < 0 or nbytes < 0 or not 0 <= dtype < len(DTYPES):
        raise DistributedError(f"rank {source} sent an invalid message fragment: {head}")
