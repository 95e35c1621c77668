"""Collectives that move values, point-to-point messages, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions

from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE
from gradwire.collectives.wire.backends import (
    Backend,
    Pending,
    by_rows,
    callee_of,
    contiguous_copy,
    dense,
    device_of,
    done,
    empty_like,
    empty_rows,
    flat,
    options,
)

_LARGE, _FEW = 1 << 20, 4
_TAG = 0x6777
"""Tag of send and recv, which keeps them apart from the caller's own messages."""


def broadcast(x: Tensor, root: int, group: ProcessGroup, blocking: bool = False) -> Pending:
    """Broadcast the root's tensor. Other ranks' `x` gives shape, dtype and device only."""
    group, _ = callee_of(group, x)
    at_root = group.rank() == root
    out = contiguous_copy(x) if at_root else empty_like(x)
    if x.numel() == 0:
        return done(out)
    work = group.broadcast([flat(out)], options(dist.BroadcastOptions, blocking, root))
    return Pending((work,), lambda: out, group)


def all_gather(
    x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup, blocking: bool = False
) -> Pending:
    """Concatenate all ranks' rows, in rank order."""
    group, backend = callee_of(group, x)
    source = dense(x)
    out = empty_rows(x, x.shape[0] * group.size() if sizes is None else sum(sizes))
    if out.numel() == 0:
        return done(out)
    equal = sizes is None or len(set(sizes)) == 1
    if equal and not _by_messages(source, group, backend):
        single = getattr(group, ALL_GATHER_SINGLE)
        work = single(flat(out), flat(source), options(AllgatherOptions, blocking))
        return Pending((work,), lambda: out, group)
    pieces = out.chunk(group.size()) if sizes is None else out.split_with_sizes(sizes)
    return Pending(_gather_into(pieces, source, group, backend, blocking), lambda: out, group)


def all_gather_list(
    x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Gather all ranks' tensors, each into its own memory, and wait for them."""
    group, backend = callee_of(group, x)
    source = dense(x)
    if sizes is None:
        pieces = [empty_like(source) for _ in range(group.size())]
    else:
        pieces = [empty_rows(x, size) for size in sizes]
    if any(piece.numel() for piece in pieces):
        Pending(
            _gather_into(pieces, source, group, backend, blocking=True), lambda: x, group
        ).wait()
    return tuple(pieces)


def _gather_into(
    pieces: Sequence[Tensor], source: Tensor, group: ProcessGroup, backend: Backend, blocking: bool
) -> list[Work]:
    equal = all(piece.shape == pieces[0].shape for piece in pieces)
    if backend.gathers_uneven or (equal and not _by_messages(source, group, backend)):
        into = [flat(piece) for piece in pieces]
        return [group.allgather([into], [flat(source)], options(AllgatherOptions, blocking))]
    # A broadcast from each rank sends the same bytes. All are started before the first wait,
    # regardless of `blocking`.
    pieces[group.rank()].copy_(source)
    return [
        group.broadcast([flat(piece)], options(dist.BroadcastOptions, False, rank))
        for rank, piece in enumerate(pieces)
        if piece.numel()
    ]


def gather(
    x: Tensor,
    root: int,
    sizes: Sequence[int],
    other_rows: int,
    group: ProcessGroup,
    blocking: bool = False,
) -> Pending:
    """Gather all ranks' rows on the root; other ranks get `other_rows` rows of zeros."""
    group, backend = callee_of(group, x)
    at_root, world = group.rank() == root, group.size()
    out = empty_rows(x, sum(sizes)) if at_root else empty_rows(x, other_rows).zero_()
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x)
    equal = len(set(sizes)) == 1 and not _by_messages(source, group, backend)
    if not (equal or backend.gathers_uneven):
        send = [x.shape[0] if rank == root else 0 for rank in range(world)]
        received = all_to_all(source, send, sizes if at_root else [0] * world, group, blocking)
        return received if at_root else Pending((), lambda: _after(received, out))
    into = [[flat(piece) for piece in out.split_with_sizes(sizes)]] if at_root else []
    work = group.gather(into, [flat(source)], options(dist.GatherOptions, blocking, root))
    return Pending((work,), lambda: out, group)


def _by_messages(source: Tensor, group: ProcessGroup, backend: Backend) -> bool:
    """Return True to gather by messages that are received directly into the result."""
    # 25 MiB per rank on Gloo: 24 ms instead of 106 between two ranks, 122 instead of 463 between
    # four on one host. Between more ranks, or several hosts, Gloo's ring keeps every link busy.
    return backend.stages_gathers and source.nbytes >= _LARGE and group.size() <= _FEW


def _after(received: Pending, out: Tensor) -> Tensor:
    received.wait()
    return out


def scatter(
    x: Tensor, root: int, sizes: Sequence[int], group: ProcessGroup, blocking: bool = False
) -> Pending:
    """Scatter the root's rows. On other ranks the values of `x` are not read."""
    group, backend = callee_of(group, x)
    at_root, world = group.rank() == root, group.size()
    rows = sizes[group.rank()]
    out = empty_rows(x, rows)
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x) if at_root else x[:0]
    if len(set(sizes)) > 1 and not backend.gathers_uneven:
        receive = [rows if rank == root else 0 for rank in range(world)]
        return all_to_all(source, sizes if at_root else [0] * world, receive, group, blocking)
    pieces = [[flat(piece) for piece in source.split_with_sizes(sizes)]] if at_root else []
    work = group.scatter([flat(out)], pieces, options(dist.ScatterOptions, blocking, root))
    return Pending((work,), lambda: out, group)


def all_to_all(
    x: Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group: ProcessGroup,
    blocking: bool = False,
) -> Pending:
    """Send rows to each rank, and receive rows from each; equal numbers without splits."""
    group, _ = callee_of(group, x)
    out = empty_rows(x, x.shape[0] if output_splits is None else sum(output_splits))
    if x.shape[1:].numel() == 0 or (input_splits is None and x.numel() == 0):
        return done(out)
    source = dense(x)
    splits = list(output_splits or ()), list(input_splits or ())
    work = getattr(group, ALL_TO_ALL_SINGLE)(
        by_rows(out), by_rows(source), *splits, options(dist.AllToAllOptions, blocking)
    )
    return Pending((work,), lambda: out, group)


def barrier(group: ProcessGroup) -> None:
    """Block until every rank has called this function."""
    group.barrier().wait()


def send(x: Tensor, to: int, group: ProcessGroup) -> Pending:
    """Send a tensor to one rank of the group."""
    group, _ = callee_of(group, x)
    source = dense(x)
    return Pending((group.send([flat(source)], to, _TAG),), lambda: source, group)


def receive(shaped: Tensor, source: int, group: ProcessGroup) -> Pending:
    """Receive a tensor, shaped like `shaped`, from one rank of the group."""
    group, _ = callee_of(group, shaped)
    out = empty_like(shaped)
    return Pending((group.recv([flat(out)], source, _TAG),), lambda: out, group)


def _nothing(x: Tensor, rows: int) -> bool:
    return rows * x.shape[1:].numel() == 0


def gather_ints(mine: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """Gather a list of integers, of the same length on every rank."""
    # Inside a torch.func transform, every new tensor would belong to the transform.
    with temporarily_clear_interpreter_stack():
        own = torch.tensor([mine], dtype=torch.int64, device=device_of(group))
        rows: list[list[int]] = all_gather(own, None, group, blocking=True).wait().tolist()
    return rows


def exchange_ints(mine: Sequence[int], group: ProcessGroup) -> list[int]:
    """Exchange one integer with each rank."""
    with temporarily_clear_interpreter_stack():
        own = torch.tensor(mine, dtype=torch.int64, device=device_of(group))
        theirs: list[int] = all_to_all(own, None, None, group, blocking=True).wait().tolist()
    return theirs
