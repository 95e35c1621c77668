"""Flat memory in which tensors of shards are added up and sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.buckets import memory_strides


class Column:
    """Tensors that are reduced in one dtype, contiguous in flat memory.

    Args:
        dtype: Dtype of the flat memory.
        like: The tensors.
        add: Function that writes the combination of two flat tensors to the first.
        width: Number of members, and of slices of the flat memory.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        like: Sequence[Tensor],
        add: Callable[[Tensor, Tensor], Tensor],
        width: int,
    ) -> None:
        self.add, self.width = add, width
        self.dtype, self.shapes = dtype, [t.shape for t in like]
        self.sizes = [t.numel() for t in like]
        self.numel = sum(self.sizes)
        self.chunk = -(-self.numel // width)
        self._spare: list[Tensor] = []
        # reused in each step, because new pages cost as much as the copies into them
        self.received: Tensor | None = None
        self.result = torch.empty(0, dtype=torch.float32)

    @property
    def averaged(self) -> bool:
        """True if the tensors are added, rather than the largest elements taken."""
        return self.add is add_to_left

    def take(self) -> Tensor:
        """Return flat memory with undefined values."""
        if self._spare:
            return self._spare.pop()
        flat = torch.empty(self.chunk * self.width, dtype=self.dtype)
        flat[self.numel :].zero_()
        return flat

    def give(self, flat: Tensor) -> None:
        """Return memory for reuse."""
        self._spare.append(flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as views of flat memory."""
        parts = flat[: self.numel].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        """Add the second tensor to the first, and reuse the memory of the second."""
        total = self.add(left, right)
        self.give(right)
        return total


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of a dtype are added: at least single precision."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return dtype


def by_sum_dtype(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Yield each dtype of a sum, with the indices of the tensors added in it."""
    sums = [_sum_dtype(dtype) for dtype in dtypes]
    for found in dict.fromkeys(sums):
        yield found, [index for index, dtype in enumerate(sums) if dtype == found]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def as_gradient(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean on its parameter's device, with its strides and its gradient's dtype.

    Strides that leave gaps are ignored. The result shares memory if nothing has to change.
    """
    strides, dtype = memory_strides(parameter) or mean.stride(), gradient_dtype(parameter)
    if strides == mean.stride() and dtype == mean.dtype and parameter.device == mean.device:
        return mean
    own = torch.empty_strided(mean.shape, strides, dtype=dtype, device=parameter.device)
    return own.copy_(mean)


def add_to_left(left: Tensor, right: Tensor) -> Tensor:
    """Write the sum to the left tensor, and return it."""
    return left.add_(right)


def larger_to_left(left: Tensor, right: Tensor) -> Tensor:
    """Write the larger elements to the left tensor, and return it."""
    return torch.maximum(left, right, out=left)


def divide(flat: Tensor, count: float) -> Tensor:
    """Divide in place, and return the tensor; zeros if the count is 0."""
    if count == 1:
        return flat
    return flat.div_(count) if count else flat.zero_()


def by_slice(flats: Sequence[Tensor], chunk: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return flat tensors in the order in which an all_to_all sends their slices."""
    if not flats:
        return torch.empty(0, dtype=dtype)
    return torch.stack([flat.view(size, chunk) for flat in flats], dim=1).view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bytes, which every backend can send."""
    return tensor.view(torch.uint8)


def splits(column: Column, received: Sequence[int], rank: int) -> tuple[Any, Any]:
    """Return the numbers of bytes to receive from, and to send to, each member."""
    width = column.dtype.itemsize
    sent = received[rank] * width
    return [count * width for count in received], [sent] * column.width
