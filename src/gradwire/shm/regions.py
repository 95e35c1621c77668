"""The memory that ranks of a group share: each has regions of its own, which all others can map.

A region is made by one rank alone, whenever it likes; its descriptor goes to the others over the
links, ahead of any collective that uses it. It ends with the last tensor over it.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import count

from torch import Tensor

from gradwire.errors import CollectiveTimeoutError
from gradwire.shm import segment
from gradwire.shm.header import NOWHERE, Place
from gradwire.shm.links import Kind, Links, Message
from gradwire.shm.sync import Deadline

__all__ = ["STAGING", "Regions"]

STAGING = 0
"""The number of every rank's staging region, which peers know without being told."""


class Regions:
    """The regions that one rank knows: its own by address, those of others by number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._next = count(STAGING + 1)  # threads may allocate at once: each step is atomic
        self._ended: deque[int] = deque()
        self._theirs: dict[tuple[int, int], Tensor] = {}

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
        fd = segment.create(max(1, size))
        try:
            if number is None:
                number = next(self._next)
            known, numbers, ended = number, self._numbers, self._ended

            def forget() -> None:
                # may run amid anything, in any thread: only what is atomic
                del numbers[address]
                ended.append(known)

            flat = segment.map_tensor(fd, forget)
            address = flat.data_ptr()
            numbers[address] = known
            links.tell(Kind.REGION, deadline, a=known, fd=fd)
        finally:
            os.close(fd)
        return flat[:size]

    def release_ended(self, links: Links, deadline: Deadline) -> None:
        """Let peers unmap regions that are no longer in use."""
        while True:
            try:  # not asked for before: another thread may do the same
                number = self._ended.popleft()
            except IndexError:
                return
            links.tell(Kind.RELEASE, deadline, a=number)

    def locate(self, tensor: Tensor) -> Place:
        """Where a tensor of this rank lies; `NOWHERE` if in no region."""
        start = tensor.untyped_storage().data_ptr()
        number = self._numbers.get(start, NOWHERE)
        return Place(number, tensor.data_ptr() - start if number >= 0 else 0)

    def receive(self, peer: int, message: Message) -> None:
        """Take in news of a peer's regions, under the links' lock."""
        if message.kind == Kind.REGION:
            self._theirs[peer, message.a] = segment.map_tensor(message.fd)
        else:
            self._theirs.pop((peer, message.a), None)

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
        """Unmap what belongs to peers."""
        self._theirs.clear()
