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
    """Return the tensor's strides if it fills its memory without gaps or overlaps, else None.

    A buffer that follows these strides has its elements in the order of the tensor's memory, so
    that copies between them run straight through.

    Example:
        >>> memory_strides(torch.empty(2, 3).t())
        (1, 3)
        >>> memory_strides(torch.empty(4, 4)[:, :2]) is None
        True
    """
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
    """Return views into a flat buffer, one for each tensor of `like`, one after another.

    A view has its tensor's strides where those leave no gaps, so that its elements lie in that
    tensor's memory order, and row-major strides otherwise.

    Args:
        buffer: Contiguous 1-d tensor. Its dtype, which is that of the views, may differ from that
            of the tensors, as that of gradients that are sent in a smaller dtype does.
        like: Tensors with the shapes and strides; their values are not read.

    Raises:
        ArgumentError: The buffer is too short.

    Example:
        >>> buffer = torch.arange(5.0)
        >>> a, b = views(buffer, [torch.empty(2, 2), torch.empty(())])
        >>> a.tolist(), b.item()
        ([[0.0, 1.0], [2.0, 3.0]], 4.0)
    """
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
    """Return True if the tensor is contiguous and neither lazily conjugated nor negated.

    Example:
        >>> numbers = torch.tensor([1j, 2j, 3j, 4j])
        >>> is_as_read(numbers), is_as_read(numbers[::2]), is_as_read(numbers.conj())
        (True, False, False)
    """
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order as a contiguous 1-d tensor.

    Args:
        tensor: Tensor of any shape and strides.

    Returns:
        The tensor itself or a view of it if its memory has this form; otherwise a copy.

    Example:
        >>> flatten(torch.arange(6.0)[::2])
        tensor([0., 2., 4.])
    """
    if not is_as_read(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
