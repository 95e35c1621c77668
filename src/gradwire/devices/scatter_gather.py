"""scatter and gather, each the other's adjoint, of tensors and of nested containers of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradwire._containers import OneLevel, flatten_one_level
from gradwire.devices import placement
from gradwire.devices.broadcast_reduce import LinearOp, tracked
from gradwire.devices.copying import HOST, chunk_copies, concat, copy_into, cut
from gradwire.devices.placement import Device, as_destination, as_devices, check_apart
from gradwire.errors import ArgumentError, NotSupportedError

Streams: TypeAlias = Sequence[torch.Stream | None] | None


def scatter(
    tensor: Tensor,
    devices: Iterable[Device] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Streams = None,
    *,
    out: Iterable[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Split a tensor into chunks, one for each device.

    Args:
        tensor: Tensor on any device, with at least one dim.
        devices: List of k devices. A device may be listed several times, for several chunks.
        chunk_sizes: List of k sizes ≥ 0 that sum to the tensor's size in `dim`. If None, the chunks
            are those of `torch.chunk`: equal except for the last, and fewer than k if the size is
            too small.
        dim: Dim to split; may be negative.
        streams: Side stream of each device, on which an accelerator receives its chunk from the
            host, or None for a shared one. The side stream is synchronized with the current stream.
            A chunk from pinned memory may still be in transfer on return: do not overwrite the
            source until the device has been synchronized.
        out: Tensors to write into instead. Their sizes in `dim` are the chunk sizes, and no
            gradient is recorded. They must not share memory with each other or with the tensor,
            except for a chunk's own memory. Exactly one of `devices` and `out` must be given.

    Returns:
        The chunks, in the tensor's memory format. The chunk for the first entry of the tensor's own
        device is a view, all others are copies.

    Adjoint: `gather` along `dim` to the tensor's device.

    Raises:
        ArgumentError: Sizes, dims or `out` do not match, or the tensor has no dims.

    Example:
        >>> scatter(torch.arange(5), ["cpu"] * 3)
        (tensor([0, 1]), tensor([2, 3]), tensor([4]))
        >>> scatter(torch.arange(5), ["cpu"] * 2, chunk_sizes=[1, 4])
        (tensor([0]), tensor([1, 2, 3, 4]))
    """
    placement.check_tensor(tensor, "tensor")
    placement.check_exactly_one(devices, out)
    if tensor.is_nested:
        raise ArgumentError("tensor is a nested tensor: give a dense tensor")
    dim = placement.canonical_dim(dim, tensor.dim())
    if tensor.layout != torch.strided:
        raise ArgumentError(f"tensor has layout {tensor.layout}: give a dense tensor")
    if devices is not None:
        places = as_devices(devices)
        sizes = placement.chunk_sizes_of(tensor.shape[dim], len(places), chunk_sizes)
        _check_streams(streams, len(places))
        return scatter_chunks(tensor, places[: len(sizes)], sizes, dim, streams)
    if chunk_sizes is not None:
        raise ArgumentError("chunk_sizes and out are given: omit one; out implies the sizes")
    targets = placement.as_tensor_list(() if out is None else out, "out")
    names = [f"out[{i}]" for i in range(len(targets))]
    shapes = [list(tensor.shape) for _ in targets]
    for shape, target in zip(shapes, targets, strict=True):
        if target.dim() == tensor.dim():
            shape[dim] = target.shape[dim]
    placement.check_out(targets, shapes, [tensor], names)
    sizes = [target.shape[dim] for target in targets]
    if sum(sizes) != tensor.shape[dim]:
        raise ArgumentError(
            f"out has sizes {sizes} in dim {dim}, which sum to {sum(sizes)}; the tensor has size "
            f"{tensor.shape[dim]}: give tensors whose sizes sum to it"
        )
    _check_streams(streams, len(targets))
    chunks = cut(tensor.detach(), sizes, dim)
    check_apart(targets, chunks, names, ["tensor"] * len(targets))
    with torch.no_grad():
        copy_into(targets, chunks, streams)
    return tuple(targets)


def gather(
    tensors: Iterable[Tensor],
    dim: int = 0,
    destination: Device | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Concatenate tensors of several devices.

    Args:
        tensors: Tensors of one dtype and number of dims, with equal sizes except in `dim`. Scalars
            are concatenated to a vector, with a warning.
        dim: Dim along which to concatenate; may be negative.
        destination: Device of the result; the first tensor's device if None, the CPU if −1.
        out: Tensor to write the result into instead, on any device; no gradient is recorded. It
            must not share memory with the tensors, except for those that already are the part of it
            that they would be copied to.

    Returns:
        The concatenation, in the memory format that all tensors have, else contiguous. A result on
        the CPU is in pinned memory if a tensor was on an accelerator.

    Adjoint: `scatter` along `dim` to the tensors' devices, with the tensors' sizes.

    Raises:
        ArgumentError: There are no tensors, one does not match the first, both `out` and
            `destination` are given, or `out` does not match.

    Example:
        >>> gather([torch.zeros(1, 2), torch.ones(2, 2)], destination="cpu").shape
        torch.Size([3, 2])
    """
    found = placement.as_tensor_list(tensors, "tensors")
    if dim in (0, -1) and all(t.dim() == 0 for t in found):
        warnings.warn(  # in PyTorch's words, by which programs filter it
            "Was asked to gather along dimension 0, but all input tensors were scalars; will "
            "instead unsqueeze and return a vector.",
            stacklevel=2,
        )
        found = [t.reshape(1) for t in found]
    dim = placement.check_concat(found, dim)
    if out is None:
        return gather_chunks(found, dim, as_destination(destination, found[0].device))
    if destination is not None:
        raise ArgumentError(
            f"destination is {destination!r} and out is given: omit one of 'destination' and 'out'"
        )
    shape = list(found[0].shape)
    shape[dim] = sum(t.shape[dim] for t in found)
    placement.check_out([out], [shape], found, ["out"])
    parts = cut(out.detach(), [t.shape[dim] for t in found], dim)
    names = [f"tensors[{i}]" for i in range(len(found))]
    check_apart(parts, found, ["out"] * len(found), names)
    with torch.no_grad():
        copy_into(parts, found)
    return out


def _check_streams(streams: Streams, places: int) -> None:
    if streams is not None and len(streams) != places:
        raise ArgumentError(
            f"streams has {len(streams)} entries for {places} devices: give one for each"
        )


def scatter_chunks(
    tensor: Tensor,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    streams: Streams = None,
) -> tuple[Tensor, ...]:
    """Return a chunk for each device. Adjoint: gather of the chunks."""
    if not any(tracked([tensor])):
        return tuple(chunk_copies(tensor, devices, sizes, dim, streams))
    home = tensor.device
    op = LinearOp(
        run=lambda given: tuple(chunk_copies(given[0], devices, sizes, dim, streams)),
        adjoint=lambda grads, _: [gather_chunks(grads, dim, home)],
        tangent=lambda tangents: scatter_chunks(tangents[0], devices, sizes, dim),
        zeros=True,
    )
    chunks: tuple[Tensor, ...] = op([tensor])
    return chunks


def gather_chunks(tensors: Sequence[Tensor], dim: int, home: torch.device) -> Tensor:
    """Concatenate chunks along `dim`. Adjoint: scatter to the chunks' devices."""
    if not any(tracked(tensors)):
        return concat(tensors, dim, home)
    devices, sizes = [t.device for t in tensors], [t.shape[dim] for t in tensors]
    op = LinearOp(
        run=lambda given: concat(given, dim, home),
        adjoint=lambda grads, _: scatter_chunks(grads[0], devices, sizes, dim),
        tangent=lambda tangents: gather_chunks(tangents, dim, home),
        zeros=True,
    )
    whole: Tensor = op(tensors)
    return whole


def scatter_nested(inputs: Any, devices: Iterable[Device], dim: int = 0) -> list[Any]:
    """Split every tensor of a nested container; return one container for each device.

    Args:
        inputs: Tensors in tuples, lists, dicts and other mappings, named tuples, dataclasses, or
            types registered with `register_container` or PyTorch's pytrees. All tensors must have
            the same size in `dim`. Other values are passed to every device unchanged.
        devices: List of k devices.
        dim: Dim to split, as `torch.chunk` does.

    Returns:
        A list with a container for each chunk: k, or fewer if the size in `dim` is too small.

    Adjoint: for each tensor, `gather` along `dim`.

    Raises:
        ArgumentError: Tensors have different sizes in `dim`, or do not have that dim.

    Example:
        >>> scatter_nested({"x": torch.arange(4), "scale": 2}, ["cpu"] * 2)
        [{'x': tensor([0, 1]), 'scale': 2}, {'x': tensor([2, 3]), 'scale': 2}]
    """
    places = as_devices(devices)
    sizes = _batch_sizes(inputs, dim, len(places))
    return _scattered(inputs, places[: len(sizes)], sizes, dim)


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Iterable[Device], dim: int = 0
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Split a call's arguments as `scatter_nested` does; return the tuples and the dicts.

    Example:
        >>> scatter_kwargs((torch.arange(2),), {"scale": 3}, ["cpu"] * 2)
        (((tensor([0]),), (tensor([1]),)), ({'scale': 3}, {'scale': 3}))
    """
    calls = scatter_nested((tuple(inputs), kwargs or {}), devices, dim)
    return tuple(args for args, _ in calls), tuple(named for _, named in calls)


def gather_nested(outputs: Sequence[Any], destination: Device, dim: int = 0) -> Any:
    """Concatenate the tensors of nested containers, one from each device, into one container.

    Args:
        outputs: Containers of the same structure. Tensors are concatenated along `dim`, scalars to
            a vector. If all values at a position are None, the result is None. Other values are
            returned as a list.
        destination: Device of the tensors.
        dim: Dim along which to concatenate.

    Adjoint: for each tensor, `scatter` along `dim`.

    Raises:
        ArgumentError: The structures differ in types, lengths or keys, or in whether a value is a
            tensor.

    Example:
        >>> gather_nested([{"y": torch.zeros(1), "n": 1}, {"y": torch.ones(2), "n": 2}], "cpu")
        {'y': tensor([0., 1., 1.]), 'n': [1, 2]}
    """
    if not outputs:
        raise ArgumentError("outputs is empty: give one container for each device")
    return _gathered(list(outputs), as_destination(destination, HOST), dim, "outputs")


def _flatten(value: Any) -> OneLevel | None:
    """Flatten by one level; refuse a PackedSequence."""
    if isinstance(value, PackedSequence):
        raise NotSupportedError(
            "a PackedSequence cannot be split along the batch: pad it, and pack inside the module"
        )
    return flatten_one_level(value)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a container with their paths."""
    if isinstance(value, Tensor):
        yield name, value
    elif flattened := _flatten(value):
        for key, child in zip(flattened.keys, flattened.children, strict=True):
            yield from _tensors(child, f"{name}[{key!r}]")


def _batch_sizes(inputs: Any, dim: int, places: int) -> list[int]:
    """Return the chunk sizes, which all tensors share; without tensors, one chunk per device."""
    found = ""
    size = places
    for name, tensor in _tensors(inputs, "inputs"):
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
            raise ArgumentError(f"{name} {kind}: give dense tensors")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)}, without a dim {dim} to split: add that "
                "dim, or pass a Python number, which every replica receives unchanged"
            )
        if found and tensor.shape[dim] != size:
            raise ArgumentError(
                f"{name} has size {tensor.shape[dim]} in dim {dim}, {found} has {size}: give "
                "tensors of one batch size. Pass a tensor that has no batch dim in an object that "
                "is not a container, or make it a buffer of the module"
            )
        found, size = found or name, tensor.shape[dim]
    return placement.chunk_sizes_of(size, places, None)


def _scattered(
    value: Any, places: Sequence[torch.device], sizes: Sequence[int], dim: int
) -> list[Any]:
    if isinstance(value, Tensor):
        return list(scatter_chunks(value, places, sizes, dim % value.dim()))
    flattened = _flatten(value)
    if flattened is None:
        return [value for _ in places]
    columns = [_scattered(child, places, sizes, dim) for child in flattened.children]
    return [
        flattened.unflatten([column[place] for column in columns]) for place in range(len(places))
    ]


def _gathered(values: list[Any], device: torch.device, dim: int, name: str) -> Any:
    first = values[0]
    for i, value in enumerate(values):
        if type(value) is type(first) or (isinstance(first, Tensor) and isinstance(value, Tensor)):
            continue
        if any(isinstance(v, Tensor) or _flatten(v) for v in (first, value)):
            raise ArgumentError(
                f"{name} is a {type(value).__name__} from replica {i}, a {type(first).__name__} "
                "from replica 0: return outputs of the same structure from all replicas"
            )
    if isinstance(first, Tensor):
        return gather(values, dim, device)
    if all(value is None for value in values):
        return None
    flattened = [_flatten(value) for value in values]
    if flattened[0] is None:
        return values
    model = flattened[0]
    children: list[list[Any]] = []
    for i, other in enumerate(flattened):
        # The order of a dict's keys may differ, but the keys must be equal.
        found = dict(zip(other.keys, other.children, strict=True)) if other else {}
        if found.keys() != set(model.keys):
            raise ArgumentError(
                f"{name} of replica {i} has keys {list(found)}, that of replica 0 has "
                f"{list(model.keys)}: return outputs with the same keys and lengths"
            )
        children.append([found[key] for key in model.keys])
    columns = zip(model.keys, zip(*children, strict=True), strict=True)
    return model.unflatten(
        [_gathered(list(column), device, dim, f"{name}[{key!r}]") for key, column in columns]
    )
