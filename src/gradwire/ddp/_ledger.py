"""What a rank has sent in this backward, so that a rank that fell behind can catch up.

When a rank fails in the middle of a backward, the others wait in collectives that it never
joined, and an engine such as Gloo has no way to call them back. So every rank keeps a ledger of
its collectives; after an error the ledgers are compared and a rank that is behind takes part in
what it missed with zeros. Then all are in step and the group can be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.errors import BrokenGroupError
from gradwire.shm.process_group import ShmProcessGroup

__all__ = [
    "Entry",
    "Ledger",
    "LedgerMode",
    "all_reduce_entry",
    "broadcast_entry",
    "catch_up",
    "missing",
]

Entry = list[Any]
"""JSON: [op, root, tensors' groups]; a tensors' group is a list of [dtype, device type, shape]."""

LARGEST = 1 << 36
"""Bytes: no ledger that asks for a larger tensor is believed."""


def all_reduce_entry(tensor: Tensor) -> Entry:
    """The entry for an all_reduce of one tensor."""
    return ["allreduce_", 0, [[_describe(tensor)]]]


def broadcast_entry(tensor: Tensor, root: int) -> Entry:
    """The entry for a broadcast of one tensor."""
    return ["broadcast_", root, [[_describe(tensor)]]]


class Ledger:
    """The collectives that a rank has lately sent on a group, each with its number.

    The number is the engine's count of collectives on the group, so that ranks mean the same by
    it, even where one is a step ahead of another, and so that collectives which are not in the
    ledger leave a gap.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sent = 0
        self.entries: list[tuple[int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """Write down the collective that has just been sent."""
        self._sent += 1
        self.entries.append((self.position(), entry))

    def position(self) -> int:
        """The number of the last collective that was sent on the group."""
        try:
            return int(self._group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:  # an engine that does not count: then only ours count
            return self._sent

    def clear(self) -> None:
        """Begin a new page: what was sent has been completed."""
        self.entries.clear()


class LedgerMode(TorchDispatchMode):
    """Writes down the collectives that are issued on one group while it is active."""

    def __init__(self, group: ProcessGroup, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group
        self._group_name = group.group_name
        self._ledger = ledger

    def __enter__(self) -> LedgerMode:
        if isinstance(self._group, ShmProcessGroup):  # its calls do not pass the dispatcher
            self._group.observer = self._observe
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if isinstance(self._group, ShmProcessGroup):
            self._group.observer = None

    def _observe(self, op: str, root: int, groups: Sequence[Sequence[Tensor]]) -> None:
        self._ledger.add([op, root, [[_describe(t) for t in g] for g in groups]])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._ledger.add(self._entry(func, args))
        return result

    def _entry(self, func: Any, args: tuple[Any, ...]) -> Entry:
        op = func._schema.name.removeprefix("c10d::")
        at = next((i for i, a in enumerate(args) if isinstance(a, torch.ScriptObject)), None)
        if at is None or dist.ProcessGroup.unbox(args[at]).group_name != self._group_name:
            return ["of another group", 0, []]
        root = args[at + 1] if op == "broadcast_" else 0
        groups = [a for a in args[:at] if isinstance(a, list)]
        flat = [g[0] if g and isinstance(g[0], list) else g for g in groups]
        return [op, root, [[_describe(t) for t in g] for g in flat]]


def missing(position: int, told: Sequence[tuple[int, Sequence[tuple[int, Entry]]]]) -> list[Entry]:
    """The entries that this rank has yet to join to be level with the furthest rank.

    Args:
        position: The number of the last collective that this rank sent.
        told: For each rank, its position and its ledger's entries.

    Raises:
        BrokenGroupError: The ledgers tell of different collectives, or not of all.

    Example:
        >>> missing(1, [(1, [(1, ["a"])]), (2, [(1, ["a"]), (2, ["b"])])])
        [['b']]
    """
    furthest, entries = max(told, key=lambda rank: rank[0])
    known = {number: list(entry) for number, entry in entries}
    for _, others in told:
        for number, entry in others:
            if known.get(number, list(entry)) != list(entry):
                raise BrokenGroupError(
                    f"ranks sent different collectives before the error: {entry} and "
                    f"{known[number]} as number {number}"
                )
    needed = range(position + 1, furthest + 1)
    if unknown := [number for number in needed if number not in known]:
        raise BrokenGroupError(
            f"collectives besides the reducer's were under way (numbers {unknown})"
        )
    return [known[number] for number in needed]


def catch_up(group: ProcessGroup, entries: Sequence[Entry]) -> list[Work]:
    """Join collectives that others wait in, with zeros.

    Raises:
        BrokenGroupError: An entry tells of a collective that cannot be joined this way.
    """
    return [_join(group, *entry) for entry in entries]


def _join(group: ProcessGroup, op: str, root: int, described: list[Any]) -> Work:
    tensors = [[_zeros(*d) for d in g] for g in described]
    if op == "allreduce_":
        return group.allreduce(tensors[0])
    if op == "broadcast_":
        options = BroadcastOptions()
        options.rootRank = root
        return group.broadcast(tensors[0], options)
    if op == "allgather_":
        return group.allgather([tensors[0]], tensors[1])
    raise BrokenGroupError(f"others wait in a {op} that this rank cannot join after its error")


def _describe(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, tensor.device.type, list(tensor.shape)]


def _zeros(dtype: str, device: str, shape: list[int]) -> Tensor:
    size = 16
    for n in shape:
        size *= n
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not 0 <= size <= LARGEST:
        raise BrokenGroupError(f"another rank's ledger tells of a {dtype} tensor of shape {shape}")
    return torch.zeros(shape, dtype=kind, device=device)
