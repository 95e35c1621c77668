"""Log of a rank's recent collectives, so that a rank that fell behind can join them.

When a rank fails within a backward, the others wait in collectives that it never joined, and a
backend such as Gloo cannot abort them. Every rank therefore logs its collectives, numbered by the
backend's own count. After an error the ranks compare their logs, and a rank that is behind joins
the collectives that it missed, with zeros (see `protocol`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.ddp.faults.waiting import InFlight, first_failure, work_in_flight
from gradwire.ddp.group import broadcast_options
from gradwire.errors import BrokenGroupError
from gradwire.shm import Operations, shm_backend_of

Entry = list[Any]
"""Collective as JSON: [op, root, number of the reduce op, lists of tensors].

A tensor is [dtype, device type, shape, sparse dims]; sparse dims is None for a dense tensor."""

MAX_BYTES = 1 << 36
"""Maximum size of a tensor in another rank's log, which this rank allocates to join."""


def all_reduce_entry(tensor: Tensor) -> Entry:
    """Return the entry for an all_reduce of one tensor."""
    return ["allreduce_", 0, 0, [[_describe(tensor)]]]


def broadcast_entry(tensor: Tensor, root: int) -> Entry:
    """Return the entry for a broadcast of one tensor."""
    return ["broadcast_", root, 0, [[_describe(tensor)]]]


class CollectiveLog:
    """Collectives of all reducers of a group that other ranks may still wait in.

    A collective's number is the backend's count. It is the same on all ranks, and a collective that
    is not in the log leaves a gap.

    Args:
        group: Process group.

    Attributes:
        sent: Collectives on the group, with their numbers.
        elsewhere: Collectives of communication hooks on other groups, by `key_of` the group.
        works: Handles of hooks' collectives, which distinguish a failure of the backend from an
            error of the hook.
        since: Time at which the first of `sent` was sent.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)  # a domain must not keep its group alive
        self._counted = 0
        self._small: list[Work] = []
        self.since = 0.0
        self.sent: list[tuple[int, Entry]] = []
        self.elsewhere: dict[str, list[tuple[int, Entry]]] = {}
        self.works: list[Work] = []

    def add(self, entry: Entry, work: Work | None = None) -> None:
        """Log a collective that was just sent; `work` is its handle if no participant keeps it."""
        self._counted += 1
        if not self.sent:
            self.since = monotonic()
        self.sent.append((self.position(), entry))
        if work is not None:
            self._small.append(work)

    def add_elsewhere(self, group: ProcessGroup, entry: Entry) -> None:
        """Log a collective that was just sent on another group."""
        self.elsewhere.setdefault(key_of(group), []).append((sequence_number(group), entry))

    def counts(self) -> tuple[int, int]:
        """Return the position and the number of logged collectives on other groups."""
        return self.position(), sum(map(len, self.elsewhere.values()))

    def in_flight(self) -> list[InFlight]:
        """Return the logged communication whose handles are kept here."""
        return [work_in_flight(work) for work in (*self.works, *self._small)]

    def failure(self) -> BaseException | None:
        """Return the failure of a hook's collective, from its handle or its shm group, or None."""
        if error := first_failure([work_in_flight(work) for work in self.works]):
            return error
        for group in (self._group(), *map(group_of, self.elsewhere)):
            member = None if group is None else shm_backend_of(group)
            if member is not None and member.failure is not None:
                return member.failure
        return None

    def position(self) -> int:
        """Return the number of the last collective sent on the group."""
        group = self._group()
        assert group is not None
        try:  # `sequence_number`, called several times per bucket
            return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:  # the backend does not count: count logged collectives only
            return self._counted

    def clear(self) -> None:
        """Drop all entries when the ranks are in step."""
        self.sent.clear()
        self.elsewhere.clear()
        self.works.clear()
        self._small.clear()

    def forget(self, through: int) -> None:
        """Drop the entries up to this number, which all ranks have sent."""
        self._small.clear()
        if self.sent and self.sent[-1][0] <= through:
            self.clear()
        else:
            self.sent = [(number, entry) for number, entry in self.sent if number > through]


class LogMode(TorchDispatchMode):
    """Dispatch mode that logs the collectives issued by this thread.

    A hook may issue any collective on any group. Collectives that its callbacks issue later, on a
    backend's threads, are not logged: `protocol.missing` then finds a number that no log has, and
    the group is broken.
    """

    def __init__(self, group: ProcessGroup, log: CollectiveLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group, self._name, self._log = group, group.group_name, log
        self._observed: list[Operations] = []
        self._dispatches = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo's wrapper would take 7 µs of each operation of a hook

    def __enter__(self) -> LogMode:
        groups = {self._group, *dist.distributed_c10d._world.pg_names}
        members = {g: shm_backend_of(g) for g in groups if isinstance(g, ProcessGroup)}
        for group, member in members.items():  # calls on shm groups may bypass the dispatcher
            if member is not None:
                member.observer = self._observer(group)
                self._observed.append(member)
        self._dispatches = None in members.values()
        if self._dispatches:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        if self._dispatches:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
        while self._observed:
            self._observed.pop().observer = None

    def _observer(self, group: ProcessGroup) -> Any:
        def observe(op: str, root: int, reduce: int, lists: Sequence[Sequence[Tensor]]) -> None:
            self._add(group, [op, root, reduce, [[_describe(t) for t in g] for g in lists]])

        return observe

    def _add(self, group: ProcessGroup, entry: Entry) -> None:
        if group.group_name == self._name:
            self._log.add(entry)
        else:
            self._log.add_elsewhere(group, entry)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._log_call(func._schema.name.removeprefix("c10d::"), args, result)
        return result

    def _log_call(self, op: str, args: tuple[Any, ...], result: Any) -> None:
        at = next((i for i, a in enumerate(args) if isinstance(a, torch.ScriptObject)), None)
        if at is None:
            return
        group = ProcessGroup.unbox(args[at])
        if shm_backend_of(group) is not None:
            return  # its observer has logged it
        root = args[at + _ROOT_AFTER_GROUP[op]] if op in _ROOT_AFTER_GROUP else 0
        if op == "alltoall_base_" and len({*args[at + 1], *args[at + 2]}) > 1:
            op = "an all_to_all of uneven parts"  # sizes differ between ranks
        if op == "_reduce_scatter_base_":
            op = "a reduce_scatter of Gloo"  # its handle is not done until it is waited for
        groups = [[a] if isinstance(a, Tensor) else a for a in args[:at]]
        flat = [g[0] if g and isinstance(g[0], list) else g for g in groups]
        # The reduce op cannot be read here. Gloo and NCCL do not compare it.
        self._add(group, [op, root, 0, [[_describe(t) for t in g] for g in flat]])
        for value in result if isinstance(result, tuple | list) else (result,):
            work = Work.unbox(value) if isinstance(value, torch.ScriptObject) else None
            if work is not None:  # NCCL returns none for a blocking collective
                self._log.works.append(work)


def check_joinable(entry: Entry) -> None:
    """Raise if a rank that is behind cannot join a collective.

    Called on all ranks, because other ranks wait in the collective.

    Raises:
        BrokenGroupError: The collective is not supported by `join`.
    """
    if entry[0] not in _JOIN:
        raise BrokenGroupError(
            f"cannot recover: ranks are blocked in {entry[0]}; after an error only "
            f"{', '.join(_JOIN)} (of equal parts) can be completed"
        )


def join(group: ProcessGroup, entry: Entry) -> Work:
    """Join, with zeros, a collective that other ranks wait in.

    The op, shapes and dtypes are the same: a size mismatch between ranks aborts the process on
    Gloo. The result is not used because all ranks raise.

    Raises:
        BrokenGroupError: The collective is not supported.
    """
    check_joinable(entry)
    op, root, reduce, described = entry
    return _JOIN[op](group, root, reduce, [[_zeros(*d) for d in g] for g in described])


def _join_reduction(
    method: str, kind: type[Any], group: ProcessGroup, root: int, reduce: int, data: Any
) -> Work:
    options = kind()
    options.reduceOp = ReduceOp(ReduceOp.RedOpType(reduce))
    if kind is ReduceOptions:
        options.rootRank = root
    work: Work = getattr(group, method)(*data, options)
    return work


def _join_broadcast(group: ProcessGroup, root: int, _: int, data: Any) -> Work:
    return group.broadcast(data[0], broadcast_options(root))


def _join_all_gather(group: ProcessGroup, _: int, __: int, data: Any) -> Work:
    return group.allgather([data[0]], data[1])


def _join_all_gather_base(group: ProcessGroup, _: int, __: int, data: Any) -> Work:
    return group._allgather_base(data[0][0], data[1][0], AllgatherOptions())


def _join_reduce_scatter(group: ProcessGroup, root: int, reduce: int, data: Any) -> Work:
    tensors = [part[0] for part in data]
    return _join_reduction(
        "_reduce_scatter_base", ReduceScatterOptions, group, root, reduce, tensors
    )


def _join_all_to_all(group: ProcessGroup, _: int, __: int, data: Any) -> Work:
    return group.alltoall_base(data[0][0], data[1][0], [], [], AllToAllOptions())


_ROOT_AFTER_GROUP = {"broadcast_": 1, "reduce_": 2}
"""Position of the root among the arguments of PyTorch's operators, relative to the group."""

_JOIN: Mapping[str, Callable[[ProcessGroup, int, int, Any], Work]] = MappingProxyType(
    {
        "allreduce_": partial(_join_reduction, "allreduce", AllreduceOptions),
        "allreduce_coalesced_": partial(
            _join_reduction, "allreduce_coalesced", AllreduceCoalescedOptions
        ),
        "reduce_": partial(_join_reduction, "reduce", ReduceOptions),
        "broadcast_": _join_broadcast,
        "allgather_": _join_all_gather,
        "_allgather_base_": _join_all_gather_base,
        "_reduce_scatter_base_": _join_reduce_scatter,
        "alltoall_base_": _join_all_to_all,
    }
)


def _describe(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    sparse = tensor.sparse_dim() if tensor.layout is torch.sparse_coo else None
    return [dtype, tensor.device.type, list(tensor.shape), sparse]


def _zeros(dtype: str, device: str, shape: list[int], sparse: int | None) -> Tensor:
    size = 16
    for n in shape:
        size *= n
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not 0 <= size <= MAX_BYTES:
        raise BrokenGroupError(f"invalid tensor in another rank's log: {dtype} of shape {shape}")
    if sparse is None:
        return torch.zeros(shape, dtype=kind, device=device)
    indices = torch.empty(sparse, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[sparse:], dtype=kind, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


def key_of(group: ProcessGroup) -> str:
    """Return a name that identifies a group on all ranks.

    The group's own name is not unique: PyTorch numbers the groups of each process, so that groups
    of different ranks may have the same name.
    """
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    return f"{group.group_name} {sorted(ranks, key=ranks.__getitem__)}"


def sequence_number(group: ProcessGroup) -> int:
    """Return the backend's count of collectives that this rank has sent on the group.

    Raises:
        RuntimeError: The backend does not count collectives.
    """
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def group_of(key: str) -> ProcessGroup | None:
    """Return the group with this `key_of`, or None if this rank is not a member of it."""
    for group in dist.distributed_c10d._world.pg_names:
        if isinstance(group, ProcessGroup) and key_of(group) == key:
            return group
    return None
