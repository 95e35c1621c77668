"""Steps one after another, each begun when the future of the one before has its value.

`Future.then` gives a future of a future where a callback starts another collective; and a callback
that waits for it would hold one of the backend's few threads. Here nothing waits.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.futures import Future

__all__ = ["Step", "chain"]

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
