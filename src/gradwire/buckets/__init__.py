"""Buckets: which tensors share a flat buffer (`plan`), and views of tensors in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.buckets.plan import BucketPlan, plan_buckets
from gradwire.errors import ArgumentError

# The other names are for other packages of gradwire, and not public.
__all__ = ["BucketPlan", "plan_buckets"]


def memory_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the tensor's strides if it fills its memory without gaps or overlaps, else None."""
    # A buffer with these strides has its elements in the order of the tensor's memory, so that
    # copies between them run straight through.
    if tensor.is_contiguous():
        return tensor.stride()
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != span:
            return None
        span *= size
    return tensor.stride()


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views into a contiguous 1-d buffer, one after another, for the tensors of `like`."""
    # The buffer's dtype may differ from the tensors', as gradients may be sent in a smaller dtype.
    # A view has its tensor's strides where those leave no gaps, so that its elements lie in that
    # tensor's memory order.
    length = sum(t.numel() for t in like)
    if buffer.dim() != 1 or len(buffer) < length:
        raise ArgumentError(
            f"buffer has shape {tuple(buffer.shape)}: these {len(like)} tensors need one dimension "
            f"of at least {length} elements"
        )
    result, start = [], buffer.storage_offset()
    for t in like:
        strides = memory_strides(t)
        if strides is None:
            strides = torch.empty(t.shape, dtype=t.dtype, device="meta").stride()
        result.append(buffer.as_strided(t.shape, strides, start))
        start += t.numel()
    return result


def is_as_read(tensor: Tensor) -> bool:
    """Return True if the tensor is contiguous and neither lazily conjugated nor negated."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order as a 1-d tensor, without a copy if possible."""
    if not is_as_read(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
