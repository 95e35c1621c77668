"""scatter and gather, each the other's adjoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from gradwire.devices import checks
from gradwire.devices.checks import check_apart
from gradwire.devices.copying import concat_into, copy_into, cut
from gradwire.devices.functional import gather_chunks, scatter_chunks
from gradwire.devices.placement import Device, as_destination, as_devices
from gradwire.errors import ArgumentError

SCALARS_WARNING = ContextVar(
    "gradwire_scalars_warning",
    default="gather was given scalars: it returns a vector of them. Unsqueeze them to be rid of "
    "this warning",
)
"""Text of a warning; within `compat` PyTorch's, by which programs filter."""


def scatter(
    tensor: Tensor,
    devices: Iterable[Device] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.Stream | None] | None = None,
    *,
    out: Iterable[Tensor] | None = None,
    strict: bool = False,
) -> tuple[Tensor, ...]:
    """Cut a tensor into chunks, one for each device.

    Args:
        tensor: On any device, with at least one dim.
        devices: The places, k of them; one device several times is several places.
        chunk_sizes: k sizes ≥ 0 that sum to the tensor's size in `dim`. If None, the chunks are
            those of `torch.chunk`: equal but for the last, and fewer than k if the size does not
            suffice.
        dim: The dim that is cut; may be negative.
        streams: For each place, the side stream on which an accelerator receives its chunk from
            the host, or None for a shared one. Both ends are synchronised. A chunk from pinned
            memory may still be on its way when this returns: the source must not be overwritten
            before the device has been synchronised.
        out: Tensors to write into instead; their sizes in `dim` are the chunk sizes, and no
            gradient is recorded. They share no memory with each other or, but for a chunk's own,
            with the tensor. Exactly one of `devices` and `out` is given.
        strict: Refuse to give fewer chunks than devices.

    Returns:
        The chunks, in the tensor's memory format. At the tensor's own place (the first entry of
        its device) the chunk is a view, elsewhere a copy.

    Adjoint: `gather` along `dim` to the tensor's device.

    Raises:
        ArgumentError: Sizes, dims or `out` that do not fit; a tensor without dims.

    Example:
        >>> scatter(torch.arange(5), ["cpu"] * 3)
        (tensor([0, 1]), tensor([2, 3]), tensor([4]))
        >>> scatter(torch.arange(5), ["cpu"] * 2, chunk_sizes=[1, 4])
        (tensor([0]), tensor([1, 2, 3, 4]))
    """
    checks.check_tensor(tensor, "tensor")
    checks.check_exactly_one(devices, out)
    if tensor.is_nested:
        raise ArgumentError("tensor is a nested tensor: scatter cuts dense tensors")
    dim = checks.canonical_dim(dim, tensor.dim())
    if tensor.layout != torch.strided:
        raise ArgumentError(f"tensor has layout {tensor.layout}: scatter cuts dense tensors")
    if devices is not None:
        places = as_devices(devices)
        sizes = checks.chunk_sizes_of(tensor.shape[dim], len(places), chunk_sizes, strict=strict)
        _check_streams(streams, len(places))
        return scatter_chunks(tensor, places[: len(sizes)], sizes, dim, streams)
    if chunk_sizes is not None:
        raise ArgumentError("chunk_sizes and out are given: the sizes of out are the chunk sizes")
    targets = checks.as_tensor_list(() if out is None else out, "out")
    _scatter_into(targets, tensor, dim, streams)
    return tuple(targets)


def gather(
    tensors: Iterable[Tensor],
    dim: int = 0,
    destination: Device | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Join tensors of several devices, one after another.

    Args:
        tensors: Of one dtype and number of dims, with equal sizes but in `dim`. Scalars are joined
            along dim 0 into a vector, with a warning.
        dim: The dim along which they are joined; may be negative.
        destination: Where the result goes; the first tensor's device if None, the host for −1.
        out: A tensor to write the result into instead, on any device; no gradient is recorded. It
            shares no memory with the tensors, but where one is already in its place.

    Returns:
        The joined tensor, in the memory format that all tensors have, else contiguous. On the host
        it is in pinned memory if it comes from an accelerator.

    Adjoint: `scatter` along `dim` to the tensors' devices, in the tensors' sizes.

    Raises:
        ArgumentError: No tensor; one that does not match the first, with its index; `out` and
            `destination`; an `out` that does not fit.

    Example:
        >>> gather([torch.zeros(1, 2), torch.ones(2, 2)], destination="cpu").shape
        torch.Size([3, 2])
    """
    found = checks.as_tensor_list(tensors, "tensors")
    if dim in (0, -1) and all(t.dim() == 0 for t in found):
        warnings.warn(SCALARS_WARNING.get(), stacklevel=2)
        found = [t.reshape(1) for t in found]
    dim = checks.check_concat(found, dim)
    if out is None:
        return gather_chunks(found, dim, as_destination(destination, found[0].device))
    checks.check_no_destination(destination)
    shape = list(found[0].shape)
    shape[dim] = sum(t.shape[dim] for t in found)
    checks.check_out(out, found[0], shape, "out")
    checks.check_out_without_grad([out], found)
    places = range(len(found))
    parts = cut(out.detach(), [t.shape[dim] for t in found], dim)
    check_apart(parts, found, ["out" for _ in places], [f"tensors[{i}]" for i in places])
    with torch.no_grad():
        concat_into(out, found, dim)
    return out


def _scatter_into(
    targets: list[Tensor], tensor: Tensor, dim: int, streams: Sequence[torch.Stream | None] | None
) -> None:
    checks.check_out_without_grad(targets, [tensor])
    for i, target in enumerate(targets):
        shape = list(tensor.shape)
        if target.dim() == tensor.dim():
            shape[dim] = target.shape[dim]
        checks.check_out(target, tensor, shape, f"out[{i}]")
    sizes = [target.shape[dim] for target in targets]
    if sum(sizes) != tensor.shape[dim]:
        raise ArgumentError(
            f"out has sizes {sizes} in dim {dim}, of sum {sum(sizes)}; the tensor has "
            f"{tensor.shape[dim]}: give tensors whose sizes sum to it"
        )
    _check_streams(streams, len(targets))
    chunks = cut(tensor.detach(), sizes, dim)
    places = range(len(targets))
    check_apart(targets, chunks, [f"out[{i}]" for i in places], ["tensor" for _ in places])
    with torch.no_grad():
        copy_into(targets, chunks, streams)


def _check_streams(streams: Sequence[torch.Stream | None] | None, places: int) -> None:
    if streams is not None and len(streams) != places:
        raise ArgumentError(
            f"streams has {len(streams)} entries, there are {places} places: give one for each"
        )
