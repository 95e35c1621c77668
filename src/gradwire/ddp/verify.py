"""Verification that all ranks have the same model, and later that replicas are still equal.

Ranks exchange digests, and descriptions only if digests differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire._digest import digest
from gradwire._groups import message_device
from gradwire.ddp.arguments import WeakHook
from gradwire.ddp.broadcast import distinct
from gradwire.ddp.faults.error_channel import backend_errors
from gradwire.ddp.faults.fault_domain import wait_for_message
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.ddp.reducer.weights import Forwards
from gradwire.errors import MismatchError
from gradwire.recorder import record_error

DIGEST_NUMBERS = 4
"""Number of int64 values in a digest."""
MODEL_REMEDY = (
    "Build the same module, in the same order and dtype, on every rank, and wrap it with the same "
    "arguments"
)
REPLICAS_REMEDY = (
    "Change parameters by the optimizer alone, with the same gradients and on every rank, or "
    "broadcast them; check_replicas=0 lets them differ"
)
Description = list[tuple[str, str]]
"""Name of each parameter and buffer, in order, with the properties that must agree."""


def describe(parameters: Iterable[tuple[str, Tensor]], kind: str) -> Description:
    """Return the names of tensors with the properties that must agree."""
    return [
        (
            name,
            f"{kind}, {t.dtype}, shape {tuple(t.shape)}, "
            + (f"strides {t.stride()}" if t.layout == torch.strided else f"layout {t.layout}")
            + f", requires_grad={t.requires_grad}",
        )
        for name, t in parameters
    ]


def verify_same(
    group: ProcessGroup, own: Description, what: str = "models", remedy: str = MODEL_REMEDY
) -> None:
    """Raise MismatchError on every rank if any rank's description of `what` differs."""
    # 32 bytes; descriptions are sent only if the digests differ
    digest = hashlib.sha256(json.dumps(own).encode()).digest()
    device = message_device(group)
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(everyones, mine, group=group, async_op=True)
    on_cpu = device.type == "cpu"
    wait_for_message(group, work, f"comparing {what}", on_cpu=on_cpu, from_all=True)
    if not all(torch.equal(d, everyones[0]) for d in everyones):
        _raise_difference(group, own, what, remedy)


def _raise_difference(group: ProcessGroup, own: Description, what: str, remedy: str) -> NoReturn:
    everyone: list[Description] = [[] for _ in range(group.size())]
    with backend_errors(group, f"comparing {what}"):
        dist.all_gather_object(everyone, own, group=group)
    each = zip_longest(*everyone, fillvalue=("(nothing)", "ends before"))
    first = next((entries for entries in each if len({*map(tuple, entries)}) > 1), ())
    values = [f"{name}: {value}" for name, value in first]
    held = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
    where = f"first {held}" if values else "in parameters that are equal by now"
    names = [{name for name, _ in rank} for rank in everyone]
    if values and (only := sorted(set[str]().union(*names) - names[0].intersection(*names))):
        where += f". Not on every rank: {', '.join(only)}"
    error = MismatchError(f"the ranks' {what} differ, {where}. {remedy}", values)
    record_error(error, group=group)
    raise error


class Replicas:
    """Comparison of the ranks' parameters, after a number of reduced backwards."""

    # A backward sends a digest of the parameters, and the next forward verifies that all ranks sent
    # the same one.

    def __init__(self, named: Sequence[tuple[str, Parameter]], reducer: Reducer) -> None:
        self._named, self._reducer = named, reducer
        # number of reduced backwards from one comparison to the next; 0 for none
        self.every = 0
        self._noted: _Snapshot | None = None
        self._sent: _Snapshot | None = None
        reducer.replica_message = WeakHook(self._message)

    def note(self, *, changes: bool) -> None:
        """Compute the digest, if one is due, before a step's first forward."""
        # Until the forward whose gradients are averaged, a program may change parameters on each
        # rank: in sharpness-aware minimization each rank ascends along its own gradient.
        # With `changes`, the parameters may change before they are compared.
        if not self._is_due():
            self._noted = None
        elif self._noted is None or self._noted.step != self._reducer.step:
            self._noted = _Snapshot(self._named, self._reducer.step, changes=changes)

    def _message(self, forwards: Forwards) -> Tensor | None:
        """Return a row for each rank, of which this one fills its own; None if none is due."""
        if not self._is_due():
            return None
        # Forwards without a backward, and all forwards. Ranks may differ in one of the two.
        counts = forwards.skipped, forwards.begun
        self._sent = self._noted or _Snapshot(self._named, self._reducer.step - 1, changes=True)
        self._sent.forwards = f"{counts[0]} of {counts[1]}"
        self._noted = None
        group = self._reducer.group
        rows = torch.zeros(group.size(), DIGEST_NUMBERS + len(counts), dtype=torch.int64)
        own = torch.frombuffer(bytearray(self._sent.digest), dtype=torch.int64)
        rows[group.rank()] = torch.cat([own, torch.tensor(counts, dtype=torch.int64)])
        return rows

    def _is_due(self) -> bool:
        return 0 < self.every <= self._reducer.since_replicas

    def verify(self) -> None:
        """Raise MismatchError on every rank if parameters differed in the last backward."""
        reducer, sent = self._reducer, self._sent
        if reducer.replica_sum is None or sent is None:
            return
        sums, work = reducer.replica_sum
        reducer.launcher.wait_small(work)
        reducer.replica_sum = None
        same = (sums == sums[0]).all(0).tolist()
        if all(same[:DIGEST_NUMBERS]) and any(same[DIGEST_NUMBERS:]):
            return
        own = [*sent.each(), ("(forwards without a backward)", sent.forwards)]
        what = f"replicas after step {sent.step}"
        _raise_difference(reducer.group, own, what, REPLICAS_REMEDY)


class _Snapshot:
    """Digest of a rank's parameters after a step; `each` has one per parameter."""

    def __init__(self, named: Iterable[tuple[str, Parameter]], step: int, *, changes: bool) -> None:
        self.step, self.forwards = step, ""
        # subclasses of Parameter are left out
        chosen = [(n, p) for n, p in named if type(p) is Parameter and not p.is_meta]
        self._chosen = [(n, p) for n, p in chosen if p.layout is torch.strided]
        self.digest = digest(distinct(p.detach()) for _, p in self._chosen)
        self._held: Description = []
        # the parameters may change before they are compared
        if changes:
            self._held = self.each()

    def each(self) -> Description:
        return self._held or [
            (n, f"digest {digest([distinct(p.detach())]).hex()[:8]}") for n, p in self._chosen
        ]
