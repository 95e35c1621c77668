"""A hook's state, by parameter: kept through a change of the buckets, saved and loaded.

A state may bring `state_dict` and `load_state_dict` of its own; where its `depends_on_buckets` is
true, the buckets that it was saved with are made again, too. Otherwise its attributes are read:
tensors that are kept by a bucket's index and are as long as the bucket (PyTorch's PowerSGD keeps
its errors so) are cut into the parameters' parts; other tensors by bucket are valid only for the
same buckets, which are therefore saved along and made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError

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
    """What has to be saved of a hook's state: tensors, numbers, and the buckets they are for."""
    if not has_state(state):
        return {}
    names = [[part.name for part in bucket] for bucket in layout]
    if callable(getattr(state, "state_dict", None)):
        own = {"own": state.state_dict()}
        return own | {"layout": names} if getattr(state, "depends_on_buckets", False) else own
    plain: dict[str, Any] = {}
    by_parameter: dict[str, Any] = {}
    by_bucket: dict[str, Any] = {}
    for name, value in _attributes(state).items():
        if _is_by_bucket(value):
            split = _split(value, layout)
            (by_bucket if split is None else by_parameter)[name] = split or dict(value)
        elif isinstance(value, bool | int | float | str | Tensor):
            plain[name] = value
    if not (plain or by_parameter or by_bucket):
        return {}
    return {"plain": plain, "parameters": by_parameter, "buckets": by_bucket, "layout": names}


def load_state(state: Any, saved: Mapping[str, Any], layout: Layout) -> None:
    """Puts saved values into a hook's state; `layout` is that of the buckets now.

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
    for name, value in saved["plain"].items():
        setattr(state, name, value)
    for name, parts in saved["parameters"].items():
        setattr(state, name, _join(parts, layout))
    for name, tensors in saved["buckets"].items():
        setattr(state, name, dict(tensors))


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


def _attributes(state: Any) -> dict[str, Any]:
    slots = [s for kind in type(state).__mro__ for s in getattr(kind, "__slots__", ())]
    found = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    return {**found, **getattr(state, "__dict__", {})}


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
