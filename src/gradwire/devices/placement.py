"""Which device an argument means, and which place of a device list is a tensor's own.

A device list may name a device several times: each entry is a place of its own, with storage of
its own. A tensor lies at the first place of its device, and only there may an op hand it out as it
is; every other place, on the same device or not, receives a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from gradwire.errors import ArgumentError, ArgumentTypeError

_COUNTED = ("cuda", "xpu", "mps")
"""Types of devices of which torch can tell how many there are."""

Device: TypeAlias = torch.device | str | int
"""A device: as torch writes it, or the index of an accelerator."""


def as_device(device: Device, name: str) -> torch.device:
    """The device that an argument means, with its index.

    Args:
        device: A torch.device, its string, or an accelerator's index ≥ 0. Without an index, the
            accelerator that is current. All of the host is "cpu".
        name: How the error should call the argument.

    Raises:
        ArgumentTypeError: Not a device at all.
        ArgumentError: A negative index, an unknown device, or an index without an accelerator.

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
            f"{torch.accelerator.device_count() * same} devices of that type: give one that is "
            'there, or "cpu"'
        )
    if found.index is None:
        return torch.device(found.type, torch.accelerator.current_device_index() if same else 0)
    return found


def _accelerator(index: int, name: str) -> torch.device:
    if index < 0:
        raise ArgumentError(f'{name} is {index}: indices start at 0, and the host is "cpu"')
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if kind is None or index >= count:
        raise ArgumentError(
            f"{name} is {index}, this machine has {count} accelerators: give an index below that, "
            'or "cpu"'
        )
    return torch.device(kind.type, index)


def as_devices(devices: Iterable[Device]) -> tuple[torch.device, ...]:
    """The devices of a list, at least one; errors name the entry.

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
    """The device of one result: `default` for None, the host for −1, else as `as_device`."""
    if destination is None:
        return default
    if isinstance(destination, int) and destination == -1:
        return torch.device("cpu")
    return as_device(destination, name)


def default_devices() -> tuple[torch.device, ...]:
    """Every accelerator of this machine, or the host once where there is none."""
    kind = torch.accelerator.current_accelerator()  # what torch was built for: may be none there
    count = torch.accelerator.device_count()
    if kind is None or count == 0:
        return (torch.device("cpu"),)
    return tuple(torch.device(kind.type, i) for i in range(count))


def own_place(home: torch.device, devices: Sequence[torch.device]) -> int | None:
    """The place in `devices` at which a tensor on `home` already lies, if there is one.

    Example:
        >>> own_place(torch.device("cpu"), as_devices(["meta", "cpu", "cpu"]))
        1
    """
    return devices.index(home) if home in devices else None
