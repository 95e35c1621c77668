"""Return values of hooks as futures, and chains of futures.

A hook returns a future, a tensor or a work handle. `as_future` converts each into a future;
`parse_hook_result` extracts the tensor from its value and checks it against the bucket.
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

from gradwire.buckets import flatten
from gradwire.errors import HookError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.stateful import StatefulHook, hook_name, tensor_in


def as_future(returned: object, hook: Callable[..., object]) -> torch._C.Future[Any]:
    """Return a future of a hook's return value.

    Raises:
        HookError: The hook returned None or another object that is not a result.

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


def after(work: Work | None, result: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
    """Return a future of a function's value after a collective, or of the collective's error.

    Args:
        work: Handle of the collective, on a participating rank.
        result: Function, called in a thread of the backend.
        device: Device of the tensors that were sent.
    """
    assert work is not None

    def give(done: Future[Any]) -> Tensor:
        done.value()  # raises the collective's error, which would be lost otherwise
        return result()

    def give_in_order(done: Future[Any]) -> Tensor:
        done.value()
        # Gloo's future is done while the copy back to the accelerator still runs: the work, not the
        # future, knows its end
        work.synchronize()
        return result()

    chosen = give if device.type == "cpu" else give_in_order
    future: Future[Tensor] = work.get_future().then(chosen)
    return future


def parse_hook_result(result: object, bucket: GradBucket, hook: Callable[..., object]) -> Tensor:
    """Return the reduced tensor from the value of a hook's future.

    Args:
        result: Value of the future. A `StatefulHook` reads it itself. For other hooks, a tensor of
            any shape and strides, or a list or tuple of one. For a complex bucket, a tensor of
            alternating real and imaginary parts is accepted, because Gloo's futures hold the real
            view that it has sent.
        bucket: Bucket that the hook was called with.
        hook: Hook, for reading the result and for messages.

    Returns:
        Tensor with the bucket's dtype, device and number of elements. For a dense bucket it is 1-d
            and contiguous, and a copy only if the hook's tensor is not.

    Raises:
        HookError: The result is not such a tensor.

    Example:
        >>> bucket = GradBucket(0, torch.zeros(2), [torch.zeros(2)], is_last=True)
        >>> parse_hook_result([torch.ones(2)], bucket, len)
        tensor([1., 1.])
    """
    if isinstance(hook, StatefulHook):
        result = hook.parse_hook_result(result)
    result = tensor_in(result, hook)
    buffer = bucket.buffer()
    prefix = f"hook {hook_name(hook)}, bucket {bucket.index()}: the result"
    if buffer.is_complex() and result.dtype == buffer.dtype.to_real():
        result = _as_complex(result, buffer)
    if result.layout != buffer.layout:
        raise HookError(f"{prefix} has layout {result.layout}, the bucket {buffer.layout}")
    if result.dtype != buffer.dtype or result.device != buffer.device:
        raise HookError(
            f"{prefix} is {result.dtype} on {result.device}, the bucket {buffer.dtype} on "
            f"{buffer.device}: convert the result before returning it"
        )
    if result.layout != torch.strided:
        return result
    if result.numel() != buffer.numel():
        raise HookError(
            f"{prefix} has {result.numel()} elements, the bucket has {buffer.numel()}: "
            "return a tensor like its buffer"
        )
    return flatten(result)


def read_future(
    returned: object, bucket: GradBucket, hook: Callable[..., object]
) -> torch._C.Future[Any]:
    """Return a future of a hook's return value, read by the hook if it is a `StatefulHook`.

    Used by hooks that run another hook: the reducer reads the results of the outer hook only.
    """
    future = as_future(returned, hook)
    if not isinstance(hook, StatefulHook):
        return future
    return future.then(lambda done: parse_hook_result(done.value(), bucket, hook))


def _as_complex(result: Tensor, buffer: Tensor) -> Tensor:
    """Return pairs of reals as complex numbers of a bucket; return other tensors unchanged."""
    if result.layout != torch.strided or result.numel() != 2 * buffer.numel():
        return result
    pairs = flatten(result)
    if pairs.storage_offset() % 2:  # a complex view needs an even offset
        pairs = pairs.clone()
    return torch.view_as_complex(pairs.view(-1, 2))


_NOT_RUN: list[Sequence[Callable[[Any], Any]]] = []
"""Steps of failed chains. A thread of the backend must not drop them (see `_Chain`)."""

Step: TypeAlias = Callable[[Any], Any]
"""Function of the previous step's value; returns a value, or a future of one."""


def chain(device: torch.device, first: Any, *steps: Step) -> Future[Any]:
    """Run functions one after another, each when the previous one's future is done.

    `Future.then` would give a future of a future where a callback starts another collective, and a
    callback that waited for it would block one of the backend's few threads. Here no thread waits.

    Args:
        device: Device of the tensors in the futures: an accelerator's futures synchronize its
            streams.
        first: Future or value that the first step receives.
        *steps: Functions. Each runs on the thread that completes the previous future, or on the
            calling thread if there was no future before it. Each is released after it has run.

    Returns:
        Future of the last step's value, or of the first exception of a step or a future.

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
    """Remaining steps of a chain.

    When the future is done, no reference to a step may be left. Steps refer to a process group,
    whose last reference must not be dropped by a thread of that group: the thread would wait for
    itself, and the process would be aborted.
    """

    def __init__(self, device: torch.device, steps: Sequence[Step]) -> None:
        self.end: Future[Any] = Future(devices=None if device.type == "cpu" else [device])
        self._steps = list(steps)

    def advance(self, value: Any) -> None:
        """Run steps until one returns a future, or none is left."""
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
    """Traceback of an exception as text. Frames would hold references to what steps refer to."""


def _without_frames(error: Exception) -> Exception:
    error.__cause__ = _Traceback("\n" + "".join(traceback.format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)
