"""Checks of callers' tensors, their conversion to 1-d contiguous ones and back, and copies."""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from gradwire.shm.header import NUMBERS

T = TypeVar("T")
_PLAIN = {Tensor, torch.nn.Parameter}


def check_transfer(sources: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Check tensors that are read and tensors that are written; all must have one dtype."""
    check_tensors(sources)
    check_results(results)
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in (*sources, *results)))
    if len(dtypes) > 1:
        raise ArgumentTypeError(
            f"tensors of one operation have dtypes {dtypes[0]} and {dtypes[1]}: pass one dtype"
        )


def check_results(tensors: Sequence[Tensor]) -> None:
    """Check tensors that are written."""
    check_tensors(tensors)
    for tensor in tensors:
        if tensor._is_zerotensor():
            raise ArgumentError("a tensor of zeros is without memory: pass its clone()")
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise ArgumentError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has "
                "elements that share memory and cannot be written: pass its clone()"
            )


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raise unless shm supports all tensors."""
    if torch._C._are_functorch_transforms_active() and any(
        map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)
    ):
        raise ArgumentTypeError(
            "a tensor belongs to a transform of torch.func, such as vmap, which process groups do "
            "not support: call the function of gradwire.collectives instead"
        )
    for tensor in tensors:
        if (  # one condition for ordinary tensors: a list may contain thousands
            isinstance(tensor, Tensor)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and (
                type(tensor) in _PLAIN
                or not (hasattr(tensor, "to_local") or hasattr(tensor, "fake_mode"))
            )
            and tensor.dtype in NUMBERS
            and (tensor.data_ptr() or not tensor.numel() or tensor._is_zerotensor())
        ):
            continue
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"got a {type(tensor).__name__}: pass tensors")
        if tensor.device.type != "cpu":
            raise NotSupportedError(
                f"shm supports CPU tensors, but one is on {tensor.device}: make a second group "
                "with that device's backend, for CUDA new_group(backend='nccl'), and "
                "pass it with such tensors"
            )
        if hasattr(tensor, "to_local"):
            raise ArgumentTypeError("got a DTensor: pass its to_local()")
        if hasattr(tensor, "fake_mode"):
            raise ArgumentTypeError("got a FakeTensor, which has no values: pass real tensors")
        if tensor.is_nested:
            raise ArgumentError("a tensor is nested: pass its parts")
        if tensor.layout != torch.strided:
            raise ArgumentError(f"a tensor has layout {tensor.layout}: pass dense tensors")
        if tensor.dtype not in NUMBERS:
            raise ArgumentError(f"a tensor has dtype {tensor.dtype}, which shm does not support")
        raise ArgumentError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory, as its storage was freed: "
            "gather a sharded module's parameters, for example, before using them"
        )


def is_ordinary(tensor: Tensor) -> bool:
    """Return True for a contiguous CPU tensor that needs no conversion and no further checks."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (
            tensor.requires_grad
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_inference()
            or torch._C._are_functorch_transforms_active()
        )
        and (tensor.data_ptr() != 0 or not tensor.numel())
    )


def flat_of(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order: a view if the tensor is contiguous, else a copy."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat._is_zerotensor():
        flat = flat.clone()
    elif not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.dim() == 1 and flat.stride(0) == 1:
        return flat
    if flat.numel() <= 1:
        # contiguous with any stride, but a view as bytes needs stride 1
        return flat.as_strided((flat.numel(),), (1,))
    return flat.view(-1)


def write_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy the result of `flat_of(tensor)` back if it was not a view."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr() and flat.numel():
        tensor.detach().copy_(flat.view(tensor.shape))


def write_all_back(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
    """Call `write_back` for several tensors."""
    for tensor, flat in zip(tensors, flats, strict=True):
        write_back(tensor, flat)


def equal_parts(flat: Tensor, size: int) -> list[Tensor]:
    """Return views of `size` equal parts of a 1-d tensor."""
    return list(flat.view(size, -1).unbind(0))


def common_base(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return the first of 1-d tensors that are adjacent in one storage, in order; else None."""
    for before, after in pairwise(blocks):
        together = after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        if not together or after.data_ptr() != before.data_ptr() + before.nbytes:
            return None
    return blocks[0]


def only(items: Sequence[T]) -> T:
    """Return the only item of a list; torch's interface has lists for several devices, shm one."""
    if len(items) != 1:
        raise ArgumentError(f"got {len(items)} tensors (or lists) for this rank: pass one")
    return items[0]


def checksum(numbers: Iterable[int]) -> int:
    """Return a checksum of integers, for the header."""
    return zlib.crc32(array("q", numbers))


def checksum_of(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of a list's dtypes and sizes for the header; 0 for a single tensor."""
    if len(tensors) < 2:
        return 0
    return checksum([n for tensor in tensors for n in (NUMBERS[tensor.dtype], tensor.numel())])


def paired(outputs: Sequence[T], inputs: Sequence[Tensor]) -> list[tuple[T, Tensor]]:
    """Return pairs of an output and its input."""
    if len(outputs) != len(inputs):
        raise ArgumentError(f"got {len(outputs)} outputs for {len(inputs)} inputs: pass one each")
    return list(zip(outputs, inputs, strict=True))


def one_each(tensors: list[Tensor], size: int, name: str) -> list[Tensor]:
    """Return a list of tensors, one for each rank."""
    if len(tensors) != size:
        raise ArgumentError(f"{name} has {len(tensors)} tensors: give one for each of {size} ranks")
    return tensors


def check_parts(*, whole: Tensor, part: Tensor, size: int) -> None:
    """Raise unless one tensor has as many elements as `size` of another."""
    if whole.numel() != part.numel() * size:
        raise ArgumentError(
            f"the larger tensor has {whole.numel()} elements: it needs {size} times "
            f"{part.numel()} of the smaller"
        )


def row_counts(tensor: Tensor, rows: Sequence[int], size: int, name: str) -> list[int]:
    """Return the elements in each rank's part: of `rows` rows each, or equal parts if empty."""
    total = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if total % size:
            raise ArgumentError(
                f"{total} rows cannot be divided into {size} equal parts: give {name}"
            )
        return [tensor.numel() // size] * size
    if len(rows) != size or sum(rows) != total or min(rows) < 0:
        raise ArgumentError(
            f"{name} is {list(rows)}: give {size} numbers of rows that add up to {total}"
        )
    each = tensor.numel() // total if total else 0
    return [count * each for count in rows]


_MOVED_BYTES = 32 << 10
"""Size from which the C library copies: pieces in the last-level cache at 10 GB/s, torch at 6, as
memmove does not read what it overwrites. Other data is copied equally fast."""


def copy(target: Tensor, source: Tensor) -> None:
    """Copy values, unless both tensors are the same memory; they may overlap."""
    to, start, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
    assert source.nbytes == nbytes
    if to == start:
        return
    # `copy_` raises if the two overlap; an address of 0: zeros without memory
    if (nbytes < _MOVED_BYTES and abs(to - start) >= nbytes) or not (to and start):
        target.copy_(source)
        return
    ctypes.memmove(to, start, nbytes)
    count_write(target)


def count_write(target: Tensor) -> None:
    """Increment a tensor's version after a write, as `copy_` does, so that autograd detects it."""
    if not target.is_inference():
        increment_version(target)


def overwrites(
    blocks: Sequence[Tensor], results: Sequence[Tensor | None], rank: int, own: Tensor | None
) -> bool:
    """Return True if writing the results would overwrite blocks that other ranks still read."""
    reads = [_span(block) for block in blocks]
    writes = [
        _span(result)
        for source, result in enumerate(results)
        if result is not None
        and (source != rank or own is None or result.data_ptr() != own.data_ptr())
    ]
    return any(a < d and c < b for a, b in reads for c, d in writes)


def may_overlap(tensors: Sequence[Tensor]) -> bool:
    """Return True if some tensors overlap, judged by their first and last elements."""
    if len(tensors) < 2:
        return False
    spans = sorted(map(_hull_of, tensors))
    return any(start < stop for (_, stop), (start, _) in pairwise(spans))


def _hull_of(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_contiguous():
        return _span(tensor)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last, start = sum((length - 1) * stride for length, stride in steps), tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize


def _span(flat: Tensor) -> tuple[int, int]:
    start = flat.data_ptr()
    return start, start + flat.nbytes
