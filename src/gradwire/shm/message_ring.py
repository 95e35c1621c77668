"""Ring of slots in the sender's shared memory, for its messages to one receiver; sending them.

Both processes map it for the lifetime of the group: a message needs no system call and touches no
new page. Long messages pass in pieces, which the sender copies in while the receiver copies out.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import DistributedError, NotSupportedError
from gradwire.shm import segment
from gradwire.shm.header import NUMBERS
from gradwire.shm.links import Kind, Links, Message
from gradwire.shm.semaphores import SEMAPHORE_BYTES, Semaphore
from gradwire.shm.tensors import flat_of

SLOTS = 8
SLOT_BYTES = 256 << 10
_STAMP, _HEAD, _STAMPED = struct.Struct("<q"), struct.Struct("<6q"), struct.Struct("<7q")
_SEMAPHORES = 5
_HEADS_AT = _SEMAPHORES * SEMAPHORE_BYTES
_SLOTS_AT = 4096
RING_BYTES = _SLOTS_AT + SLOTS * SLOT_BYTES

_GLANCES = 600
"""About 30 µs, the time a wait spins before it yields: 200 are too few for messages of 64 KiB."""
_IN_ORDER = platform.machine() in {"x86_64", "AMD64", "i686"}
"""True if this CPU does not reorder the read of a semaphore before an earlier post of another."""


class Head(NamedTuple):
    """Description of the piece of a message in a slot."""

    # number of the message among those from this sender to this receiver
    message: int
    tag: int
    dtype: int
    # of the whole message
    elements: int
    # offset and size of the piece, in bytes
    offset: int
    nbytes: int


class MessageRing:
    """One side of a ring; used by one thread of the sender and one of the receiver at a time."""

    def __init__(
        self,
        memory: Tensor,
        spins: int,
        yields: int | None,
        is_beside: Callable[[], bool],
        *,
        create: bool,
    ) -> None:
        self._memory = memory  # kept mapped
        address = memory.data_ptr()
        # They count the slots, wake a waiting thread, and order memory. A signal handler may raise
        # just after the receiver decremented one, so that the receiver does not know it: it
        # increments it again, and recognizes a surplus by the slots' stamps.
        semaphores = [
            Semaphore(ctypes.c_void_p(address + SEMAPHORE_BYTES * i), spins, yields, is_beside)
            for i in range(_SEMAPHORES)
        ]
        self._filled, self._free, self._listening, self._woken, self._wanted = semaphores
        if create:
            # `wanted` is 1: the receiver must be woken to learn about the ring
            for semaphore, value in zip(semaphores, (0, SLOTS, 0, 0, 1), strict=True):
                semaphore.create(value)
        heads = (ctypes.c_ubyte * (SLOTS * _STAMPED.size)).from_address(address + _HEADS_AT)
        self._heads = memoryview(heads).cast("B")
        self._slots = [address + _SLOTS_AT + SLOT_BYTES * i for i in range(SLOTS)]
        self._glances = _GLANCES if yields is None else 0  # 0: another rank needs the core
        self._count = 0  # slots that this side has filled, or emptied
        self._ready = 0  # filled slots that the receiver has taken from the semaphore

    # --- the sender's side ---

    def acquire(self, seconds: float) -> bool:
        """Wait for a free slot; return False if there is none in time."""
        return self._free.try_wait() or (seconds > 0 and self._free.wait(seconds))

    def put(self, head: Head, source: int) -> bool:
        """Fill the acquired slot from memory at address `source`."""
        slot = self._count % SLOTS
        ctypes.memmove(self._slots[slot], source, head.nbytes)
        # the stamp last: a receiver with a surplus post may be reading it
        at = slot * _STAMPED.size
        _HEAD.pack_into(self._heads, at + _STAMP.size, *head)
        _STAMP.pack_into(self._heads, at, self._count + 1)
        self._count += 1
        self._filled.post()
        if _IN_ORDER and (self._listening.value() or not self._wanted.value()):
            return False
        return self.must_wake()

    def must_wake(self) -> bool:
        """Return True if the caller must wake the receiver for messages in the ring."""
        if _IN_ORDER and (self._listening.value() or self._woken.value()):
            return False
        self._woken.post()
        return True

    # --- the receiver's side ---

    def head(self) -> Head | None:
        """Return the head in the next slot if the slot is filled, else None."""
        while self._ready or self._filled.try_wait():
            # read the stamp first, as it is written last
            stamp, *head = _STAMPED.unpack_from(self._heads, self._count % SLOTS * _STAMPED.size)
            if stamp == self._count + 1:
                self._ready = max(self._ready, 1)
                return Head._make(head)
            self._ready = max(self._ready - 1, 0)
        return None

    def seems_filled(self, *, soon: bool) -> bool:
        """Return True if the next slot seems to be filled; in any thread."""
        read, heads, filled = _STAMP.unpack_from, self._heads, (self._count + 1,)
        at = self._count % SLOTS * _STAMPED.size
        if read(heads, at) == filled:
            return True
        # check for 30 µs, unless that would block the sender's core
        if soon and self._filled.can_try():
            for _ in range(self._glances):
                if read(heads, at) == filled:
                    return True
        return False

    def take(self, head: Head, target: int) -> None:
        """Copy the slot that `head` described to memory at address `target`, and free it."""
        ctypes.memmove(target, self._slots[self._count % SLOTS], head.nbytes)
        self._count += 1
        self._ready -= 1
        self._free.post()

    @property
    def taken(self) -> int:
        """Number of slots that were taken."""
        return self._count

    def want(self, wanted: bool) -> None:
        """Set whether the sender wakes this rank for messages from here on."""
        # A `head` after this call finds messages that arrived before it.
        if not wanted:
            while self._wanted.try_wait():
                pass
        elif not self._wanted.value():
            self._wanted.post()

    def listen(self) -> None:
        """Announce that a thread of the receiver waits, and need not be woken."""
        self._listening.post()

    def wait(self, seconds: float) -> None:
        """Wait until a slot is filled or the time is over; `head` tells which."""
        self._ready += self._filled.wait(seconds)

    def interrupted(self) -> None:
        """Increment the semaphore again after an exception ended one of these calls."""
        self._filled.post()

    def stop_listening(self) -> None:
        """Undo `listen`; a `head` after this call finds slots that were filled before it."""
        while self._listening.try_wait():  # more than once if an exception skipped this before
            pass

    def woke(self) -> None:
        """Record that the receiver is awake; call it before polling."""
        self._woken.try_wait()


REST = struct.Struct("<6q")
"""Head of a message, or of the rest of one, that travels over the connection: before its data, or
with the descriptor of the memory that holds the data."""

_ON_THE_LINK = 16 << 10
"""Maximum size of data inside the connection's own message."""
_GLANCE = 0.001
"""Seconds without a free slot after which the sender wakes the receiver."""
_PATIENCE = 0.02
"""Seconds without a free slot after which the rest travels over the connection. An active receiver
frees a slot in about 20 µs; if its main thread runs Python, in up to 5 ms. Later messages do not
wait at all until a slot is free."""


class Outgoing:
    """Sending side of one pair of ranks; any thread may send."""

    def __init__(self, peer: int, links: Links, make_ring: Callable[[], MessageRing]) -> None:
        self._peer, self._links, self._make_ring = peer, links, make_ring
        self._lock = threading.RLock()
        self._ring: MessageRing | None = None
        self._amid = False  # whether a message is being sent
        self._ring_is_usable = True
        self._behind = False  # whether the receiver failed to empty the ring in time
        self._number = 0

    def send(self, tag: int, tensor: Tensor, deadline: Deadline) -> None:
        """Send a contiguous tensor; it can be changed once this returns."""
        kind = tag, NUMBERS[tensor.dtype], tensor.numel()
        with self._lock:
            self._links.check((self._peer,))
            if self._amid:  # in a signal handler
                self._send(None, kind, tensor, deadline)
                return
            self._amid = True
            try:
                if self._ring is None:
                    with suppress(NotSupportedError):  # in a signal handler, amid an allocation
                        self._ring = self._make_ring()
                ring = self._ring if self._ring_is_usable else None
                self._send(ring, kind, tensor, deadline)
            finally:
                self._amid = False

    def close(self) -> None:
        """Release the ring's memory; nothing is sent any more."""
        self._ring, self._ring_is_usable = None, False

    def _send(
        self,
        ring: MessageRing | None,
        kind: tuple[int, int, int],
        tensor: Tensor,
        deadline: Deadline,
    ) -> None:
        # no call between these: a signal handler runs before or after both, or inside the `try`
        number = self._number
        self._number = number + 1
        try:
            message = Head(number, *kind, 0, tensor.nbytes)
            rest = message if ring is None else self._fill(ring, message, tensor, deadline)
            if rest is not None:
                self._send_rest(rest, tensor, deadline)
        except DistributedError as error:
            self._links.disconnect(self._peer, error)
            raise
        except BaseException:
            # A signal handler raised, and the slot may have been filled or not. The receiver waits
            # for the message; receiving part of it twice does no harm.
            self._ring_is_usable = False
            try:
                self._send_rest(Head(number, *kind, 0, tensor.nbytes), tensor, deadline)
            except BaseException as error:
                self._links.disconnect(self._peer, error)
                raise
            raise

    def _fill(
        self, ring: MessageRing, message: Head, tensor: Tensor, deadline: Deadline
    ) -> Head | None:
        """Send a message through the ring; return the rest that did not fit, or None."""
        address, total = tensor.data_ptr(), message.nbytes
        offset, glance = 0, 0 if self._behind else _GLANCE
        while True:
            if not ring.acquire(glance):
                glance = 0  # the receiver does not poll by itself
                if ring.must_wake():
                    self._links.send(self._peer, Message(Kind.WAKE), deadline)
                if not ring.acquire(0 if self._behind else _PATIENCE):
                    self._behind = True
                    return message._replace(offset=offset)
            self._behind = False
            nbytes = min(SLOT_BYTES, total - offset)
            whole = nbytes == total
            piece = message if whole else message._replace(offset=offset, nbytes=nbytes)
            if ring.put(piece, address + offset):
                self._links.send(self._peer, Message(Kind.WAKE), deadline)
            offset += nbytes
            if offset == total:
                return None
            self._links.check((self._peer,))

    def _send_rest(self, rest: Head, tensor: Tensor, deadline: Deadline) -> None:
        """Send a message from an offset on over the connection."""
        flat = flat_of(tensor)
        content = flat.view(torch.uint8)[rest.offset :] if flat.nbytes else flat
        head = REST.pack(*rest._replace(nbytes=content.nbytes))
        if content.nbytes <= _ON_THE_LINK:
            data = head + ctypes.string_at(content.data_ptr(), content.nbytes)
            self._links.send(self._peer, Message(Kind.DATA, data=data), deadline)
            return
        fd = segment.create(content.nbytes)
        try:
            segment.Mapping(fd).flat.copy_(content)
            self._links.send(self._peer, Message(Kind.DATA, data=head, fd=fd), deadline)
        finally:
            os.close(fd)
