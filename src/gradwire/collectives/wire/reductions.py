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
from gradwire.collectives.wire.backends import NATIVE, dense, direct, empty, engine, fresh, plain
from gradwire.collectives.wire.movement import all_gather, all_to_all
from gradwire.collectives.wire.pending import Pending, done

__all__ = ["all_reduce", "reduce", "reduce_locally", "reduce_scatter"]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def all_reduce(x: Tensor, op: str, group: ProcessGroup, now: bool = False) -> Pending:
    """The reduction, on every rank."""
    group = direct(group, x)
    if x.numel() == 0:
        return done(fresh(x))
    if not _reduces(x, op, group):
        return _all_reduce_by_parts(x, op, group, now)
    wire, result = _reduction_buffer(x, op, group)
    options = dist.AllreduceOptions()
    options.asyncOp = not now
    options.reduceOp = _OPS[op]
    return Pending((group.allreduce([wire], options),), result)


def reduce(x: Tensor, root: int, op: str, group: ProcessGroup, now: bool = False) -> Pending:
    """The reduction on the root, zeros elsewhere."""
    group = direct(group, x)
    at_root = group.rank() == root
    if x.numel() == 0:
        return done(fresh(x))
    if not _reduces(x, op, group):
        everywhere = _all_reduce_by_parts(x, op, group, now)
        return Pending(
            (), lambda: everywhere.wait() if at_root else torch.zeros_like(everywhere.wait())
        )
    wire, result = _reduction_buffer(x, op, group)
    options = dist.ReduceOptions()
    options.asyncOp = not now
    options.reduceOp = _OPS[op]
    options.rootRank = root
    work = group.reduce([wire], options)
    # Engines leave partial results in the other ranks' buffers.
    return Pending((work,), result if at_root else lambda: result().zero_())


def reduce_scatter(
    x: Tensor, sizes: Sequence[int] | None, op: str, group: ProcessGroup, now: bool = False
) -> Pending:
    """The reduction's rows, dealt out: this rank's."""
    group = direct(group, x)
    world = group.size()
    rows = len(x) // world if sizes is None else sizes[group.rank()]
    if x.numel() == 0:
        return done(empty(x, rows))
    if sizes is None and _scatters(x, op, group):
        source = dense(x)
        out = empty(x, rows)
        options = dist.ReduceScatterOptions()
        options.asyncOp = not now
        options.reduceOp = _OPS[op]
        real = torch.view_as_real if x.is_complex() else _same
        work = getattr(group, REDUCE_SCATTER_SINGLE)(real(out), real(source), options)
        return Pending((work,), lambda: out)
    # On Gloo this is faster than its reduce_scatter, and it knows every op and dtype.
    received = all_to_all(x, sizes, None if sizes is None else [rows] * world, group, now)
    return Pending((), lambda: reduce_locally(received.wait().view(world, rows, *x.shape[1:]), op))


def reduce_locally(pieces: Tensor, op: str) -> Tensor:
    """The reduction over the first dim, in one fixed order."""
    if op == "sum":
        return pieces.sum(0, dtype=pieces.dtype)
    if op == "product":
        return pieces.prod(0, dtype=pieces.dtype)
    if op == "max":
        return pieces.amax(0)
    if op == "min":
        return pieces.amin(0)
    combine = {
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }[op]
    result = pieces[0].clone()
    for piece in pieces[1:]:
        combine(result, piece, out=result)
    return result


def _same(x: Tensor) -> Tensor:
    return x


def _reduces(x: Tensor, op: str, group: ProcessGroup) -> bool:
    """Whether the group's engine can reduce this."""
    if x.is_complex():
        return op == "sum"
    if op in ("band", "bor", "bxor") and engine(group, x) == "nccl":
        return False
    return x.dtype in NATIVE or (x.dtype == torch.bool and op in ("band", "bor", "max", "min"))


def _scatters(x: Tensor, op: str, group: ProcessGroup) -> bool:
    """Whether the engine's own reduce_scatter is to be taken."""
    name = engine(group, x)
    passes_nan = name == "shm" or op not in ("max", "min") or not x.is_floating_point()
    return name in ("nccl", "shm") and passes_nan and _reduces(x, op, group)


def _reduction_buffer(
    x: Tensor, op: str, group: ProcessGroup
) -> tuple[Tensor, Callable[[], Tensor]]:
    """What the engine reduces in place, and how it becomes the result."""
    if op in ("max", "min") and x.is_floating_point() and engine(group, x) != "shm":
        wire = float_order.encode(plain(x), op)
        return wire, lambda: float_order.decode(wire, x.dtype)
    out = fresh(x)
    if x.is_complex():
        return torch.view_as_real(out), lambda: out
    if x.dtype == torch.bool:
        return out.view(torch.uint8), lambda: out
    return out, lambda: out


def _all_reduce_by_parts(x: Tensor, op: str, group: ProcessGroup, now: bool) -> Pending:
    """reduce_scatter and all_gather: for what engines cannot reduce."""
    world = group.size()
    small, more = divmod(x.numel(), world)
    sizes = [small + (rank < more) for rank in range(world)]
    mine = reduce_scatter(dense(x).view(-1), sizes, op, group, now=True).wait()
    whole = all_gather(mine, sizes, group, now)
    # Not a view, which could not be changed in place: autograd knows nothing of its base.
    return Pending((), lambda: whole.wait().view(x.shape).data)
