"""The only place that calls torch.distributed: each collective on plain tensors, without gradients.

Tensors arrive with the dim that is cut or joined in front. Every function starts its collective
and returns a `Pending`, whose `wait` gives a fresh, contiguous result. Engines differ in what they
can do; what one lacks is put together here from what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions

from gradwire.collectives import ordering
from gradwire.collectives.engines import NATIVE, by_rows, dense, empty, engine, flat, fresh, plain
from gradwire.collectives.failures import translated

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "reduce",
    "reduce_locally",
    "reduce_scatter",
    "scatter",
    "send",
]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_TAG = 0x6777
"""Of point-to-point messages, to keep them apart from the caller's own."""
# torch 2.13 gave these methods new names.
_GATHER_SINGLE = (
    "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
)
_SCATTER_SINGLE = (
    "reduce_scatter_single"
    if hasattr(ProcessGroup, "reduce_scatter_single")
    else "_reduce_scatter_base"
)
_EXCHANGE_SINGLE = (
    "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"
)


def _both(kind: type) -> tuple[Any, Any]:
    """Options for what is waited for later, and for what is waited for at once."""
    later, now = kind(), kind()
    now.asyncOp = False
    return later, now


# Made once: making them costs as much as a small copy.
_GATHER_OPTIONS = _both(AllgatherOptions)
_EXCHANGE_OPTIONS = _both(dist.AllToAllOptions)


class Pending:
    """A collective under way.

    Args:
        works: What has to be waited for.
        finish: Called once after that; returns the result.
    """

    __slots__ = ("_finish", "_works")

    def __init__(self, works: Sequence[Work], finish: Callable[[], Tensor]) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """The result, when it has arrived.

        Raises:
            PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            ours = translated(error)
            if ours is error:
                raise
            raise ours from error
        return self._finish()


def done(result: Tensor) -> Pending:
    """A collective for which nothing has to be sent."""
    return Pending((), lambda: result)


# --- reductions ---


def all_reduce(x: Tensor, op: str, group: ProcessGroup, now: bool = False) -> Pending:
    """The reduction, on every rank."""
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
    world = group.size()
    rows = len(x) // world if sizes is None else sizes[group.rank()]
    if sizes is None and _scatters(x, op, group):
        source = dense(x)
        out = empty(x, rows)
        options = dist.ReduceScatterOptions()
        options.asyncOp = not now
        options.reduceOp = _OPS[op]
        real = torch.view_as_real if x.is_complex() else _same
        work = getattr(group, _SCATTER_SINGLE)(real(out), real(source), options)
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
        wire = ordering.encode(plain(x), op)
        return wire, lambda: ordering.decode(wire, x.dtype)
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
    return Pending((), lambda: whole.wait().view(x.shape))


# --- movement ---


def broadcast(x: Tensor, root: int, group: ProcessGroup, now: bool = False) -> Pending:
    """The root's tensor. On other ranks only shape, dtype and device of `x` are looked at."""
    at_root = group.rank() == root
    out = fresh(x) if at_root else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return done(out)
    options = dist.BroadcastOptions()
    options.asyncOp = not now
    options.rootRank = root
    return Pending((group.broadcast([flat(out)], options),), lambda: out)


def all_gather(
    x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup, now: bool = False
) -> Pending:
    """All ranks' rows, one rank's after the other."""
    source = dense(x)
    if sizes is None or len(set(sizes)) == 1:
        out = empty(x, len(x) * group.size())
        if out.numel() == 0:
            return done(out)
        single = getattr(group, _GATHER_SINGLE)
        work = single(flat(out), flat(source), _GATHER_OPTIONS[now])
        return Pending((work,), lambda: out)
    out = empty(x, sum(sizes))
    if out.numel() == 0:
        return done(out)
    return Pending(_gather_into(out.split_with_sizes(sizes), source, group, now), lambda: out)


def all_gather_list(
    x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[Tensor, ...]:
    """All ranks' tensors, when they have arrived."""
    source = dense(x)
    if sizes is None:
        parts = [torch.empty_like(source, requires_grad=False) for _ in range(group.size())]
    else:
        parts = [empty(x, size) for size in sizes]
    if any(part.numel() for part in parts):
        Pending(_gather_into(parts, source, group, now=True), lambda: x).wait()
    return tuple(parts)


def _gather_into(
    parts: Sequence[Tensor], source: Tensor, group: ProcessGroup, now: bool
) -> list[Work]:
    equal = all(len(part) == len(parts[0]) for part in parts) if source.dim() else True
    if equal or engine(group, source) in ("nccl", "shm"):
        into = [flat(part) for part in parts]
        return [group.allgather([into], [flat(source)], _GATHER_OPTIONS[now])]
    # Gloo gathers equal sizes only: one broadcast a rank sends no byte more.
    parts[group.rank()].copy_(source)
    works = []
    for rank, part in enumerate(parts):
        if part.numel():
            options = dist.BroadcastOptions()
            options.rootRank = rank
            works.append(group.broadcast([flat(part)], options))
    return works


def gather(
    x: Tensor,
    root: int,
    sizes: Sequence[int],
    elsewhere: int,
    group: ProcessGroup,
    now: bool = False,
) -> Pending:
    """All ranks' rows on the root; that many rows of zeros elsewhere."""
    at_root, world = group.rank() == root, group.size()
    out = empty(x, sum(sizes)) if at_root else empty(x, elsewhere).zero_()
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x)
    if len(set(sizes)) > 1 and engine(group, x) not in ("nccl", "shm"):
        # Gloo gathers equal sizes only.
        send = [len(x) if rank == root else 0 for rank in range(world)]
        received = all_to_all(source, send, sizes if at_root else [0] * world, group, now)
        return received if at_root else Pending((), lambda: _after(received, out))
    options = dist.GatherOptions()
    options.asyncOp = not now
    options.rootRank = root
    into = [[flat(part) for part in out.split_with_sizes(sizes)]] if at_root else []
    return Pending((group.gather(into, [flat(source)], options),), lambda: out)


def _after(received: Pending, out: Tensor) -> Tensor:
    received.wait()
    return out


def scatter(
    x: Tensor, root: int, sizes: Sequence[int], group: ProcessGroup, now: bool = False
) -> Pending:
    """The root's rows, dealt out: this rank's. On other ranks `x` is not looked at."""
    at_root, world = group.rank() == root, group.size()
    rows = sizes[group.rank()]
    out = empty(x, rows)
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x) if at_root else x[:0]
    if len(set(sizes)) > 1 and engine(group, x) not in ("nccl", "shm"):
        receive = [rows if rank == root else 0 for rank in range(world)]
        return all_to_all(source, sizes if at_root else [0] * world, receive, group, now)
    options = dist.ScatterOptions()
    options.asyncOp = not now
    options.rootRank = root
    parts = [[flat(part) for part in source.split_with_sizes(sizes)]] if at_root else []
    return Pending((group.scatter([flat(out)], parts, options),), lambda: out)


def all_to_all(
    x: Tensor,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    group: ProcessGroup,
    now: bool = False,
) -> Pending:
    """Rows for each rank against rows from each rank; equal numbers of them if not given."""
    out = empty(x, len(x) if receive is None else sum(receive))
    if x.shape[1:].numel() == 0 or (send is None and x.numel() == 0):
        return done(out)
    source = dense(x)
    splits = list(receive or ()), list(send or ())
    work = getattr(group, _EXCHANGE_SINGLE)(
        by_rows(out), by_rows(source), *splits, _EXCHANGE_OPTIONS[now]
    )
    return Pending((work,), lambda: out)


def barrier(group: ProcessGroup) -> None:
    """Returns when every rank has called it."""
    group.barrier().wait()


def send(x: Tensor, to: int, group: ProcessGroup) -> Pending:
    """The tensor to one rank of the group."""
    source = dense(x)
    return Pending((group.send([flat(source)], to, _TAG),), lambda: source)


def receive(like: Tensor, source: int, group: ProcessGroup) -> Pending:
    """A tensor of that shape from one rank of the group."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return Pending((group.recv([flat(out)], source, _TAG),), lambda: out)


def _nothing(x: Tensor, rows: int) -> bool:
    return rows * x.shape[1:].numel() == 0
