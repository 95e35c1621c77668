"""Process group and backend classes, under which torch.distributed sees a group's operations.

From 2.14 on, torch accepts a Backend written in Python: `ShmBackend` handles the CPU tensors of
torch's own ProcessGroup, which supports "cpu:shm,cuda:nccl" and split_group. In older versions, a
backend's creator returns the whole group: `ShmProcessGroup`. C++ callers (DistributedDataParallel's
reducer, functional collectives), Python callers and older versions of torch use different names for
some operations, so some methods have several names here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import BarrierOptions

from gradwire._processes import Deadline
from gradwire._torch import outside_graphs
from gradwire.errors import DistributedError, NotSupportedError
from gradwire.shm.operations import Operations
from gradwire.shm.point_to_point import RingMessages
from gradwire.shm.reduction import KnownCalls, SharedMemory
from gradwire.shm.shm_group import Parts
from gradwire.shm.work import Queue

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="assignment,misc,override"


def join(rank: int, peers: dict[int, Any], seconds: float) -> Parts:
    """Form a group on one host.

    Args:
        rank: Rank of this process.
        peers: Connection to each other rank.
        seconds: Timeout for the group to form, and of operations without their own.
    """
    state = SharedMemory(rank, len(peers) + 1, peers, Deadline(seconds))
    messages = RingMessages(state)
    queue = Queue(f"gradwire-shm-{rank}")
    state.is_awaited = queue.is_awaited
    state.links.start()  # not before: a peer may have sent already
    return Parts(state, messages, queue, seconds, KnownCalls(state))


@outside_graphs
class ShmProcessGroup(Operations, ProcessGroup):
    """Process group written in Python."""

    def __init__(self, parts: Parts) -> None:
        ProcessGroup.__init__(self, parts.state.rank, parts.state.size)  # type: ignore[call-arg]
        self._names = {"name": "", "desc": ""}
        Operations.__init__(self, parts)

    def getRank(self) -> int:
        """Return the rank of this process."""
        return self.state.rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self.state.size

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
        """Raise: the group has no separate backend."""
        raise DistributedError(
            "with this version of PyTorch a shm group has no separate backend: call the group's "
            "own methods, such as set_timeout"
        )

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Reduce a list, or one tensor, which join() of torch's DDP passes."""
        return super().allreduce([tensors] if isinstance(tensors, Tensor) else tensors, opts)

    def monitored_barrier(  # torch's two classes differ in the first argument
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it; see `Operations.monitored_barrier`."""
        opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        super().monitored_barrier(opts, wait_all_ranks)

    def splitGroup(self, *args: object) -> ProcessGroup:
        """Raise: not supported."""
        raise NotSupportedError("shm groups cannot be split: use torch.distributed.new_group")

    split_group = splitGroup

    def _start_coalescing(self, device: torch.device) -> None:
        raise NotSupportedError(
            "shm cannot coalesce different operations: use the *_coalesced operations, or several "
            "operations with async_op=True"
        )

    def _has_hooks(self) -> bool:
        return False


class ShmBackend(Operations, Backend):
    """Backend for the CPU tensors of a process group."""

    # torch 2.15 reads these from the class; its own properties of these names would recurse
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_window = False
    _supports_time_estimate = False
    supports_splitting = True

    def __init__(
        self, parts: Parts, split_off: Callable[[Any, int, list[int], timedelta], Any]
    ) -> None:
        Backend.__init__(self, parts.state.rank, parts.state.size)
        Operations.__init__(self, parts)
        # makes a group from a store, a rank, the ranks of this group that form it, and a timeout
        self._split_off = split_off

    @property
    def options(self) -> Any:
        """Initial options of a group split from this one."""
        return Backend.Options("shm", self.timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> Any:
        """Make a group of some of the ranks, in the given order."""
        if self.state.rank not in ranks:
            raise NotSupportedError(
                f"rank {self.state.rank} is in none of split_ranks: give it a group, of its own "
                "for instance, or use torch.distributed.new_group"
            )
        return self._split_off(store, ranks.index(self.state.rank), ranks, options._timeout)
