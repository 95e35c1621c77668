"""State of a communication hook: conversion to other buckets, saving and loading.

A state with `state_dict` and `load_state_dict` is saved through these methods. If its
`depends_on_buckets` is true, its bucket layout is also saved and restored.

Of any other state, the attributes or dictionary entries are saved: plain data, tensors, and the
state of random generators. Tensors by bucket index that have the size of the bucket, such as the
errors of PyTorch's PowerSGD, are split by parameter. Other tensors by bucket index are valid only
for the same buckets, so the bucket layout is saved with them and restored.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError, NotSavedWarning

Layout = Sequence[Sequence["Part"]]
"""Parameters of each bucket."""


@dataclass(frozen=True)
class Part:
    """Name and number of elements of a parameter in a bucket."""

    name: str
    numel: int


def has_state(state: Any) -> bool:
    """Return True if the hook has a state that can be saved and loaded."""
    return state is not None and not isinstance(state, ProcessGroup)


def save_state(state: Any, layout: Layout) -> dict[str, Any]:
    """Return a hook's state in a form that can be saved, with its bucket layout.

    Warns:
        NotSavedWarning: An attribute is neither plain data nor a tensor, and is skipped.
    """
    if not has_state(state):
        return {}
    names = [[part.name for part in bucket] for bucket in layout]
    if callable(getattr(state, "state_dict", None)):
        own = {"own": state.state_dict()}
        return own | {"layout": names} if getattr(state, "depends_on_buckets", False) else own
    found: dict[str, dict[str, Any]] = {
        kind: {} for kind in ("plain", "parameters", "buckets", "generators")
    }
    for name, value in _attributes(state).items():
        if _is_by_bucket(value):
            split = _split(value, layout)
            found["buckets" if split is None else "parameters"][name] = split or _copied(value)
        elif hasattr(value, "get_state") and hasattr(value, "set_state"):
            found["generators"][name] = _generator_state(value)
        elif not (isinstance(value, _NOT_SAVED) or callable(value)):
            try:
                found["plain"][name] = _copied(value)
            except TypeError as error:
                warnings.warn(
                    f"{type(state).__name__}.{name} is not saved because it contains {error}: "
                    "define state_dict and load_state_dict on the hook's state",
                    NotSavedWarning,
                    stacklevel=3,
                )
    return {**found, "layout": names} if any(found.values()) else {}


def load_state(state: Any, saved: Mapping[str, Any], layout: Layout) -> None:
    """Load saved values into a hook's state; `layout` is the current bucket layout.

    Raises:
        ArgumentError: The hook has no state.
    """
    if not has_state(state):
        raise ArgumentError(
            "no communication hook with a state is registered: call register_comm_hook before "
            "load_comm_hook_state_dict"
        )
    if "own" in saved:
        state.load_state_dict(saved["own"])
        return
    own = _attributes(state)
    for name, value in saved["plain"].items():
        _put(state, name, own.get(name), _copied(value))
    for name, parts in saved["parameters"].items():
        _put(state, name, own.get(name), _join(parts, layout))
    for name, tensors in saved["buckets"].items():
        _put(state, name, own.get(name), _copied(tensors))
    for name, value in saved.get("generators", {}).items():
        own[name].set_state(value)


def rekey(state: Any, old: Layout, new: Layout) -> None:
    """Convert a state's tensors by bucket index from an old bucket layout to a new one."""
    if old == new:
        return
    for value in _attributes(state).values():
        if _is_by_bucket(value):
            parts = _split(value, old)
            value.clear()
            if parts:
                value.update(_join(parts, new))


def replace_group(state: Any, old: ProcessGroup, new: ProcessGroup) -> Any:
    """Return the state with a process group replaced: itself or its `process_group` attribute."""
    if state is old:
        return new
    if getattr(state, "process_group", None) is old:
        state.process_group = new
    return state


_NOT_SAVED = (ProcessGroup, weakref.ReferenceType)
"""Types of attributes that are not saved: a state in another process has its own."""


def _attributes(state: Any) -> dict[str, Any]:
    if isinstance(state, dict):
        return {"": state} if _is_by_bucket(state) else state
    slots = [s for kind in type(state).__mro__ for s in getattr(kind, "__slots__", ())]
    found = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    return {**found, **getattr(state, "__dict__", {})}


def _put(state: Any, name: str, own: Any, value: Any) -> None:
    """Set an attribute or dictionary entry; update an existing dictionary in place."""
    if isinstance(own, MutableMapping):
        own.clear()
        own.update(value)
    elif isinstance(state, dict):
        if name:
            state[name] = value
        else:
            state.update(value)
    else:
        setattr(state, name, value)


def _copied(value: Any) -> Any:
    """Return a copy of plain data and tensors, in plain containers.

    Raises:
        TypeError: The value contains another type; the message is the type's name.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {_copied(key): _copied(entry) for key, entry in value.items()}
    for kind in (list, tuple, set, deque):
        if type(value) is kind:
            return kind(map(_copied, value))
    plain = bool | int | float | complex | str | bytes | torch.dtype | torch.device | torch.Size
    if value is None or isinstance(value, plain):
        return value
    raise TypeError(type(value).__name__)


def _generator_state(generator: Any) -> Any:
    """Return the state of a torch or NumPy generator as tensors and plain numbers."""
    state = generator.get_state()
    if not isinstance(state, tuple):
        return state
    return tuple(part.tolist() if hasattr(part, "tolist") else part for part in state)


def _is_by_bucket(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(k, int) and isinstance(v, Tensor) for k, v in value.items())
    )


def _split(value: Mapping[int, Tensor], layout: Layout) -> dict[str, Tensor] | None:
    """Return tensors by parameter name, or None if sizes differ from the buckets'."""
    parts: dict[str, Tensor] = {}
    for index, tensor in value.items():
        if index >= len(layout) or tensor.numel() != sum(p.numel for p in layout[index]):
            return None
        sizes = [p.numel for p in layout[index]]
        for part, piece in zip(layout[index], tensor.reshape(-1).split(sizes), strict=True):
            parts[part.name] = piece.clone()
    return parts


def _join(parts: Mapping[str, Tensor], layout: Layout) -> dict[int, Tensor]:
    """Return tensors by bucket index, for buckets all of whose parameters are in `parts`."""
    return {
        index: torch.cat([parts[p.name].reshape(-1) for p in bucket])
        for index, bucket in enumerate(layout)
        if all(p.name in parts for p in bucket)
    }
