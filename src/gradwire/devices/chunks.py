"""Cuts a tensor into chunks for several places and concatenates them, without gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import _memory
from gradwire.devices.accelerators import has_streams
from gradwire.devices.copying import HOST, copy_into
from gradwire.devices.placement import own_place

__all__ = ["chunk_copies", "concat", "concat_into", "cut"]

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def cut(tensor: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Views of a tensor, one after another along `dim`.

    Unlike those of torch.split they may be written where gradients are recorded.
    """
    ends = itertools.accumulate(sizes)
    return [tensor.narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True)]


def chunk_copies(
    tensor: Tensor,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[Tensor]:
    """For each place, its chunk: at the tensor's own place a view of it, elsewhere a copy."""
    chunks = cut(tensor, sizes, dim)
    own = own_place(tensor.device, devices)
    others = [place for place in range(len(devices)) if place != own]
    pinned = has_streams(tensor.device)
    targets = [
        _memory.empty_like(chunks[i], devices[i], pinned=pinned and devices[i] == HOST)
        for i in others
    ]
    chosen = [streams[i] for i in others] if streams else None
    copy_into(targets, [chunks[i] for i in others], chosen)
    for place, target in zip(others, targets, strict=True):
        chunks[place] = target
    return chunks


def concat(tensors: Sequence[Tensor], dim: int, device: torch.device) -> Tensor:
    """One tensor on a device: the others one after another along `dim`, in their memory format."""
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    result = _memory.empty(
        torch.Size(shape),
        first,
        device,
        memory_format=_common_format(tensors),
        pinned=device == HOST and any(has_streams(t.device) for t in tensors),
    )
    concat_into(result, tensors, dim)
    return result


def concat_into(result: Tensor, tensors: Sequence[Tensor], dim: int) -> None:
    """Write tensors one after another along `dim` into another."""
    copy_into(cut(result, [t.shape[dim] for t in tensors], dim), tensors)


def _common_format(tensors: Sequence[Tensor]) -> torch.memory_format:
    """The memory format that all of the tensors have."""
    for memory_format in _FORMATS:
        rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format)
        if rank in (None, tensors[0].dim()) and all(
            t.is_contiguous(memory_format=memory_format) for t in tensors
        ):
            return memory_format
    return torch.contiguous_format
