"""Copies of tensors into and out of flat buffers, with one multi-tensor call each way.

A buffer holds each tensor's elements in row-major order, whatever its strides: what one rank
packs another may unpack into other strides. Where several dtypes share a buffer it is a buffer of
bytes, and each tensor starts at a multiple of `ALIGNMENT`, so that any dtype can be viewed in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ArgumentError

__all__ = ["ALIGNMENT", "memory_strides", "pack", "unpack", "views"]

ALIGNMENT = 16
"""Bytes: the largest element of any dtype (complex128)."""


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


def _placement(like: Sequence[Tensor]) -> tuple[torch.dtype, list[int], int]:
    """Return the dtype of the buffer, each tensor's start in it, and its length, in elements."""
    dtype = like[0].dtype if like else torch.get_default_dtype()
    offsets, end = [], 0
    if all(t.dtype == dtype for t in like):
        for t in like:
            offsets.append(end)
            end += t.numel()
        return dtype, offsets, end
    for t in like:
        offsets.append(end)
        end += -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT
    return torch.uint8, offsets, end


def views(buffer: Tensor, like: Sequence[Tensor], *, keep_strides: bool = False) -> list[Tensor]:
    """Return views into a packed buffer, one for each tensor of `like`, with its shape.

    Args:
        buffer: 1-d buffer in the layout of `pack`; contiguous if the dtypes differ.
        like: Tensors with the shapes and dtypes of the views; their values are not read.
        keep_strides: Give a view its tensor's strides where those leave no gaps. The elements then
            lie in that tensor's memory order: only for buffers whose readers have the same strides.

    Returns:
        Views, in order, contiguous if the buffer is, unless `keep_strides`. Writing to one writes
        to the buffer. In a buffer of bytes that holds several dtypes each has its tensor's dtype;
        otherwise all have the buffer's, which may be another (gradients sent in a smaller dtype).

    Raises:
        ArgumentError: The buffer is shorter than what `pack` makes for such tensors, or its bytes
            do not lie one after another.

    Example:
        >>> buffer = torch.arange(5.0)
        >>> a, b = views(buffer, [torch.empty(2, 2), torch.empty(())])
        >>> a.tolist(), b.item()
        ([[0.0, 1.0], [2.0, 3.0]], 4.0)
    """
    dtype, offsets, length = _placement(like)
    mixed = any(t.dtype != dtype for t in like)
    if buffer.dim() != 1 or buffer.numel() < length or (mixed and buffer.dtype != dtype):
        raise ArgumentError(
            f"buffer is {buffer.dtype} of shape {tuple(buffer.shape)}: these {len(like)} tensors "
            f"need {dtype}, 1-d, of at least {length} elements"
        )
    if mixed and not buffer.is_contiguous():
        raise ArgumentError(
            f"buffer has stride {buffer.stride(0)}: other dtypes are viewed in bytes that lie one "
            "after another, pass buffer.contiguous()"
        )
    typed = {dtype: buffer}
    result = []
    for t, offset in zip(like, offsets, strict=True):
        if mixed and t.dtype not in typed:
            whole = buffer.numel() // ALIGNMENT * ALIGNMENT
            typed[t.dtype] = buffer[:whole].view(t.dtype)
        base = typed[t.dtype if mixed else dtype]
        step = base.stride(0)
        first = offset * buffer.element_size() // base.element_size()
        strides = memory_strides(t) if keep_strides else None
        if strides is None:
            strides = torch.empty(t.shape, dtype=t.dtype, device="meta").stride()
        if step != 1:
            strides = tuple(stride * step for stride in strides)
        result.append(base.as_strided(t.shape, strides, base.storage_offset() + first * step))
    return result


def pack(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy tensors into one flat buffer: one multi-tensor copy, N bytes read, N written.

    Args:
        tensors: On one device; any shapes (zero-size and 0-d too), any strides, any dtypes. With
            one dtype the buffer has that dtype and no gaps; with several it is uint8.
        out: Buffer to fill, 1-d and at least as long as needed; allocated if None.

    Returns:
        The buffer. `unpack` and `views` read it.

    Raises:
        ArgumentError: `out` does not fit, or devices differ.

    Example:
        >>> pack([torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)])
        tensor([1., 2., 3.])
    """
    for i, t in enumerate(tensors):
        if t.device != tensors[0].device:
            raise ArgumentError(
                f"tensors[{i}] is on {t.device}, tensors[0] on {tensors[0].device}: "
                "pack the tensors of each device separately"
            )
    dtype, _, length = _placement(tensors)
    if out is None:
        out = torch.empty(length, dtype=dtype, device=tensors[0].device if tensors else None)
    elif out.dtype != dtype:
        raise ArgumentError(f"out is {out.dtype}: these {len(tensors)} tensors need {dtype}")
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(views(out, tensors), list(tensors))
    return out


def unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a packed buffer's values back into tensors: one multi-tensor copy.

    Args:
        buffer: Buffer that `pack` makes for tensors of these shapes and dtypes.
        tensors: Written in place, whatever their strides.

    Raises:
        ArgumentError: The buffer does not fit the tensors.

    Example:
        >>> a, b = torch.zeros(2), torch.zeros((), dtype=torch.int64)
        >>> unpack(pack([torch.tensor([1.0, 2.0]), torch.tensor(3)]), [a, b])
        >>> a, b
        (tensor([1., 2.]), tensor(3))
    """
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(list(tensors), views(buffer, tensors))


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
