"""A ring of slots in the sender's shared memory, through which its messages reach one receiver.

Both have it mapped for as long as the group lives: a message costs no system call, and no page of
memory is touched for the first time. Long messages pass through it in pieces, which the sender
copies in while the receiver copies out.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gradwire.shm.sync import SEMAPHORE_BYTES, Semaphore

SLOTS = 8
SLOT_BYTES = 256 << 10
_STAMP, _HEAD, _STAMPED = struct.Struct("<q"), struct.Struct("<6q"), struct.Struct("<7q")
_SEMAPHORES = 5
_HEADS_AT = _SEMAPHORES * SEMAPHORE_BYTES
_SLOTS_AT = 4096
RING_BYTES = _SLOTS_AT + SLOTS * SLOT_BYTES

_GLANCES = 600
"""About 30 µs, as a wait tries before it yields: 200 are too few for messages of 64 KiB on."""
_IN_ORDER = platform.machine() in {"x86_64", "AMD64", "i686"}
"""Whether a semaphore that is read after another was posted is read after it on this CPU."""


class Head(NamedTuple):
    """What a slot holds.

    Args:
        message: The message's number, of those from this sender to this receiver.
        tag: Its tag.
        dtype: Its dtype's number.
        elements: How many it has.
        offset: Where in it the piece begins, in bytes.
        nbytes: The piece's bytes.
    """

    message: int
    tag: int
    dtype: int
    elements: int
    offset: int
    nbytes: int


class MessageRing:
    """One side of a ring; used by one thread of the sender and one of the receiver at a time.

    Semaphores count the slots, wake who waits for one, and order memory. A signal's handler may
    raise just after the receiver took one, so that it does not know it: it puts one back, and finds
    by the slots' stamps if that was one too many.

    Args:
        memory: `RING_BYTES` bytes that both map.
        spins: How often to try a semaphore before sleeping.
        yields, is_beside: As of `Semaphore`, for the other side of the ring.
        create: Whether this is the sender, which initializes it.
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
            # wanted: the receiver does not know of the ring before it is woken
            for semaphore, value in zip(semaphores, (0, SLOTS, 0, 0, 1), strict=True):
                semaphore.create(value)
        heads = (ctypes.c_ubyte * (SLOTS * _STAMPED.size)).from_address(address + _HEADS_AT)
        self._heads = memoryview(heads).cast("B")
        self._slots = [address + _SLOTS_AT + SLOT_BYTES * i for i in range(SLOTS)]
        self._glances = _GLANCES if yields is None else 0  # else another rank needs the core
        self._turn = 0  # how many slots this side has filled, or emptied
        self._ready = 0  # how many filled slots the receiver has taken from the semaphore

    # --- the sender's side ---

    def acquire(self, seconds: float) -> bool:
        """Wait for a slot to fill; whether there is one."""
        return self._free.try_wait() or (seconds > 0 and self._free.wait(seconds))

    def put(self, head: Head, source: int) -> bool:
        """Fill the acquired slot from memory at `source`.

        Returns:
            Whether the receiver has to be woken: it wants what arrives, and no thread of it waits
            at the ring.
        """
        place = self._turn % SLOTS
        ctypes.memmove(self._slots[place], source, head.nbytes)
        # the stamp last: a receiver with a post too many may be reading it
        at = place * _STAMPED.size
        _HEAD.pack_into(self._heads, at + _STAMP.size, *head)
        _STAMP.pack_into(self._heads, at, self._turn + 1)
        self._turn += 1
        self._filled.post()
        if _IN_ORDER and (self._listening.value() or not self._wanted.value()):
            return False
        return self.must_wake()

    def must_wake(self) -> bool:
        """Whether the receiver has to be woken for what the ring holds; the caller does."""
        if _IN_ORDER and (self._listening.value() or self._woken.value()):
            return False
        self._woken.post()
        return True

    # --- the receiver's side ---

    def head(self) -> Head | None:
        """What the next slot holds, if it is filled."""
        while self._ready or self._filled.try_wait():
            # the stamp is read first, as it is written last
            stamp, *head = _STAMPED.unpack_from(self._heads, self._turn % SLOTS * _STAMPED.size)
            if stamp == self._turn + 1:
                self._ready = max(self._ready, 1)
                return Head._make(head)
            self._ready = max(self._ready - 1, 0)
        return None

    def seems_filled(self, *, soon: bool) -> bool:
        """Whether the next slot is filled, as far as a glance tells; in any thread.

        Args:
            soon: Whether to look for 30 µs, unless that keeps the sender from its core.
        """
        read, heads, filled = _STAMP.unpack_from, self._heads, (self._turn + 1,)
        at = self._turn % SLOTS * _STAMPED.size
        if read(heads, at) == filled:
            return True
        if soon and self._filled.can_try():
            for _ in range(self._glances):
                if read(heads, at) == filled:
                    return True
        return False

    def take(self, head: Head, target: int) -> None:
        """Copy the slot that `head` returned to memory at `target`, and give it back."""
        ctypes.memmove(target, self._slots[self._turn % SLOTS], head.nbytes)
        self._turn += 1
        self._ready -= 1
        self._free.post()

    @property
    def taken(self) -> int:
        """How many slots were taken."""
        return self._turn

    def want(self, wanted: bool) -> None:
        """Whether to be woken for what arrives from here on; else it waits here until it is looked
        for. What arrived before is found by a `head` after this."""
        if not wanted:
            while self._wanted.try_wait():
                pass
        elif not self._wanted.value():
            self._wanted.post()

    def listen(self) -> None:
        """From here on a thread of the receiver waits, and need not be woken."""
        self._listening.post()

    def wait(self, seconds: float) -> None:
        """Wait until a slot is filled; `head` says whether one is."""
        self._ready += self._filled.wait(seconds)

    def interrupted(self) -> None:
        """An exception ended one of these calls: what it took from the semaphore is put back."""
        self._filled.post()

    def stop_listening(self) -> None:
        """The opposite of `listen`; what was filled before it is found by a `head` after it."""
        while self._listening.try_wait():  # more than one if an exception skipped this before
            pass

    def woke(self) -> None:
        """The receiver is awake; called before it looks."""
        self._woken.try_wait()
