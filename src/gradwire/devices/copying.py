"""Moves tensors between places, without gradients: one copy, copies to many places, in buckets.

Copies keep a tensor's strides where those leave no gaps, and never its conjugate or negative bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import _memory
from gradwire.buckets.pack import views
from gradwire.buckets.plan import plan_buckets
from gradwire.devices.accelerators import (
    from_host,
    has_streams,
    nccl_broadcast,
    nccl_takes,
    wait_for,
)
from gradwire.devices.placement import own_place

__all__ = [
    "HOST",
    "buckets_of",
    "copies",
    "copies_coalesced",
    "copy_into",
    "copy_to",
    "local",
    "packed",
]

HOST = torch.device("cpu")


def copy_into(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    streams: Sequence[torch.Stream | None] | None = None,
) -> None:
    """Copy each source into its target; every link is busy at once, the values are there after."""
    to_host = set()
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.device == HOST and has_streams(target.device):
            from_host(source, target, streams[i] if streams else None)
        elif target is not source:
            if target.device == HOST and has_streams(source.device):
                to_host.add(source.device)
            target.copy_(source, non_blocking=has_streams(source.device))
    wait_for(to_host)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor on a device, dense or sparse, in storage of its own."""
    return copies(tensor, [device])[0]


def local(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: itself if it is there."""
    return tensor if tensor.device == device else copy_to(tensor, device)


def copies(tensor: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """A copy of a tensor for each place, each in storage of its own."""
    if tensor.layout != torch.strided:
        return [tensor.to(device, copy=True) for device in devices]
    # Pinned memory is what lets a device write to the host at full speed.
    streamed = has_streams(tensor.device)
    targets = [
        _memory.empty_like(tensor, device, pinned=streamed and device == HOST) for device in devices
    ]
    if len(targets) > 1 and nccl_takes([tensor, *targets]):
        nccl_broadcast(tensor, targets)
    else:
        copy_into(targets, [tensor] * len(targets))
    return targets


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor of the values of several of one dtype, and each one's view in it."""
    size = sum(t.numel() for t in tensors)
    flat = _memory.empty((size,), tensors[0], tensors[0].device)
    inside = views(flat, tensors, keep_strides=True)
    torch._foreach_copy_(inside, list(tensors))
    return flat, inside


def buckets_of(
    tensors: Sequence[Tensor], sparse: Sequence[bool], buffer_size: int
) -> Sequence[Sequence[int]]:
    """The indices of the tensors that share a buffer: of one dtype; a sparse one shares none."""
    sizes = [
        0 if alone else t.numel() * t.element_size()
        for t, alone in zip(tensors, sparse, strict=True)
    ]
    dtypes = [t.dtype for t in tensors]
    same_device = [None] * len(dtypes)
    return plan_buckets(sizes, dtypes, same_device, [buffer_size], alone=sparse).buckets


def copies_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    buffer_size: int,
) -> list[list[Tensor]]:
    """For each place, each tensor: at the tensors' own place they themselves, elsewhere copies.

    Tensors of one dtype share buffers. A buffer is filled once on the tensors' device, and that
    first one is already the storage of a replica, if another place is on the same device.

    Args:
        tensors: On one device.
        devices: The places.
        buffer_size: Bytes after which a buffer is closed.
    """
    own = own_place(tensors[0].device, devices) if tensors else None
    others = [place for place in range(len(devices)) if place != own]
    replicas: list[list[Tensor]] = [list(tensors) for _ in devices]
    if not others:
        return replicas
    sparse = [t.layout != torch.strided for t in tensors]
    targets = [devices[place] for place in others]
    for bucket in buckets_of(tensors, sparse, buffer_size):
        members = [tensors[i] for i in bucket]
        for place, results in zip(others, _bucket_copies(members, targets), strict=True):
            for i, result in zip(bucket, results, strict=True):
                replicas[place][i] = result
    return replicas


def _bucket_copies(members: list[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """The copies of one bucket's tensors for each place."""
    if len(members) == 1:
        return [[copy] for copy in copies(members[0], devices)]
    flat, inside = packed(members)
    first = own_place(flat.device, devices)
    flats = copies(flat, [d for i, d in enumerate(devices) if i != first])
    replicas = [views(f, members, keep_strides=True) for f in flats]
    if first is not None:
        replicas.insert(first, inside)
    # `.data` gives each view a version counter of its own.
    return [[view.data for view in replica] for replica in replicas]
