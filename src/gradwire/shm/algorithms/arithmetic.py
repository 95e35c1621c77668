"""Reduction of several pieces of memory into one, always in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire.errors import ArgumentError


def number_of(op: object) -> int:
    """Return torch.distributed's number of a reduce op."""
    number: int = op.value  # type: ignore[attr-defined]
    return number


OPS: dict[int, Callable[..., Tensor]] = {
    number_of(ReduceOp.SUM): torch.add,
    number_of(ReduceOp.AVG): torch.add,
    number_of(ReduceOp.PRODUCT): torch.mul,
    number_of(ReduceOp.MIN): torch.minimum,
    number_of(ReduceOp.MAX): torch.maximum,
    number_of(ReduceOp.BAND): torch.bitwise_and,
    number_of(ReduceOp.BOR): torch.bitwise_or,
    number_of(ReduceOp.BXOR): torch.bitwise_xor,
}
"""Binary functions by torch.distributed's number of the reduce op."""

SUM = number_of(ReduceOp.SUM)
_AVG = number_of(ReduceOp.AVG)
_LINEAR = {SUM, _AVG}
_ROUNDING = {*_LINEAR, number_of(ReduceOp.PRODUCT)}
_BITWISE = {number_of(ReduceOp.BAND), number_of(ReduceOp.BOR), number_of(ReduceOp.BXOR)}
_ORDERED = {number_of(ReduceOp.MIN), number_of(ReduceOp.MAX)}
_PRODUCT = number_of(ReduceOp.PRODUCT)
_WIDE_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # few of torch's ops support them
HALF = {torch.float16, torch.bfloat16}


@cache
def check_reduction(op: int, dtype: torch.dtype) -> None:
    """Raise unless tensors of `dtype` can be reduced by `op`.

    Raises:
        ArgumentError: The op does not support the dtype.
    """
    name = ReduceOp.RedOpType(op).name
    fractional = dtype.is_floating_point or dtype.is_complex
    if op not in OPS:
        known = ", ".join(ReduceOp.RedOpType(o).name for o in OPS)
        raise ArgumentError(f"reduce op is {name}: the shm backend supports {known}")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ArgumentError(f"tensors of {dtype} cannot be reduced: convert them to bfloat16")
    if dtype in _WIDE_UNSIGNED and op not in _BITWISE and op != _PRODUCT:
        raise ArgumentError(f"tensors of {dtype} cannot be reduced by {name}: convert them")
    if op == _AVG and dtype == torch.complex32:
        raise ArgumentError(f"tensors of {dtype} cannot be averaged: convert them to complex64")
    if op in _BITWISE and fractional:
        raise ArgumentError(f"reduce op {name} works on integers, but the tensor is {dtype}")
    if op == _AVG and not fractional:
        raise ArgumentError(
            f"reduce op AVG needs floating point, but the tensor is {dtype}: use SUM and divide"
        )
    if op in _ORDERED and dtype.is_complex:
        raise ArgumentError(f"reduce op {name} has no meaning for {dtype}: use SUM or PRODUCT")


def reduce_into(out: Tensor, pieces: Sequence[Tensor], op: int) -> None:
    """Set `out` to the reduction of the pieces: ((piece 0 ∘ piece 1) ∘ piece 2) ….

    float16 and bfloat16 are accumulated in float32 and rounded once.

    Args:
        out: Tensor of the pieces' shape; may be one of them.
        pieces: One or more tensors of one shape and dtype.
        op: Number of the reduce op.
    """
    function = OPS[op]
    if out.numel() == 0:
        return
    if len(pieces) == 1:
        if out.data_ptr() != pieces[0].data_ptr():
            out.copy_(pieces[0])
        return
    if op == _AVG:
        _average_into(out, pieces)
        return
    if out.dtype in HALF and op in _ROUNDING and len(pieces) > 2:
        total = function(pieces[0].float(), pieces[1])
        for piece in pieces[2:]:
            function(total, piece, out=total)
        out.copy_(total)
        return
    if len(pieces) > 2 and any(piece.data_ptr() == out.data_ptr() for piece in pieces[2:]):
        total = torch.empty_like(out)  # `out` is still read after the first step
        reduce_into(total, pieces, op)
        out.copy_(total)
        return
    function(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        function(out, piece, out=out)


def _average_into(out: Tensor, pieces: Sequence[Tensor]) -> None:
    """Set `out` to the average of two or more pieces; it overflows only where the average does.

    Before they are added, the pieces are scaled by a power of two, which is exact.
    """
    power = 1 << (len(pieces) - 1).bit_length()
    if out.dtype in HALF:
        total = pieces[0].float().mul_(1 / power)
    elif any(piece.data_ptr() == out.data_ptr() for piece in pieces[1:]):
        total = pieces[0] * (1 / power)
    else:
        total = torch.mul(pieces[0], 1 / power, out=out)
    for piece in pieces[1:]:
        total.add_(piece, alpha=1 / power)
    if power != len(pieces):
        total.div_(len(pieces) / power)
    if total is not out:
        out.copy_(total)


def reducer(op: int, count: int) -> Callable[[Tensor, Sequence[Tensor]], None]:
    """Return `reduce_into` for an op and a number of pieces, none of which is empty."""
    if count == 2 and op != _AVG:
        function = OPS[op]

        def reduce_two(out: Tensor, pieces: Sequence[Tensor]) -> None:
            function(pieces[0], pieces[1], out=out)

        return reduce_two
    return lambda out, pieces: reduce_into(out, pieces, op)
