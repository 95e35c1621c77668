"""What may be chosen, and what each costs on this machine: measured, with nothing sent."""

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
    bf16,
    bind_hook,
    fp16,
)
from gradwire.hooks.compression.compressor import as_real
from gradwire.hooks.registry import COMPRESSING
from gradwire.tuning.cost_model import Cost

PLAIN = "all_reduce"
"""The name of what is taken where nothing else pays."""
VOTE = Message("all_reduce", 40)
"""By which ranks agree that no hook has failed, where there is one."""
WEIGHTS = Message("all_reduce", 32)
"""By which ranks add up their weights before the first bucket of a hook."""
PARTS, PART_SECONDS = 3, 0.03
"""A part is as many runs as take so long, or one; the median of the parts' means counts.

Ranks that share cores have them by turns of some ms: one run of 2 ms is seldom interrupted, and
says half of what a run takes where all ranks compute. The mean of many says it; the median of three
such means leaves out what disturbs one.
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
    """A hook that may be chosen.

    Attributes:
        name: What it is called in choices.
        hook: The hook.
        single: Whether it has one collective.
        grows_with_world: Whether it computes more with more ranks.
    """

    single = True
    grows_with_world = False

    def __init__(self, name: str, hook: StatefulHook[Any]) -> None:
        self.name, self.hook = name, hook

    @abstractmethod
    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """What it sends of a bucket."""

    @abstractmethod
    def compute(self, bucket: GradBucket, world: int) -> Computing:
        """What it computes for a bucket, whose values it may change: run once, and timed."""

    def measure(self, parameters: Sequence[Tensor], world: int, *, parts: int = PARTS) -> Computing:
        """What a run takes on gradients like these parameters, in the mean of many.

        Args:
            parameters: Of a bucket.
            world: How many ranks there are.
            parts: Of how many parts' means the median counts.
        """
        first = parameters[0]
        flat = torch.randn(sum(p.numel() for p in parameters), dtype=first.dtype)
        if not len(flat):  # hooks are not used for it
            return Computing(0.0, 0.0)
        bucket = GradBucket(0, flat.to(first.device), list(parameters), is_last=True)
        self.compute(bucket, world)  # in the first, memory is touched for the first time
        means = [self._mean(bucket, world) for _ in range(parts)]
        return Computing(median(m.before for m in means), median(m.after for m in means))

    def _mean(self, bucket: GradBucket, world: int) -> Computing:
        """Of the runs of a part."""
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
        """Return the costs of each bucket, with the small messages before the first and at the end.

        Args:
            buckets: The parameters of each.
            computing: What this computes for each.
            packing: Seconds that it takes to make each, for any hook.
            world: How many ranks there are.
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
    """The mean by one all_reduce, without a hook: what it computes is what hooks add to that."""

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
    """The mean in a smaller dtype."""

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
    """A hook with error feedback."""

    single = False
    hook: Compressor

    def __init__(self, name: str, hook: Compressor) -> None:
        super().__init__(name, hook)
        self._scratch: CompressorState | None = None

    def measure(self, parameters: Sequence[Tensor], world: int, *, parts: int = PARTS) -> Computing:
        """As for all, with an error of its own."""
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
    """What is allowed, by a hook's name, or a hook that compresses.

    Raises:
        ArgumentError: It is neither.
    """
    if isinstance(allowed, Compressor):
        if allowed.changes_mean:
            raise ArgumentError(
                f"allowed has {allowed!r} with momentum, which steps without it would lack: leave "
                "momentum to the optimizer"
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
        f"allowed has {allowed!r}: the hooks to choose from by name are {named}; or give one that "
        "compresses, such as hooks.LowRank(8)"
    )


def largest_of(
    candidates: Iterable[Candidate], buckets: Sequence[Sequence[Tensor]], world: int
) -> dict[Collective, float]:
    """The most bytes that a rank gives to a collective, for each that any of them sends.

    In an order that is the same on all ranks.
    """
    found: dict[Collective, float] = {}
    for c in candidates:
        for m in (m for bucket in buckets for m in c.messages(bucket, world)):
            found[m.collective] = max(found.get(m.collective, 0.0), m.nbytes)
    return found


def interpolated(points: Sequence[tuple[int, Computing]], numel: int) -> Computing:
    """The time for a bucket between, or beyond, the smallest and the largest that were measured."""
    (small, low), (large, high) = points[0], points[-1]
    part = (numel - small) / (large - small) if large > small else 0.0

    def between(a: float, b: float) -> float:
        return max(0.0, a + (b - a) * part)

    return Computing(between(low.before, high.before), between(low.after, high.after))


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
