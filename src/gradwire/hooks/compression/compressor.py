"""What all compressing hooks share: error feedback, and what is not compressed.

A step adds to each gradient what earlier steps did not send, sends an approximation of that, and
keeps the difference. So everything arrives, some of it later (error feedback; Seide et al. 2014,
Karimireddy et al., arXiv 1901.09847).
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
    """One bucket on its way through a compressing hook.

    Args:
        bucket: Of reals.
        state: The hook's.
        wire: Where collectives are started.

    Attributes:
        sent: Gradient and error, in float32 at least: what is to be approximated. It is memory of
            its own, which becomes the error.
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
        """Put the result into the bucket, and keep what was not sent.

        Where the result is not finite, memories stay as they were, on all ranks as the result is
        the same on all: such a step is skipped by whoever looks at gradients, and its error would
        stay for good.

        Args:
            mean: What the ranks got, the same on all: like the buffer.
            error: What this rank has not sent.
            others: What else is to be kept like the buffer, by its use.
            bases: What is to be kept by parameter, of other sizes than the parameter's.

        Returns:
            The buffer.
        """
        self.put(0, mean, error)
        return self.keep(error, others=others, bases=bases)

    def put(self, at: int, mean: Tensor, error: Tensor) -> None:
        """Put a part of the result into the bucket, from an element on.

        The part of the error takes what the bucket's dtype cannot hold of it, on every rank.
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
        """As `finish`, where all of the result is in the bucket already."""
        buffer = self.bucket.buffer()
        if is_finite(buffer):
            self.state.errors.put(self.bucket, error)
            self.state.bases.update(bases)
            for use, flat in others.items():
                self.state.memories[use].put(self.bucket, flat)
        return buffer


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are: in one pass, a twentieth of what isfinite takes."""
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    # finite elements may have a sum that is not
    return bool(total.isfinite()) or all(bool(t.isfinite()) for t in tensor.aminmax())


class Compressor(StatefulHook[CompressorState]):
    """A hook that approximates the mean, with error feedback.

    A subclass says in `reduce` how a bucket travels. Integer and sparse gradients are averaged as
    without a hook, complex ones travel as pairs of reals; on one rank nothing is changed. The
    error is kept in float32 for float16 and bfloat16 gradients, one float for each element of a
    parameter.

    Args:
        group: The group; None: that of the module it is registered for.
        start: How many steps are averaged without compression, before the first with it.
    """

    averages = True

    grows_with_world = False
    """Whether what it computes on each rank grows with the number of ranks."""

    changes_mean = False
    """Whether it has an effect where nothing is compressed, on one rank and before `start`."""

    def __init__(self, group: ProcessGroup | None = None, *, start: int = 0) -> None:
        if group is not None:
            check_group(group)
        if start < 0:
            raise ArgumentError(f"start is {start}: give the number of steps before compression")
        super().__init__(CompressorState(type(self).__name__, group))
        self.start = start

    @property
    def traffic(self) -> Traffic:
        """What this rank has given to collectives so far."""
        return self.state.traffic

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Start a bucket."""
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
        """Counts the step."""
        self.state.step += 1

    def release(self, bucket: GradBucket) -> None:
        """Add to a bucket, on its way by another hook, what this one has not sent of it."""
        if bucket.buffer().layout == torch.strided:
            self.state.errors.move(as_real(bucket))

    @abstractmethod
    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """Start what ends with `reduction.finish`."""

    @abstractmethod
    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """What `reduce` sends of a bucket of these parameters, for predictions."""

    @staticmethod
    def extent(parameters: Sequence[Tensor]) -> tuple[int, int]:
        """How many reals a bucket of these parameters has, and the bytes of each as it is sent."""
        numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        double = parameters[0].dtype in (torch.float64, torch.complex128)
        return numel, 8 if double else 4


def is_compressible(buffer: Tensor) -> bool:
    """Return True if a bucket has real or complex numbers in dense memory."""
    dense = buffer.layout == torch.strided and len(buffer) > 0
    return dense and (buffer.is_floating_point() or buffer.is_complex())


def as_real(bucket: GradBucket) -> GradBucket:
    """The bucket, or one of pairs of reals in its memory."""
    buffer = bucket.buffer()
    if not buffer.is_complex():
        return bucket
    return with_buffer(bucket, torch.view_as_real(buffer).view(-1))
