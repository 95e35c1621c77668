"""Hooks around other hooks: functions before and after, and casts to a smaller dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket, with_buffer
from gradwire.hooks.result import as_future, parse_hook_result, read_future
from gradwire.hooks.stateful import CommHook, compose


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
bf16.linear = True  # type: ignore[attr-defined]
