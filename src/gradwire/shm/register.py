"""Groups as torch.distributed makes and sees them: classes, registration, the kind of group.

From 2.14 on, torch accepts a Backend written in Python: `ShmBackend` handles the CPU tensors of
torch's own ProcessGroup, which supports "cpu:shm,cuda:nccl" and split_group. In older versions, a
backend's creator returns the whole group: `ShmProcessGroup`. C++ callers (DistributedDataParallel's
reducer, functional collectives), Python callers and older versions of torch use different names for
some operations, so some methods have several names here.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as PythonBackend
from torch.distributed import Backend, PrefixStore, ProcessGroup, Store, Work
from torch.distributed.distributed_c10d import BackendConfig, BarrierOptions, _world

import gradwire_autoload
from gradwire._processes import Deadline
from gradwire._torch import PYTHON_BACKENDS, outside_graphs
from gradwire.errors import ArgumentError, ArgumentTypeError, DistributedError, NotSupportedError
from gradwire.shm.across_hosts import AcrossHosts, Team
from gradwire.shm.engine import Options, Transport
from gradwire.shm.operations import Operations
from gradwire.shm.point_to_point import EngineMessages, RingMessages
from gradwire.shm.reduction import KnownCalls, SharedMemory
from gradwire.shm.rendezvous import Forming, Teams, connect_all
from gradwire.shm.semaphores import has_semaphores
from gradwire.shm.shm_group import Parts
from gradwire.shm.work import Queue, ThreadQueue

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="assignment,misc,override"

_members: WeakKeyDictionary[ProcessGroup, Operations | None] = WeakKeyDictionary()


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


class ShmBackend(Operations, PythonBackend):
    """Backend for the CPU tensors of a process group."""

    # torch 2.15 reads these from the class; its own properties of these names would recurse
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_window = False
    _supports_time_estimate = False
    supports_splitting = True

    def __init__(
        self, parts: Parts, split_off: Callable[[Any, int, list[int], timedelta], Any]
    ) -> None:
        PythonBackend.__init__(self, parts.state.rank, parts.state.size)
        Operations.__init__(self, parts)
        # makes a group from a store, a rank, the ranks of this group that form it, and a timeout
        self._split_off = split_off

    @property
    def options(self) -> Any:
        """Initial options of a group split from this one."""
        return PythonBackend.Options("shm", self.timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> Any:
        """Make a group of some of the ranks, in the given order."""
        if self.state.rank not in ranks:
            raise NotSupportedError(
                f"rank {self.state.rank} is in none of split_ranks: give it a group, of its own "
                "for instance, or use torch.distributed.new_group"
            )
        return self._split_off(store, ranks.index(self.state.rank), ranks, options._timeout)


def is_available() -> bool:
    """Return True if this host supports shm groups: 64-bit Linux with glibc 2.30 or newer.

    Example:
        >>> import gradwire.shm
        >>> gradwire.shm.is_available()
        True
    """
    return sys.platform == "linux" and sys.maxsize > 2**32 and has_semaphores()


def register() -> None:
    """Register the backend "shm" with torch.distributed.

    Importing gradwire does this, and so does `import torch` if gradwire is installed.

    Example:
        >>> import gradwire.shm
        >>> gradwire.shm.register()
        >>> torch.distributed.Backend.backend_capability["shm"]
        ['cpu']
    """
    gradwire_autoload.register_shm()


def shares_memory(group: ProcessGroup) -> bool:
    """Return True if the ranks of each host share memory, in which `empty` allocates tensors."""
    return shm_backend_of(group) is not None


def shm_backend_of(group: ProcessGroup) -> Operations | None:
    """Return the group, or its backend for CPU tensors, if that is shm, else None."""
    if isinstance(group, Operations):
        return group
    if group not in _members:
        cpu, backend = torch.device("cpu"), None
        if PYTHON_BACKENDS and cpu in group._device_types:
            backend = group._get_backend(cpu)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
            backend = getattr(backend, "wrapped_pg", backend)
        _members[group] = backend if isinstance(backend, Operations) else None
    return _members[group]


def teams(group: ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in the group that share memory with each other: those of each host.

    Raises:
        ArgumentError: The group is not on shm.

    Example:
        >>> import gradwire.shm
        >>> run_ranks(lambda: gradwire.shm.teams(dist.group.WORLD), world_size=2)[0]
        ((0, 1),)
    """
    member = shm_backend_of(group)
    if member is None:
        raise ArgumentError(
            'group is not on shm: pass one that new_group(backend="shm") or init_process_group made'
        )
    return member.teams


def empty(
    shape: int | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return a tensor in memory that the group's ranks share: collectives use it in place.

    Only this rank calls; other ranks map the memory when they take part in a collective with it.
    The first access to new memory is slow: allocate once and use the tensor often. In a group over
    several hosts, the ranks of this host share the memory. If the group is not on shm, or fell back
    to Gloo, the result is an ordinary tensor.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor; torch's default if None.
        group: Group whose ranks share the memory; the default group if None.

    Returns:
        Contiguous CPU tensor with undefined values.

    Raises:
        ArgumentTypeError: `group`, `shape` or `dtype` is of the wrong type.
        ArgumentError: A length is negative.
        DistributedError: There is not enough memory; none is allocated.

    Example:
        >>> import torch, torch.distributed as dist, gradwire.shm
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     x = gradwire.shm.empty(3).fill_(dist.get_rank() + 1.0)  # [1, 1, 1] and [2, 2, 2]
        ...     dist.all_reduce(x)
        ...     return x.tolist()
        >>> run_ranks(main, world_size=2, backend="shm")
        [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """
    group = group or dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise ArgumentTypeError(
            f"group is {group!r}: pass a ProcessGroup that this rank is a member of, or call "
            "init_process_group first"
        )
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"dtype is {dtype!r}: pass a torch.dtype")
    try:
        size = tuple(map(index, shape if isinstance(shape, Sequence) else [shape]))
    except TypeError as error:
        raise ArgumentTypeError(f"shape is {shape!r}: pass an int, or several") from error
    if any(length < 0 for length in size):
        raise ArgumentError(f"shape is {size}: give lengths of 0 and more")
    member = shm_backend_of(group)
    if member is None:
        return torch.empty(size, dtype=dtype, device="cpu")
    return member.allocate(prod(size) * dtype.itemsize).view(dtype).view(size)


def create_backend(options: Any, given: object) -> Any:
    """Return a group's backend; torch.distributed calls this with the caller's `pg_options`."""
    if isinstance(given, ShmBackend.Options):
        given = None  # options of Gloo, with GRADWIRE_BACKEND=shm, or of torch itself
    if given is not None and not isinstance(given, Options):
        raise ArgumentTypeError(
            f"pg_options is {given!r}: for shm, pass gradwire.shm.Options, or leave it out"
        )
    # torch gives no ranks for the default group
    members = options.global_ranks_in_group or range(options.group_size)
    timeout, given = options.timeout, given or Options()
    return make_backend(options.store, options.group_rank, members, timeout, given)


def make_backend(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    options: Options | None = None,
) -> Any:
    """Return a backend for a group's CPU tensors: shm, or Gloo if no ranks can share memory."""
    # `store` is prefixed with the group's name. The ranks agree on the group by `members`, its
    # global ranks in group order. `timeout` is for the group to form, and of operations without
    # their own.
    size = len(members)
    with Forming(store, rank, members) as forming:
        if forming.all_available(is_available(), timeout):
            group = _form_group(forming, rank, size, timeout, options or Options())
            if group is not None:
                return group
            reason = "each rank is on its own host, or in a container that others cannot reach"
        else:
            reason = "a rank's system is not supported (shm needs Linux with glibc 2.30)"
        if rank == 0:
            warnings.warn(f"this group runs on Gloo, not on shm: {reason}", stacklevel=2)
        return dist.ProcessGroupGloo(forming.store, rank, size, timeout)


def _form_group(
    forming: Forming, rank: int, size: int, timeout: timedelta, options: Options
) -> Operations | None:
    """Connect to the other ranks; on all of them, return the group, return None, or raise."""
    group: Operations | None = None
    store = forming.store
    try:
        if timeout.total_seconds() <= 0:
            raise ArgumentError(f"timeout is {timeout}: give a positive one")
        peers, ranks = connect_all(store, rank, size, timeout, forming.identity, options.host)
        if len(ranks) == size > 1:
            return None
        teams = Teams(ranks, rank)
        places = {teams.own.index(peer): connection for peer, connection in peers.items()}
        if teams.count == 1:
            joined = join(rank, places, timeout.total_seconds())
        else:
            joined = _join_hosts(store, timeout, options, teams, places)
        split_off = partial(make_backend, options=options)
        group = ShmBackend(joined, split_off) if PYTHON_BACKENDS else ShmProcessGroup(joined)
        opts = BarrierOptions()
        opts.asyncOp = False
        group.barrier(opts)  # raises if a rank failed meanwhile: it has closed its connections
    except Exception as error:
        if group is not None:
            group.shutdown()
        if isinstance(error, OSError) and not isinstance(error, DistributedError):
            raise DistributedError(
                f"shared memory cannot be set up: {error}; raise the process's limits, or use the "
                "gloo backend"
            ) from error
        raise
    return group


def _join_hosts(
    store: Store, timeout: timedelta, options: Options, teams: Teams, peers: dict[int, Any]
) -> Parts:
    """Form a group over several hosts: a team within each, and an engine between them."""
    rank, size = teams.own[teams.place], sum(map(len, teams.ranks))
    seconds = timeout.total_seconds()
    team = Team(teams.own, teams.place, teams.owners, peers, Deadline(seconds))
    try:
        engine = options.engine(PrefixStore("engine", store), rank, size, timeout)
    except BaseException:
        team.close()
        raise
    transport = Transport(engine, rank, size, store)
    state, messages = AcrossHosts(rank, teams, team, transport), EngineMessages(transport)
    queue = ThreadQueue(f"gradwire-hosts-{rank}")
    return Parts(state, messages, queue, seconds)


# --- GRADWIRE_BACKEND=shm: groups that a program requests on Gloo use shm instead ---


QUIET = "GRADWIRE_QUIET"
_announced: list[int] = []


def make_group_without_gloo(
    make: Callable[[str], tuple[Any, Any]], backend: str
) -> tuple[Any, Any]:
    """Make a group with shm in place of Gloo, and keep the requested name."""
    # torch.distributed's notation: "gloo", "cpu:gloo,cuda:nccl", "undefined"
    instead = with_shm(backend)
    group, store = make(instead)
    # Programs read the name: some refuse an unknown backend, some continue to train without
    # communication. The group may be `NON_GROUP_MEMBER`.
    if instead != backend and isinstance(group, ProcessGroup):
        _announce(group)
        _world.pg_map[group] = (backend, _world.pg_map[group][1])
        _world.pg_backend_config[group] = str(BackendConfig(Backend(backend)))
    return group, store


def _announce(group: ProcessGroup) -> None:
    """Say on rank 0 of the first group what is in place."""
    if _announced or group.rank() != 0 or os.environ.get(QUIET, "0") not in ("", "0"):
        return
    _announced.append(group.size())
    print(
        f"gradwire: {group.size()} ranks use shm in place of Gloo, because GRADWIRE_BACKEND is "
        f"shm ({QUIET}=1 hides this line)",
        file=sys.stderr,
        flush=True,
    )


def with_shm(backend: str) -> str:
    """Return the backend with shm in place of Gloo for CPU tensors."""
    if backend != Backend.UNDEFINED and Backend.GLOO not in backend:
        return backend
    asked = BackendConfig(Backend(backend))
    by_device = dict(asked.get_device_backend_map())
    if by_device.pop("cpu", None) != Backend.GLOO:
        return backend
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    own = accelerator and accelerator.type
    others = {d: name for d, name in by_device.items() if name != Backend.GLOO or d == own}
    if not others:
        return "shm"
    if PYTHON_BACKENDS:
        return ",".join(["cpu:shm", *(f"{device}:{name}" for device, name in others.items())])
    warnings.warn(
        f"GRADWIRE_BACKEND=shm: a group of {asked} is unchanged, because with PyTorch "
        f"{torch.__version__} shm would be the whole group: upgrade PyTorch",
        stacklevel=4,
    )
    return backend
