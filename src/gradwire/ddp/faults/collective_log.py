"""The collectives that a rank has sent lately, so that a rank that fell behind can join them.

When a rank fails in the middle of a backward, the others wait in collectives that it never joined,
and a backend such as Gloo cannot abort them. So every rank logs its collectives, with the backend's
own count of them as their numbers; after an error the logs are compared, and a rank that is behind
takes part in what it missed with zeros (see `protocol`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.ddp.group import broadcast_options
from gradwire.errors import BrokenGroupError
from gradwire.shm.group_base import GroupBase
from gradwire.shm.register import member_of

__all__ = [
    "CollectiveLog",
    "Entry",
    "LogMode",
    "all_reduce_entry",
    "broadcast_entry",
    "check_joinable",
    "group_named",
    "join",
    "sequence_number",
]

Entry = list[Any]
"""JSON: [op, root, tensors' groups]; a tensors' group is a list of [dtype, device type, shape]."""

JOINABLE = frozenset({"allreduce_", "broadcast_", "allgather_"})
MAX_BYTES = 1 << 36
"""A received entry with a larger tensor is invalid: this rank would allocate it to join."""


def all_reduce_entry(tensor: Tensor) -> Entry:
    """The entry for an all_reduce of one tensor."""
    return ["allreduce_", 0, [[_describe(tensor)]]]


def broadcast_entry(tensor: Tensor, root: int) -> Entry:
    """The entry for a broadcast of one tensor."""
    return ["broadcast_", root, [[_describe(tensor)]]]


class CollectiveLog:
    """The collectives that all reducers of a group have sent and others may still wait in.

    Their number is the backend's count, so that ranks mean the same by it, and so that collectives
    which are not in the log leave a gap.

    Attributes:
        sent: On the group.
        elsewhere: On other groups, by name, as communication hooks may.
        works: Handles of what hooks sent: by them a backend's failure is known from the hook's own.
        since: When the first of `sent` was sent.
    """

    def __init__(self) -> None:
        self._counted = 0
        self.since = 0.0
        self.sent: list[tuple[int, Entry]] = []
        self.elsewhere: dict[str, list[tuple[int, Entry]]] = {}
        self.works: list[Work] = []

    def add(self, group: ProcessGroup, entry: Entry) -> None:
        """Log the collective that has just been sent on the group."""
        self._counted += 1
        if not self.sent:
            self.since = monotonic()
        self.sent.append((self.position(group), entry))

    def add_elsewhere(self, group: ProcessGroup, entry: Entry) -> None:
        """Log one that has just been sent on another group."""
        self.elsewhere.setdefault(group.group_name, []).append((sequence_number(group), entry))

    def position(self, group: ProcessGroup) -> int:
        """The number of the last collective that was sent on the group."""
        try:
            return sequence_number(group)
        except RuntimeError:  # a backend that does not count: then only ours count
            return self._counted

    def clear(self) -> None:
        """All ranks are in step."""
        self.sent.clear()
        self.elsewhere.clear()
        self.works.clear()

    def forget(self, through: int) -> None:
        """All ranks have sent the collective of this number, and so all before it."""
        if self.sent and self.sent[-1][0] <= through:
            self.clear()
        else:
            self.sent = [(number, entry) for number, entry in self.sent if number > through]


class LogMode(TorchDispatchMode):
    """Logs the collectives that this thread issues while the mode is active.

    A hook may send anything on any group; what its callbacks send later, on a backend's threads, is
    not seen (`protocol.missing` then finds a number that no log has, and the group is broken).
    """

    def __init__(self, group: ProcessGroup, log: CollectiveLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group, self._name, self._log = group, group.group_name, log
        self._observed: list[GroupBase] = []

    def __enter__(self) -> LogMode:
        groups = {self._group, *dist.distributed_c10d._world.pg_names}
        for group in groups:  # those on shm: their calls need not pass the dispatcher
            if isinstance(group, ProcessGroup) and (member := member_of(group)) is not None:
                member.observer = self._observer(group)
                self._observed.append(member)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        while self._observed:
            self._observed.pop().observer = None

    def _observer(self, group: ProcessGroup) -> Any:
        def observe(op: str, root: int, lists: Sequence[Sequence[Tensor]]) -> None:
            self._add(group, [op, root, [[_describe(t) for t in g] for g in lists]])

        return observe

    def _add(self, group: ProcessGroup, entry: Entry) -> None:
        if group.group_name == self._name:
            self._log.add(self._group, entry)
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
        if member_of(group) is not None:
            return  # its observer has logged it
        root = args[at + 1] if op == "broadcast_" else 0
        groups = [a for a in args[:at] if isinstance(a, list)]
        flat = [g[0] if g and isinstance(g[0], list) else g for g in groups]
        entry = [op, root, [[_describe(t) for t in g] for g in flat]]
        self._add(group, entry)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.ScriptObject):
                self._log.works.append(Work.unbox(value))


def check_joinable(entry: Entry) -> None:
    """Refuse what a rank that is behind cannot join: on all ranks, as those who wait in it do so.

    Raises:
        BrokenGroupError: It is none of `JOINABLE`.
    """
    if entry[0] not in JOINABLE:
        raise BrokenGroupError(
            "ranks wait in a collective that is no all_reduce, broadcast or all_gather: those "
            "behind cannot join it after an error"
        )


def join(group: ProcessGroup, entry: Entry) -> Work:
    """Take part, with zeros, in a collective that others wait in.

    With the same op, shapes and dtypes: on Gloo, two collectives of different sizes that meet abort
    the process. The result is not used: all ranks raise.

    Raises:
        BrokenGroupError: It cannot be joined this way.
    """
    check_joinable(entry)
    op, root, described = entry
    tensors = [[_zeros(*d) for d in g] for g in described]
    if op == "allreduce_":
        return group.allreduce(tensors[0])
    if op == "broadcast_":
        return group.broadcast(tensors[0], broadcast_options(root))
    return group.allgather([tensors[0]], tensors[1])


def _describe(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, tensor.device.type, list(tensor.shape)]


def _zeros(dtype: str, device: str, shape: list[int]) -> Tensor:
    size = 16
    for n in shape:
        size *= n
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not 0 <= size <= MAX_BYTES:
        raise BrokenGroupError(f"another rank's log has a {dtype} tensor of shape {shape}")
    return torch.zeros(shape, dtype=kind, device=device)


def sequence_number(group: ProcessGroup) -> int:
    """How many collectives this rank has sent on the group, by its backend's count.

    Raises:
        RuntimeError: The backend does not count.
    """
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def group_named(name: str) -> ProcessGroup | None:
    """The group of this name, if this rank is a member of it."""
    for group in dist.distributed_c10d._world.pg_names:
        if isinstance(group, ProcessGroup) and group.group_name == name:
            return group
    return None
