"""A function before a hook, on the local gradients, or after it, on its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import ArgumentError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.protocol import CommHook
from gradwire.hooks.result import as_future, parse_hook_result, read_future
from gradwire.hooks.stateful import compose

__all__ = ["wrap"]


def wrap(
    hook: CommHook,
    *,
    before: Callable[[GradBucket], None] | None = None,
    after: Callable[[Tensor, GradBucket], Tensor] | None = None,
) -> CommHook:
    """Wrap a hook; the result is a hook, so that wrappers compose.

    Args:
        hook: The hook that communicates; its state is passed through. Of a `StatefulHook` the
            result is one, with the same state.
        before: Gets the bucket of local gradients; may change the buffer in place, or set another.
        after: Gets the reduced buffer and the bucket, and returns the result.

    Raises:
        ArgumentError: Neither is given.
        ArgumentTypeError: `hook` is no hook.

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
