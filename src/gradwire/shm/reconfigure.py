"""A group that can be formed again from other processes, for instance without a dead one.

It implements `torch.distributed.init_process_group(..., enable_reconfigure=True)`: each process has
a handle, the program gathers the handles of the processes that are to be ranks, by any means, and
all of them pass the same list to `reconfigure`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from gradwire.errors import ArgumentError, BrokenGroupError
from gradwire.shm.process_group import Operations, ShmProcessGroup
from gradwire.shm.rendezvous import Listener, connect_by_name
from gradwire.shm.sync import Deadline
from gradwire.shm.work import ended

_PREFIX = "shm:"


class ReconfigurableGroup(ShmProcessGroup):
    """A group that has no members until `reconfigure` is called, and can be reconfigured again.

    It is a ProcessGroup with every version of torch, as the rank and the size of a Backend cannot
    change.

    Args:
        rank: The rank that init_process_group was given; `reconfigure` sets another.
        size: The world size, likewise.
        timeout: For each operation that has none of its own.
    """

    supports_reconfigure = True

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        Operations.__init__(self, timeout)
        self._closed = "the group has no members yet: call its reconfigure first"
        self._names = {"name": "", "desc": ""}
        self._rank, self._size = rank, size
        self._listener: Listener | None = Listener()
        self._used: set[int] = set()

    @property
    def _device_types(self) -> list[torch.device]:
        return []  # torch attaches its dispatcher's hooks, which this has not, to groups with some

    def get_reconfigure_handle(self) -> str:
        """What other processes need to connect to this one; always the same.

        Raises:
            BrokenGroupError: The group was destroyed.
        """
        if self._listener is None:
            raise BrokenGroupError("the group was destroyed on this rank: make a new one")
        return _PREFIX + self._listener.name

    def reconfigure(self, options: Any) -> Work:
        """Leave the present members and form the group again; returns when all have.

        Args:
            options: torch's `ReconfigureOptions`: `uuid`, a number that the group never had before;
                `handles`, of all members, this process's among them, a list in the order of the
                ranks, or a set, which is sorted; `timeout`, the group's if None.

        Returns:
            A handle that is done.

        Raises:
            ArgumentError: The number was used, or the handles are none of ours, repeated, or
                without this process's.
            PeerLostError, PeerFailedError, CollectiveTimeoutError: A member is gone or did not
                take part; the group has no members then, and can be reconfigured again.
        """
        names, own = _names_of(options.handles, self.get_reconfigure_handle())
        uuid = int(options.uuid)
        if uuid in self._used:
            raise ArgumentError(f"uuid is {uuid}, which this group had before: give a new number")
        self._used.add(uuid)
        timeout = options.timeout or self._timeout
        deadline = Deadline(timeout.total_seconds())
        if not self._closed:  # operations that wait for a lost peer must not delay this
            self._state.links.aborted = BrokenGroupError("the group was reconfigured")
        self._leave("the group has no members since its last reconfigure failed: call it again")
        assert self._listener is not None
        rank = names.index(own)
        peers = connect_by_name(self._listener, names, rank, uuid, deadline)
        self._join(rank, len(names), peers, deadline)
        self.barrier().wait()  # no rank returns before all have joined
        return ended([])

    def shutdown(self) -> None:
        """Leave the group; it cannot be reconfigured any more."""
        super().shutdown()
        self._close_listener()

    def _leave_in_child(self) -> None:
        super()._leave_in_child()
        self._close_listener()  # or others could still connect after this rank's process has ended

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _names_of(handles: Collection[str], own: str) -> tuple[list[str], str]:
    """The listeners' names in the handles, in the order of the ranks, and this process's own.

    Raises:
        ArgumentError: They are no handles of shm groups, repeated, or without this process's.
    """
    ordered = list(handles) if isinstance(handles, list) else sorted(handles)
    for handle in ordered:
        if not handle.startswith(_PREFIX) or not 0 < len(handle) <= 100:
            raise ArgumentError(f"handles has {handle!r}: give what get_reconfigure_handle returns")
    if own not in ordered:
        raise ArgumentError(f"handles lacks this process's own, {own!r}: it must be a member")
    if len(set(ordered)) < len(ordered):
        raise ArgumentError(f"handles has one twice: {ordered}; each member has one")
    return [handle.removeprefix(_PREFIX) for handle in ordered], own.removeprefix(_PREFIX)
