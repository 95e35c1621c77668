"""scatter and gather of nested containers of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradwire._containers import OneLevel, flatten_one_level
from gradwire.devices import checks
from gradwire.devices.functional import scatter_chunks
from gradwire.devices.placement import Device, as_device, as_devices
from gradwire.devices.scatter_gather import gather
from gradwire.errors import ArgumentError, NotSupportedError


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
    device = torch.device("cpu") if destination == -1 else as_device(destination, "destination")
    return _gathered(list(outputs), device, dim, "outputs")


def _flatten(value: Any) -> OneLevel | None:
    """Flatten by one level.

    Raises:
        NotSupportedError: A PackedSequence.
    """
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
    return checks.chunk_sizes_of(size, places, None, strict=False)


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
    _check_types(values, name)
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


def _check_types(values: list[Any], name: str) -> None:
    first = values[0]
    for i, value in enumerate(values):
        both_tensors = isinstance(first, Tensor) and isinstance(value, Tensor)
        if both_tensors or type(value) is type(first):
            continue
        if any(isinstance(v, Tensor) or _flatten(v) for v in (first, value)):
            raise ArgumentError(
                f"{name} is a {type(value).__name__} from replica {i}, a {type(first).__name__} "
                "from replica 0: return outputs of the same structure from all replicas"
            )
