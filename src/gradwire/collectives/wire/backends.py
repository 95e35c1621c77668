"""Which engine moves a group's tensors, and tensors as engines can carry them."""

from __future__ import annotations

from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from gradwire._memory import advised

__all__ = [
    "NATIVE",
    "behind",
    "by_rows",
    "dense",
    "direct",
    "empty",
    "engine",
    "flat",
    "fresh",
    "in_bytes",
    "like",
    "plain",
]

NATIVE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
"""What every engine carries; the rest travels as bytes."""
_engines: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()
_behind: WeakKeyDictionary[ProcessGroup, dict[str, Any]] = WeakKeyDictionary()


def direct(group: ProcessGroup, x: Tensor) -> ProcessGroup:
    """What to call for a collective on tensors of that device: the group, or what is behind it.

    A backend written in Python is called without PyTorch's dispatcher, which adds a quarter to the
    time of a small call, unless somebody follows what is dispatched: a mode such as CommDebugMode,
    or the profiler.
    """
    if torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled():
        return group
    carrier: ProcessGroup = behind(group, x)
    return carrier


def behind(group: ProcessGroup, x: Tensor) -> Any:
    """What carries tensors of that device, if it is written in Python; else the group."""
    known = _behind.get(group)
    if known is None:
        known = _behind[group] = {}
    kind = x.device.type
    if kind not in known:
        known[kind] = _python_backend(group, x.device)
    return known[kind] or group


def _python_backend(group: ProcessGroup, device: torch.device) -> Any:
    if type(group) is not ProcessGroup or device.type not in {d.type for d in group._device_types}:
        return None
    backend = group._get_backend(device)
    return backend if isinstance(getattr(type(backend), "allreduce", None), FunctionType) else None


def engine(group: ProcessGroup, x: Tensor) -> str:
    """The name of what moves the group's tensors of that device; "" if it has none."""
    names = _engines.setdefault(group, {})
    kind = x.device.type
    if kind not in names:
        if type(group) is ProcessGroup:
            names[kind] = group._get_backend(x.device).name()
        else:  # written in Python: one engine
            names[kind] = getattr(group, "getBackendName", str)()
    return names[kind]


def dense(x: Tensor) -> Tensor:
    """The tensor with its elements in order in memory; itself, if they are."""
    x = plain(x)
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def fresh(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return like(x).copy_(plain(x))


def plain(x: Tensor) -> Tensor:
    """The tensor without its tangent, which would follow it into the engine."""
    return forward_ad.unpack_dual(x).primal if forward_ad._current_level >= 0 else x


def flat(x: Tensor) -> Tensor:
    """A contiguous tensor as the engine can carry it: bytes, if it does not know the dtype."""
    return x if x.dtype in NATIVE else in_bytes(x, (x.numel(),))


def by_rows(x: Tensor) -> Tensor:
    """`_flat` that keeps the first dim."""
    if x.dtype in NATIVE:
        return x
    width = x[0].numel() if len(x) else 0
    return in_bytes(x, (len(x), width))


def in_bytes(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor's bytes, in one dim or by rows.

    A contiguous tensor may have any stride in a dim of size 1, where `view(dtype)` wants a 1.
    """
    return x.as_strided(shape, (1,) if len(shape) == 1 else (shape[1], 1)).view(torch.uint8)


def empty(x: Tensor, rows: int) -> Tensor:
    """Memory for that many rows like the tensor's."""
    return advised(torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device))


def like(x: Tensor) -> Tensor:
    """Memory for a tensor of that shape."""
    return advised(torch.empty(x.shape, dtype=x.dtype, device=x.device))
