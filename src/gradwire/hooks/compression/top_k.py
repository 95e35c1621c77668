"""Sparsification: the largest elements of a bucket, and their indices."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError, HookError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.compression.compressor import (
    Compressor,
    Reduction,
    as_real,
    is_compressible,
    is_finite,
)
from gradwire.hooks.compression.state import ParameterMemory
from gradwire.hooks.compression.wire import Message, values_in
from gradwire.hooks.result import chain
from gradwire.hooks.stateful import HookReturn

SAMPLES = 1 << 14
"""Minimum size of the sample that gives the threshold.

For a ratio of 1 %, the number of chosen elements then varies by about 8 %.
"""


CACHED = 1 << 18
"""Number of elements that are compared with the threshold at a time."""


class TopK(Compressor):
    """Average the largest elements of each rank's gradients, and keep the rest for later steps.

    The threshold is estimated from a sample of the bucket. A rank sends at most twice as many
    elements as `ratio` specifies. Ranks exchange their counts, then a 4-byte index and the value of
    each chosen element, by all_gather. If W times the ratio is large, this is more than without
    compression. A NaN is always chosen; the errors of that step are then not kept.

    Args:
        ratio: Fraction of a bucket's elements that a rank sends; 0 < ratio <= 1.
        momentum: Momentum of SGD, applied before elements are chosen (momentum correction), so that
            delayed elements have the same momentum as without compression. It is also applied on
            one rank and before `start`, but not to sparse and integer gradients. Set the
            optimizer's momentum to 0.
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.

    Raises:
        ArgumentError: `ratio` or `momentum` is out of its range.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        ...     net.register_comm_hook(None, TopK(0.25))
        ...     gradients = []
        ...     for _ in range(2):
        ...         net.zero_grad()
        ...         net(torch.tensor([[5.0, 1.0, 4.0, 0.0]])).sum().backward()
        ...         gradients.append(net.module.weight.grad.tolist())
        ...     return gradients
        >>> run_ranks(main, world_size=2)[0]  # the kept elements are the largest of the next step
        [[[5.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 8.0, 0.0]]]

    Source:
        Deep Gradient Compression, Y. Lin et al., arXiv 1712.01887.
    """

    grows_with_world = True

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        momentum: float = 0.0,
        group: ProcessGroup | None = None,
        start: int = 0,
    ) -> None:
        super().__init__(group, start=start)
        if not 0 < ratio <= 1:
            raise ArgumentError(f"ratio is {ratio}: pass a fraction of the elements, such as 0.01")
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum is {momentum}: pass at least 0 and less than 1")
        self.ratio, self.momentum = ratio, momentum
        if momentum:
            self.state.memories["momentum"] = ParameterMemory()
            self.changes_mean = True

    def average(self, group: ProcessGroup, bucket: GradBucket) -> HookReturn:
        """Start averaging without compression, with momentum."""
        buffer = bucket.buffer()
        if not (self.momentum and is_compressible(buffer)):
            return super().average(group, bucket)
        real = as_real(bucket)
        dtype = torch.float64 if real.buffer().dtype == torch.float64 else torch.float32
        kept = self.state.memories["momentum"].flat(real, dtype)
        velocity = kept * self.momentum + real.buffer()
        real.buffer().copy_(velocity)

        def keep(_: Tensor) -> Tensor:
            if is_finite(real.buffer()):
                self.state.memories["momentum"].put(real, velocity)
            return buffer

        return chain(buffer.device, super().average(group, bucket), keep)

    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """Choose elements, exchange their counts, then their indices and values."""
        wire, error = reduction.wire, reduction.sent
        others = self._with_momentum(reduction)
        count = max(1, round(self.ratio * error.numel()))
        indices = largest(error, count)
        values = error[indices]
        error[indices] = 0
        for velocity in others.values():
            velocity[indices] = 0  # sent elements include their momentum
        integer = torch.int32 if error.numel() < 2**31 else torch.int64
        width = integer.itemsize + error.element_size()
        own = _joined(indices.to(integer), values)

        def exchange(counts: Tensor) -> Any:
            lengths.extend(counts.view(-1).tolist())
            if min(lengths) < 0 or max(lengths) > error.numel():
                raise HookError(
                    f"ranks sent counts {lengths} for {error.numel()} elements: use the same "
                    "module and hook on all ranks"
                )
            padded = own.new_zeros(max(lengths) * width)
            padded[: own.numel()] = own
            # skipped if no rank has chosen anything
            return wire.all_gather(padded) if len(padded) else padded.view(1, 0)

        def finish(received: Tensor) -> Tensor:
            buffer = reduction.bucket.buffer()
            same = buffer.dtype == error.dtype
            mean = buffer.zero_() if same else torch.zeros_like(error)
            for row, length in zip(received, lengths, strict=False):
                where, what = _split(row, length, integer, error)
                mean.index_add_(0, where, what.div_(wire.size))
            if not same:
                reduction.put(0, mean, error)
            return reduction.keep(error, others=others)

        lengths: list[int] = []
        counts = torch.tensor([len(indices)], dtype=torch.int64, device=error.device)
        return chain(error.device, wire.all_gather(counts), exchange, finish)

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """Return an all_gather of counts, and one of the expected largest count of elements."""
        numel, itemsize = self.extent(parameters)
        index = 4 if numel < 2**31 else 8
        count = max(1, round(self.ratio * numel))
        pairs = round(count * _most(numel, count, world)) * (index + itemsize)
        return [Message("all_gather", 8), Message("all_gather", pairs)]

    def _with_momentum(self, reduction: Reduction) -> dict[str, Tensor]:
        """Add the momentum of earlier steps to `sent`; return the velocity to keep."""
        if not self.momentum:
            return {}
        kept = reduction.state.memories["momentum"].flat(reduction.bucket, reduction.dtype)
        reduction.sent.add_(kept, alpha=self.momentum)  # error + gradient + m * velocity
        return {"momentum": kept * self.momentum + reduction.bucket.buffer()}


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of about `count` elements of the largest magnitude, at most 2 * count.

    Example:
        >>> largest(torch.tensor([1.0, -5.0, 3.0, 0.0]), 2)
        tensor([1, 2])
    """
    threshold = _threshold(values, count)
    found = []
    for lo in range(0, values.numel(), CACHED):
        magnitudes = values[lo : lo + CACHED].abs()
        # both comparisons choose NaN
        chosen = ~(magnitudes < threshold) if threshold > 0 else magnitudes != 0
        found.append(positions(chosen).add_(lo))
    indices = torch.cat(found)
    if len(indices) > 2 * count:
        among = values[indices].abs().topk(count, sorted=False).indices
        indices = indices[among].sort().values
    return indices


def positions(mask: Tensor) -> Tensor:
    """Return the indices of a sparse mask's true elements, in a fifth of `nonzero`'s time.

    Words of eight elements are tested first.

    Example:
        >>> mask = torch.zeros(20, dtype=torch.bool)
        >>> mask[[3, 4, 19]] = True
        >>> positions(mask)
        tensor([ 3,  4, 19])
    """
    whole = mask.numel() // 8 * 8
    words = mask[:whole].view(torch.uint8).view(torch.int64).nonzero().view(-1)
    row, column = mask[:whole].view(-1, 8)[words].nonzero().unbind(1)
    return torch.cat((words[row] * 8 + column, mask[whole:].nonzero().view(-1) + whole))


def _most(numel: int, count: int, world: int) -> float:
    """Return the expected number of elements, in units of `count`, of the rank that chooses most.

    The number that a rank chooses varies because its threshold is estimated from a sample: the
    standard deviation is the root of the number of sampled elements above the threshold. Blom's
    formula gives the expected maximum of W normal variables.

    Source:
        G. Blom, Statistical estimates and transformed beta-variables, 1958.
    """
    sampled = numel / max(1, numel // SAMPLES)
    if sampled == numel:
        return 1.0  # the threshold is exact
    deviation = 1 / sqrt(max(1.0, count * sampled / numel))
    return min(2.0, 1 + deviation * NormalDist().inv_cdf((world - 0.375) / (world + 0.25)))


def _threshold(values: Tensor, count: int) -> float:
    """Return the magnitude that the largest `count` elements reach, estimated from a sample."""
    stride = max(1, values.numel() // max(SAMPLES, 1))
    sample = values[::stride].abs()
    wanted = max(1, round(count * len(sample) / values.numel()))
    return sample.topk(wanted, sorted=False).values.min().item()


def _joined(indices: Tensor, values: Tensor) -> Tensor:
    """Return the bytes of (index, value) pairs, interleaved so that messages may be truncated."""
    pairs = (indices.view(-1, 1).view(torch.uint8), values.view(-1, 1).view(torch.uint8))
    return torch.cat(pairs, 1).view(-1)


def _split(row: Tensor, length: int, integer: torch.dtype, like: Tensor) -> tuple[Tensor, Tensor]:
    cut = integer.itemsize
    width = cut + like.element_size()
    pairs = row[: length * width].view(length, width)
    where = values_in(pairs[:, :cut], integer).view(-1)
    return where, values_in(pairs[:, cut:], like.dtype).view(-1)
