"""Process group and backend classes, under which torch.distributed sees a group's operations.

From 2.14 on, torch accepts a Backend written in Python: `ShmBackend` handles the CPU tensors of
torch's own ProcessGroup, which supports "cpu:shm,cuda:nccl" and split_group. In older versions, a
backend's creator returns the whole group: `ShmProcessGroup`. C++ callers (DistributedDataParallel's
reducer, functional collectives), Python callers and older versions of torch use different names for
some operations, so some methods have several names here.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import BarrierOptions

from gradwire._processes import Deadline
from gradwire._torch import BackendBase, outside_graphs
from gradwire.errors import ArgumentError, DistributedError, NotSupportedError
from gradwire.recorder import RecordedGroup
from gradwire.shm.operations import Movement, Reductions
from gradwire.shm.point_to_point import RingMessages
from gradwire.shm.reduction import KnownCalls, SharedMemory
from gradwire.shm.shm_group import Group, Observer
from gradwire.shm.work import Queue

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="assignment,misc,override"


_GROUPS: WeakSet[Operations] = WeakSet()
"""All groups of this process, for its handlers at fork and at exit."""
_AWAITING = (
    *("broadcast", "allreduce", "allreduce_sparse", "reduce", "allgather", "all_gather_single"),
    *("all_gather_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv"),
    *("recv_anysource", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall_base"),
)
_JOINED: set[Operations] = set()
"""Groups that this rank has not left: PyTorch's C++ keeps only their C++ part alive."""


def join(
    rank: int, peers: dict[int, Any], seconds: float, deadline: Deadline | None = None
) -> Group:
    """Form a group on one host.

    Args:
        rank: Rank of this process.
        peers: Connection to each other rank.
        seconds: Timeout of operations without their own.
        deadline: Deadline for the group to form; that of an operation if None.
    """
    size, deadline = len(peers) + 1, deadline or Deadline(seconds)
    messages = RingMessages(len(peers))
    deliver, on_lost = messages.deliver, messages.on_lost
    state = SharedMemory(rank, size, peers, deliver, on_lost, deadline)
    messages.connect(state, peers)
    queue = Queue(f"gradwire-shm-{rank}")
    state.is_awaited = queue.is_awaited
    state.links.start()  # not before: a peer may have sent already
    return Group(rank, size, state, messages, queue, seconds, KnownCalls(state))


def _awaited(value: Any) -> Any:
    """Return a tensor, or nested lists of tensors, after waiting for pending results."""
    if isinstance(value, list):
        new = [_awaited(v) for v in value]
        return value if all(n is v for n, v in zip(new, value, strict=True)) else new
    return value.trigger_wait() if hasattr(value, "trigger_wait") else value


def _awaiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an operation accept pending results of functional collectives."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ArgumentError:  # raised before anything is sent: a pending result has no memory
            awaited = [_awaited(arg) for arg in args]
            if all(new is old for new, old in zip(awaited, args, strict=True)):
                raise
        return method(self, *awaited, **kwargs)

    return call


def _with_awaited_tensors(cls: type[Any]) -> type[Any]:
    for name in _AWAITING:
        setattr(cls, name, _awaiting(getattr(cls, name)))
    return cls


@outside_graphs
@_with_awaited_tensors
class Operations(Reductions, Movement):
    """All operations of a group, and its end."""

    def __init__(self, group: Group) -> None:
        self._group, group.recorded = group, RecordedGroup(self)
        _GROUPS.add(self)
        _JOINED.add(self)

    # names in torch before 2.13
    _allgather_base = Movement.all_gather_single
    allgather_into_tensor_coalesced = Movement.all_gather_single_coalesced
    _reduce_scatter_base = Reductions.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Reductions.reduce_scatter_single_coalesced
    alltoall_base = Movement.all_to_all_single

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor; between hosts, it must not change until the handle was waited for."""
        return self._group.messages.send(self._group, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from rank `src`."""
        return self._group.messages.receive(self._group, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from any rank."""
        return self._group.messages.receive(self._group, tensors, None, tag)

    # --- properties ---

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "shm"

    @property
    def timeout(self) -> timedelta:
        """Timeout of operations without their own."""
        return timedelta(seconds=self._group.seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations without their own."""
        self._group.seconds = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of submitted collectives, equal on ranks that are in step."""
        return self._group.submitted

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share memory with each other: those of each host."""
        return self._group.teams

    @property
    def failure(self) -> BaseException | None:
        """Error of the operation that made the group unusable, to be raised; None if usable."""
        return self._group.failure

    @property
    def observer(self) -> Observer | None:
        """Function called with each collective at its submission, or None."""
        return self._group.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._group.observer = observer

    def marked(self, mark: int) -> AbstractContextManager[None]:
        """Send a mark with the next collective that this thread submits; see `Group.marked`."""
        return self._group.marked(mark)

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate bytes in memory that the ranks of this host share."""
        self._group.check_usable()
        return self._group.state.allocate(nbytes)

    # --- leaving ---

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this rank get an error."""
        _JOINED.discard(self)
        self._group.leave("the group was destroyed on this rank: make a new one")

    def abort(self) -> None:
        """Leave the group at once; pending operations fail."""
        _JOINED.discard(self)
        self._group.abort_and_leave()

    def leave_at_exit(self) -> None:
        """Leave the group when the process ends."""
        # an operation in which all ranks take part still ends; a wait for absent ranks must not
        # delay the process's exit
        self._group.abort("the process of this rank ends")
        self.shutdown()

    def leave_in_child(self) -> None:
        """Make the group unusable in a forked child."""
        self._group.leave_in_child()


def _at_exit() -> None:
    """End the groups' threads: a thread that runs a kernel at the interpreter's exit crashes."""
    for group in list(_GROUPS):
        group.leave_at_exit()


def _in_child() -> None:
    for group in list(_GROUPS):
        group.leave_in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@outside_graphs
class ShmProcessGroup(Operations, ProcessGroup):
    """Process group written in Python."""

    def __init__(self, group: Group) -> None:
        ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[call-arg]
        self._names = {"name": "", "desc": ""}
        Operations.__init__(self, group)

    def getRank(self) -> int:
        """Return the rank of this process."""
        return self._group.rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self._group.size

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

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Reduce a list, or one tensor, which join() of torch's DDP passes."""
        return super().allreduce([tensors] if isinstance(tensors, Tensor) else tensors, opts)

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
    """Backend for the CPU tensors of a process group.

    Args:
        group: Group of this rank.
        split_off: Function that makes a group from a store, a rank, the ranks of this group that
            form it, and a timeout.
    """

    # torch 2.15 reads these from the class; its own properties of these names would recurse
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_window = False
    _supports_time_estimate = False
    supports_splitting = True

    def __init__(
        self, group: Group, split_off: Callable[[Any, int, list[int], timedelta], Any]
    ) -> None:
        BackendBase.__init__(self, group.rank, group.size)
        Operations.__init__(self, group)
        self._split_off = split_off

    @property
    def options(self) -> Any:
        """Initial options of a group split from this one."""
        return BackendBase.Options("shm", self.timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> Any:
        """Make a group of some of the ranks, in the given order.

        Args:
            store: Store used by the new group alone.
            ranks: Ranks of the new group, as ranks of this group.
            options: Options of the new group, of which the timeout is used.

        Raises:
            NotSupportedError: This rank is not in `ranks`; torch would crash on a result of None.
        """
        if self._group.rank not in ranks:
            raise NotSupportedError(
                f"rank {self._group.rank} is in none of split_ranks: give it a group, of its own "
                "for instance, or use torch.distributed.new_group"
            )
        return self._split_off(store, ranks.index(self._group.rank), ranks, options._timeout)
