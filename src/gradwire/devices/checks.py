"""Checks of the six ops' arguments, before any tensor is copied; messages name the entry."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")


def as_tensor_list(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    """The tensors of a list, at least one."""
    found = as_list(tensors, name)
    if not found:
        raise ArgumentError(f"{name} is empty: give at least one tensor")
    for i, tensor in enumerate(found):
        check_tensor(tensor, f"{name}[{i}]")
    return found


def as_list(tensors: Iterable[T], name: str) -> list[T]:
    """The entries of a list, which a tensor is not, although its rows could be listed."""
    if isinstance(tensors, Tensor):
        raise ArgumentTypeError(f"{name} is a tensor: give a list of tensors")
    if not isinstance(tensors, Iterable):
        raise ArgumentTypeError(f"{name} is a {type(tensors).__name__}: give a list of tensors")
    return list(tensors)


def check_tensor(tensor: object, name: str) -> None:
    """Refuse what is no tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(tensor).__name__}: give a tensor")


def check_exactly_one(devices: object, out: object) -> None:
    """Refuse neither and both of `devices` and `out`."""
    if (devices is None) == (out is None):
        raise ArgumentError(
            f"devices is {devices!r} and out is {'None' if out is None else 'given'}: give exactly "
            "one of 'devices' and 'out'"
        )


def check_out_without_grad(out: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Refuse `out=` where a gradient would be recorded, as torch's own ops do."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*out, *inputs)):
        raise ArgumentError(
            "out is given and a tensor requires grad: writing into out records no gradient. Call "
            "under torch.no_grad(), or without out"
        )


def common_device(tensors: Sequence[Tensor], name: str) -> torch.device:
    """The one device that all of the tensors are on."""
    device = tensors[0].device
    for i, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ArgumentError(
                f"{name}[{i}] is on {tensor.device}, {name}[0] on {device}: put them on one device"
            )
    return device


def check_alike(tensors: Sequence[Tensor], name: str, *, layout: bool = True) -> None:
    """Refuse shapes, dtypes or layouts that differ from the first tensor's."""

    def key(tensor: Tensor) -> tuple[object, ...]:
        return (tuple(tensor.shape), tensor.dtype, tensor.layout if layout else None)

    expected = key(tensors[0])
    for i, tensor in enumerate(tensors):
        found = key(tensor)
        if found == expected:
            continue
        for field, got, wanted in zip(("shape", "dtype", "layout"), found, expected, strict=True):
            if got != wanted:
                raise ArgumentError(
                    f"{name}[{i}] has {field} {got}, expected {wanted} as {name}[0] has: tensors "
                    "that are added must match"
                )


def check_out(out: Tensor, like: Tensor, shape: Sequence[int], name: str) -> None:
    """Refuse a result tensor of another shape, dtype or layout than the result has."""
    check_tensor(out, name)
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(
            f"{name} has shape {tuple(out.shape)}, the result has {tuple(shape)}: give a tensor of "
            "that shape"
        )
    if out.dtype != like.dtype or out.layout != like.layout:
        raise ArgumentError(
            f"{name} is {out.dtype}, {out.layout}, the result {like.dtype}, {like.layout}: give a "
            "tensor of those"
        )


def canonical_dim(dim: int, rank: int) -> int:
    """The dim, counted from the front."""
    if not isinstance(dim, int):
        raise ArgumentTypeError(f"dim is {dim!r}, a {type(dim).__name__}: give an int")
    if not -rank <= dim < rank:
        allowed = f"from {-rank} to {rank - 1}" if rank else "none: give it a dimension first"
        raise ArgumentError(
            f"dim is {dim}, the tensor has {rank} dims: those allowed are {allowed}"
        )
    return dim % rank


def check_concat(tensors: Sequence[Tensor], dim: int) -> int:
    """Refuse tensors that cannot be joined along `dim`; the dim, counted from the front."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dim() != first.dim():
            raise ArgumentError(
                f"tensors[{i}] has {tensor.dim()} dims, tensors[0] has {first.dim()}: give all the "
                "same number of dimensions"
            )
        if tensor.dtype != first.dtype or tensor.layout != torch.strided:
            raise ArgumentError(
                f"tensors[{i}] is {tensor.dtype}, {tensor.layout}; tensors[0] is {first.dtype}: "
                "give dense tensors of one dtype"
            )
    dim = canonical_dim(dim, first.dim())
    for i, tensor in enumerate(tensors):
        got, expected = list(tensor.shape), list(first.shape)
        expected[dim] = got[dim]
        if got != expected:
            raise ArgumentError(
                f"tensors[{i}] has shape {tuple(got)}, expected {tuple(expected)}: sizes may "
                f"differ from those of tensors[0] only in dim {dim}"
            )
    return dim


def chunk_sizes_of(
    size: int, places: int, chunk_sizes: Sequence[int] | None, *, strict: bool
) -> list[int]:
    """Each chunk's size: as given, or as torch.chunk cuts, which may give fewer than places."""
    if chunk_sizes is None:
        step = -(-size // places)
        sizes = [min(step, size - i) for i in range(0, size, step)] if size else [0] * places
        if strict and len(sizes) < places:
            raise ArgumentError(
                f"tensor has size {size} in the scattered dim: that is {len(sizes)} chunks of "
                f"{step}, devices has {places}. Give chunk_sizes, or strict=False to leave the "
                "last devices without a chunk"
            )
        return sizes
    if not isinstance(chunk_sizes, Iterable):
        raise ArgumentTypeError(f"chunk_sizes is {chunk_sizes!r}: give a list of ints")
    try:
        sizes = [operator.index(size) for size in chunk_sizes]
    except TypeError as error:
        raise ArgumentTypeError(f"chunk_sizes is {chunk_sizes!r}: give a list of ints") from error
    if len(sizes) != places:
        raise ArgumentError(
            f"chunk_sizes has {len(sizes)} entries, devices has {places}: give one for each device"
        )
    if sum(sizes) != size or min(sizes) < 0:
        raise ArgumentError(
            f"chunk_sizes is {sizes}, of sum {sum(sizes)}; the tensor has size {size} in the "
            "scattered dim: give sizes ≥ 0 that sum to it"
        )
    return sizes


def check_no_destination(destination: object) -> None:
    """Refuse a destination beside `out`."""
    if destination is not None:
        raise ArgumentError(
            f"destination is {destination!r} and out is given: 'destination' must not be given "
            "with 'out'"
        )


# --- overlap of memory ---


# --- overlap of memory ---


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
