"""Devices as arguments, and the entry of a device list at which a tensor already is.

A device list may contain a device several times. Each entry is a *place* with its own storage. A
tensor is at the first place of its device, where an op may return it without copying. All other
places, on the same device or not, receive copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from gradwire.errors import ArgumentError, ArgumentTypeError

_COUNTED = ("cuda", "xpu", "mps")
"""Device types whose number of devices PyTorch can count."""

Device: TypeAlias = torch.device | str | int
"""Device as a torch.device, a string, or the index of an accelerator."""


def as_device(device: Device, name: str) -> torch.device:
    """Return the device that an argument specifies, with its index.

    Args:
        device: A torch.device, its string, or an accelerator's index ≥ 0. Without an index, the
            current accelerator. The CPU has no index.
        name: Name of the argument, for error messages.

    Raises:
        ArgumentTypeError: The type is not that of a device.
        ArgumentError: The index is negative, or the device is unknown or does not exist.

    Example:
        >>> as_device("cpu:1", "destination")
        device(type='cpu')
    """
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise ArgumentTypeError(
            f"{name} is {device!r}, a {type(device).__name__}: give a torch.device, its string or "
            "an accelerator's index"
        )
    if isinstance(device, int):
        return _accelerator(device, name)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{name} is {device!r}: {error}") from error
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    current = torch.accelerator.current_accelerator()
    same = current is not None and current.type == found.type
    if found.type in _COUNTED and (found.index or 0) >= (torch.accelerator.device_count() * same):
        raise ArgumentError(
            f"{name} is {str(found)!r}, this machine has "
            f"{torch.accelerator.device_count() * same} devices of that type: give an existing "
            'device, or "cpu"'
        )
    if found.index is None:
        return torch.device(found.type, torch.accelerator.current_device_index() if same else 0)
    return found


def _accelerator(index: int, name: str) -> torch.device:
    if index < 0:
        raise ArgumentError(f'{name} is {index}: give an index ≥ 0, or "cpu" for the host')
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if kind is None or index >= count:
        raise ArgumentError(
            f"{name} is {index}, this machine has {count} accelerators: give an index below that, "
            'or "cpu"'
        )
    return torch.device(kind.type, index)


def as_devices(devices: Iterable[Device]) -> tuple[torch.device, ...]:
    """Return the devices of a list, which must not be empty; errors name the entry.

    Example:
        >>> as_devices(["cpu"] * 2)
        (device(type='cpu'), device(type='cpu'))
    """
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
    kind = torch.accelerator.current_accelerator()  # the type that torch was built for
    count = torch.accelerator.device_count()
    if kind is None or count == 0:
        return (torch.device("cpu"),)
    return tuple(torch.device(kind.type, i) for i in range(count))


def own_place(home: torch.device, devices: Sequence[torch.device]) -> int | None:
    """Return the index in `devices` at which a tensor on `home` already is, or None.

    Example:
        >>> own_place(torch.device("cpu"), as_devices(["meta", "cpu", "cpu"]))
        1
    """
    return devices.index(home) if home in devices else None
