"""Process group and backend classes, under which torch.distributed sees a group's operations.

From 2.14 on, torch accepts a Backend written in Python: `ShmBackend` handles the CPU tensors of
torch's own ProcessGroup, which supports "cpu:shm,cuda:nccl" and split_group. In older versions, a
backend's creator returns the whole group: `ShmProcessGroup`. C++ callers (DistributedDataParallel's
reducer, functional collectives), Python callers and older versions of torch use different names for
some operations, so some methods have several names here.
"""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="assignment,misc,override"

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import BarrierOptions

from gradwire._processes import Deadline
from gradwire._torch import BackendBase, outside_graphs
from gradwire.errors import DistributedError, NotSupportedError
from gradwire.shm.group.movement import Movement
from gradwire.shm.group.overloads import with_awaited_tensors, with_overloads
from gradwire.shm.group.point_to_point import PointToPoint
from gradwire.shm.group.reductions import Reductions


@outside_graphs
@with_awaited_tensors
class Operations(Reductions, Movement, PointToPoint):
    """All operations of a group over shared memory."""

    # names in torch before 2.13
    _allgather_base = Movement.all_gather_single
    allgather_into_tensor_coalesced = Movement.all_gather_single_coalesced
    _reduce_scatter_base = Reductions.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Reductions.reduce_scatter_single_coalesced
    alltoall_base = Movement.all_to_all_single


@with_overloads
class ShmProcessGroup(Operations, ProcessGroup):
    """Process group of the ranks of one host.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        peers: Connection to each other rank.
        timeout: Timeout of operations without their own.
    """

    def __init__(self, rank: int, size: int, peers: dict[int, Any], timeout: timedelta) -> None:
        ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self._names = {"name": "", "desc": ""}
        Operations.__init__(self, timeout)
        self._join(rank, size, peers, Deadline(timeout.total_seconds()))

    def getRank(self) -> int:
        """Return the rank of this process."""
        return self._rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self._size

    def getGroupName(self) -> str:
        """Return the name that torch.distributed gave the group."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        """Set the name that torch.distributed gives the group."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        """Return the description."""
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:
        """Set the description."""
        self._names["desc"] = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    name = Operations.getBackendName

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def bound_device_id(self) -> None:
        """None: the group supports CPU tensors only."""
        return

    def _get_backend(self, device: torch.device) -> Any:
        """Raise: the group has no separate backend.

        Raises:
            DistributedError: Always; a subclass of RuntimeError, which torch expects.
        """
        raise DistributedError(
            "with this version of PyTorch a shm group has no separate backend: call the group's "
            "own methods, such as set_timeout"
        )

    def monitored_barrier(  # torch's two classes differ in the first argument
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it; see `Movement.monitored_barrier`."""
        opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        super().monitored_barrier(opts, wait_all_ranks)

    def splitGroup(self, *args: object) -> ProcessGroup:
        """Raise: not supported.

        Raises:
            NotSupportedError: Always.
        """
        raise NotSupportedError("shm groups cannot be split: use torch.distributed.new_group")

    split_group = splitGroup

    def _start_coalescing(self, device: torch.device) -> None:
        raise NotSupportedError(
            "shm cannot coalesce different operations: use the *_coalesced operations, or several "
            "operations with async_op=True"
        )

    def _has_hooks(self) -> bool:
        return False


class ShmBackend(Operations, BackendBase):
    """Backend of the ranks of one host for a process group's CPU tensors.

    Args:
        rank, size, peers, timeout: Arguments of `ShmProcessGroup`.
        split_off: Function that makes a group from a store, a rank, the ranks of this group that
            form it, and a timeout.
    """

    # torch 2.15 reads these from the class; its own properties of these names would recurse
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_window = False
    _supports_time_estimate = False
    supports_splitting = True

    def __init__(
        self,
        rank: int,
        size: int,
        peers: dict[int, Any],
        timeout: timedelta,
        split_off: Callable[[Any, int, list[int], timedelta], Any],
    ) -> None:
        BackendBase.__init__(self, rank, size)
        Operations.__init__(self, timeout)
        self._split_off = split_off
        self._join(rank, size, peers, Deadline(timeout.total_seconds()))

    @property
    def options(self) -> Any:
        """Initial options of a group split from this one."""
        return BackendBase.Options("shm", self._timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> Any:
        """Make a group of some of the ranks, in the given order.

        Args:
            store: Store used by the new group alone.
            ranks: Ranks of the new group, as ranks of this group.
            options: Options of the new group, of which the timeout is used.

        Raises:
            NotSupportedError: This rank is not in `ranks`; torch would crash on a result of None.
        """
        if self._rank not in ranks:
            raise NotSupportedError(
                f"rank {self._rank} is in none of split_ranks: give it a group, of its own for "
                "instance, or use torch.distributed.new_group"
            )
        return self._split_off(store, ranks.index(self._rank), ranks, options._timeout)
