"""Assigns tensors to buckets: integers in, integers out.

Nothing here sees a tensor or a process group, so every rule can be tested without processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from gradwire.errors import ArgumentError


@dataclass(frozen=True)
class BucketPlan:
    """An assignment of tensors to buckets.

    Attributes:
        buckets: For each bucket, the indices of its tensors, in buffer order.
        limits: For each bucket, the size limit in bytes that applied when it was closed; 0
            for a bucket of one tensor that is sent alone.
    """

    buckets: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]


def plan_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[Hashable],
    devices: Sequence[Hashable],
    caps: Sequence[int],
    *,
    alone: Sequence[bool] = (),
    indices: Sequence[int] = (),
) -> BucketPlan:
    """Assign tensors to buckets by size, keeping dtypes and devices apart.

    Tensors are taken in order. Those of one (dtype, device) fill a bucket until its size reaches
    the cap, the last one included; then the bucket closes and the next cap applies to that
    pair. The last cap repeats. A tensor is never split.

    Args:
        sizes: Bytes of each tensor, ≥ 0.
        dtypes: Dtype of each tensor, or any hashable that compares as it does.
        devices: Device of each tensor, or any hashable that compares as it does.
        caps: Size limits in bytes, at least one, each > 0: for the first bucket of a pair, for the
            second, and so on.
        alone: Per tensor *index*, whether it gets a bucket of its own, as sparse gradients do;
            empty means none.
        indices: Index of each tensor in the plan; empty means 0, 1, 2, ….
            It decides the order of the buckets, too: when given, tensors are taken to become ready
            in this order, and buckets stay in the order in which they closed. Otherwise they are
            sorted by their smallest index.

    Returns:
        The plan. Every index is in exactly one bucket.

    Raises:
        ArgumentError: Lengths differ, or caps are empty or not positive.

    Example:
        >>> plan_buckets([400, 400, 400, 80], ["f32"] * 4, ["cpu"] * 4, caps=[400, 1000]).buckets
        ((0,), (1, 2, 3))
        >>> plan_buckets([40, 8, 40], ["f32", "i64", "f32"], ["cpu"] * 3, caps=[100]).buckets
        ((0, 2), (1,))
    """
    _check(sizes, dtypes, devices, caps, alone, indices)
    closed: list[tuple[tuple[int, ...], int]] = []
    filling: dict[tuple[Hashable, Hashable], _Filling] = {}
    order = indices or range(len(sizes))
    for index, size, key in zip(order, sizes, zip(dtypes, devices, strict=True), strict=True):
        if alone and alone[index]:
            closed.append(((index,), 0))
            continue
        bucket = filling.get(key)
        if bucket is None:
            bucket = filling[key] = _Filling([], 0, 0)
        bucket.members.append(index)
        bucket.size += size
        cap = caps[bucket.cap]
        if bucket.size >= cap:
            closed.append((tuple(bucket.members), cap))
            filling[key] = _Filling([], 0, min(bucket.cap + 1, len(caps) - 1))
    closed += [(tuple(b.members), caps[b.cap]) for b in filling.values() if b.members]
    if not indices:
        closed.sort(key=lambda bucket: min(bucket[0]))
    return BucketPlan(tuple(b for b, _ in closed), tuple(limit for _, limit in closed))


@dataclass(slots=True)
class _Filling:
    """The open bucket of one (dtype, device)."""

    members: list[int]
    size: int
    cap: int


def _check(
    sizes: Sequence[int],
    dtypes: Sequence[Hashable],
    devices: Sequence[Hashable],
    caps: Sequence[int],
    alone: Sequence[bool],
    indices: Sequence[int],
) -> None:
    n = len(sizes)
    for name, given in (("dtypes", dtypes), ("devices", devices)):
        if len(given) != n:
            raise ArgumentError(f"{name} has {len(given)} entries, sizes has {n}: give one each")
    if indices and (len(indices) != n or len(set(indices)) != n):
        raise ArgumentError(
            f"indices has {len(indices)} entries ({len(set(indices))} distinct), sizes has {n}: "
            "give one distinct index each, or none"
        )
    if alone and len(alone) <= max(indices, default=n - 1):
        raise ArgumentError(
            f"alone has {len(alone)} entries for indices up to {max(indices, default=n - 1)}: "
            "give one per index, or none"
        )
    if not caps or min(caps) <= 0:
        raise ArgumentError(f"caps is {list(caps)}: give at least one limit, each above 0 bytes")
    if n and min(sizes) < 0:
        raise ArgumentError(f"sizes has a negative entry, {min(sizes)}: sizes are bytes")
