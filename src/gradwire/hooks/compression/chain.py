"""Steps one after another, each begun when the future of the one before has its value.

`Future.then` gives a future of a future where a callback starts another collective; and a callback
that waits for it would hold one of the backend's few threads. Here nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.futures import Future

__all__ = ["Step", "chain"]

Step: TypeAlias = Callable[[Any], Any]
"""Takes what the step before gave; returns a value, or a future of one."""


def chain(device: torch.device, first: Any, *steps: Step) -> Future[Any]:
    """A future of what the last step gives.

    Args:
        device: Of the tensors in it: an accelerator's futures synchronize its streams.
        first: A future, or a value.
        *steps: The first is given `first`'s value. They run on whichever thread completes the
            future before; without a future among them, here and at once.

    Returns:
        A future. It has the first exception of a step or of a future, if there is one.

    Example:
        >>> chain(torch.device("cpu"), 1, lambda x: x + 1, lambda x: x * 10).wait()
        20
    """
    end: Future[Any] = Future(devices=None if device.type == "cpu" else [device])
    _advance(end, steps, first)
    return end


def _advance(end: Future[Any], steps: Sequence[Step], value: Any) -> None:
    try:
        for number, step in enumerate(steps):
            if isinstance(value, torch._C.Future):
                value.add_done_callback(partial(_resume, end, steps[number:]))
                return
            value = step(value)
        if isinstance(value, torch._C.Future):
            value.add_done_callback(partial(_resume, end, ()))
            return
    except Exception as error:
        end.set_exception(error)
    else:
        end.set_result(value)


def _resume(end: Future[Any], steps: Sequence[Step], done: torch._C.Future[Any]) -> None:
    try:
        value = done.value()
    except Exception as error:
        end.set_exception(error)
    else:
        _advance(end, steps, value)
