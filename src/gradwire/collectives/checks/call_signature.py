"""Signatures of calls as rows of integers, which ranks exchange and compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

MAX_DIMS = 8
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
ABSENT = -1
"""In place of the number of dims and the dtype, on a rank that gets them from the root."""


class CallSignature(NamedTuple):
    """A collective as one rank is about to call it; a tuple, which is quick to make and to hash.

    Args:
        op: The collective's name.
        shape: Of the tensor with the dim that is split in front; None where only the root knows.
        dtype: Of the tensor.
        wants_grad: Whether this rank makes a graph node: 1, 0, or -1 if it cannot.
        reduce: The reduction.
        root: In the group.
        detail: Other arguments that have to be equal, as text.
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
class PeerSignature:
    """What one rank sent of its signature; the shape is None if it has more dims than fit."""

    wants_grad: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    send: list[int]


_details: ContextVar[Callable[[], str] | None] = ContextVar("gradwire_details", default=None)


@contextmanager
def detailed(text: Callable[[], str]) -> Iterator[None]:
    """Add a text to what calls compare in the block; it is made only where they do."""
    if torch.compiler.is_compiling():  # nothing is compared, and all ranks run the same graph
        yield
        return
    token = _details.set(text)
    try:
        yield
    finally:
        _details.reset(token)


def in_full(call: CallSignature) -> CallSignature:
    """The signature with the text of `detailed`."""
    text = _details.get()
    return call if text is None else call._replace(detail=f"{call.detail} {text()}".strip())


# A row: _HEAD single numbers, MAX_DIMS sizes, then rows for and from each rank.
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


def encode(call: CallSignature, number: int, world: int) -> list[int]:
    """A signature as integers, the same number of them on every rank."""
    shape = call.shape
    dims = list(shape or ())
    if len(dims) > MAX_DIMS:
        dims = [*dims[: MAX_DIMS - 1], _hash(tuple(dims[MAX_DIMS - 1 :]))]
    dims += [0] * (MAX_DIMS - len(dims))
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


@lru_cache(maxsize=4096)
def signature_hash(call: CallSignature) -> int:
    """A hash of a signature, the same in every process of a host."""
    return hash(tuple(encode(call, 0, 1)))


def decode(row: Sequence[int], world: int) -> PeerSignature:
    """The signature that a rank sent."""
    dtype, dims = row[_FIELDS.index("dtype")], row[_FIELDS.index("dims")]
    return PeerSignature(
        wants_grad=row[_FIELDS.index("grad")],
        shape=tuple(row[_HEAD : _HEAD + dims]) if ABSENT < dims <= MAX_DIMS else None,
        dtype=None if dtype == ABSENT else _DTYPES[dtype],
        send=list(row[_HEAD + MAX_DIMS : _HEAD + MAX_DIMS + world]),
    )


@lru_cache(maxsize=4096)
def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def first_difference(rows: list[list[int]], ragged: bool) -> str | None:
    """The name of the first field in which ranks differ that must not; None if there is none."""
    for name, values in _must_agree(rows, ragged):
        if len(set(values)) > 1:
            return name
    return None if _splits_agree(rows) else "splits"


def _must_agree(rows: list[list[int]], ragged: bool) -> Iterator[tuple[str, list[object]]]:
    """Each field that has to be equal, with the ranks' values."""
    for i, name in enumerate(_FIELDS[:-2]):
        yield name, [row[i] for row in rows if name != "dtype" or row[i] != ABSENT]
    dims = _FIELDS.index("dims")
    present = [row for row in rows if row[dims] != ABSENT]
    yield "shape", [(row[dims], *row[_HEAD + ragged : _HEAD + MAX_DIMS]) for row in present]
    gradients: list[object] = [row[_FIELDS.index("grad")] for row in rows]
    if {1, -1} <= set(gradients):
        yield "requires-grad", gradients


def _splits_agree(rows: list[list[int]]) -> bool:
    """Whether what each rank sends to another is what that one expects."""
    world = len(rows)
    sends = [row[_HEAD + MAX_DIMS : _HEAD + MAX_DIMS + world] for row in rows]
    receives = [row[_HEAD + MAX_DIMS + world :] for row in rows]
    pairs = [(sends[s][r], receives[r][s]) for s in range(world) for r in range(world)]
    return all(-1 in pair or pair[0] == pair[1] for pair in pairs)


def description(field: str, call: CallSignature, number: int) -> str:
    """A field of a signature, for error messages; `number` is the call's among those compared."""
    gradients = {1: "requires grad", 0: "requires none", -1: "gradients are off"}
    texts = {
        "shape": f"{call.shape}" + (" (the first size may differ)" if call.ragged else ""),
        "dtype": str(call.dtype),
        "reduce op": call.reduce or "none",
        "root": str(call.root),
        "detail": call.detail or "none",
        "splits": f"sends {list(call.send)}, expects {list(call.receive)}",
        "requires-grad": gradients[call.wants_grad],
        "call": f"{call.op}, the group's call {number} that ranks compare",
    }
    own = call.op if call.origin < 0 else f"{call.op}, the group's call {call.origin}"
    return texts.get(field, own)
