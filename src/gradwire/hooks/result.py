"""What a hook returns, and how it is read.

A hook may return a future, a tensor or a work handle; `as_future` makes a future of each, and
`parse_hook_result` takes the tensor out of it and compares it with the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from gradwire.buckets.flat import flatten
from gradwire.errors import HookError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.protocol import hook_name
from gradwire.hooks.stateful import StatefulHook, tensor_in

__all__ = ["after", "as_future", "parse_hook_result", "read_future"]


def as_future(returned: object, hook: Callable[..., object]) -> torch._C.Future[Any]:
    """A future of what a hook returned.

    Raises:
        HookError: The hook returned None or something else that is no result.

    Example:
        >>> as_future(torch.ones(2), len).wait()
        tensor([1., 1.])
    """
    if isinstance(returned, torch._C.Future):
        return returned
    if isinstance(returned, Work):
        return returned.get_future()
    if isinstance(returned, Tensor | list | tuple):
        done: Future[Any] = Future()
        done.set_result(returned)
        return done
    raise HookError(
        f"hook {hook_name(hook)} returned {returned!r}: return a torch.futures.Future, a tensor or "
        "a work handle whose result is the reduced buffer"
    )


def after(work: Work | None, result: Callable[[], Tensor]) -> Future[Tensor]:
    """A future of what a function gives when a collective is done; of its error, if it failed.

    Args:
        work: The collective's handle, on a rank that takes part.
        result: Called in a thread of the backend's.
    """
    assert work is not None

    def give(done: Future[Any]) -> Tensor:
        done.value()  # a callback that did not ask would hide what ended the collective
        return result()

    future: Future[Tensor] = work.get_future().then(give)
    return future


def parse_hook_result(result: object, bucket: GradBucket, hook: Callable[..., object]) -> Tensor:
    """The reduced tensor in what a hook's future held.

    Args:
        result: What a `StatefulHook` reads; from others, a tensor, or a list or tuple of one, of
            any shape and strides. For a complex bucket, real and imaginary parts in turn will do:
            Gloo's futures hold the real view that it has sent.
        bucket: The bucket the hook was called with.
        hook: The hook, which may read the result itself, and is named in messages.

    Returns:
        The tensor: the bucket's dtype, device and number of elements; of a dense bucket 1-d and
            contiguous, copied only where the hook's is not so.

    Raises:
        HookError: No such tensor.

    Example:
        >>> bucket = GradBucket(0, torch.zeros(2), [torch.zeros(2)], is_last=True)
        >>> parse_hook_result([torch.ones(2)], bucket, len)
        tensor([1., 1.])
    """
    if isinstance(hook, StatefulHook):
        result = hook.parse_hook_result(result)
    result = tensor_in(result, hook)
    buffer = bucket.buffer()
    prefix = f"hook {hook_name(hook)}, bucket {bucket.index()}: the result is"
    if buffer.is_complex() and result.dtype == buffer.dtype.to_real():
        result = _as_complex(result, buffer)
    if result.layout != buffer.layout:
        raise HookError(f"{prefix} of layout {result.layout}, the bucket of {buffer.layout}")
    if result.dtype != buffer.dtype or result.device != buffer.device:
        raise HookError(
            f"{prefix} {result.dtype} on {result.device}, the bucket is {buffer.dtype} on "
            f"{buffer.device}: convert it back before returning it"
        )
    if result.layout != torch.strided:
        return result
    if result.numel() != buffer.numel():
        raise HookError(f"{prefix} of {result.numel()} elements, the bucket of {buffer.numel()}")
    return flatten(result)


def read_future(
    returned: object, bucket: GradBucket, hook: Callable[..., object]
) -> torch._C.Future[Any]:
    """As `as_future`, of the reduced tensor where the hook reads its results itself.

    For what runs a hook inside of another: only the outer one's results are read by the reducer.
    """
    future = as_future(returned, hook)
    if not isinstance(hook, StatefulHook):
        return future
    return future.then(lambda done: parse_hook_result(done.value(), bucket, hook))


def _as_complex(result: Tensor, buffer: Tensor) -> Tensor:
    """Pairs of reals as a bucket's complex numbers; another tensor as it is."""
    if result.layout != torch.strided or result.numel() != 2 * buffer.numel():
        return result
    pairs = flatten(result)
    if pairs.storage_offset() % 2:  # a complex number cannot begin there
        pairs = pairs.clone()
    return torch.view_as_complex(pairs.view(-1, 2))
