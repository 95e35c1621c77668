"""A wire that sends nothing: what a hook computes is then all that takes time."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.hooks.compression.wire import Wire

__all__ = ["LocalWire"]


class LocalWire(Wire):
    """As if all ranks had what this one has; futures are done at once.

    Args:
        size: How many ranks there would be.

    Attributes:
        started: When the first collective was, in seconds of `perf_counter`; 0: not yet.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.started = size, 0, 0.0

    def all_reduce(self, tensor: Tensor) -> torch._C.Future[Tensor]:
        """The tensor as it is."""
        return self._done(tensor)

    def all_gather(self, own: Tensor) -> torch._C.Future[Tensor]:
        """As many copies, as would be received."""
        return self._done(own.repeat(self.size, *[1] * own.dim()).view(self.size, *own.shape))

    def all_to_all(self, rows: Tensor) -> torch._C.Future[Tensor]:
        """The rows themselves."""
        return self._done(rows)

    def _done(self, value: Tensor) -> torch._C.Future[Tensor]:
        self.started = self.started or perf_counter()
        future: Future[Tensor] = Future(
            devices=None if value.device.type == "cpu" else [value.device]
        )
        future.set_result(value)
        return future
