"""Sending side of a pair of ranks: through their ring, or over the connection if that is full.

`send` never waits for a receive. If the receiver is busy, data that does not fit into the ring is
sent in separate memory, whose descriptor travels over the connection. Messages are numbered, so
that the receiver can order both ways.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import DistributedError, NotSupportedError
from gradwire.shm.meeting.links import Kind, Links, Message
from gradwire.shm.memory import segment
from gradwire.shm.memory.header import NUMBERS
from gradwire.shm.memory.tensors import flat_of
from gradwire.shm.messages.message_ring import SLOT_BYTES, Head, MessageRing

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
    """Sending side of one pair of ranks; any thread may send.

    Args:
        make_ring: Function that makes the ring, called for the first message.
    """

    def __init__(self, peer: int, links: Links, make_ring: Callable[[], MessageRing]) -> None:
        self._peer, self._links, self._make_ring = peer, links, make_ring
        self._lock = threading.RLock()
        self._ring: MessageRing | None = None
        self._amid = False  # whether a message is being sent
        self._ring_is_usable = True
        self._behind = False  # whether the receiver failed to empty the ring in time
        self._number = 0

    def send(self, tag: int, tensor: Tensor, deadline: Deadline) -> None:
        """Send a contiguous tensor; it can be changed once this returns.

        Raises:
            PeerLostError: The peer is gone.
            CollectiveTimeoutError: The peer has not read earlier messages.
            DistributedError: There is no memory for a message that the peer does not read. As the
                receiver waits for the message, the ranks then lose each other.
        """
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
            segment.map_tensor(fd).copy_(content)
            self._links.send(self._peer, Message(Kind.DATA, data=head, fd=fd), deadline)
        finally:
            os.close(fd)
