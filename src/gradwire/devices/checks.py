"""Checks of the six ops' arguments, before any tensor is copied; messages name the entry."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "as_list",
    "as_tensor_list",
    "canonical_dim",
    "check_alike",
    "check_concat",
    "check_exactly_one",
    "check_no_destination",
    "check_out",
    "check_out_without_grad",
    "check_tensor",
    "chunk_sizes_of",
    "common_device",
]

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
