"""What a hook returns, and how it is read.

A hook may return a future, a tensor or a work handle; `as_future` makes a future of each, and
`parse_hook_result` takes the tensor out of it and compares it with the bucket.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from gradwire.buckets.flat import flatten
from gradwire.errors import HookError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.stateful import StatefulHook, hook_name, tensor_in


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


_NOT_RUN: list[Sequence[Callable[[Any], Any]]] = []
"""Steps of chains that failed: a thread of the backend's must not drop them (see `_Chain`)."""

Step: TypeAlias = Callable[[Any], Any]
"""Takes what the step before gave; returns a value, or a future of one."""


def chain(device: torch.device, first: Any, *steps: Step) -> Future[Any]:
    """A future of what the last step gives.

    Args:
        device: Of the tensors in it: an accelerator's futures synchronize its streams.
        first: A future, or a value.
        *steps: The first is given `first`'s value. They run on whichever thread completes the
            future before; without a future among them, here and at once. Each is let go of when
            it has run.

    Returns:
        A future. It has the first exception of a step or of a future, if there is one.

    Example:
        >>> chain(torch.device("cpu"), 1, lambda x: x + 1, lambda x: x * 10).wait()
        20
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):  # it is Python's own
        _NOT_RUN.clear()
    running = _Chain(device, steps)
    running.advance(first)
    return running.end


class _Chain:
    """The steps that are left.

    When the future is done, nobody may hold a step any more: steps hold a process group, whose
    last reference must not be dropped by a thread of that group. It would wait for itself, and
    abort the process.
    """

    def __init__(self, device: torch.device, steps: Sequence[Step]) -> None:
        self.end: Future[Any] = Future(devices=None if device.type == "cpu" else [device])
        self._steps = list(steps)

    def advance(self, value: Any) -> None:
        """Run steps until one gives a future, or none is left."""
        failure: Exception | None = None
        try:
            while self._steps and not isinstance(value, torch._C.Future):
                value = self._steps.pop(0)(value)
        except Exception as error:
            failure = _without_frames(error)
        if failure is not None:
            self._fail(failure)
        elif isinstance(value, torch._C.Future):
            value.add_done_callback(self._resume)
        else:
            self.end.set_result(value)

    def _resume(self, done: torch._C.Future[Any]) -> None:
        failure: Exception | None = None
        try:
            value = done.value()
        except Exception as error:
            failure = _without_frames(error)
        if failure is not None:
            self._fail(failure)
        else:
            self.advance(value)

    def _fail(self, failure: Exception) -> None:
        if self._steps:
            _NOT_RUN.append(self._steps)
            self._steps = []
        self.end.set_exception(failure)


class _Traceback(Exception):
    """An exception's traceback as text, in place of frames, which hold what steps hold."""


def _without_frames(error: Exception) -> Exception:
    error.__cause__ = _Traceback("\n" + "".join(traceback.format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)
