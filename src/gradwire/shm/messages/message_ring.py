"""Ring of slots in the sender's shared memory, for its messages to one receiver.

Both processes map it for the lifetime of the group: a message needs no system call and touches no
new page. Long messages pass in pieces, which the sender copies in while the receiver copies out.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gradwire.shm.runtime.sync import SEMAPHORE_BYTES, Semaphore

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
    """Description of the piece of a message in a slot.

    Args:
        message: Number of the message among those from this sender to this receiver.
        tag: Tag of the message.
        dtype: Number of the message's dtype.
        elements: Number of elements of the message.
        offset: Offset of the piece in the message, in bytes.
        nbytes: Bytes of the piece.
    """

    message: int
    tag: int
    dtype: int
    elements: int
    offset: int
    nbytes: int


class MessageRing:
    """One side of a ring; used by one thread of the sender and one of the receiver at a time.

    Semaphores count the slots, wake a waiting thread, and order memory. A signal handler may raise
    just after the receiver decremented one, so that the receiver does not know it: it increments
    it again, and recognizes a surplus by the slots' stamps.

    Args:
        memory: `RING_BYTES` bytes that both sides map.
        yields, is_beside: Arguments of `Semaphore`, for the other side of the ring.
        create: True for the sender, which initializes the ring.
    """

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
        """Fill the acquired slot from memory at address `source`.

        Returns:
            True if the receiver must be woken: it wants messages, and none of its threads waits at
            the ring.
        """
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
        """Return True if the next slot seems to be filled; in any thread.

        Args:
            soon: True to check for 30 µs, unless that would block the sender's core.
        """
        read, heads, filled = _STAMP.unpack_from, self._heads, (self._count + 1,)
        at = self._count % SLOTS * _STAMPED.size
        if read(heads, at) == filled:
            return True
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
        """Set whether the sender wakes this rank for messages from here on.

        A `head` after this call finds messages that arrived before it.
        """
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
