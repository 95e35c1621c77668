"""The mean over ranks: one all_reduce for dense gradients, a gather of entries for sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire.errors import ArgumentError
from gradwire.hooks.bucket import GradBucket, with_buffer
from gradwire.hooks.interface import (
    CommHook,
    after,
    as_future,
    compose,
    parse_hook_result,
    read_future,
)

_COUNT_BYTES = 8
_MERGED = (torch.float32, torch.float64)
"""Dtypes in which every supported version of PyTorch adds two sparse tensors."""
_SMALL_BYTES = 64 << 10
"""Size of the smallest message, with which a first sum begins."""


def all_reduce(group: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks with one all_reduce; the state is the process group.

    Args:
        group: Process group; None for the default group.
        bucket: Local gradients of N bytes. The buffer is overwritten. The all_reduce sends N bytes.

    Returns:
        Future of the buffer with (Σ over ranks) / W.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     net.register_comm_hook(None, all_reduce)
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     return net.module.weight.grad.item()
        >>> run_ranks(main, world_size=2)  # (1 + 2) / 2 on both ranks
        [1.5, 1.5]
    """
    group = group or dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return _all_reduce_sparse(group, buffer)
    buffer.div_(group.size())
    wire = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    work = dist.all_reduce(wire, group=group, async_op=True)
    return after(work, lambda: buffer, buffer.device)


all_reduce.single_collective = all_reduce.takes_group = True  # type: ignore[attr-defined]
all_reduce.linear = all_reduce.averages = True  # type: ignore[attr-defined]
all_reduce.is_mean = True  # type: ignore[attr-defined]


def _all_reduce_sparse(group: ProcessGroup, gradient: Tensor) -> torch.futures.Future[Tensor]:
    total = SparseSum(group)
    total.pack(gradient / group.size())
    total.send().wait()
    work = total.send_rest()
    if work is None:
        return as_future(total.result(), all_reduce)  # type: ignore[return-value]
    return after(work, total.result, gradient.device)


class SparseSum:
    """Sums over ranks of sparse COO tensors: `pack`, `send`, `send_rest` and `result` for each."""

    # Only Gloo sums sparse tensors, and not in every dtype. So ranks gather the numbers of entries,
    # the indices and the values as bytes. The first message has room for the entries of the longest
    # tensor of an earlier sum, and an eighth more. From the numbers in it, all ranks see whether a
    # rank has more, and gather the rest. Every rank sums the entries in rank order, so that all
    # ranks get the same bits.

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._room = 0
        self._first: _Message | None = None
        self._rest: _Message | None = None
        self.wire: list[list[Tensor]] = []  # outputs and input of the last all_gather

    def pack(self, tensor: Tensor) -> None:
        """Fill the first message."""
        # The tensor, coalesced or not, has the same shape, dtype and number of sparse dimensions on
        # every rank and in every sum: buffers are kept from one sum to the next.
        self._own, self._rest = tensor.coalesce(), None
        if self._first is None or self._first.room != self._room:
            self._room = self._room or _least_room(self._own)
            self._first = _Message(self._own, self._group.size(), self._room)
        self._first.fill(self._own)

    def send(self) -> Work:
        """Send the number of entries, and as many of them as there is room for."""
        assert self._first is not None
        return self._gather(self._first)

    def send_rest(self) -> Work | None:
        """Send the remaining entries after `send` has ended; return None if no rank has any."""
        assert self._first is not None
        most, room = max(self._first.counts), self._first.room
        least = _least_room(self._own)
        if not most <= room <= max(2 * most, least):
            self._room = max(most + most // 8, least)
        if most <= room:
            return None
        rest = self._rest = _Message(self._own, self._group.size(), most - room, begin=room)
        rest.fill(self._own)
        return self._gather(rest)

    def _gather(self, message: _Message) -> Work:
        self.wire = [[*message.rows[1:]], [message.rows[0]]]
        work: Work = self._group.allgather([self.wire[0]], self.wire[1])
        return work

    def result(self) -> Tensor:
        """Return the coalesced sum. Call this when the work of `send_rest`, if any, has ended."""
        assert self._first is not None
        counts = self._first.counts
        if not any(counts):
            return self._own
        messages = [m for m in (self._first, self._rest) if m is not None]
        parts = [m.entries(rank, n) for rank, n in enumerate(counts) for m in messages]
        if len(parts) == 2 and self._own.dtype in _MERGED:
            # merging two sorted tensors takes half the time of sorting both
            first, second = (self._sparse(*part, coalesced=True) for part in parts)
            return (first + second).coalesce()
        indices, values = (torch.cat(part) for part in zip(*parts, strict=True))
        return self._sparse(indices, values, coalesced=False).coalesce()

    def _sparse(self, indices: Tensor, values: Tensor, *, coalesced: bool) -> Tensor:
        return torch.sparse_coo_tensor(
            indices.t(),
            values,
            self._own.shape,
            check_invariants=False,
            is_coalesced=coalesced or None,
        )


class _Message:
    """`room` entries of each rank, from position `begin` of its tensor on, as bytes."""

    def __init__(self, like: Tensor, ranks: int, room: int, begin: int = 0) -> None:
        self.room, self._begin = room, begin
        of_indices, of_values = _entry_bytes(like)
        end = _COUNT_BYTES + of_indices * room
        start = _aligned(end)
        size = start + of_values * room
        # the first row is sent, the others are received
        shape = 1 + ranks, _aligned(size)
        self.rows = rows = torch.zeros(shape, dtype=torch.uint8, device=like.device)
        self._counts = rows[:, :_COUNT_BYTES].view(torch.int64)
        indices, values = rows[:, _COUNT_BYTES:end], rows[:, start:size]
        self._indices = indices.view(torch.int64).view(1 + ranks, room, like.sparse_dim())
        self._values = values.view(like.dtype).view(1 + ranks, room, *like.values().shape[1:])

    def fill(self, own: Tensor) -> None:
        """Write this rank's entries, as many as there is room for."""
        self._counts[0] = own._nnz()
        sent = slice(self._begin, self._begin + self.room)
        indices, values = own.indices().t()[sent], own.values()[sent]
        self._indices[0, : len(indices)] = indices
        self._values[0, : len(values)] = values

    @property
    def counts(self) -> list[int]:
        """Numbers of entries of the ranks' tensors, in rank order; valid when gathered."""
        counts: list[int] = self._counts[1:, 0].tolist()
        return counts

    def entries(self, rank: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the indices and the values of a rank whose tensor has `count` entries."""
        length = max(count - self._begin, 0)
        return self._indices[1 + rank, :length], self._values[1 + rank, :length]


def _entry_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of bytes of the indices and of the values of one entry."""
    values = tensor.values()
    return 8 * tensor.sparse_dim(), values.element_size() * values.shape[1:].numel()


def _least_room(tensor: Tensor) -> int:
    return max(1, _SMALL_BYTES // sum(_entry_bytes(tensor)))


def _aligned(size: int) -> int:
    """Return a number of bytes after which values of any dtype may follow."""
    return -(-size // 16) * 16


def wrap(
    hook: CommHook,
    *,
    before: Callable[[GradBucket], None] | None = None,
    after: Callable[[Tensor, GradBucket], Tensor] | None = None,
) -> CommHook:
    """Wrap a hook; the result is a hook, so that wrappers compose.

    Args:
        hook: Hook that communicates. Its state is passed through. If it is a `StatefulHook`, so is
            the result, with the same state.
        before: Function of the bucket of local gradients. It may change the buffer or replace it.
        after: Function of the reduced buffer and the bucket that returns the result.

    Raises:
        ArgumentError: Neither `before` nor `after` is given.
        ArgumentTypeError: `hook` is not a hook.

    Example:
        >>> from gradwire.testing import FakeBucket
        >>> def send(state, bucket):
        ...     return bucket.buffer() * 2  # as if there were two ranks with the same gradients
        >>> def clip(bucket):
        ...     bucket.buffer().clamp_(-1, 1)
        >>> def halve(reduced, bucket):
        ...     return reduced / 2
        >>> hook = wrap(send, before=clip, after=halve)
        >>> hook(None, FakeBucket(torch.tensor([0.5, 9.0]))).wait()
        tensor([0.5000, 1.0000])
    """
    if before is None and after is None:
        raise ArgumentError("neither before nor after is given: use the hook itself")

    def run(hook: CommHook, state: Any, bucket: GradBucket) -> torch._C.Future[Any]:
        if before is not None:
            before(bucket)
        returned = hook(state, bucket)
        if after is None:
            return read_future(returned, bucket, hook)
        return as_future(returned, hook).then(
            lambda f: after(parse_hook_result(f.value(), bucket, hook), bucket)
        )

    return compose(run, hook)


def compress(hook: CommHook, dtype: torch.dtype) -> CommHook:
    """Run any hook on gradients that are cast to a smaller dtype.

    The inner hook receives a bucket with the same index, parameters and `is_last`, whose buffer is
    the cast copy. Its result is cast back into the bucket. This takes two passes over the bucket: N
    bytes are read and N/2 written, then the reverse.

    Args:
        hook: Hook that communicates. Its state is passed through.
        dtype: Floating-point dtype.

    Returns:
        Hook; a `StatefulHook` with the same state if `hook` is one. Complex buckets are cast as
        pairs of reals; integer buckets are not cast.

    Raises:
        ArgumentError: `dtype` is not floating-point.
        ArgumentTypeError: `hook` is not a hook.

    Example:
        >>> from gradwire.testing import FakeBucket
        >>> seen = []
        >>> def inner(state, bucket):
        ...     seen.append(bucket.buffer().dtype)
        ...     return bucket.buffer() * 2
        >>> bucket = FakeBucket(torch.ones(3))
        >>> compress(inner, torch.bfloat16)(None, bucket).wait()
        tensor([2., 2., 2.])
        >>> seen
        [torch.bfloat16]
    """
    if not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}: pass a floating-point one, such as torch.bfloat16")

    def run(hook: CommHook, state: Any, bucket: GradBucket) -> torch._C.Future[Tensor]:
        buffer = bucket.buffer()
        dense = buffer.layout == torch.strided
        real = torch.view_as_real(buffer).view(-1) if dense and buffer.is_complex() else buffer
        if not real.is_floating_point():
            return read_future(hook(state, bucket), bucket, hook)
        small = with_buffer(bucket, real.to(dtype))

        def decompress(future: torch._C.Future[Any]) -> Tensor:
            reduced = parse_hook_result(future.value(), small, hook)
            if not dense:
                return reduced.to(buffer.dtype)
            real.copy_(reduced)
            return buffer

        return as_future(hook(state, small), hook).then(decompress)

    # values outside the range of float16 would be lost before the weights are applied
    wide = torch.finfo(dtype).max >= torch.finfo(torch.bfloat16).max
    return compose(run, hook, linear=wide)


_fp16 = compress(all_reduce, torch.float16)
_bf16 = compress(all_reduce, torch.bfloat16)


def fp16(group: ProcessGroup | None, bucket: GradBucket) -> torch._C.Future[Tensor]:
    """Average a bucket in float16: half the bytes, 11 significant bits, maximum 65504.

    Args:
        group: Process group; None for the default group.
        bucket: Local gradients. The buffer is overwritten. N bytes of float32 are sent as N/2.

    Returns:
        Future of the buffer with the mean over ranks. Each addend is divided by W first.
    """
    return _fp16(group, bucket)  # type: ignore[no-any-return]


def bf16(group: ProcessGroup | None, bucket: GradBucket) -> torch._C.Future[Tensor]:
    """Average a bucket in bfloat16: half the bytes, 8 significant bits, the range of float32.

    Args:
        group: Process group; None for the default group.
        bucket: Local gradients. The buffer is overwritten. N bytes of float32 are sent as N/2.

    Returns:
        Future of the buffer with the mean over ranks. Each addend is divided by W first.
    """
    return _bf16(group, bucket)  # type: ignore[no-any-return]


fp16.single_collective = bf16.single_collective = True  # type: ignore[attr-defined]
fp16.takes_group = bf16.takes_group = True  # type: ignore[attr-defined]
bf16.linear = fp16.averages = bf16.averages = True  # type: ignore[attr-defined]
