"""The collectives that reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._torch import REDUCE_SCATTER_SINGLE
from gradwire.collectives.wire import float_order
from gradwire.collectives.wire.backends import (
    CARRIED,
    Backend,
    callee_of,
    contiguous_copy,
    dense,
    empty_rows,
    options,
    without_tangent,
)
from gradwire.collectives.wire.computable import check_computable
from gradwire.collectives.wire.movement import all_gather, all_to_all
from gradwire.collectives.wire.pending import Pending, done

__all__ = ["all_reduce", "reduce", "reduce_locally", "reduce_scatter", "split_sizes"]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def all_reduce(x: Tensor, op: str, group: ProcessGroup, blocking: bool = False) -> Pending:
    """The reduction, on every rank."""
    group, backend = callee_of(group, x)
    if x.numel() == 0:
        return done(contiguous_copy(x))
    if not _reduces(x, op, backend):
        return _all_reduce_by_parts(x, op, group, blocking)
    buffer, result = _reduction_buffer(x, op, backend)
    work = group.allreduce([buffer], options(dist.AllreduceOptions, blocking, None, _OPS[op]))
    return Pending((work,), result, group)


def reduce(x: Tensor, root: int, op: str, group: ProcessGroup, blocking: bool = False) -> Pending:
    """The reduction on the root, zeros elsewhere."""
    group, backend = callee_of(group, x)
    at_root = group.rank() == root
    if x.numel() == 0:
        return done(contiguous_copy(x))
    if not _reduces(x, op, backend):
        reduced = _all_reduce_by_parts(x, op, group, blocking)
        return Pending((), lambda: reduced.wait() if at_root else reduced.wait().zero_())
    buffer, result = _reduction_buffer(x, op, backend)
    work = group.reduce([buffer], options(dist.ReduceOptions, blocking, root, _OPS[op]))
    # Backends leave partial results in the other ranks' buffers.
    return Pending((work,), result if at_root else lambda: result().zero_(), group)


def reduce_scatter(
    x: Tensor, sizes: Sequence[int] | None, op: str, group: ProcessGroup, blocking: bool = False
) -> Pending:
    """Of the reduction's rows, those for this rank."""
    group, backend = callee_of(group, x)
    world = group.size()
    rows = x.shape[0] // world if sizes is None else sizes[group.rank()]
    if x.numel() == 0:
        return done(empty_rows(x, rows))
    if sizes is None and _reduce_scatters(x, op, backend):
        source = dense(x)
        out = empty_rows(x, rows)
        buffer = (out, source)
        if x.is_complex():
            buffer = (torch.view_as_real(out), torch.view_as_real(source))
        chosen = options(dist.ReduceScatterOptions, blocking, None, _OPS[op])
        return Pending(
            (getattr(group, REDUCE_SCATTER_SINGLE)(*buffer, chosen),), lambda: out, group
        )
    # Here too, for backward: a gather's cotangents may have a dtype that is only moved in forward.
    check_computable(x, op, reduce_locally)
    # On Gloo this takes less than half as long as its reduce_scatter. It does every op, adds in
    # one fixed order, and accumulates half precision in float32.
    received = all_to_all(x, sizes, None if sizes is None else [rows] * world, group, blocking)
    return Pending((), lambda: reduce_locally(received.wait().view(world, rows, *x.shape[1:]), op))


def reduce_locally(pieces: Tensor, op: str) -> Tensor:
    """The reduction over the first dim, in one fixed order."""
    if op == "sum":
        if pieces.dtype == torch.complex32:  # PyTorch's sum does not take it on the CPU
            return torch.view_as_complex(torch.view_as_real(pieces).sum(0))
        return pieces.sum(0, dtype=pieces.dtype)
    if op == "product":
        return pieces.prod(0, dtype=pieces.dtype)
    if op == "max":
        return pieces.amax(0)
    if op == "min":
        return pieces.amin(0)
    combine = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    result = pieces[0].clone()
    for piece in pieces[1:]:
        combine(result, piece, out=result)
    return result


def split_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """How `torch.tensor_split` divides rows."""
    small, more = divmod(rows, parts)
    return tuple(small + (i < more) for i in range(parts))


def _reduces(x: Tensor, op: str, backend: Backend) -> bool:
    """Whether the backend can reduce this."""
    if x.is_complex():
        return op == "sum"
    if op in ("band", "bor", "bxor") and not backend.reduces_bitwise:
        return False
    return x.dtype in CARRIED or (x.dtype == torch.bool and op in ("band", "bor", "max", "min"))


def _reduce_scatters(x: Tensor, op: str, backend: Backend) -> bool:
    """Whether to call the backend's own reduce_scatter."""
    keeps_nan = backend.max_keeps_nan or op not in ("max", "min") or not x.is_floating_point()
    return backend.own_reduce_scatter and keeps_nan and _reduces(x, op, backend)


def _reduction_buffer(x: Tensor, op: str, backend: Backend) -> tuple[Tensor, Callable[[], Tensor]]:
    """What the backend reduces in place, and a function that makes it the result."""
    if op in ("max", "min") and x.is_floating_point() and not backend.max_keeps_nan:
        buffer = float_order.encode(without_tangent(x), op)
        return buffer, lambda: float_order.decode(buffer, x.dtype)
    out = contiguous_copy(x)
    if x.is_complex():
        return torch.view_as_real(out), lambda: out
    if x.dtype == torch.bool:
        return out.view(torch.uint8), lambda: out
    return out, lambda: out


def _all_reduce_by_parts(x: Tensor, op: str, group: ProcessGroup, blocking: bool) -> Pending:
    """reduce_scatter and all_gather: for what the backend cannot reduce."""
    world = group.size()
    sizes = split_sizes(x.numel(), world)
    mine = reduce_scatter(dense(x).view(-1), sizes, op, group, blocking=True).wait()
    gathered = all_gather(mine, sizes, group, blocking)
    # Not a view, which could not be changed in place: autograd knows nothing of its base.
    return Pending((), lambda: gathered.wait().view(x.shape).data)
