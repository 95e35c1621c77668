"""Sums of tensors of several devices, without gradients, in index order, in one pass over memory.

The sum is computed piece by piece: a piece of the result stays in the cache while the same piece of
each input is added to it. For k inputs of N bytes, (k+1)·N bytes cross the memory bus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire import _memory
from gradwire.buckets import memory_strides, views
from gradwire.devices.copying import buckets_of, copy_to, local, packed

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
    """Sum two or more strided tensors in index order, into another tensor.

    Inputs on other devices are copied one piece at a time.
    """
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
        total = copy_to(inputs[0], device)
        for other in inputs[1:]:
            total = total + local(other, device)
        return total
    result = _memory.empty_like(inputs[0], device)
    sum_into(result, inputs)
    return result


def summed_coalesced(
    replicas: Sequence[Sequence[Tensor]], device: torch.device, buffer_size: int
) -> list[Tensor]:
    """Return, for each position, the sum over the replicas; dense results share buffers.

    The sum at a position is sparse if the tensors of all replicas are sparse, and dense if only
    some are.

    Args:
        replicas: List of k lists of n tensors.
        device: Device of the sums.
        buffer_size: Number of bytes after which a buffer is closed.
    """
    if len(replicas) == 1:
        return [local(t, device) for t in replicas[0]]
    positions = list(zip(*replicas, strict=True))
    sparse = [all(t.layout != torch.strided for t in tensors) for tensors in positions]
    firsts = replicas[0]
    results = list(firsts)
    for bucket in buckets_of(firsts, sparse, buffer_size):
        if sparse[bucket[0]]:
            sums = [summed(positions[bucket[0]], device)]
        else:
            sums = _bucket_sums([[_dense(r[i]) for i in bucket] for r in replicas], device)
        for i, result in zip(bucket, sums, strict=True):
            results[i] = result
    return results


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _bucket_sums(replicas: list[list[Tensor]], device: torch.device) -> list[Tensor]:
    """Sum the tensors of one bucket, given as k lists, to one list."""
    if len(replicas[0]) == 1:
        return [summed([tensors[0] for tensors in replicas], device)]
    replicas = [_arrived(tensors, device) for tensors in replicas]
    like = replicas[0]
    flat = _memory.empty((sum(t.numel() for t in like),), like[0], device)
    results = views(flat, like, keep_strides=True)
    for group in _groups(results):
        if len(group) == 1:
            sum_into(results[group[0]], [tensors[group[0]] for tensors in replicas])
            continue
        sums = [results[i] for i in group]
        torch._foreach_copy_(sums, [replicas[0][i] for i in group])
        for tensors in replicas[1:]:
            torch._foreach_add_(sums, [tensors[i] for i in group])
    # `.data` gives each view its own version counter.
    return [result.data for result in results]


def _arrived(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on a device: themselves, or copies made in one transfer."""
    if tensors[0].device == device:
        return tensors
    flat, _ = packed(tensors)
    return views(copy_to(flat, device), tensors, keep_strides=True)


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield runs of tensors that fit the cache together, to be added in one call."""
    group: list[int] = []
    total = 0
    for i, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if group and total + size > PIECE:
            yield group
            group, total = [], 0
        group.append(i)
        total += size
    if group:
        yield group
