"""Signatures of calls, encoded as rows of integers for ranks to exchange and compare."""

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
"""Number of dims, and dtype, on a rank that receives them from the root."""


class CallSignature(NamedTuple):
    """Signature of a rank's call of a collective; a tuple, which is fast to construct and to hash.

    Args:
        op: Name of the collective.
        shape: Shape of the tensor with the split dim in front; None if only the root knows it.
        dtype: Dtype of the tensor; None if only the root knows it.
        wants_grad: 1 if this rank records a graph node, 0 if not, -1 if it cannot.
        reduce: Name of the reduction.
        root: Root's rank in the group.
        detail: Text of other arguments that must be equal.
        ragged: True if the sizes of the first dim may differ between ranks.
        send, receive: Rows to and from each rank, -1 if unknown.
        origin: Number of the forward call in its backward, -1 in forward.
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
    """Signature received from a rank; the shape is None if it has more than `MAX_DIMS` dims."""

    wants_grad: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    send: list[int]


_details: ContextVar[Callable[[], str] | None] = ContextVar("gradwire_details", default=None)


@contextmanager
def detailed(text: Callable[[], str]) -> Iterator[None]:
    """Add text to the signatures of calls in the block; `text` is called only if ranks compare."""
    if torch.compiler.is_compiling():  # checks are off: all ranks run the same graph
        yield
        return
    token = _details.set(text)
    try:
        yield
    finally:
        _details.reset(token)


def in_full(call: CallSignature) -> CallSignature:
    """Return the signature with the text of `detailed`."""
    text = _details.get()
    return call if text is None else call._replace(detail=f"{call.detail} {text()}".strip())


# A row: _HEAD single numbers, MAX_DIMS sizes, then rows to and from each rank.
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
    """Encode a signature as integers, the same number of them on every rank."""
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
    """Return a hash of a signature that is equal in all processes of a host."""
    return hash(tuple(encode(call, 0, 1)))


def decode(row: Sequence[int], world: int) -> PeerSignature:
    """Decode the signature that a rank sent."""
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
    """Return the name of the first field that must be equal and is not, or None."""
    for name, values in _must_agree(rows, ragged):
        if len(set(values)) > 1:
            return name
    return None if _splits_agree(rows) else "splits"


def _must_agree(rows: list[list[int]], ragged: bool) -> Iterator[tuple[str, list[object]]]:
    """Yield each field that must be equal, with the ranks' values."""
    for i, name in enumerate(_FIELDS[:-2]):
        yield name, [row[i] for row in rows if name != "dtype" or row[i] != ABSENT]
    dims = _FIELDS.index("dims")
    present = [row for row in rows if row[dims] != ABSENT]
    yield "shape", [(row[dims], *row[_HEAD + ragged : _HEAD + MAX_DIMS]) for row in present]
    gradients: list[object] = [row[_FIELDS.index("grad")] for row in rows]
    if {1, -1} <= set(gradients):
        yield "requires-grad", gradients


def _splits_agree(rows: list[list[int]]) -> bool:
    """Return True if each rank sends as many rows as the receiver expects."""
    world = len(rows)
    sends = [row[_HEAD + MAX_DIMS : _HEAD + MAX_DIMS + world] for row in rows]
    receives = [row[_HEAD + MAX_DIMS + world :] for row in rows]
    pairs = [(sends[s][r], receives[r][s]) for s in range(world) for r in range(world)]
    return all(-1 in pair or pair[0] == pair[1] for pair in pairs)


def description(field: str, call: CallSignature, number: int) -> str:
    """Return a field's value for error messages; `number` counts the group's compared calls."""
    gradients = {1: "requires grad", 0: "does not require grad", -1: "gradients are disabled"}
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
