"""Base of the compressing hooks: error feedback, and averaging of incompressible gradients.

With error feedback (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847), a step adds the error
of earlier steps to each gradient, sends an approximation of the sum, and keeps the difference as
the new error. So all of a gradient arrives eventually.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group
from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket, with_buffer
from gradwire.hooks.compression.state import CompressorState
from gradwire.hooks.compression.wire import Message, Traffic, Wire
from gradwire.hooks.result import chain
from gradwire.hooks.stateful import HookReturn, StatefulHook

_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Reduction:
    """Reduction of one bucket by a compressing hook.

    Args:
        bucket: Bucket of real numbers.
        state: State of the hook.
        wire: Wire that starts the collectives.

    Attributes:
        sent: Sum of gradient and error, in float32 or float64: the tensor that is approximated. Its
            memory is not shared with the bucket, and becomes the error.
    """

    def __init__(self, bucket: GradBucket, state: CompressorState, wire: Wire) -> None:
        self.bucket, self.state, self.wire = bucket, state, wire
        buffer = bucket.buffer()
        double = buffer.dtype == torch.float64
        self.dtype = torch.float64 if double else torch.float32
        self.sent = state.errors.plus(bucket, self.dtype)

    def finish(
        self,
        mean: Tensor,
        error: Tensor,
        *,
        others: Mapping[str, Tensor] = _NOTHING,
        bases: Mapping[str, Tensor] = _NOTHING,
    ) -> Tensor:
        """Write the result to the bucket, and keep the error.

        If the result is not finite, the kept state does not change, on all ranks, because the
        result is the same on all ranks. Such a step is usually skipped, and a NaN in the error
        would never leave it.

        Args:
            mean: Result, the same on all ranks, like the buffer.
            error: Difference of `sent` and what this rank has sent.
            others: Other tensors like the buffer that are kept, by use.
            bases: Tensors of other sizes that are kept, by parameter.

        Returns:
            Buffer of the bucket.
        """
        self.put(0, mean, error)
        return self.keep(error, others=others, bases=bases)

    def put(self, at: int, mean: Tensor, error: Tensor) -> None:
        """Write a part of the result to the bucket, beginning at element `at`.

        The rounding error of the bucket's dtype is added to this part of the error on every rank.
        """
        into = self.bucket.buffer()[at : at + len(mean)]
        into.copy_(mean)
        if into.dtype != mean.dtype:
            error += mean - into

    def keep(
        self,
        error: Tensor,
        *,
        others: Mapping[str, Tensor] = _NOTHING,
        bases: Mapping[str, Tensor] = _NOTHING,
    ) -> Tensor:
        """Keep the error as `finish` does, when the result is already in the bucket."""
        buffer = self.bucket.buffer()
        if is_finite(buffer):
            self.state.errors.put(self.bucket, error)
            self.state.bases.update(bases)
            for use, flat in others.items():
                self.state.memories[use].put(self.bucket, flat)
        return buffer


def is_finite(tensor: Tensor) -> bool:
    """Return True if all elements are finite, in one pass: a twentieth of isfinite's time."""
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    # the sum of finite elements may overflow
    return bool(total.isfinite()) or all(bool(t.isfinite()) for t in tensor.aminmax())


class Compressor(StatefulHook[CompressorState]):
    """Hook that approximates the mean, with error feedback.

    A subclass implements `reduce`. Integer and sparse gradients are averaged without compression;
    complex gradients are reduced as pairs of reals. On one rank gradients do not change. The error
    is kept in float32 for float16 and bfloat16 gradients, one float for each element of a
    parameter.

    Args:
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.
    """

    averages = True

    grows_with_world = False
    """True if its computation on each rank grows with the number of ranks."""

    changes_mean = False
    """True if it changes gradients without compression, too: on one rank and before `start`."""

    def __init__(self, group: ProcessGroup | None = None, *, start: int = 0) -> None:
        if group is not None:
            check_group(group)
        if start < 0:
            raise ArgumentError(f"start is {start}: pass a number of steps, at least 0")
        super().__init__(CompressorState(type(self).__name__, group))
        self.start = start

    @property
    def traffic(self) -> Traffic:
        """Counters of this rank's collectives so far."""
        return self.state.traffic

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Start reducing a bucket."""
        state, step = self.state, self.state.step
        group = state.process_group or default_group("group")
        buffer = bucket.buffer()
        if group.size() == 1 and not self.changes_mean:
            return buffer
        if step < self.start or not is_compressible(buffer):
            return self.average(group, bucket)
        real = as_real(bucket)
        reduction = Reduction(real, state, Wire(group, state.traffic))
        reduced = self.reduce(reduction, step)
        return chain(buffer.device, reduced, lambda _: buffer)

    def average(self, group: ProcessGroup, bucket: GradBucket) -> HookReturn:
        """Start the mean of a bucket without compression."""
        buffer = bucket.buffer()
        if buffer.layout == torch.strided:
            sent = 2 * buffer.nbytes * (group.size() - 1) / group.size()
            self.state.traffic.add(buffer.nbytes, sent)
        return all_reduce(group, bucket)

    def committed(self) -> None:
        """Count the step."""
        self.state.step += 1

    def release(self, bucket: GradBucket) -> None:
        """Add this hook's error to a bucket that another hook reduces, and clear it."""
        if bucket.buffer().layout == torch.strided:
            self.state.errors.move(as_real(bucket))

    @abstractmethod
    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """Start the reduction of a bucket, which ends with `reduction.finish`."""

    @abstractmethod
    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """Return the collectives of `reduce` for a bucket of these parameters, for predictions."""

    @staticmethod
    def extent(parameters: Sequence[Tensor]) -> tuple[int, int]:
        """Return the number of reals in a bucket of parameters, and the bytes sent for each."""
        numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        double = parameters[0].dtype in (torch.float64, torch.complex128)
        return numel, 8 if double else 4


def is_compressible(buffer: Tensor) -> bool:
    """Return True if a bucket has real or complex numbers in dense memory."""
    dense = buffer.layout == torch.strided and len(buffer) > 0
    return dense and (buffer.is_floating_point() or buffer.is_complex())


def as_real(bucket: GradBucket) -> GradBucket:
    """Return the bucket, or for complex numbers a bucket of pairs of reals in the same memory."""
    buffer = bucket.buffer()
    if not buffer.is_complex():
        return bucket
    return with_buffer(bucket, torch.view_as_real(buffer).view(-1))
