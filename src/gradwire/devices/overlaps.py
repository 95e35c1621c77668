"""Whether what is written with `out=` lies over what is still to be read, or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ArgumentError

__all__ = ["check_apart", "check_writable", "same_place", "share_memory"]


def check_apart(
    writes: Sequence[Tensor],
    reads: Sequence[Tensor],
    write_names: Sequence[str],
    read_names: Sequence[str],
) -> None:
    """Refuse results over each other or over a source, when each source is copied into its result.

    A result may be the memory of its own source. Results of one name are parts of one tensor.
    """
    for i, write in enumerate(writes):
        check_writable(write, write_names[i])
        for j in range(i):
            # parts that are columns would be looked at element by element
            if write_names[i] != write_names[j] and share_memory(write, writes[j]):
                raise ArgumentError(
                    f"{write_names[i]} shares memory with {write_names[j]}: one would be written "
                    "over the other. Give tensors that lie apart"
                )
        if same_place(write, reads[i]):
            continue  # it has its values already
        for j, read in enumerate(reads):
            if share_memory(write, read):
                raise ArgumentError(
                    f"{write_names[i]} shares memory with {read_names[j]}: that would be "
                    "overwritten before it is read. Give a tensor of its own"
                )


def check_writable(out: Tensor, name: str) -> None:
    """Refuse a tensor in which several elements are one in memory, as `expand` makes."""
    if out.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)
    ):
        raise ArgumentError(
            f"{name} has shape {tuple(out.shape)} and strides {out.stride()}, so that elements "
            "share memory: give one that is not expanded"
        )


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether each element of one is that of the other, in memory, for equal shapes."""

    def place(tensor: Tensor) -> tuple[object, ...]:
        return (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())

    strided = a.layout == b.layout == torch.strided
    return a is b or (strided and place(a) == place(b) and a.stride() == b.stride())


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have memory in common; those that are sparse do not tell."""
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    if b1 <= a0 or a1 <= b0:
        return False
    start, size = min(a0, b0), a.element_size()
    if (a0 - b0) % size:
        return True
    # The extents meet; columns of one matrix may still lie apart.
    mark = torch.zeros((max(a1, b1) - start) // size, dtype=torch.bool)
    mark.as_strided(*_distinct(b), (b0 - start) // size).fill_(True)
    return bool(mark.as_strided(*_distinct(a), (a0 - start) // size).any())


def _distinct(tensor: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """Shape and strides, with one element in place of those that are one in memory."""
    shape = [
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return shape, tensor.stride()


def _extent(tensor: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
