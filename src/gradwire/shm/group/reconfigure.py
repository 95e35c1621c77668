"""Group that can be formed again from other processes, for example without a dead one.

It implements `torch.distributed.init_process_group(..., enable_reconfigure=True)`: each process has
a handle, the program gathers the handles of the new members by any means, and all members pass the
same list to `reconfigure`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from gradwire._processes import Deadline
from gradwire.errors import ArgumentError, BrokenGroupError
from gradwire.shm.group.group import NoMembers
from gradwire.shm.group.process_group import ShmProcessGroup, join
from gradwire.shm.meeting.rendezvous import Listener, connect_by_name
from gradwire.shm.runtime.work import ended

_PREFIX = "shm:"


class ReconfigurableGroup(ShmProcessGroup):
    """Group without members until `reconfigure` is called, which can be called again.

    It is a ProcessGroup in every version of torch, as rank and size of a Backend cannot change.

    Args:
        rank: Rank passed to init_process_group; `reconfigure` sets another.
        size: World size passed to init_process_group; `reconfigure` sets another.
    """

    supports_reconfigure = True

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        reason = "the group has no members yet: call its reconfigure first"
        nobody: Any = NoMembers(reason, rank, size, timeout.total_seconds())
        super().__init__(nobody)
        self._listener: Listener | None = Listener()
        self._used: set[int] = set()

    @property
    def _device_types(self) -> list[torch.device]:
        return []  # with device types, torch would attach dispatcher hooks, which this group lacks

    def get_reconfigure_handle(self) -> str:
        """Return the handle by which other processes connect to this one; it never changes.

        Raises:
            BrokenGroupError: The group was destroyed.
        """
        if self._listener is None:
            raise BrokenGroupError("the group was destroyed on this rank: make a new one")
        return _PREFIX + self._listener.name

    def reconfigure(self, options: Any) -> Work:
        """Leave the present members and form the group again; return when all members have joined.

        Args:
            options: torch's `ReconfigureOptions`: `uuid`, a number that the group never used;
                `handles` of all members including this process, a list in rank order, or a set,
                which is sorted; `timeout`, None for that of the group.

        Returns:
            Completed handle.

        Raises:
            ArgumentError: The number was used, or the handles are invalid, repeated, or lack the
                one of this process.
            PeerLostError, PeerFailedError, CollectiveTimeoutError: A member is gone or did not
                take part; the group then has no members, and can be reconfigured again.
        """
        names, own = _names_of(options.handles, self.get_reconfigure_handle())
        uuid = int(options.uuid)
        if uuid in self._used:
            raise ArgumentError(f"uuid is {uuid}, which was used before: give a new number")
        self._used.add(uuid)
        timeout, former = options.timeout or self.timeout, self._group
        deadline = Deadline(timeout.total_seconds())
        former.abort("the group was reconfigured")  # end operations that wait for a lost peer
        reason = "the group has no members since its last reconfigure failed: call it again"
        former.leave(reason)
        nobody: Any = NoMembers(reason, former.rank, former.size, former.seconds)
        self._enter(nobody)
        assert self._listener is not None
        rank = names.index(own)
        peers = connect_by_name(self._listener, names, rank, uuid, deadline)
        self._enter(join(rank, peers, former.seconds, deadline))
        self.barrier().wait()  # no rank returns before all have joined
        return ended([])

    def shutdown(self) -> None:
        """Leave the group for good; it cannot be reconfigured any more."""
        super().shutdown()
        self._close_listener()

    def leave_in_child(self) -> None:
        """Make the group unusable in a forked child, and close its listener there."""
        super().leave_in_child()
        self._close_listener()  # others could still connect after this rank's process has ended

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _names_of(handles: Collection[str], own: str) -> tuple[list[str], str]:
    """Return the listeners' names in the handles, in rank order, and this process's own name.

    Raises:
        ArgumentError: Handles are invalid, repeated, or lack the one of this process.
    """
    ordered = list(handles) if isinstance(handles, list) else sorted(handles)
    for handle in ordered:
        if not handle.startswith(_PREFIX) or not 0 < len(handle) <= 100:
            raise ArgumentError(
                f"handles contains {handle!r}: give strings that get_reconfigure_handle returned"
            )
    if own not in ordered:
        raise ArgumentError(f"handles lacks the handle of this process, {own!r}: add it")
    if len(set(ordered)) < len(ordered):
        raise ArgumentError(f"handles contains duplicates: {ordered}; give one per member")
    return [handle.removeprefix(_PREFIX) for handle in ordered], own.removeprefix(_PREFIX)
