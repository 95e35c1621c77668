"""Agreement: before the data, ranks exchange what they are about to do, and all see who deviates.

Gloo ends the process when sizes differ, other engines hang or mix data. With checks on, each rank
first sends a row of integers of fixed length: what must agree, whether a gradient is wanted, and
how many rows it has for whom. All ranks read the same rows and come to the same verdict.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.numbers import gather_numbers
from gradwire.errors import ArgumentError, MismatchError

__all__ = [
    "ABSENT",
    "Call",
    "Note",
    "Row",
    "agree",
    "checks",
    "describe",
    "digest",
    "enabled",
    "exchange",
    "wants_grad",
]

ENVIRONMENT = "GRADWIRE_CHECKS"
_DIMS = 8
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
ABSENT = -1
"""The number of dims of a tensor that a rank leaves to the root to describe."""

_setting: ContextVar[bool | None] = ContextVar("gradwire_checks", default=None)
_numbers: WeakKeyDictionary[ProcessGroup, count[int]] = WeakKeyDictionary()


@contextmanager
def checks(on: bool = True) -> Iterator[None]:
    """Switch the agreement checks of collectives on, or off, within a block.

    With checks on, ranks compare before each collective, forward and backward, what they are about
    to do; a disagreement raises `MismatchError` on every rank instead of hanging, ending the
    process or mixing data, and a gradient that only some ranks ask for is computed on all.
    Switch them on every rank alike. An argument `check` goes before this, and this before the
    environment variable `GRADWIRE_CHECKS` (0 or 1). By default they are off, and nothing is sent
    besides the data: each costs about as much as a collective of 200 bytes. The "shm" engine
    compares op, reduction, root, dtype and sizes in its own headers, always.

    Example:
        Rank 1 holds one number more than rank 0.

        >>> from gradwire.collectives import all_reduce, checks
        >>> from gradwire.errors import MismatchError
        >>> def main():
        ...     with checks():
        ...         try:
        ...             all_reduce(torch.ones(2 + dist.get_rank()))
        ...         except MismatchError as error:
        ...             return str(error).split(":")[1].strip()
        >>> run_ranks(main, world_size=2)
        ['ranks disagree on shape', 'ranks disagree on shape']
    """
    token = _setting.set(on)
    try:
        yield
    finally:
        _setting.reset(token)


def enabled(check: bool | None) -> bool:
    """Whether this call is checked. Compiled graphs are not: all ranks run the same one."""
    if torch.compiler.is_compiling():
        return False
    if check is None:
        check = _setting.get()
    if check is None:
        check = _from_environment()
    return check


def _from_environment() -> bool:
    value = os.environ.get(ENVIRONMENT) or "0"
    if value not in ("0", "1"):
        raise ArgumentError(f"the environment variable {ENVIRONMENT} is {value!r}: give 0 or 1")
    return value == "1"


@dataclass(frozen=True)
class Call:
    """What one rank is about to do.

    Args:
        op: The collective's name.
        shape: Of the tensor with the cut dim in front; None where only the root knows.
        dtype: Of the tensor.
        wants_grad: Whether this rank makes a graph node: 1, 0, or -1 if it cannot.
        reduce: The reduction.
        root: In the group.
        detail: Whatever else has to agree, as text.
        ragged: Whether ranks may differ in the first dim.
        send, receive: Rows for and from each rank, -1 where not known.
        origin: The number of the call whose backward this is, -1 in forward.
    """

    op: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    wants_grad: int = 0
    reduce: str = ""
    root: int = -1
    detail: str = ""
    ragged: bool = False
    send: Sequence[int] = ()
    receive: Sequence[int] = ()
    origin: int = -1


@dataclass(frozen=True)
class Row:
    """What came from one rank."""

    wants_grad: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    send: list[int]
    receive: list[int]


@dataclass(frozen=True)
class Note:
    """Kept with a checked call, so that its backward is checked too."""

    group: ProcessGroup
    call: str
    number: int

    def before_backward(self, cotangent: Tensor) -> None:
        """Compare with the other ranks which call's backward this is, and of what.

        Raises:
            MismatchError: On every rank, if one runs its backwards in another order.
        """
        exchange(
            self.group,
            Call(
                f"backward of {self.call}",
                tuple(cotangent.shape),
                cotangent.dtype,
                ragged=True,
                origin=self.number,
            ),
        )


def agree(group: ProcessGroup, x: Tensor, call: Call) -> tuple[Tensor, Note, list[Row]]:
    """Exchange; the tensor, made to require a gradient if one is wanted elsewhere.

    Raises:
        MismatchError: On every rank, if they disagree.
    """
    rows, number = exchange(group, call)
    if not x.requires_grad and any(row.wants_grad == 1 for row in rows):
        x = x.detach().requires_grad_()
    return x, Note(group, call.op, number), rows


def describe(
    op: str,
    x: Tensor,
    *,
    reduce: str = "",
    root: int = -1,
    detail: str = "",
    ragged: bool = False,
    send: Sequence[int] = (),
    receive: Sequence[int] = (),
) -> Call:
    """A `Call` of a collective on a tensor."""
    return Call(
        op, tuple(x.shape), x.dtype, wants_grad(x), reduce, root, detail, ragged, send, receive
    )


def digest(x: Tensor) -> str:
    """A short text that differs, all but surely, where the tensor's values do."""
    data = wire.dense(x.detach()).cpu().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def wants_grad(x: Tensor) -> int:
    """For `Call`: 1 if a graph node will be made, -1 if none can be, 0 else."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0
    return int(x.requires_grad) if torch.is_grad_enabled() else -1


def grad_mode() -> int:
    """`wants_grad` of a rank that has no tensor to say so."""
    return 0 if torch.is_grad_enabled() else -1


def exchange(group: ProcessGroup, call: Call) -> tuple[list[Row], int]:
    """All ranks' rows, and this call's number in the group.

    Raises:
        MismatchError: On every rank, if they disagree.
    """
    number = next(_numbers.setdefault(group, count()))
    world = group.size()
    mine = _encode(call, number, world)
    rows = gather_numbers(mine, group)
    for name, values in _must_agree(rows, call.ragged):
        if len(set(values)) > 1:
            _raise_mismatch(group, name, call)
    _check_splits(group, rows, call)
    return [_decode(row, world) for row in rows], number


# A row: _HEAD single numbers, _DIMS sizes, then rows for and from each rank.
_FIELDS = (
    "call",
    "order of backward",
    "op",
    "reduce op",
    "root",
    "dtype",
    "detail",
    "dims",
    "grad",
)
_HEAD = len(_FIELDS)


def _encode(call: Call, number: int, world: int) -> list[int]:
    shape = call.shape
    dims = list(shape or ())
    if len(dims) > _DIMS:
        dims = [*dims[: _DIMS - 1], _hash(tuple(dims[_DIMS - 1 :]))]
    dims += [0] * (_DIMS - len(dims))
    return [
        number,
        call.origin,
        _hash(call.op),
        _hash(call.reduce),
        call.root,
        ABSENT if call.dtype is None else _DTYPES.index(call.dtype),
        _hash(call.detail),
        ABSENT if shape is None else len(shape),
        call.wants_grad,
        *dims,
        *(call.send or [-1] * world),
        *(call.receive or [-1] * world),
    ]


def _decode(row: Sequence[int], world: int) -> Row:
    dtype, dims = row[_FIELDS.index("dtype")], row[_FIELDS.index("dims")]
    splits = row[_HEAD + _DIMS :]
    return Row(
        wants_grad=row[_FIELDS.index("grad")],
        shape=None if dims == ABSENT else tuple(row[_HEAD : _HEAD + dims]),
        dtype=None if dtype == ABSENT else _DTYPES[dtype],
        send=list(splits[:world]),
        receive=list(splits[world:]),
    )


@lru_cache(maxsize=4096)
def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _must_agree(rows: list[list[int]], ragged: bool) -> Iterator[tuple[str, list[object]]]:
    """Each field that has to be equal, with the ranks' values."""
    for i, name in enumerate(_FIELDS[:-2]):
        yield name, [row[i] for row in rows if name != "dtype" or row[i] != ABSENT]
    dims = _FIELDS.index("dims")
    present = [row for row in rows if row[dims] != ABSENT]
    yield "shape", [(row[dims], *row[_HEAD + ragged : _HEAD + _DIMS]) for row in present]
    states = {row[_FIELDS.index("grad")] for row in rows}
    if states >= {1, -1}:
        yield "requires-grad", [row[_FIELDS.index("grad")] for row in rows]


def _check_splits(group: ProcessGroup, rows: list[list[int]], call: Call) -> None:
    """What a rank sends to another must be what that one expects."""
    world = group.size()
    sends = [row[_HEAD + _DIMS : _HEAD + _DIMS + world] for row in rows]
    receives = [row[_HEAD + _DIMS + world :] for row in rows]
    for source in range(world):
        for target in range(world):
            sent, expected = sends[source][target], receives[target][source]
            if -1 not in (sent, expected) and sent != expected:
                _raise_mismatch(group, "splits", call)


def _raise_mismatch(group: ProcessGroup, field: str, call: Call) -> NoReturn:
    """Tell every rank what every rank was about to do, and raise."""
    text = _description(field, call).encode()[:_TEXT]
    everyone = gather_numbers(list(text.ljust(_TEXT)), group)
    values = [bytes(row).decode(errors="replace").rstrip() for row in everyone]
    held = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    raise MismatchError(
        f"{call.op}: ranks disagree on {field}: {held}. Nothing was sent; give every rank of the "
        "group the same call in the same order"
    )


_TEXT = 200


def _description(field: str, call: Call) -> str:
    if field == "shape":
        return f"{call.shape}" if not call.ragged else f"{call.shape} (the first size may differ)"
    if field == "dtype":
        return str(call.dtype)
    if field == "reduce op":
        return call.reduce or "none"
    if field == "root":
        return str(call.root)
    if field == "detail":
        return call.detail or "none"
    if field == "splits":
        return f"sends {list(call.send)}, expects {list(call.receive)}"
    if field == "requires-grad":
        return {1: "requires grad", 0: "requires none", -1: "gradients are off"}[call.wants_grad]
    if call.origin >= 0:
        return f"{call.op}, the group's call {call.origin}"
    return call.op
