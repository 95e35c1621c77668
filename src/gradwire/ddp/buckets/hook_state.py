"""A hook's state, by parameter: kept through a change of the buckets, saved and loaded.

A state may have `state_dict` and `load_state_dict`; if its `depends_on_buckets` is true, the
buckets that it was saved with are made again, too. Otherwise its attributes, or the entries of a
dictionary, are saved: plain data, tensors, and the state of random generators. Tensors that are
kept by a bucket's index and are as long as the bucket (PyTorch's PowerSGD keeps its errors so) are
cut into the parameters' parts; other tensors by bucket are valid only for the same buckets, which
are therefore saved along and made again.
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

__all__ = ["Layout", "Part", "has_state", "load_state", "rekey", "replace_group", "save_state"]

Layout = Sequence[Sequence["Part"]]
"""For each bucket, the parameters in it."""


@dataclass(frozen=True)
class Part:
    """A parameter's place in a bucket: its name and its number of elements."""

    name: str
    numel: int


def has_state(state: Any) -> bool:
    """Whether there is anything to save or to load into."""
    return state is not None and not isinstance(state, ProcessGroup)


def save_state(state: Any, layout: Layout) -> dict[str, Any]:
    """Return what has to be saved of a hook's state, and the buckets that it is for.

    Warns:
        NotSavedWarning: An attribute is neither plain data nor a tensor.
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
                    f"{type(state).__name__}.{name} is not saved, as it contains {error}: give the "
                    "hook's state the methods state_dict and load_state_dict",
                    NotSavedWarning,
                    stacklevel=3,
                )
    return {**found, "layout": names} if any(found.values()) else {}


def load_state(state: Any, saved: Mapping[str, Any], layout: Layout) -> None:
    """Put saved values into a hook's state; `layout` is that of the buckets now.

    Raises:
        ArgumentError: There is no state to load into.
    """
    if not has_state(state):
        raise ArgumentError(
            "no hook with a state is registered: call register_comm_hook before "
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
    """Takes what a state keeps by bucket over to other buckets."""
    if old == new:
        return
    for value in _attributes(state).values():
        if _is_by_bucket(value):
            parts = _split(value, old)
            value.clear()
            if parts:
                value.update(_join(parts, new))


def replace_group(state: Any, old: ProcessGroup, new: ProcessGroup) -> Any:
    """The state with one group in another's place: itself, or its attribute `process_group`."""
    if state is old:
        return new
    if getattr(state, "process_group", None) is old:
        state.process_group = new
    return state


_NOT_SAVED = (ProcessGroup, weakref.ReferenceType)
"""What a state may refer to, and finds again in another process by itself."""


def _attributes(state: Any) -> dict[str, Any]:
    if isinstance(state, dict):
        return {"": state} if _is_by_bucket(state) else state
    slots = [s for kind in type(state).__mro__ for s in getattr(kind, "__slots__", ())]
    found = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    return {**found, **getattr(state, "__dict__", {})}


def _put(state: Any, name: str, own: Any, value: Any) -> None:
    """Set an attribute, or an entry of a dictionary; a dictionary of the state is filled."""
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
        TypeError: There is something else in it; its text names the type.
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
    """Return a random generator's state: torch's or NumPy's, as tensors and plain numbers."""
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
    """Tensors by parameter; None if they are not as long as their buckets."""
    parts: dict[str, Tensor] = {}
    for index, tensor in value.items():
        if index >= len(layout) or tensor.numel() != sum(p.numel for p in layout[index]):
            return None
        sizes = [p.numel for p in layout[index]]
        for part, piece in zip(layout[index], tensor.reshape(-1).split(sizes), strict=True):
            parts[part.name] = piece.clone()
    return parts


def _join(parts: Mapping[str, Tensor], layout: Layout) -> dict[int, Tensor]:
    """Tensors by bucket, for buckets of which all parameters are there."""
    return {
        index: torch.cat([parts[p.name].reshape(-1) for p in bucket])
        for index, bucket in enumerate(layout)
        if all(p.name in parts for p in bucket)
    }
