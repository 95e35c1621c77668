"""Headers: each rank's description of the collective that it calls, compared by all ranks.

A header is a row of integers in shared memory. The first seven must be equal on all ranks, the
tables of block sizes must match each other, and the rest is the location of the rank's data. All
ranks read the same headers and so raise the same error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from gradwire.errors import CheckedMismatchError, MismatchError

_FIXED = struct.Struct("<10q")
COMPARED_BYTES = 7 * 8
"""Bytes that must be equal: six numbers that describe the call, and its mark."""
_MARK = 6 * 8
_LOCATION = struct.Struct("<2q")
_LOCATION_AT = _FIXED.size - _LOCATION.size
TABLES_AT = _FIXED.size // 8
"""Index of the first number of a header's tables: the elements sent to each rank, then the elements
expected from each rank."""

DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
        *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)
"""Dtypes that shm supports; a header contains the index."""
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

KINDS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_single", "all_to_all", "barrier"),
    *("broadcast_coalesced", "all_reduce_sparse", "monitored_barrier"),
)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Call(NamedTuple):
    """A collective as one rank calls it."""

    # one of `KINDS`
    kind: str
    dtype: torch.dtype = torch.uint8
    # elements of one block if all ranks must have the same number, else 0
    numel: int = 0
    # number of the reduce op; -1 if nothing is reduced
    op: int = -1
    # rank in the group; -1 if there is none
    root: int = -1
    # elements for each rank, and those expected from each, if these may differ; else empty
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    # of the dtypes and sizes in a list of tensors; 0 without a list
    checksum: int = 0


class Location(NamedTuple):
    """Location of a rank's data for a collective."""

    # number of one of the rank's regions; `INLINE` for data beside the header, `PRIVATE` for data
    # in memory that the rank does not share
    region: int
    # bytes from the region's start; for private data, index in `RINGS` of the requested ring
    offset: int = 0


INLINE, PRIVATE = -1, -2


def header_bytes(size: int) -> int:
    """Return the bytes of a header in a group of `size` ranks, rounded up to whole cache lines."""
    return (_FIXED.size + 16 * size + 63) // 64 * 64


def packed(call: Call, location: Location, mark: int = 0) -> bytes:
    """Return the bytes of a header; a mark of 0 means none."""
    return _FIXED.pack(
        _KIND_NUMBERS[call.kind],
        NUMBERS[call.dtype],
        call.op,
        call.root,
        call.numel,
        call.checksum,
        mark,
        len(call.sends),
        *location,
    ) + struct.pack(f"<{2 * len(call.sends)}q", *call.sends, *call.receives)


def write_mark(buffer: memoryview, mark: int) -> None:
    """Write a call's mark into a header."""
    struct.pack_into("<q", buffer, _MARK, mark)


def read(buffer: memoryview) -> Call:
    """Return the call in a header."""
    kind, dtype, op, root, numel, checksum, _, count, *_ = _FIXED.unpack_from(buffer)
    table = struct.unpack_from(f"<{2 * count}q", buffer, _FIXED.size) if count else ()
    return Call(KINDS[kind], DTYPES[dtype], numel, op, root, table[:count], table[count:], checksum)


def location_of(buffer: memoryview) -> Location:
    """Return the location in a header."""
    return Location._make(_LOCATION.unpack_from(buffer, _LOCATION_AT))


def check_consistent(headers: Sequence[memoryview], rank: int, *, tables: bool) -> None:
    """Raise unless all ranks call the same collective with matching arguments."""
    # Marks are compared only if all calls have one.
    own = headers[rank][:COMPARED_BYTES]
    if any(header[:COMPARED_BYTES] != own for header in headers):
        marks = [struct.unpack_from("<q", header, _MARK)[0] for header in headers]
        calls = [read(header) for header in headers]
        same = all(header[:_MARK] == own[:_MARK] for header in headers)
        if not same or (all(marks) and len(set(marks)) > 1):
            # do not name the error: its traceback refers to this frame, which would refer to it
            kind = CheckedMismatchError if all(mark & 1 for mark in marks) else MismatchError
            raise kind(*_mismatch(calls))
    if tables:
        check_tables([read(header) for header in headers])


def _mismatch(calls: Sequence[Call]) -> tuple[str, Sequence[object]]:
    """Return the message about the first difference, and the values of all ranks."""
    kinds = [call.kind for call in calls]
    if len(set(kinds)) > 1:
        return f"ranks call different collectives: {_by_rank(kinds)}", kinds
    ops = ["none" if call.op < 0 else ReduceOp.RedOpType(call.op).name for call in calls]
    fields: dict[str, Sequence[object]] = {
        "dtype": [call.dtype for call in calls],
        "reduce op": ops,
        "root": [call.root for call in calls],
        "number of elements": [call.numel for call in calls],
        "tensors' dtypes and sizes (by checksum)": [call.checksum for call in calls],
    }
    for field, values in fields.items():
        if len(set(values)) > 1:
            return f"ranks disagree on {kinds[0]}'s {field}: {_by_rank(values)}", values
    return (
        f"ranks call {kinds[0]} for different operations of gradwire.collectives, or for the "
        "backward of different calls: set GRADWIRE_CHECKS=1 to see which arguments differ"
    ), ()


def check_tables(calls: Sequence[Call]) -> None:
    """Raise a MismatchError unless each rank sends every other what that expects."""
    for source, call in enumerate(calls):
        for target, count in enumerate(call.sends):
            expected = calls[target].receives[source]
            if count != expected:
                raise MismatchError(
                    f"ranks disagree on {call.kind}'s number of elements: rank {source} has "
                    f"{count} for rank {target}, which expects {expected}"
                )


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
