"""Devices as arguments, and the entry of a device list at which a tensor already is.

A device list may contain a device several times. Each entry is a *place* with its own storage. A
tensor is at the first place of its device, where an op may return it without copying. All other
places, on the same device or not, receive copies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradwire.errors import ArgumentError, ArgumentTypeError

_COUNTED = ("cuda", "xpu", "mps")
"""Device types whose number of devices PyTorch can count."""

Device: TypeAlias = torch.device | str | int
"""Device as a torch.device, a string, or the index of an accelerator."""


def as_device(device: Device, name: str) -> torch.device:
    """Return the device that an argument specifies, with its index; the CPU has no index."""
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise ArgumentTypeError(
            f"{name} is {device!r}, a {type(device).__name__}: give a torch.device, its string or "
            "an accelerator's index"
        )
    if isinstance(device, int):
        current, count = _accelerators()
        if current is None or not 0 <= device < count:
            raise ArgumentError(
                f"{name} is {device}, this machine has {count} accelerators: give an index from 0 "
                'on and below that, or "cpu"'
            )
        return torch.device(current.type, device)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{name} is {device!r}: {error}") from error
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    current, count = _accelerators()
    same = current is not None and current.type == found.type
    if found.type in _COUNTED and (found.index or 0) >= count * same:
        raise ArgumentError(
            f"{name} is {str(found)!r}, this machine has {count * same} devices of that type: give "
            'an existing device, or "cpu"'
        )
    if found.index is None:
        return torch.device(found.type, torch.accelerator.current_device_index() if same else 0)
    return found


def _accelerators() -> tuple[torch.device | None, int]:
    # not called for the CPU: counting may load the driver's library, each time anew
    return torch.accelerator.current_accelerator(), torch.accelerator.device_count()


def as_devices(devices: Iterable[Device]) -> tuple[torch.device, ...]:
    """Return the devices of a list, which must not be empty; errors name the entry."""
    if isinstance(devices, str | torch.device | int):
        raise ArgumentTypeError(f"devices is {devices!r}: give a list of devices, [{devices!r}]")
    found = tuple(as_device(device, f"devices[{i}]") for i, device in enumerate(devices))
    if not found:
        raise ArgumentError("devices is empty: give at least one device")
    return found


def as_destination(
    destination: Device | None, default: torch.device, name: str = "destination"
) -> torch.device:
    """Return the device of a result: `default` for None, the CPU for −1, else `as_device`."""
    if destination is None:
        return default
    if isinstance(destination, int) and destination == -1:
        return torch.device("cpu")
    return as_device(destination, name)


def default_devices() -> tuple[torch.device, ...]:
    """Return all accelerators of this machine, or the CPU if there are none."""
    kind, count = _accelerators()
    if kind is None or count == 0:  # torch was built for a type that this machine lacks
        return (torch.device("cpu"),)
    return tuple(torch.device(kind.type, i) for i in range(count))


def own_place(home: torch.device, devices: Sequence[torch.device]) -> int | None:
    """Return the index in `devices` at which a tensor on `home` already is, or None."""
    return devices.index(home) if home in devices else None


T = TypeVar("T")


def as_tensor_list(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    """Return the tensors of a list, which must not be empty."""
    found = as_list(tensors, name)
    if not found:
        raise ArgumentError(f"{name} is empty: give at least one tensor")
    for i, tensor in enumerate(found):
        check_tensor(tensor, f"{name}[{i}]")
    return found


def as_list(tensors: Iterable[T], name: str) -> list[T]:
    """Return the entries of a list; a tensor is rejected, although it is iterable."""
    if isinstance(tensors, Tensor):
        raise ArgumentTypeError(f"{name} is a tensor: give a list of tensors")
    if not isinstance(tensors, Iterable):
        raise ArgumentTypeError(f"{name} is a {type(tensors).__name__}: give a list of tensors")
    return list(tensors)


def check_tensor(tensor: object, name: str) -> None:
    """Raise unless the argument is a tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(tensor).__name__}: give a tensor")


def check_exactly_one(devices: object, out: object) -> None:
    """Raise unless exactly one of `devices` and `out` is given."""
    if (devices is None) == (out is None):
        raise ArgumentError(
            f"devices is {devices!r} and out is {'None' if out is None else 'given'}: give exactly "
            "one of 'devices' and 'out'"
        )


def check_out(
    out: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[Tensor],
    names: Sequence[str],
) -> None:
    """Raise if an `out` lacks the result's shape, dtype or layout, or would record a gradient."""
    for target, shape, name in zip(out, shapes, names, strict=True):
        check_tensor(target, name)
        _check_field(target, name, "shape", torch.Size(shape), "the result")
        _check_field(target, name, "dtype", inputs[0].dtype, "the result")
        _check_field(target, name, "layout", inputs[0].layout, "the result")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*out, *inputs)):
        raise ArgumentError(
            "out is given and a tensor requires grad: writing into out records no gradient. Use "
            "torch.no_grad(), or omit out"
        )


def check_alike(
    tensors: Sequence[Tensor], name: str, fields: Sequence[str] = ("shape", "dtype", "layout")
) -> None:
    """Raise if a field of a tensor differs from that of the first one."""
    for i, tensor in enumerate(tensors):
        for field in fields:
            _check_field(tensor, f"{name}[{i}]", field, getattr(tensors[0], field), f"{name}[0]")


def _check_field(tensor: Tensor, name: str, field: str, wanted: Any, of: str) -> None:
    found = getattr(tensor, field)
    if found != wanted:
        if field == "shape":
            found, wanted = tuple(found), tuple(wanted)
        raise ArgumentError(
            f"{name} has {field} {found}, {of} has {wanted}: give tensors of one {field}"
        )


def canonical_dim(dim: int, rank: int) -> int:
    """Return the dim as a non-negative index."""
    if not isinstance(dim, int):
        raise ArgumentTypeError(f"dim is {dim!r}, a {type(dim).__name__}: give an int")
    if not -rank <= dim < rank:
        remedy = f"give a dim from {-rank} to {rank - 1}" if rank else "give a tensor with a dim"
        raise ArgumentError(f"dim is {dim}, the tensor has {rank} dims: {remedy}")
    return dim % rank


def check_concat(tensors: Sequence[Tensor], dim: int) -> int:
    """Raise if the tensors cannot be concatenated; return the dim as a non-negative index."""
    first = tensors[0]
    check_alike(tensors, "tensors", ("ndim", "dtype", "layout"))
    if first.layout != torch.strided:
        raise ArgumentError(f"tensors[0] has layout {first.layout}: give dense tensors")
    dim = canonical_dim(dim, first.dim())
    for i, tensor in enumerate(tensors):
        got, expected = list(tensor.shape), list(first.shape)
        expected[dim] = got[dim]
        if got != expected:
            raise ArgumentError(
                f"tensors[{i}] has shape {tuple(got)}, expected {tuple(expected)}: give tensors "
                f"whose sizes differ in dim {dim} only"
            )
    return dim


def chunk_sizes_of(size: int, places: int, chunk_sizes: Sequence[int] | None) -> list[int]:
    """Return the chunk sizes: as given, or as those of torch.chunk, which may be fewer."""
    if chunk_sizes is None:
        step = -(-size // places)
        return [min(step, size - i) for i in range(0, size, step)] if size else [0] * places
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
            f"chunk_sizes is {sizes}, which sums to {sum(sizes)}; the tensor has size {size} in "
            "the scattered dim: give sizes ≥ 0 that sum to it"
        )
    return sizes


# --- overlap of memory ---


def check_apart(
    writes: Sequence[Tensor],
    reads: Sequence[Tensor],
    write_names: Sequence[str],
    read_names: Sequence[str],
) -> None:
    """Raise if copying each source into its result would overwrite another result or source."""
    for i, write in enumerate(writes):
        # Several elements may share memory, as those of `expand` do.
        if write.layout == torch.strided and torch._debug_has_internal_overlap(write) == 1:
            raise ArgumentError(
                f"{write_names[i]} has shape {tuple(write.shape)} and strides {write.stride()}, so "
                "that elements share memory: give one that is not expanded"
            )
        for j in range(i):
            # Results with the same name are parts of one tensor.
            # parts of one tensor are disjoint; comparing columns element by element would be slow
            if write_names[i] != write_names[j] and _share_memory(write, writes[j]):
                raise ArgumentError(
                    f"{write_names[i]} shares memory with {write_names[j]}: one would overwrite "
                    "the other. Give tensors with separate memory"
                )
        if _same_place(write, reads[i]):
            continue  # the result already has its values
        for j, read in enumerate(reads):
            if _share_memory(write, read):
                raise ArgumentError(
                    f"{write_names[i]} shares memory with {read_names[j]}, which would be "
                    "overwritten before it is read. Give a separate tensor"
                )


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of equal shape have the same elements in memory."""

    def place(tensor: Tensor) -> tuple[object, ...]:
        return tensor.device, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()

    return a is b or (a.layout == b.layout == torch.strided and place(a) == place(b))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if two strided tensors of one dtype share memory; False for sparse ones."""
    # elements of `b` may share memory with each other, as those of `expand` do
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
    # The extents overlap, but the elements may be disjoint, as for columns of one matrix.
    mark = torch.zeros((max(a1, b1) - start) // size, dtype=torch.bool)
    mark.as_strided(a.shape, a.stride(), (a0 - start) // size).fill_(True)
    return bool(mark.as_strided(b.shape, b.stride(), (b0 - start) // size).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
