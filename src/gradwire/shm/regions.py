"""The memory that ranks of a group share: each has regions of its own, which all others can map.

A region is made by one rank alone, whenever it likes; word of it goes to the others over the links,
ahead of any collective that uses it. It ends with the last tensor over it. All regions of a rank
are pieces of one descriptor's memory, which goes with the first word.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from itertools import count

from torch import Tensor

from gradwire.errors import CollectiveTimeoutError, DistributedError
from gradwire.shm import segment
from gradwire.shm.header import PRIVATE, Location
from gradwire.shm.links import Kind, Links, Message
from gradwire.shm.sync import Deadline

__all__ = ["STAGING", "Regions"]

STAGING = (0, 1)
"""The numbers of every rank's staging regions, which peers know without being told."""

_PIECE = struct.Struct("<qq")  # where a region begins in its rank's memory, and its bytes


class Regions:
    """The regions that one rank knows: its own by address, those of others by number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._next = count(len(STAGING))
        self._ended: deque[int] = deque()
        self._pieces: dict[int, tuple[int, int]] = {}
        self._memory: segment.GrowingMemory | None = None
        self._sent = False
        self._lock = threading.Lock()  # the descriptor has to arrive ahead of all later words
        self._theirs: dict[tuple[int, int], Tensor] = {}
        self._descriptors: dict[int, int] = {}

    def allocate(
        self, size: int, links: Links, deadline: Deadline, number: int | None = None
    ) -> Tensor:
        """New shared memory, zeros, and its announcement to all peers.

        Args:
            size: Bytes.
            links: To the peers.
            deadline: For telling them.
            number: The region's; the next free one if None.

        Raises:
            DistributedError: No room.
        """
        self.release_ended(links, deadline)
        with self._lock:
            if self._memory is None:
                self._memory = segment.GrowingMemory()
            offset = self._memory.take(size)
            numbers, ended = self._numbers, self._ended
            known = next(self._next) if number is None else number
            self._pieces[known] = offset, size

            def forget(address: int) -> None:
                del numbers[address]
                ended.append(known)

            flat = segment.map_for_user(self._memory, offset, max(size, 1), forget)
            numbers[flat.data_ptr()] = known
            fd = None if self._sent else self._memory.fd
            links.send_to_all(Kind.REGION, deadline, a=known, data=_PIECE.pack(offset, size), fd=fd)
            self._sent = True
        return flat[:size]

    def release_ended(self, links: Links, deadline: Deadline) -> None:
        """Let peers unmap regions that are no longer in use, and the system have their memory.

        Every collective that reads regions ends only when all have read, so nobody looks there.
        """
        while True:
            try:  # not asked for before: another thread may do the same
                number = self._ended.popleft()
            except IndexError:
                return
            links.send_to_all(Kind.RELEASE, deadline, a=number)
            assert self._memory is not None
            self._memory.free(*self._pieces.pop(number))

    def locate(self, tensor: Tensor) -> Location:
        """Where a tensor of this rank lies; `PRIVATE` if in no region."""
        start = tensor.untyped_storage().data_ptr()
        number = self._numbers.get(start, PRIVATE)
        return Location(number, tensor.data_ptr() - start if number >= 0 else 0)

    def receive(self, peer: int, message: Message) -> None:
        """Take in news of a peer's regions, under the links' lock.

        Raises:
            DistributedError: It tells of memory that is not there, or that cannot be mapped.
        """
        if message.kind == Kind.RELEASE:
            self._theirs.pop((peer, message.a), None)
            return
        if message.fd >= 0:
            self._let_go(peer)
            self._descriptors[peer] = os.dup(message.fd)
        offset, size = _PIECE.unpack(message.text)
        fd = self._descriptors.get(peer, -1)
        if fd < 0 or min(offset, size) < 0 or offset + size > os.fstat(fd).st_size:
            raise DistributedError(
                f"rank {peer} tells of {size} bytes at {offset} of memory that is not there: have "
                "all ranks the same version of gradwire?"
            )
        self._theirs[peer, message.a] = segment.Mapping(fd, None, offset, max(size, 1)).flat

    def of_peer(self, peer: int, number: int, links: Links, deadline: Deadline) -> Tensor:
        """A peer's region; its descriptor may still be on the way.

        Raises:
            PeerLostError, CollectiveTimeoutError: It will not come.
        """
        found = self._theirs.get((peer, number))
        if found is not None:
            return found
        with links.changed:
            while (peer, number) not in self._theirs:
                links.check([peer])
                if deadline.over():
                    raise CollectiveTimeoutError(
                        f"rank {peer} did not share its memory within {deadline.seconds:g} s"
                    )
                links.changed.wait(0.05)
            return self._theirs[peer, number]

    def close(self) -> None:
        """Unmap what belongs to peers, and let go of the descriptors."""
        self._theirs.clear()
        for peer in list(self._descriptors):
            self._let_go(peer)
        self._memory = None

    def _let_go(self, peer: int) -> None:
        fd = self._descriptors.pop(peer, -1)
        if fd >= 0:
            os.close(fd)
