"""Copies between devices, without gradients: of one tensor, of many in buckets, of chunks.

Copies keep a tensor's strides if these leave no gaps. They never have the conjugate or negative
bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire._memory import advised
from gradwire.buckets import memory_strides, plan_buckets, views
from gradwire.devices.placement import own_place

HOST = torch.device("cpu")


def copy_into(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    streams: Sequence[torch.Stream | None] | None = None,
) -> None:
    """Copy each source into its target, all at the same time; the copies are complete on return."""
    to_host = set()
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.device == HOST and has_streams(target.device):
            from_host(source, target, streams[i] if streams else None)
        elif target is not source:
            if target.device == HOST and has_streams(source.device):
                to_host.add(source.device)
            target.copy_(source, non_blocking=has_streams(source.device))
    for device in to_host:
        torch.accelerator.current_stream(device).synchronize()


def local(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device: the tensor itself if it is there, else a copy."""
    return tensor if tensor.device == device else copies(tensor, [device])[0]


def copies(tensor: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Return a copy of a tensor for each device, each in new storage."""
    if tensor.layout != torch.strided:
        return [tensor.to(device, copy=True) for device in devices]
    targets = [_new_on(tensor, device) for device in devices]
    copy_into(targets, [tensor] * len(targets))
    return targets


def _new_on(tensor: Tensor, device: torch.device) -> Tensor:
    # an accelerator writes to pinned host memory at full speed
    pinned = has_streams(tensor.device) and device == HOST
    return advised(torch.empty_like(tensor, device=device, pin_memory=pinned))


def _flat_for(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return a new flat tensor for tensors of one dtype, and a view for each of them."""
    size = sum(t.numel() for t in tensors)
    flat = advised(torch.empty(size, dtype=tensors[0].dtype, device=device))
    return flat, views(flat, tensors)


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors of one dtype into a flat tensor; return it, and a view for each tensor."""
    flat, inside = _flat_for(tensors, tensors[0].device)
    torch._foreach_copy_(inside, list(tensors))
    return flat, inside


def buckets_of(
    tensors: Sequence[Tensor], sparse: Sequence[bool], buffer_size: int
) -> Sequence[Sequence[int]]:
    """Return the indices of the tensors in each buffer: of one dtype; sparse tensors are alone."""
    sizes = [0 if t.layout != torch.strided else t.nbytes for t in tensors]
    dtypes, same_device = [t.dtype for t in tensors], [None] * len(tensors)
    return plan_buckets(sizes, dtypes, same_device, [buffer_size], alone=sparse).buckets


def copies_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    buffer_size: int,
) -> list[list[Tensor]]:
    """Return the tensors for each device: copies, or themselves for their device's first entry."""
    # Tensors of one dtype share buffers. A buffer is filled once, on the tensors' device. If the
    # list has a further entry for that device, this first buffer is already the storage of its
    # copies.
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
    """Return the copies of a bucket's tensors for each device."""
    if len(members) == 1:
        return [[copy] for copy in copies(members[0], devices)]
    flat, inside = packed(members)
    first = own_place(flat.device, devices)
    flats = copies(flat, [d for i, d in enumerate(devices) if i != first])
    replicas = [views(f, members) for f in flats]
    if first is not None:
        replicas.insert(first, inside)
    # `.data` gives each view its own version counter.
    return [[view.data for view in replica] for replica in replicas]


# --- accelerators: side streams, pinned memory ---
#
# PyTorch's copy between two accelerators orders the streams of both. Between the host and an
# accelerator, these functions do.


def has_streams(device: torch.device) -> bool:
    """Return True if copies to and from a device can overlap with other work."""
    return device.type in ("cuda", "xpu")


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the side stream on which a device receives copies from the host."""
    return torch.Stream(device)


def from_host(source: Tensor, target: Tensor, stream: torch.Stream | None) -> None:
    """Copy a CPU tensor into an accelerator's tensor, on a side stream, by default a shared one."""
    # The copy waits for work queued on the device's current stream, and work queued there
    # afterwards waits for the copy. From pinned memory, the call returns before the copy is
    # complete: do not write to the source until the device has been synchronized.
    side = stream or _copy_stream(target.device)
    current = torch.accelerator.current_stream(target.device)
    side.wait_stream(current)
    with side:
        target.copy_(source, non_blocking=True)
    # The target was allocated on the current stream: the allocator must not reuse its memory before
    # the side stream has finished with it.
    target.record_stream(side)
    current.wait_stream(side)


# --- chunks ---


def cut(tensor: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Split a tensor into consecutive views along `dim`."""
    # Unlike those of torch.split, the views may be written to while gradients are recorded.
    ends = itertools.accumulate(sizes)
    return [tensor.narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True)]


def chunk_copies(
    tensor: Tensor,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[Tensor]:
    """Return a chunk for each device: a view for the tensor's own device, copies for others."""
    chunks = cut(tensor, sizes, dim)
    own = own_place(tensor.device, devices)
    others = [place for place in range(len(devices)) if place != own]
    targets = [_new_on(chunks[i], devices[i]) for i in others]
    chosen = [streams[i] for i in others] if streams else None
    copy_into(targets, [chunks[i] for i in others], chosen)
    for place, target in zip(others, targets, strict=True):
        chunks[place] = target
    return chunks


def concat(tensors: Sequence[Tensor], dim: int, device: torch.device) -> Tensor:
    """Concatenate tensors along `dim` on a device, keeping their common memory format."""
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    result = torch.empty(
        shape,
        dtype=first.dtype,
        device=device,
        memory_format=_common_format(tensors),
        pin_memory=device == HOST and any(has_streams(t.device) for t in tensors),
    )
    advised(result)
    copy_into(cut(result, [t.shape[dim] for t in tensors], dim), tensors)
    return result


def _common_format(tensors: Sequence[Tensor]) -> torch.memory_format:
    """Return the memory format that all tensors have, contiguous if there is none."""
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
        if all(t.is_contiguous(memory_format=memory_format) for t in tensors):
            return memory_format
    return torch.contiguous_format


PIECE = 2 << 20
"""Size in bytes of a piece of the result on the CPU: it fits the caches of two cores."""


def _piece_bytes(result: Tensor) -> int:
    if result.device.type == "cuda":
        # Launches cost more on a GPU, and its cache is larger.
        return max(PIECE, torch.cuda.get_device_properties(result.device).L2_cache_size // 4)
    return PIECE if result.device.type == "cpu" else result.numel() * result.element_size()


def _pieces(result: Tensor, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the pieces of the result, each with the same piece of every input."""
    strides = memory_strides(result)
    length = max(1, _piece_bytes(result) // result.element_size())
    if result.numel() <= length or strides is None or any(t.stride() != strides for t in inputs):
        yield (result, *inputs)
        return
    flat = [torch.split(t.as_strided((t.numel(),), (1,)), length) for t in (result, *inputs)]
    yield from zip(*flat, strict=True)


def sum_into(result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Sum two or more strided tensors in index order; copy those of other devices in pieces."""
    for piece, first, second, *rest in _pieces(result, inputs):
        device = piece.device
        torch.add(local(first, device), local(second, device), out=piece)
        for other in rest:
            piece.add_(local(other, device))


def summed(inputs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum tensors on a device, in index order; a single input is returned unchanged."""
    if len(inputs) == 1:
        return local(inputs[0], device)
    if inputs[0].layout != torch.strided:
        total = copies(inputs[0], [device])[0]
        for other in inputs[1:]:
            total = total + local(other, device)
        return total
    result = advised(torch.empty_like(inputs[0], device=device))
    sum_into(result, inputs)
    return result


def summed_coalesced(
    replicas: Sequence[Sequence[Tensor]], device: torch.device, buffer_size: int
) -> list[Tensor]:
    """Return, for each position, the sum over the replicas; dense results share buffers."""
    if len(replicas) == 1:
        return [local(t, device) for t in replicas[0]]
    positions = list(zip(*replicas, strict=True))
    sparse = [all(t.layout != torch.strided for t in tensors) for tensors in positions]
    results = list(replicas[0])
    for bucket in buckets_of(replicas[0], sparse, buffer_size):
        if sparse[bucket[0]]:
            sums = [summed(positions[bucket[0]], device)]
        else:
            sums = _bucket_sums([[r[i].to_dense() for i in bucket] for r in replicas], device)
        for i, result in zip(bucket, sums, strict=True):
            results[i] = result
    return results


def _bucket_sums(replicas: list[list[Tensor]], device: torch.device) -> list[Tensor]:
    """Sum the tensors of one bucket, given as k lists, to one list."""
    if len(replicas[0]) == 1:
        return [summed([tensors[0] for tensors in replicas], device)]
    for i, tensors in enumerate(replicas):
        if tensors[0].device != device:
            # in one transfer
            replicas[i] = views(local(packed(tensors)[0], device), tensors)
    _, results = _flat_for(replicas[0], device)
    # of at most one piece together, to be added in one call; longer ones alone, in pieces
    long = [result.nbytes > PIECE // 2 for result in results]
    for group in buckets_of(results, long, PIECE // 2):
        if len(group) == 1:
            sum_into(results[group[0]], [tensors[group[0]] for tensors in replicas])
            continue
        sums = [results[i] for i in group]
        torch._foreach_copy_(sums, [replicas[0][i] for i in group])
        for tensors in replicas[1:]:
            torch._foreach_add_(sums, [tensors[i] for i in group])
    # `.data` gives each view its own version counter.
    return [result.data for result in results]
