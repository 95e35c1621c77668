"""Candidate hooks, and the measurement of their computing time without communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import ArgumentError
from gradwire.hooks import (
    COMPRESSING,
    Collective,
    CommHook,
    Compressor,
    CompressorState,
    GradBucket,
    Message,
    Reduction,
    StatefulHook,
    Wire,
    all_reduce,
    as_real,
    bf16,
    bind_hook,
    fp16,
)
from gradwire.tuning.cost_model import Cost

PLAIN = "all_reduce"
"""Name of the candidate that is chosen if no hook gains enough: the mean without a hook."""
VOTE = Message("all_reduce", 40)
"""Message at the end of a backward pass with a hook, by which ranks agree that none failed."""
WEIGHTS = Message("all_reduce", 32)
"""Message before the first bucket of a hook, by which ranks sum their weights."""
PARTS, PART_SECONDS = 3, 0.03
"""Number of parts of a measurement, and their duration. The result is the median of their means.

The scheduler switches between ranks that share cores every few ms. A single run of 2 ms is seldom
interrupted, and takes half of the time that it takes on average while all ranks compute. The mean
of many runs includes the interruptions; the median of three means excludes disturbances.
"""
CASTS: dict[str, tuple[CommHook, torch.dtype]] = {
    "bf16": (bf16, torch.bfloat16),
    "fp16": (fp16, torch.float16),
}


@dataclass(frozen=True)
class Computing:
    """Seconds of computing before the first collective and after it."""

    before: float
    after: float


class Candidate(ABC):
    """Hook that may be chosen.

    Attributes:
        name: Name in choices.
        hook: Hook.
        single: True if it has one collective for each bucket.
        grows_with_world: True if its computing time grows with the number of ranks.
    """

    single = True
    grows_with_world = False

    def __init__(self, name: str, hook: StatefulHook[Any]) -> None:
        self.name, self.hook = name, hook

    @abstractmethod
    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """Return the collectives for a bucket."""

    @abstractmethod
    def compute(self, bucket: GradBucket, world: int) -> Computing:
        """Time the computation for a bucket once. The bucket's values may change."""

    def measure(self, parameters: Sequence[Tensor], world: int, *, parts: int = PARTS) -> Computing:
        """Return the mean computing time for gradients like these parameters.

        Args:
            parameters: Parameters of a bucket.
            world: Number of ranks.
            parts: Number of parts whose means give the median.
        """
        first = parameters[0]
        flat = torch.randn(sum(p.numel() for p in parameters), dtype=first.dtype)
        if not len(flat):  # hooks are not called for an empty bucket
            return Computing(0.0, 0.0)
        bucket = GradBucket(0, flat.to(first.device), list(parameters), is_last=True)
        self.compute(bucket, world)  # the first run has page faults
        means = [self._mean(bucket, world) for _ in range(parts)]
        return Computing(median(m.before for m in means), median(m.after for m in means))

    def _mean(self, bucket: GradBucket, world: int) -> Computing:
        """Return the mean of the runs of one part."""
        runs: list[Computing] = []
        start = perf_counter()
        while not runs or perf_counter() - start < PART_SECONDS:
            runs.append(self.compute(bucket, world))
        return Computing(fmean(r.before for r in runs), fmean(r.after for r in runs))

    def costs(
        self,
        buckets: Sequence[Sequence[Tensor]],
        computing: Sequence[Computing],
        packing: Sequence[float],
        world: int,
    ) -> list[Cost]:
        """Return the costs of each bucket, including the messages for weights and failures.

        Args:
            buckets: Parameters of each bucket.
            computing: Computing time of this candidate for each bucket.
            packing: Seconds for packing each bucket, the same for any hook.
            world: Number of ranks.
        """
        found = []
        for i, (parameters, computes, packs) in enumerate(
            zip(buckets, computing, packing, strict=True), 1
        ):
            messages = self.messages(parameters, world)
            if i == 1:
                messages.insert(0, WEIGHTS)
            if i == len(buckets):
                messages.append(VOTE)
            found.append(
                Cost(packs + computes.before, tuple(messages), computes.after, single=self.single)
            )
        return found


class _Plain(Candidate):
    """Mean by one all_reduce, without a hook. Its computing time is the packing of other hooks."""

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        return [Message("all_reduce", sum(p.nbytes for p in parameters))]

    def compute(self, bucket: GradBucket, world: int) -> Computing:
        start = perf_counter()
        bucket.buffer().clone().div_(world)
        return Computing(perf_counter() - start, 0.0)

    def costs(
        self,
        buckets: Sequence[Sequence[Tensor]],
        computing: Sequence[Computing],
        packing: Sequence[float],
        world: int,
    ) -> list[Cost]:
        return [Cost(0.0, tuple(self.messages(b, world)), single=True) for b in buckets]


class _Cast(Candidate):
    """Mean in a smaller dtype."""

    def __init__(self, name: str, hook: StatefulHook[Any], dtype: torch.dtype) -> None:
        super().__init__(name, hook)
        self._dtype = dtype

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        numel = sum(p.numel() for p in parameters)
        pairs = 2 if parameters[0].is_complex() else 1
        return [Message("all_reduce", numel * pairs * self._dtype.itemsize)]

    def compute(self, bucket: GradBucket, world: int) -> Computing:
        buffer = as_real(bucket).buffer()
        start = perf_counter()
        small = buffer.to(self._dtype).div_(world)
        middle = perf_counter()
        buffer.copy_(small)
        return Computing(middle - start, perf_counter() - middle)


class _Compressing(Candidate):
    """Hook with error feedback."""

    single = False
    hook: Compressor

    def __init__(self, name: str, hook: Compressor) -> None:
        super().__init__(name, hook)
        self._scratch: CompressorState | None = None

    def measure(self, parameters: Sequence[Tensor], world: int, *, parts: int = PARTS) -> Computing:
        """Measure with a temporary state instead of the hook's."""
        try:
            return super().measure(parameters, world, parts=parts)
        finally:
            self._scratch = None

    @property
    def grows_with_world(self) -> bool:  # type: ignore[override]
        return self.hook.grows_with_world

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        return self.hook.messages(parameters, world)

    def compute(self, bucket: GradBucket, world: int) -> Computing:
        if self._scratch is None:
            self._scratch = self.hook.state.empty()
        wire, start = LocalWire(world), perf_counter()
        reduction = Reduction(as_real(bucket), self._scratch, wire)
        self.hook.reduce(reduction, 0).wait()
        return Computing(wire.started - start, perf_counter() - wire.started)


def candidate(allowed: str | Compressor) -> Candidate:
    """Return the candidate for a hook's name or a compressing hook.

    Raises:
        ArgumentError: `allowed` is neither, or is a hook with momentum.
    """
    if isinstance(allowed, Compressor):
        if allowed.changes_mean:
            raise ArgumentError(
                f"allowed has {allowed!r} with momentum, which steps with other hooks would lack: "
                "use the optimizer's momentum"
            )
        return _Compressing(type(allowed).__name__, allowed)
    if allowed == PLAIN:
        return _Plain(PLAIN, bind_hook(None, all_reduce))
    if allowed in CASTS:
        hook, dtype = CASTS[allowed]
        return _Cast(allowed, bind_hook(None, hook), dtype)
    if allowed in COMPRESSING:
        return _Compressing(allowed, COMPRESSING[allowed]())
    named = ", ".join([*CASTS, *COMPRESSING])
    raise ArgumentError(
        f"allowed has {allowed!r}: pass names out of {named}, or compressing hooks such as "
        "hooks.LowRank(8)"
    )


def largest_of(
    candidates: Iterable[Candidate], buckets: Sequence[Sequence[Tensor]], world: int
) -> dict[Collective, float]:
    """Return the maximum input size in bytes of each collective that any candidate uses.

    The order of the entries is the same on all ranks.
    """
    found: dict[Collective, float] = {}
    for c in candidates:
        for m in (m for bucket in buckets for m in c.messages(bucket, world)):
            found[m.collective] = max(found.get(m.collective, 0.0), m.nbytes)
    return found


def interpolated(points: Sequence[tuple[int, Computing]], numel: int) -> Computing:
    """Interpolate or extrapolate the time for a bucket from the smallest and the largest bucket."""
    (small, low), (large, high) = points[0], points[-1]
    part = (numel - small) / (large - small) if large > small else 0.0

    def between(a: float, b: float) -> float:
        return max(0.0, a + (b - a) * part)

    return Computing(between(low.before, high.before), between(low.after, high.after))


class LocalWire(Wire):
    """Wire that sends nothing: all ranks are assumed to have this rank's tensors.

    Its futures are done immediately, so that only a hook's computation takes time.

    Args:
        size: Assumed number of ranks.

    Attributes:
        started: Time of the first collective, in seconds of `perf_counter`; 0 before it.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.started = size, 0, 0.0

    def all_reduce(self, tensor: Tensor) -> torch._C.Future[Tensor]:
        """Return the tensor."""
        return self._done(tensor)

    def all_gather(self, own: Tensor) -> torch._C.Future[Tensor]:
        """Return copies of the tensor for all ranks."""
        return self._done(own.repeat(self.size, *[1] * own.dim()).view(self.size, *own.shape))

    def all_to_all(self, rows: Tensor) -> torch._C.Future[Tensor]:
        """Return the rows."""
        return self._done(rows)

    def _done(self, value: Tensor) -> torch._C.Future[Tensor]:
        self.started = self.started or perf_counter()
        future: Future[Tensor] = Future(
            devices=None if value.device.type == "cpu" else [value.device]
        )
        future.set_result(value)
        return future
