"""GRADWIRE_BACKEND=shm: groups that a program requests on Gloo use shm instead.

The group keeps the requested backend name, because programs read it: some refuse an unknown
backend, some continue to train without communication.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Backend, ProcessGroup
from torch.distributed.distributed_c10d import BackendConfig, _world

from gradwire._torch import PYTHON_BACKENDS


def make_group(make: Callable[[str], tuple[Any, Any]], backend: str) -> tuple[Any, Any]:
    """Make a group with shm in place of Gloo, and keep the requested name.

    Args:
        make: Function that makes the group of a backend and returns it, or `NON_GROUP_MEMBER`, and
            its store.
        backend: Backend in torch.distributed's notation: "gloo", "cpu:gloo,cuda:nccl", "undefined".
    """
    instead = with_shm(backend)
    group, store = make(instead)
    if instead != backend and isinstance(group, ProcessGroup):
        _world.pg_map[group] = (backend, _world.pg_map[group][1])
        _world.pg_backend_config[group] = str(BackendConfig(Backend(backend)))
    return group, store


def with_shm(backend: str) -> str:
    """Return the backend with shm in place of Gloo for CPU tensors."""
    if backend != Backend.UNDEFINED and Backend.GLOO not in backend:
        return backend
    asked = BackendConfig(Backend(backend))
    by_device = dict(asked.get_device_backend_map())
    if by_device.pop("cpu", None) != Backend.GLOO:
        return backend
    others = {d: name for d, name in by_device.items() if name != Backend.GLOO or _exists(d)}
    if not others:
        return "shm"
    if PYTHON_BACKENDS:
        return ",".join(["cpu:shm", *(f"{device}:{name}" for device, name in others.items())])
    warnings.warn(
        f"GRADWIRE_BACKEND=shm: a group of {asked} is unchanged, because with PyTorch "
        f"{torch.__version__} shm would be the whole group: upgrade PyTorch",
        stacklevel=4,
    )
    return backend


def _exists(device: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return (
        accelerator is not None and accelerator.type == device and torch.accelerator.is_available()
    )
