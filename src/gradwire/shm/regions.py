"""Memory that the ranks of a group share, and the rings of slots in it.

Each rank has regions of its own, which all peers map. A rank makes a region without the others; a
message over the links announces it, ahead of any collective that uses it. A region lives as long as
the last tensor over it. All regions of a rank are ranges of one descriptor's memory, which travels
with the first message.

Data moves between private and shared memory through the slots of a staging region, in collectives.
(A `MessageRing` is for messages between two ranks.) Every torch op releases the GIL and acquires it
again, for which it waits up to 5 ms while another thread runs Python (sys.getswitchinterval). An
operation that runs beside other threads therefore uses few large slots.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, NotSupportedError
from gradwire.shm import segment
from gradwire.shm.header import PRIVATE, Location
from gradwire.shm.links import Kind, Links, Message

STAGING = (0, 1, 2, 3)
"""Numbers of a rank's staging regions, equal on all ranks."""
UPFRONT = (4, 5, 6)
"""Numbers of the regions, by size, into which a rank copies data before `announce`."""
USERS = 7
"""First number of the regions that users allocate."""
MESSAGE_RING = 1 << 40
"""Number of the region with a rank's message ring to rank 0; add r for the ring to rank r."""

_KEPT_VIEWS = 64  # of each region
_PIECE = struct.Struct("<qq")  # a region's offset in its rank's memory, and its bytes

_Views = dict[tuple[torch.dtype, int, int], Tensor]


class Regions:
    """Regions that one rank has mapped: its own and those of its peers."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._numbers: dict[int, int] = {}  # numbers of this rank's regions, by address
        self._next = count(USERS)
        self._ended: deque[tuple[int, tuple[int, int]]] = deque()
        self._pieces: dict[int, tuple[int, int]] = {}
        self._memory: segment.GrowingMemory | None = None
        self._sent = False
        # the descriptor must be sent before any later region; an RLock, so that an allocation by a
        # signal handler amid another one raises instead of blocking
        self._lock, self._allocating = threading.RLock(), False
        # peers' regions by peer and number, with the views of them that were requested
        self._mapped: dict[tuple[int, int], tuple[Tensor, _Views]] = {}
        self._descriptors: dict[int, int] = {}  # by peer

    def allocate(self, size: int, deadline: Deadline, number: int | None = None) -> Tensor:
        """Make a region of zeros and send its location to all peers."""
        self.release_ended(deadline.left())
        with self._lock:
            if self._allocating:
                raise NotSupportedError(
                    "this thread is in another allocation of shared memory, which a signal "
                    "interrupted: let the signal's handler set a flag, and allocate after it"
                )
            self._allocating = True
            try:
                return self._allocate(size, deadline, number)
            finally:
                self._allocating = False

    def _allocate(self, size: int, deadline: Deadline, number: int | None) -> Tensor:
        if self._memory is None:
            self._memory = segment.GrowingMemory()
        piece = self._memory.allocate(size), size
        numbers, ended = self._numbers, self._ended
        known = next(self._next) if number is None else number
        self._pieces[known] = piece

        # runs in any thread when the last tensor is freed, so it takes no lock and sends nothing;
        # `release_ended` does the rest
        def on_unmap(address: int) -> None:
            numbers.pop(address, None)
            ended.append((known, piece))

        flat = segment.map_for_user(self._memory, piece[0], max(size, 1), on_unmap)
        numbers[flat.data_ptr()] = known
        fd = -1 if self._sent else self._memory.fd
        data = _PIECE.pack(*piece)
        self._links.send_to_all(Message(Kind.REGION, number=known, data=data, fd=fd), deadline)
        self._sent = True
        return flat[:size]

    def release_ended(self, seconds: float | None) -> None:
        """Have peers unmap the regions whose tensors are gone, and free their memory."""
        # No peer reads them: a collective on regions ends after all ranks have read.
        while self._ended:
            try:  # another thread may take the last one meanwhile
                number, piece = self._ended.popleft()
            except IndexError:
                return
            if self._pieces.get(number) is piece:  # otherwise allocated again after an error
                self._links.send_to_all(Message(Kind.RELEASE, number=number), Deadline(seconds))
                del self._pieces[number]
            assert self._memory is not None
            self._memory.free(*piece)

    def locate(self, tensor: Tensor) -> Location:
        """Return the location of a tensor of this rank; `PRIVATE` if it is in no region."""
        at = tensor.data_ptr()
        if (number := self._numbers.get(at)) is not None:
            return Location(number, 0)  # the usual case; reading the storage takes 2 us
        start = tensor.untyped_storage().data_ptr()
        number = self._numbers.get(start, PRIVATE)
        return Location(number, at - start if number >= 0 else 0)

    def receive(self, peer: int, message: Message) -> None:
        """Map or unmap a peer's region; called with the links' lock held."""
        if message.kind == Kind.RELEASE:
            self._mapped.pop((peer, message.number), None)
            return
        if message.fd >= 0:
            self._close_descriptor(peer)
            self._descriptors[peer] = os.dup(message.fd)
        offset, size = _PIECE.unpack(message.data)
        fd = self._descriptors.get(peer, -1)
        if fd < 0 or min(offset, size) < 0 or offset + size > os.fstat(fd).st_size:
            raise DistributedError(
                f"rank {peer} sent a region of {size} bytes at {offset}, outside of its memory: "
                "check that all ranks run the same version of gradwire"
            )
        mapping = segment.Mapping(fd, None, offset, max(size, 1))
        self._mapped[peer, message.number] = mapping.flat, {}

    def view(
        self, peer: int, location: Location, dtype: torch.dtype, count: int, deadline: Deadline
    ) -> Tensor:
        """Return elements of a peer's region from a location on, waiting for it; see `of_peer`."""
        # Views are cached, as training uses the same ones in each step and making one takes 4 µs.
        flat, views = self.of_peer(peer, location.region, deadline)
        key = dtype, location.offset, count
        view = views.get(key)
        if view is None:
            if len(views) == _KEPT_VIEWS:
                views.clear()
            end = location.offset + count * dtype.itemsize
            with torch.inference_mode(False):  # kept for calls outside of it
                view = views[key] = flat[location.offset : end].view(dtype)
        return view

    def of_peer(self, peer: int, number: int, deadline: Deadline) -> tuple[Tensor, _Views]:
        """Return a peer's region and views of it; wait for it if necessary."""
        found = self._mapped.get((peer, number))
        if found is not None:
            return found
        with self._links.changed:
            while (peer, number) not in self._mapped:
                self._links.check([peer])
                if deadline.over():
                    raise CollectiveTimeoutError(
                        f"rank {self._links.ranks[peer]} did not share its memory within "
                        f"{deadline.seconds:g} s"
                    )
                self._links.changed.wait(0.05)
            return self._mapped[peer, number]

    def close(self) -> None:
        """Unmap the peers' regions, and close the descriptors."""
        self._mapped.clear()
        for peer in list(self._descriptors):
            self._close_descriptor(peer)
        self._memory = None

    def _close_descriptor(self, peer: int) -> None:
        fd = self._descriptors.pop(peer, -1)
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True)
class Ring:
    """Slots of a staging region."""

    # with one, a piece is copied in after the last was copied out
    slots: int
    slot_bytes: int

    def lag(self, stages: int) -> int:
        """Return how many steps a rank may be ahead of others in a pipeline with these stages."""
        return max(0, self.slots // stages - 1)

    def schedule(self, pieces: int, stages: int) -> Iterator[list[int]]:
        """Yield the number of the piece in each stage, -1 for none, for each step of a pipeline."""
        delay = self.lag(stages) + 1
        stride = 1 if self.slots >= stages else stages
        for step in range((pieces - 1) * stride + 1 + (stages - 1) * delay):
            found = (divmod(step - stage * delay, stride) for stage in range(stages))
            yield [n if rest == 0 and 0 <= n < pieces else -1 for n, rest in found]


RINGS = (
    # for stages that all ranks do at the same time, whose copies in and out need not overlap: a
    # slot that is reused for each piece stays in the caches. An all_reduce of 3 to 26 MB takes 0.73
    # to 0.91 of the time with the next ring: docs/design/shm.md
    Ring(1, 2 << 20),
    Ring(6, 1 << 20),
    # with fewer cores than ranks, each step takes until every rank has had a core, so few steps
    # are best. An all_reduce of 10 MB between 16 ranks on two cores takes 52 ms with the last ring
    # and 83 with the second
    Ring(1, 8 << 20),
    # DDP's buckets have 25 MiB: each stage is one op. An all_reduce of 26 MB in the group's thread,
    # while the main thread runs Python, takes 89 ms with this ring and 190 ms with the second
    Ring(1, 32 << 20),
)
_REUSED, _SHORT, _LONG, _LONGEST = range(4)
_FEW = 4
"""Maximum number of ranks that reduce in one reused slot. Between eight ranks on two cores, an
all_reduce of 4 MiB takes 1.1 of the time with long slots, one of 25 MiB 1.5."""
_LARGE = 4 << 20
"""Size above which an operation beside other threads requests the last ring."""
_CROWD_BYTES = 512 << 20
"""Maximum memory of crowded ranks together; with more ranks, only threads use the last ring."""


def ring_for(nbytes: int, ranks: int, crowded: bool, beside_others: bool, reduces: bool) -> int:
    """Return the index in `RINGS` of the ring that a rank requests."""
    if nbytes > _LARGE and beside_others:
        return _LONGEST
    if reduces and ranks <= _FEW:
        return _REUSED
    if not crowded:
        return _SHORT
    affordable = ranks * RINGS[_LONGEST].slot_bytes <= _CROWD_BYTES
    return _LONGEST if affordable and nbytes > RINGS[_LONG].slot_bytes else _LONG
