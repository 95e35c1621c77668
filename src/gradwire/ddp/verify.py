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

from gradwire.ddp.faults.fault_domain import wait_for_message
from gradwire.ddp.group import backend_errors, message_device
from gradwire.ddp.layouts import dense_parts
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.ddp.reducer.tally import Forwards
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
SMALL_BYTES = 64 << 10
COLUMNS = 64
"""Number of int64 columns of a tensor's bytes: their sums, from one pass, form its digest."""
Description = list[tuple[str, str]]
"""Name of each parameter and buffer, in order, with the properties that must agree."""


def describe(parameters: Iterable[tuple[str, Tensor]], kind: str) -> Description:
    """Return the names of tensors with the properties that must agree.

    Example:
        >>> describe([("weight", torch.zeros(2, 3))], "parameter")
        [('weight', 'parameter, torch.float32, shape (2, 3), strides (3, 1), requires_grad=False')]
    """
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
    """Raise on every rank if any rank's description differs.

    Each rank sends 32 bytes, and its description only if the digests differ.

    Args:
        group: Process group.
        own: Description of this rank.
        what: Name of the compared objects, for the message.
        remedy: Advice for the message.

    Raises:
        MismatchError: Descriptions differ; has the first difference and each rank's value.
        PeerLostError, CollectiveTimeoutError: Another rank has ended, or did not call in time.
    """
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
    """Raise with the first difference of the ranks' descriptions."""
    everyone: list[Description] = [[] for _ in range(group.size())]
    with backend_errors(group, f"comparing {what}"):
        dist.all_gather_object(everyone, own, group=group)
    message = f"the ranks' {what} differ, {_first_difference(everyone)}. {remedy}"
    error = MismatchError(message, _first_differing(everyone))
    record_error(error, group=group)
    raise error


class Replicas:
    """Comparison of the ranks' parameters, after a number of reduced backwards.

    A backward sends a digest of the parameters, and the next forward verifies that all ranks sent
    the same one. The digest is that of the step's first forward: until the forward whose gradients
    are averaged, a program may change parameters on each rank. In sharpness-aware minimization each
    rank ascends along its own gradient.

    Args:
        named: Names and parameters.
        reducer: Reducer that sends the digests.

    Attributes:
        every: Number of reduced backwards from one comparison to the next; 0 for none.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], reducer: Reducer) -> None:
        self._named, self._reducer = named, reducer
        self.every = 0
        self._noted: _Snapshot | None = None
        self._sent: _Snapshot | None = None
        self._sums = reducer.replica_sums
        self._sums.send_from(self._message)

    def note(self, *, changes: bool) -> None:
        """Compute the digest, if one is due, before a step's first forward.

        Args:
            changes: True if the parameters may change before they are compared.
        """
        if not self._is_due():
            self._noted = None
        elif self._noted is None or self._noted.step != self._reducer.step:
            self._noted = _Snapshot(self._named, self._reducer.step, changes=changes)

    def _message(self, forwards: Forwards) -> Tensor | None:
        """Return what is sent at the end of a backward; None if no digest is due."""
        if not self._is_due():
            return None
        step = self._reducer.step - 1
        self._sent = self._noted or _Snapshot(self._named, step, changes=True)
        self._noted = None
        counts = forwards.skipped, forwards.begun
        return self._sent.message(self._reducer.group, counts)

    def _is_due(self) -> bool:
        return 0 < self.every <= self._sums.backwards

    def verify(self) -> None:
        """Raise on every rank if the ranks' parameters differed in the last backward.

        Raises:
            MismatchError: Parameters differ; has the name of the first one and each rank's digest.
        """
        sums = self._sums.receive()
        if sums is not None and self._sent is not None:
            self._sent.verify(self._reducer.group, sums)


class _Snapshot:
    """Digest of a rank's parameters after a step, with one per parameter if it is asked for.

    Args:
        named: Names and parameters; subclasses of Parameter are left out.
        step: Step after which they are compared.
        changes: True if the parameters may change before they are compared.
    """

    def __init__(self, named: Iterable[tuple[str, Parameter]], step: int, *, changes: bool) -> None:
        self.step = step
        self._chosen = [(n, p) for n, p in named if type(p) is Parameter and not p.is_meta]
        self._digest = digest([p for _, p in self._chosen])
        self._held = self._each() if changes else None
        self._forwards = ""

    def _each(self) -> Description:
        return [(name, f"digest {digest([p]).hex()[:8]}") for name, p in self._chosen]

    def message(self, group: ProcessGroup, forwards: tuple[int, int]) -> Tensor:
        """Return what is added up over the ranks: a row for each, of which this rank fills its own.

        `forwards` are the numbers of this rank's forwards without a backward, and of all its
        forwards. Ranks may differ in one of the two.
        """
        self._forwards = f"{forwards[0]} of {forwards[1]}"
        rows = torch.zeros(group.size(), DIGEST_NUMBERS + 2, dtype=torch.int64)
        own = torch.frombuffer(bytearray(self._digest), dtype=torch.int64)
        rows[group.rank()] = torch.cat([own, torch.tensor(forwards, dtype=torch.int64)])
        return rows

    def verify(self, group: ProcessGroup, sums: Tensor) -> None:
        """Raise on every rank if the sum of the messages shows different parameters."""
        same = (sums == sums[0]).all(0).tolist()
        if all(same[:DIGEST_NUMBERS]) and any(same[DIGEST_NUMBERS:]):
            return
        each = self._each() if self._held is None else self._held
        own = [*each, ("(forwards without a backward)", self._forwards)]
        _raise_difference(group, own, f"replicas after step {self.step}", REPLICAS_REMEDY)


def digest(tensors: Sequence[Tensor]) -> bytes:
    """Return a digest of tensors' bits.

    Example:
        >>> a, b = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
        >>> digest([a]) == digest([a.clone()]), digest([a]) == digest([b])
        (True, False)
    """
    sums: dict[torch.device, list[Tensor]] = {}
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for part in (part for t in tensors for part in dense_parts(t.detach())):
            flat = part.resolve_conj().resolve_neg().reshape(-1)
            if flat.nbytes < SMALL_BYTES:  # one pass over many small tensors
                small.setdefault((flat.device, flat.dtype), []).append(flat)
            else:
                sums.setdefault(flat.device, []).append(_column_sums(flat))
        for (device, _), flats in small.items():
            sums.setdefault(device, []).append(_column_sums(torch.cat(flats)))
        rows = [torch.stack(found).cpu() for found in sums.values()]  # one copy from each device
    return hashlib.sha256(b"".join(row.numpy().tobytes() for row in rows)).digest()


def _column_sums(flat: Tensor) -> Tensor:
    """Return sums of a tensor's bytes, in rows of `COLUMNS` int64."""
    total = torch.zeros(COLUMNS, dtype=torch.int64, device=flat.device)
    row = COLUMNS * total.itemsize
    if flat.data_ptr() % total.itemsize:  # cannot be viewed as int64
        flat = flat.clone()
    as_bytes = flat.view(torch.uint8)
    whole = as_bytes.numel() // row * row
    if whole:
        total += as_bytes[:whole].view(torch.int64).view(-1, COLUMNS).sum(0)
    if whole < as_bytes.numel():
        last = torch.zeros(row, dtype=torch.uint8, device=flat.device)
        last[: as_bytes.numel() - whole] = as_bytes[whole:]
        total += last.view(torch.int64)
    return total


def _first_difference(everyone: list[Description]) -> str:
    values = _first_differing(everyone)
    if not values:
        return "in parameters that are equal by now"
    held = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
    names = [{name for name, _ in rank} for rank in everyone]
    only = sorted(set[str]().union(*names) - names[0].intersection(*names))
    hint = f". Not on every rank: {', '.join(only)}" if only else ""
    return f"first {held}{hint}"


def _first_differing(everyone: list[Description]) -> list[str]:
    """Return what each rank has where they first differ; empty if they do not."""
    for entries in zip_longest(*everyone, fillvalue=("(nothing)", "ends before")):
        if len({tuple(entry) for entry in entries}) > 1:
            return [f"{name}: {what}" for name, what in entries]
    return []
