"""Backends: their capabilities, tensors in a form that they accept, and collectives under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, Work

from gradwire._engine_errors import backend_failure, backend_timeout, is_over, is_transport
from gradwire._memory import advised
from gradwire.errors import DistributedError
from gradwire.recorder import number_of_last, record_error, ring

CARRIED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
"""Dtypes that every backend supports; all others are sent as bytes."""


@dataclass(frozen=True)
class Backend:
    """Backend of a group for one device type, and its capabilities.

    Args:
        name: Name such as "gloo" or "nccl"; "" if there is none.
        python: Object to call, if the backend is written in Python.
        gathers_uneven: True if gather, all_gather and scatter accept a different size per rank.
        reduces_bitwise: True if band, bor and bxor are implemented.
        max_keeps_nan: True if max and min of floating-point numbers propagate NaN.
        own_reduce_scatter: True if reduce_scatter is faster than an all_to_all and a local sum.
        averages_half: True if averages in half precision do not overflow.
        stages_gathers: True if large gathers pass through memory that is allocated for each call.
    """

    name: str = ""
    python: Any = None
    gathers_uneven: bool = False
    reduces_bitwise: bool = True
    max_keeps_nan: bool = False
    own_reduce_scatter: bool = False
    averages_half: bool = False
    stages_gathers: bool = False


_KNOWN = {
    "gloo": Backend("gloo", stages_gathers=True),
    "nccl": Backend(
        "nccl",
        gathers_uneven=True,
        reduces_bitwise=False,
        own_reduce_scatter=True,
        averages_half=True,
    ),
    "shm": Backend(
        "shm",
        gathers_uneven=True,
        max_keeps_nan=True,
        own_reduce_scatter=True,
        averages_half=True,
    ),
}
# Looked up once for each group and device type. No value may refer to its group, which would then
# never be freed.
_backends: WeakKeyDictionary[ProcessGroup, dict[str, Backend]] = WeakKeyDictionary()


def backend_of(group: ProcessGroup, x: Tensor) -> Backend:
    """Return the group's backend for the tensor's device type."""
    by_device = _backends.get(group)
    if by_device is None:
        by_device = _backends[group] = {}
    backend = by_device.get(x.device.type)
    if backend is None:
        backend = by_device[x.device.type] = _find_backend(group, x.device)
    return backend


def _find_backend(group: ProcessGroup, device: torch.device) -> Backend:
    if type(group) is not ProcessGroup:  # a group written in Python has one backend
        return _named(_python_name(group))
    if device.type not in {known.type for known in group._device_types}:
        return Backend()
    found: Any = group._get_backend(device)
    if isinstance(getattr(type(found), "allreduce", None), FunctionType):
        return replace(_named(_python_name(found)), python=found)
    return _named(found.name())


def _named(name: str) -> Backend:
    return _KNOWN.get(name, Backend(name))


def _python_name(backend: object) -> str:
    name: str = getattr(backend, "getBackendName", str)()  # some backends have no name
    return name


def callee_of(group: ProcessGroup, x: Tensor) -> tuple[ProcessGroup, Backend]:
    """Return the object whose methods run collectives: the group, or its backend written in Python.

    Calling the backend bypasses PyTorch's dispatcher, which adds a quarter to the time of a small
    call. The dispatcher is not bypassed under a dispatch mode, such as CommDebugMode, or the
    profiler.

    Returns:
        The object to call, and the backend.
    """
    backend = backend_of(group, x)
    if backend.python is None:
        return group, backend
    if torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled():
        return group, backend
    return backend.python, backend


@lru_cache(maxsize=4096)
def options(kind: Any, blocking: bool, root: int | None = None, op: Any = None) -> Any:
    """Return the options of a collective, cached: construction costs as much as a small copy."""
    made = kind()
    made.asyncOp = not blocking
    if root is not None:
        made.rootRank = root
    if op is not None:
        made.reduceOp = op
    return made


def dense(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the same values; the tensor itself, if it is contiguous."""
    x = without_tangent(x)
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    # Autograd's zero tensors may have no memory, although is_contiguous() is True.
    return contiguous_copy(x) if x._is_zerotensor() else x.contiguous()


def contiguous_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return empty_like(x).copy_(without_tangent(x))


def without_tangent(x: Tensor) -> Tensor:
    """Return the tensor without its tangent."""
    return forward_ad.unpack_dual(x).primal if forward_ad._current_level >= 0 else x


def flat(x: Tensor) -> Tensor:
    """Return a contiguous tensor in a form that backends accept: as bytes, for other dtypes."""
    return x if x.dtype in CARRIED else in_bytes(x, (x.numel(),))


def by_rows(x: Tensor) -> Tensor:
    """Return the tensor as `flat` does, keeping the first dim."""
    if x.dtype in CARRIED:
        return x
    width = x[0].numel() if x.shape[0] else 0
    return in_bytes(x, (x.shape[0], width))


def in_bytes(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor's bytes, in one dim or by rows."""
    # A contiguous tensor may have any stride in a dim of size 1; `view(dtype)` requires 1.
    return x.as_strided(shape, (1,) if len(shape) == 1 else (shape[1], 1)).view(torch.uint8)


def device_of(group: ProcessGroup) -> torch.device:
    """Return a device that the group supports, preferably the CPU."""
    kinds = [device.type for device in group._device_types]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def placeholder(
    shape: Sequence[int], dtype: torch.dtype | None, requires_grad: bool, group: ProcessGroup
) -> Tensor:
    """Return a tensor for values that are never read: one element, expanded to the shape."""
    number = torch.empty((), dtype=dtype, device=device_of(group))
    return number.expand(tuple(shape)).requires_grad_(requires_grad)


# torch.empty takes 2.7 µs to parse dtype and device, empty_like 0.9 µs. Of a tensor subclass,
# new_empty and empty_like return that subclass, but results are plain tensors.


def empty_rows(x: Tensor, rows: int) -> Tensor:
    """Return uninitialized memory for a number of rows like those of `x`."""
    shape = (rows, *x.shape[1:])
    if type(x) is Tensor:
        return advised(x.new_empty(shape))
    return advised(torch.empty(shape, dtype=x.dtype, device=x.device))


def empty_like(x: Tensor) -> Tensor:
    """Return uninitialized, contiguous memory for a tensor like `x`."""
    if type(x) is Tensor:
        return advised(torch.empty_like(x, memory_format=torch.contiguous_format))
    return advised(torch.empty(x.shape, dtype=x.dtype, device=x.device))


def zeros_like(x: Tensor) -> Tensor:
    """Return contiguous zeros of the shape of `x`."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


class Pending:
    """A collective under way, whose `wait` raises the backend's errors as gradwire's.

    Args:
        works: Handles of torch.distributed to wait for. NCCL returns None for a blocking
            collective, which the current stream already waits for.
        finish: Function that returns the result; called once, after the works have completed.
        group: Process group of the works, if there are any.
    """

    __slots__ = ("_finish", "_group", "_number", "_since", "_works")

    def __init__(
        self,
        works: Sequence[Work | None],
        finish: Callable[[], Tensor],
        group: ProcessGroup | None = None,
    ) -> None:
        self._works, self._finish, self._group = works, finish, group
        self._since = time.monotonic() if works else 0.0
        self._number = number_of_last(group) if works else 0

    def wait(self) -> Tensor:
        """Wait for completion, and return the result.

        Raises:
            PeerLostError: Another rank is gone.
            CollectiveTimeoutError: Another rank did not take part in time.
        """
        try:
            for work in self._works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            if isinstance(error, DistributedError) or not is_transport(error):
                raise
            raise self._failure(error) from error
        if self._number and self._group is not None:
            ring.end(self._group, self._number)
        return self._finish()

    def _failure(self, error: RuntimeError) -> DistributedError:
        assert self._group is not None
        timed_out = is_over(self._since, backend_timeout(self._group))
        what = "another rank did not take part in time" if timed_out else "another rank is gone"
        failure = backend_failure(error, what, timed_out=timed_out)
        record_error(failure)
        return failure


def done(result: Tensor) -> Pending:
    """Return a completed collective, for results that require no communication."""
    return Pending((), lambda: result)
