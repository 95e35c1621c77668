"""Flat buffers: one-dimensional, contiguous, without lazy conjugation or negation."""

from __future__ import annotations

from torch import Tensor

__all__ = ["flatten", "is_as_read"]


def is_as_read(tensor: Tensor) -> bool:
    """Return True if the tensor is contiguous and neither lazily conjugated nor negated.

    Example:
        >>> import torch
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
        >>> import torch
        >>> flatten(torch.arange(6.0)[::2])
        tensor([0., 2., 4.])
    """
    if not is_as_read(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
