"""Sums tensors of several places, without gradients, in index order and in one pass over memory.

The sum is taken piece by piece: a piece of the result stays in the cache while the same piece of
each input is added to it. For k inputs of N bytes, (k+1)·N bytes cross the memory bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradwire.buckets.pack import memory_strides, views
from gradwire.buckets.plan import plan_buckets
from gradwire.devices import _memory
from gradwire.devices.copying import copy_to, local, packed

__all__ = ["sum_into", "summed", "summed_coalesced"]

_CACHE = 1 << 20
"""Bytes of a result that stay in one core's cache while inputs are added to them."""

_SERIAL = 31 << 10
"""Elements, a little below the 32768 from which PyTorch splits an op among threads."""

_SHARE = 4 << 20
"""Bytes of a result that make it worth another thread."""

_MOST_THREADS = 8


def _piece_length(result: Tensor, inputs: Sequence[Tensor]) -> int:
    """How many elements of the result are worked on at a time."""
    if result.device.type == "cuda":
        # Launches cost more on a GPU, and its cache is larger.
        cache = torch.cuda.get_device_properties(result.device).L2_cache_size // 4
        return max(2 * _CACHE, cache) // result.element_size()
    if result.device.type != "cpu":
        return max(result.numel(), 1)
    if any(t.device != result.device for t in inputs):
        return 2 * _CACHE // result.element_size()
    return _SERIAL


def _chunks(result: Tensor, inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The result's chunks, each with the same chunk of every input; flat if all lie alike."""
    strides = memory_strides(result)
    if strides is None or any(t.stride() != strides for t in inputs):
        return [(result, *inputs)]
    flat = [t.as_strided((t.numel(),), (1,)) for t in (result, *inputs)]
    length = max(_piece_length(result, inputs), _CACHE // result.element_size())
    return list(zip(*(torch.split(t, length) for t in flat), strict=True))


def _add_chunk(chunk: tuple[Tensor, ...]) -> None:
    """Add a chunk's inputs into its result, piece by piece if it is flat."""
    result, *inputs = chunk
    length = _piece_length(result, inputs)
    if result.dim() != 1 or result.numel() <= length or not result.is_contiguous():
        _add(result, inputs)
        return
    for piece, *others in zip(*(torch.split(t, length) for t in chunk), strict=True):
        _add(piece, others)


def _add(result: Tensor, inputs: Sequence[Tensor]) -> None:
    first, second, *rest = inputs
    torch.add(local(first, result.device), local(second, result.device), out=result)
    for other in rest:
        result.add_(local(other, result.device))


def _add_group(sums: list[Tensor], replicas: Sequence[Sequence[Tensor]]) -> None:
    """Add small tensors together, in one call for each replica."""
    torch._foreach_copy_(sums, list(replicas[0]))
    for tensors in replicas[1:]:
        torch._foreach_add_(sums, list(tensors))


def _side_by_side(jobs: Sequence[Callable[[], None]], size: int, tensors: Sequence[Tensor]) -> None:
    """Run jobs that write `size` bytes; on the CPU in threads, if it is worth it.

    Threads of our own that run pieces without interruption, not those of PyTorch's ops: an op ends
    when the slowest of its threads does. Where another program has a core, the many ops on pieces
    would each wait for it.
    """
    threads = min(torch.get_num_threads(), _MOST_THREADS, size // _SHARE)
    elsewhere = any(t.device.type != "cpu" for t in tensors)
    # Forward mode is a matter of the thread that began it.
    if threads < 2 or elsewhere or forward_ad._current_level >= 0:
        for job in jobs:
            job()
        return
    inference = torch.is_inference_mode_enabled()

    def run(share: Sequence[Callable[[], None]]) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            for job in share:
                job()

    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = [pool.submit(run, jobs[i::threads]) for i in range(1, threads)]
        run(jobs[::threads])
        for helper in helpers:
            helper.result()


def sum_into(result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Write the sum of at least two strided tensors, taken in index order, into another.

    Inputs elsewhere are copied over a piece at a time.
    """
    jobs = [partial(_add_chunk, chunk) for chunk in _chunks(result, inputs)]
    _side_by_side(jobs, result.numel() * result.element_size(), [result, *inputs])


def summed(inputs: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of tensors on a device, in index order; one input is returned as it is."""
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
    """For each position, the sum over the replicas; the dense results share buffers.

    A position whose tensors are sparse on all replicas has a sparse sum; sparse on some, a dense
    one.

    Args:
        replicas: k lists of n tensors.
        device: Where the sums go.
        buffer_size: Bytes after which a buffer is closed.
    """
    if len(replicas) == 1:
        return [local(t, device) for t in replicas[0]]
    positions = list(zip(*replicas, strict=True))
    sparse = [all(t.layout != torch.strided for t in tensors) for tensors in positions]
    firsts = replicas[0]
    results = list(firsts)
    plan = plan_buckets(
        [0 if s else t.numel() * t.element_size() for s, t in zip(sparse, firsts, strict=True)],
        [t.dtype for t in firsts],
        [device] * len(firsts),
        [buffer_size],
        alone=sparse,
    )
    for bucket in plan.buckets:
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
    """The sums of one bucket: k lists of tensors to one list."""
    if len(replicas[0]) == 1:
        return [summed([tensors[0] for tensors in replicas], device)]
    replicas = [_arrived(tensors, device) for tensors in replicas]
    like = replicas[0]
    flat = _memory.empty((sum(t.numel() for t in like),), like[0], device)
    results = views(flat, like, keep_strides=True)
    jobs: list[Callable[[], None]] = []
    for group in _groups(results):
        if len(group) == 1:
            inputs = [tensors[group[0]] for tensors in replicas]
            jobs += [partial(_add_chunk, chunk) for chunk in _chunks(results[group[0]], inputs)]
        else:
            columns = [[tensors[i] for i in group] for tensors in replicas]
            jobs.append(partial(_add_group, [results[i] for i in group], columns))
    _side_by_side(jobs, flat.numel() * flat.element_size(), [flat])
    # `.data` gives each view a version counter of its own.
    return [result.data for result in results]


def _arrived(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a device: themselves, or their copies after one transfer."""
    if tensors[0].device == device:
        return tensors
    flat, _ = packed(tensors)
    return views(copy_to(flat, device), tensors, keep_strides=True)


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Runs of tensors that fit the cache together, so that they can be added in one call.

    One that is worked on in pieces is a run of its own.
    """
    group: list[int] = []
    room = _CACHE
    for i, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if tensor.numel() > _piece_length(tensor, ()):
            yield [i]
            continue
        if group and room < size:
            yield group
            group, room = [], _CACHE
        group.append(i)
        room -= size
    if group:
        yield group
