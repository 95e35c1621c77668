"""The collectives that move values, messages between two ranks, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions

from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE
from gradwire.collectives.wire.backends import (
    by_rows,
    dense,
    direct,
    empty,
    engine,
    flat,
    fresh,
    like,
)
from gradwire.collectives.wire.pending import Pending, done

__all__ = [
    "all_gather",
    "all_gather_list",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "scatter",
    "send",
]

_LARGE, _FEW = 1 << 20, 4
_TAG = 0x6777
"""Of point-to-point messages, to keep them apart from the caller's own."""


def _both(kind: type) -> tuple[Any, Any]:
    """Options for what is waited for later, and for what is waited for at once."""
    later, now = kind(), kind()
    now.asyncOp = False
    return later, now


# Made once: making them costs as much as a small copy.
_GATHER_OPTIONS = _both(AllgatherOptions)
_EXCHANGE_OPTIONS = _both(dist.AllToAllOptions)


def broadcast(x: Tensor, root: int, group: ProcessGroup, now: bool = False) -> Pending:
    """The root's tensor. On other ranks only shape, dtype and device of `x` are looked at."""
    group = direct(group, x)
    at_root = group.rank() == root
    out = fresh(x) if at_root else like(x)
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
    group = direct(group, x)
    source = dense(x)
    out = empty(x, len(x) * group.size() if sizes is None else sum(sizes))
    if out.numel() == 0:
        return done(out)
    equal = sizes is None or len(set(sizes)) == 1
    if equal and not _by_messages(source, group):
        single = getattr(group, ALL_GATHER_SINGLE)
        work = single(flat(out), flat(source), _GATHER_OPTIONS[now])
        return Pending((work,), lambda: out)
    parts = out.chunk(group.size()) if sizes is None else out.split_with_sizes(sizes)
    return Pending(_gather_into(parts, source, group, now), lambda: out)


def all_gather_list(
    x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[Tensor, ...]:
    """All ranks' tensors, when they have arrived."""
    group = direct(group, x)
    source = dense(x)
    if sizes is None:
        parts = [like(source) for _ in range(group.size())]
    else:
        parts = [empty(x, size) for size in sizes]
    if any(part.numel() for part in parts):
        Pending(_gather_into(parts, source, group, now=True), lambda: x).wait()
    return tuple(parts)


def _gather_into(
    parts: Sequence[Tensor], source: Tensor, group: ProcessGroup, now: bool
) -> list[Work]:
    equal = all(part.shape == parts[0].shape for part in parts)
    if (equal and not _by_messages(source, group)) or engine(group, source) in ("nccl", "shm"):
        into = [flat(part) for part in parts]
        return [group.allgather([into], [flat(source)], _GATHER_OPTIONS[now])]
    # Gloo gathers equal sizes only, and large ones slowly: a broadcast a rank sends no byte more.
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
    group = direct(group, x)
    at_root, world = group.rank() == root, group.size()
    out = empty(x, sum(sizes)) if at_root else empty(x, elsewhere).zero_()
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x)
    equal = len(set(sizes)) == 1 and not _by_messages(source, group)
    if not equal and engine(group, x) not in ("nccl", "shm"):
        # Gloo gathers equal sizes only, and large ones slowly.
        send = [len(x) if rank == root else 0 for rank in range(world)]
        received = all_to_all(source, send, sizes if at_root else [0] * world, group, now)
        return received if at_root else Pending((), lambda: _after(received, out))
    options = dist.GatherOptions()
    options.asyncOp = not now
    options.rootRank = root
    into = [[flat(part) for part in out.split_with_sizes(sizes)]] if at_root else []
    return Pending((group.gather(into, [flat(source)], options),), lambda: out)


def _by_messages(source: Tensor, group: ProcessGroup) -> bool:
    """Whether to gather by messages that are received where they belong.

    Gloo's own gathers pass through memory of theirs that is fresh each time. Between more ranks its
    ring is worth that.
    """
    large = source.nbytes >= _LARGE and group.size() <= _FEW
    return large and engine(group, source) == "gloo"


def _after(received: Pending, out: Tensor) -> Tensor:
    received.wait()
    return out


def scatter(
    x: Tensor, root: int, sizes: Sequence[int], group: ProcessGroup, now: bool = False
) -> Pending:
    """The root's rows, dealt out: this rank's. On other ranks `x` is not looked at."""
    group = direct(group, x)
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
    group = direct(group, x)
    out = empty(x, len(x) if receive is None else sum(receive))
    if x.shape[1:].numel() == 0 or (send is None and x.numel() == 0):
        return done(out)
    source = dense(x)
    splits = list(receive or ()), list(send or ())
    work = getattr(group, ALL_TO_ALL_SINGLE)(
        by_rows(out), by_rows(source), *splits, _EXCHANGE_OPTIONS[now]
    )
    return Pending((work,), lambda: out)


def barrier(group: ProcessGroup) -> None:
    """Returns when every rank has called it."""
    group.barrier().wait()


def send(x: Tensor, to: int, group: ProcessGroup) -> Pending:
    """The tensor to one rank of the group."""
    group = direct(group, x)
    source = dense(x)
    return Pending((group.send([flat(source)], to, _TAG),), lambda: source)


def receive(shaped: Tensor, source: int, group: ProcessGroup) -> Pending:
    """A tensor of that shape from one rank of the group."""
    group = direct(group, shaped)
    out = like(shaped)
    return Pending((group.recv([flat(out)], source, _TAG),), lambda: out)


def _nothing(x: Tensor, rows: int) -> bool:
    return rows * x.shape[1:].numel() == 0
