"""The calls of torch.distributed, on tensors without gradients: the only module that makes them.

Only the first dim is split or concatenated. Every function starts its collective and returns a
`Pending`, whose `wait` returns a new, contiguous result. Backends differ in their capabilities
(`Backend`); a missing one is composed of other collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.utils._python_dispatch import _disable_current_modes

from gradwire._engine_errors import backend_failure, backend_timeout, is_over, is_transport
from gradwire._groups import OBSERVERS, message_device
from gradwire._memory import advised
from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE, REDUCE_SCATTER_SINGLE
from gradwire.errors import ArgumentError, DistributedError
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
    """Backend of a group for one device type, and its capabilities."""

    # Name such as "gloo" or "nccl"; "" if there is none.
    name: str = ""
    # Object to call, if the backend is written in Python.
    python: Any = None
    # Gathers and scatters take a different size per rank, reduce_scatter is faster than an
    # all_to_all and a local sum, and averages in half precision do not overflow.
    complete: bool = False
    # band, bor and bxor are implemented.
    reduces_bitwise: bool = True
    # max and min of floating-point numbers propagate NaN.
    max_keeps_nan: bool = False
    # Large gathers pass through memory that is allocated for each call.
    stages_gathers: bool = False


_KNOWN = {
    "gloo": Backend("gloo", stages_gathers=True),
    "nccl": Backend("nccl", complete=True, reduces_bitwise=False),
    "shm": Backend("shm", complete=True, max_keeps_nan=True),
}
# Looked up once for each group and device type. No value may refer to its group, which would then
# never be freed.
_backends: WeakKeyDictionary[ProcessGroup, dict[str, Backend]] = WeakKeyDictionary()


def backend_of(group: ProcessGroup, x: Tensor) -> Backend:
    """Return the group's backend for the tensor's device type."""
    by_device = _backends.setdefault(group, {})
    backend = by_device.get(x.device.type)
    if backend is None:
        backend = by_device[x.device.type] = _find_backend(group, x.device)
    return backend


def _find_backend(group: ProcessGroup, device: torch.device) -> Backend:
    name, python = "", None
    if type(group) is not ProcessGroup:  # a group written in Python has one backend
        name = _python_name(group)
    elif device.type in {known.type for known in group._device_types}:
        found: Any = group._get_backend(device)
        if isinstance(getattr(type(found), "allreduce", None), FunctionType):
            name, python = _python_name(found), found
        else:
            name = found.name()
    return replace(_KNOWN.get(name, Backend(name)), python=python)


def _python_name(backend: object) -> str:
    name: str = getattr(backend, "getBackendName", str)()  # some backends have no name
    return name


def callee_of(group: ProcessGroup, x: Tensor) -> tuple[Callable[..., Work], Backend]:
    """Return a function that calls a collective by name, and the backend."""
    backend = backend_of(group, x)
    return partial(_call, group, backend), backend


def _call(group: ProcessGroup, backend: Backend, name: str, *args: Any) -> Work:
    # Calling a backend that is written in Python bypasses PyTorch's dispatcher, which adds a
    # quarter to the time of a small call. A dispatch mode, such as CommDebugMode, and the profiler
    # need the dispatcher.
    dispatched = torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled()
    collective = getattr(group if dispatched else backend.python or group, name)
    for observe in OBSERVERS:
        collective = partial(observe, group, name, collective)
    work: Work = collective(*args)
    return work


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


def placeholder(
    shape: Sequence[int], dtype: torch.dtype | None, requires_grad: bool, group: ProcessGroup
) -> Tensor:
    """Return a tensor for values that are never read: one element, expanded to the shape."""
    number = torch.empty((), dtype=dtype, device=message_device(group))
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
    """Collective under way, whose `wait` raises the backend's errors as gradwire's."""

    __slots__ = ("_finish", "_group", "_number", "_since", "_works")

    def __init__(
        self,
        works: Sequence[Work | None],
        finish: Callable[[], Tensor],
        group: ProcessGroup | None = None,
    ) -> None:
        # `finish` is called once, after the works have completed.
        self._works, self._finish, self._group = works, finish, group
        self._since = time.monotonic() if works else 0.0
        self._number = number_of_last(group) if works else 0

    def wait(self) -> Tensor:
        """Wait for completion, and return the result."""
        try:
            for work in self._works:
                # NCCL returns None for a blocking collective, which the current stream already
                # waits for.
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            if isinstance(error, DistributedError) or not is_transport(error):
                raise
            assert self._group is not None
            timed_out = is_over(self._since, backend_timeout(self._group))
            what = "another rank did not take part in time" if timed_out else "another rank is gone"
            failure = backend_failure(error, what, timed_out=timed_out)
            record_error(failure)
            raise failure from error
        if self._number and self._group is not None:
            ring.end(self._group, self._number)
        return self._finish()


def done(result: Tensor) -> Pending:
    """Return a completed collective, for results that require no communication."""
    return Pending((), lambda: result)


_LARGE, _FEW = 1 << 20, 4
_TAG = 0x6777
"""Tag of send and recv, which keeps them apart from the caller's own messages."""


def broadcast(x: Tensor, root: int, group: ProcessGroup, blocking: bool = False) -> Pending:
    """Broadcast the root's tensor. Other ranks' `x` gives shape, dtype and device only."""
    call, backend = callee_of(group, x)
    at_root = group.rank() == root
    out = contiguous_copy(x) if at_root else empty_like(x)
    if x.numel() == 0:
        return done(out)
    work = call("broadcast", [flat(out)], options(dist.BroadcastOptions, blocking, root))
    return Pending((work,), lambda: out, backend.python or group)


def all_gather(
    x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup, blocking: bool = False
) -> Pending:
    """Concatenate all ranks' rows, in rank order."""
    call, backend = callee_of(group, x)
    source = dense(x)
    out = empty_rows(x, x.shape[0] * group.size() if sizes is None else sum(sizes))
    if out.numel() == 0:
        return done(out)
    direct = not _by_messages(source, group, backend)
    if direct and (sizes is None or len(set(sizes)) == 1):
        opts = options(AllgatherOptions, blocking)
        work = call(ALL_GATHER_SINGLE, flat(out), flat(source), opts)
        return Pending((work,), lambda: out, backend.python or group)
    pieces = out.chunk(group.size()) if sizes is None else out.split_with_sizes(sizes)
    if backend.complete:
        into = [flat(piece) for piece in pieces]
        work = call("allgather", [into], [flat(source)], options(AllgatherOptions, blocking))
        return Pending((work,), lambda: out, backend.python or group)
    # A broadcast from each rank sends the same bytes. All are started before the first wait,
    # regardless of `blocking`.
    pieces[group.rank()].copy_(source)
    works = [
        call("broadcast", [flat(piece)], options(dist.BroadcastOptions, False, rank))
        for rank, piece in enumerate(pieces)
        if piece.numel()
    ]
    return Pending(works, lambda: out, backend.python or group)


def gather(
    x: Tensor,
    root: int,
    sizes: Sequence[int],
    other_rows: int,
    group: ProcessGroup,
    blocking: bool = False,
) -> Pending:
    """Gather all ranks' rows on the root; other ranks get `other_rows` rows of zeros."""
    call, backend = callee_of(group, x)
    at_root, world = group.rank() == root, group.size()
    out = empty_rows(x, sum(sizes)) if at_root else empty_rows(x, other_rows).zero_()
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x)
    equal = len(set(sizes)) == 1 and not _by_messages(source, group, backend)
    if not (equal or backend.complete):
        send = [x.shape[0] if rank == root else 0 for rank in range(world)]
        received = all_to_all(source, send, sizes if at_root else [0] * world, group, blocking)
        return received if at_root else Pending((), lambda: _after(received, out))
    into = [[flat(piece) for piece in out.split_with_sizes(sizes)]] if at_root else []
    work = call("gather", into, [flat(source)], options(dist.GatherOptions, blocking, root))
    return Pending((work,), lambda: out, backend.python or group)


def _by_messages(source: Tensor, group: ProcessGroup, backend: Backend) -> bool:
    """Return True to gather by messages that are received directly into the result."""
    # 25 MiB per rank on Gloo: 24 ms instead of 106 between two ranks, 122 instead of 463 between
    # four on one host. Between more ranks, or several hosts, Gloo's ring keeps every link busy.
    return backend.stages_gathers and source.nbytes >= _LARGE and group.size() <= _FEW


def _after(received: Pending, out: Tensor) -> Tensor:
    received.wait()
    return out


def scatter(
    x: Tensor, root: int, sizes: Sequence[int], group: ProcessGroup, blocking: bool = False
) -> Pending:
    """Scatter the root's rows. On other ranks the values of `x` are not read."""
    call, backend = callee_of(group, x)
    at_root, world = group.rank() == root, group.size()
    rows = sizes[group.rank()]
    out = empty_rows(x, rows)
    if _nothing(x, sum(sizes)):
        return done(out)
    source = dense(x) if at_root else x[:0]
    if len(set(sizes)) > 1 and not backend.complete:
        receive = [rows if rank == root else 0 for rank in range(world)]
        return all_to_all(source, sizes if at_root else [0] * world, receive, group, blocking)
    pieces = [[flat(piece) for piece in source.split_with_sizes(sizes)]] if at_root else []
    work = call("scatter", [flat(out)], pieces, options(dist.ScatterOptions, blocking, root))
    return Pending((work,), lambda: out, backend.python or group)


def all_to_all(
    x: Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group: ProcessGroup,
    blocking: bool = False,
) -> Pending:
    """Send rows to each rank, and receive rows from each; equal numbers without splits."""
    call, backend = callee_of(group, x)
    out = empty_rows(x, x.shape[0] if output_splits is None else sum(output_splits))
    if x.shape[1:].numel() == 0 or (input_splits is None and x.numel() == 0):
        return done(out)
    source = dense(x)
    splits = list(output_splits or ()), list(input_splits or ())
    opts = options(dist.AllToAllOptions, blocking)
    work = call(ALL_TO_ALL_SINGLE, by_rows(out), by_rows(source), *splits, opts)
    return Pending((work,), lambda: out, backend.python or group)


def barrier(group: ProcessGroup) -> None:
    """Block until every rank has called this function."""
    _call(group, Backend(), "barrier").wait()


def send(x: Tensor, to: int, group: ProcessGroup) -> Pending:
    """Send a tensor to one rank of the group."""
    call, backend = callee_of(group, x)
    source = dense(x)
    return Pending(
        (call("send", [flat(source)], to, _TAG),), lambda: source, backend.python or group
    )


def receive(shaped: Tensor, source: int, group: ProcessGroup) -> Pending:
    """Receive a tensor, shaped like `shaped`, from one rank of the group."""
    call, backend = callee_of(group, shaped)
    out = empty_like(shaped)
    return Pending((call("recv", [flat(out)], source, _TAG),), lambda: out, backend.python or group)


def _nothing(x: Tensor, rows: int) -> bool:
    return rows * x.shape[1:].numel() == 0


def gather_ints(mine: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """Gather a list of integers, of the same length on every rank."""
    # Inside a torch.func transform, every new tensor would belong to the transform.
    with temporarily_clear_interpreter_stack():
        own = torch.tensor([mine], dtype=torch.int64, device=message_device(group))
        rows: list[list[int]] = all_gather(own, None, group, blocking=True).wait().tolist()
    return rows


def exchange_ints(mine: Sequence[int], group: ProcessGroup) -> list[int]:
    """Exchange one integer with each rank."""
    with temporarily_clear_interpreter_stack():
        own = torch.tensor(mine, dtype=torch.int64, device=message_device(group))
        theirs: list[int] = all_to_all(own, None, None, group, blocking=True).wait().tolist()
    return theirs


BITWISE = ("band", "bor", "bxor")
REDUCTIONS = ("sum", "avg", "max", "min", "product", *BITWISE)
_OPS: dict[str, Any] = {name: getattr(dist.ReduceOp, name.upper()) for name in REDUCTIONS}


def all_reduce(x: Tensor, op: str, group: ProcessGroup, blocking: bool = False) -> Pending:
    """Reduce on every rank."""
    call, backend = callee_of(group, x)
    if x.numel() == 0:
        return done(contiguous_copy(x))
    if not _reduces(x, op, backend):
        return _all_reduce_by_parts(x, op, group, blocking)
    buffer, op, result = _reduction_buffer(x, op, backend, group.size())
    work = call("allreduce", [buffer], options(dist.AllreduceOptions, blocking, None, _OPS[op]))
    return Pending((work,), result, backend.python or group)


def reduce(x: Tensor, root: int, op: str, group: ProcessGroup, blocking: bool = False) -> Pending:
    """Reduce on the root; other ranks get zeros."""
    call, backend = callee_of(group, x)
    at_root = group.rank() == root
    if x.numel() == 0:
        return done(contiguous_copy(x))
    if not _reduces(x, op, backend):
        reduced = _all_reduce_by_parts(x, op, group, blocking)
        return Pending((), lambda: reduced.wait() if at_root else reduced.wait().zero_())
    buffer, op, result = _reduction_buffer(x, op, backend, group.size())
    work = call("reduce", [buffer], options(dist.ReduceOptions, blocking, root, _OPS[op]))
    # Backends leave partial results in the buffers of the other ranks.
    return Pending(
        (work,), result if at_root else lambda: result().zero_(), backend.python or group
    )


def reduce_scatter(
    x: Tensor, sizes: Sequence[int] | None, op: str, group: ProcessGroup, blocking: bool = False
) -> Pending:
    """Reduce, and scatter the rows of the result."""
    call, backend = callee_of(group, x)
    world = group.size()
    rows = x.shape[0] // world if sizes is None else sizes[group.rank()]
    if x.numel() == 0:
        return done(empty_rows(x, rows))
    keeps_nan = backend.max_keeps_nan or op not in ("max", "min") or not x.is_floating_point()
    own = backend.complete and keeps_nan and _reduces(x, op, backend)
    if sizes is None and own:
        scaled = op == "avg" and not _averages(x, backend)
        source = _scaled(x, world) if scaled else dense(x)
        out = empty_rows(source, rows)
        buffer = (out, source)
        if x.is_complex():
            buffer = (torch.view_as_real(out), torch.view_as_real(source))
        chosen = options(dist.ReduceScatterOptions, blocking, None, _OPS["sum" if scaled else op])
        work = call(REDUCE_SCATTER_SINGLE, *buffer, chosen)
        finish = (lambda: _unscaled(out, x.dtype, world)) if scaled else (lambda: out)
        return Pending((work,), finish, backend.python or group)
    # Checked here as well, for backward: forward only moves the dtype of a gather's cotangents.
    check_computable(x, op)
    # On Gloo this takes less than half as long as its reduce_scatter. It supports every op, sums in
    # a fixed order, and accumulates half precision in float32.
    received = all_to_all(x, sizes, None if sizes is None else [rows] * world, group, blocking)
    return Pending((), lambda: reduce_locally(received.wait().view(world, rows, *x.shape[1:]), op))


def reduce_locally(pieces: Tensor, op: str) -> Tensor:
    """Reduce over the first dim, in a fixed order."""
    if op == "avg":
        total = reduce_locally(_scaled(pieces, len(pieces)), "sum")
        return _unscaled(total, pieces.dtype, len(pieces))
    if op == "sum":
        if pieces.dtype == torch.complex32:  # torch.sum does not support it on the CPU
            return torch.view_as_complex(torch.view_as_real(pieces).sum(0))
        return pieces.sum(0, dtype=pieces.dtype)
    if op == "product":
        return pieces.prod(0, dtype=pieces.dtype)
    if op in ("max", "min"):
        return pieces.amax(0) if op == "max" else pieces.amin(0)
    combine = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    result = pieces[0].clone()
    for piece in pieces[1:]:
        combine(result, piece, out=result)
    return result


def split_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return the sizes into which `torch.tensor_split` divides rows."""
    small, more = divmod(rows, parts)
    return tuple(small + (i < more) for i in range(parts))


def _reduces(x: Tensor, op: str, backend: Backend) -> bool:
    """Return True if the backend can reduce the tensor with the op."""
    if x.is_complex():
        return op in ("sum", "avg")
    if op in BITWISE and not backend.reduces_bitwise:
        return False
    return x.dtype in CARRIED or (x.dtype == torch.bool and op in ("band", "bor", "max", "min"))


def _reduction_buffer(
    x: Tensor, op: str, backend: Backend, world: int
) -> tuple[Tensor, str, Callable[[], Tensor]]:
    """Return the buffer to reduce in place, the op, and a function that returns the result."""
    if op in ("max", "min") and x.is_floating_point() and not backend.max_keeps_nan:
        buffer = _to_ordered_ints(without_tangent(x), op)
        return buffer, op, lambda: _from_ordered_ints(buffer, x.dtype)
    scaled = op == "avg" and not _averages(x, backend)
    out = _scaled(x, world) if scaled else contiguous_copy(x)
    buffer = out
    if x.is_complex():
        buffer = torch.view_as_real(out)
    elif x.dtype == torch.bool:
        buffer = out.view(torch.uint8)
    if scaled:
        return buffer, "sum", lambda: _unscaled(out, x.dtype, world)
    return buffer, op, lambda: out


# An average is computed as a sum of scaled numbers, which overflows only if the average does. The
# scale is a power of two, which does not round, so that the final division by the remaining factor
# rounds once. Two-byte dtypes have too few bits for sums, and scaling would flush small numbers to
# zero: they are converted to a wider dtype.


def _averages(x: Tensor, backend: Backend) -> bool:
    """Return True if the backend's own average of the tensor cannot overflow."""
    return backend.complete and wider(x.dtype) is not x.dtype


def _scaled(x: Tensor, world: int) -> Tensor:
    """Return a scaled, contiguous copy to sum, in a dtype that is wide enough."""
    return contiguous_copy(x).to(wider(x.dtype)).mul_(1 / _power_of_two(world))


def _unscaled(total: Tensor, dtype: torch.dtype, world: int) -> Tensor:
    """Return the average, given the sum of scaled tensors, which is overwritten."""
    rest = world / _power_of_two(world)
    return (total if rest == 1 else total.div_(rest)).to(dtype)


def _power_of_two(world: int) -> int:
    """Return the smallest power of two that is at least `world`."""
    return 1 << (world - 1).bit_length()


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum numbers of a dtype."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def _all_reduce_by_parts(x: Tensor, op: str, group: ProcessGroup, blocking: bool) -> Pending:
    """Run all_reduce as reduce_scatter and all_gather, for reductions that the backend lacks."""
    world = group.size()
    sizes = split_sizes(x.numel(), world)
    mine = reduce_scatter(dense(x).view(-1), sizes, op, group, blocking=True).wait()
    gathered = all_gather(mine, sizes, group, blocking)
    # `.data`, because a view could not be modified in place: autograd does not know its base.
    return Pending((), lambda: gathered.wait().view(x.shape).data)


_COMPUTABLE = CARRIED | {torch.int16, torch.bool, torch.complex64, torch.complex128}
"""Dtypes for which PyTorch computes every reduction that is defined."""


def check_computable(x: Tensor, op: str) -> None:
    """Raise if PyTorch cannot compute a reduction of the tensor's dtype."""
    # Every dtype can be sent, but some, such as uint16 and float8, can be neither summed nor
    # compared. A rank that detects this after communication has begun would leave the others
    # waiting.
    if x.dtype in _COMPUTABLE or _computes(op, x.dtype, x.device):
        return
    wider = torch.float32 if x.is_floating_point() else torch.int64
    wider = torch.complex64 if x.is_complex() else wider
    raise ArgumentError(
        f"op is {op}, tensor is {x.dtype}: PyTorch cannot compute it on {x.device.type}; convert "
        f"the tensor, for instance to {wider}"
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _computes(op: str, dtype: torch.dtype, device: torch.device) -> bool:
    return _try(op, dtype, device)


@lru_cache(maxsize=256)
def _try(op: str, dtype: torch.dtype, device: torch.device) -> bool:
    # PyTorch has no table of supported dtypes, so the reduction is tried on zeros. Neither
    # torch.func transforms nor modes, such as FakeTensorMode, may see the trial.
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        try:
            # one element: products of float8 fail for a single element, but not for more
            reduce_locally(torch.zeros((2, 1), dtype=dtype, device=device), op)
        except (RuntimeError, TypeError):
            return False
    return True


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _to_ordered_ints(x: Tensor, op: str) -> Tensor:
    """Map floating-point numbers to new integers of the same order, for max or min."""
    # Gloo and MPI compare as C does, where NaN propagates or not depending on its position. The
    # bits of an IEEE number, read as an integer, are ordered as the number is, once those of
    # negative numbers are flipped; NaN is mapped to the integer that wins. The message keeps its
    # size.
    wide = x if x.dtype in _INTEGERS else x.float()
    integer = _INTEGERS[wide.dtype]
    limits = torch.iinfo(integer)
    keys = _flipped(wide.contiguous().resolve_neg().view(integer))
    return keys.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def _from_ordered_ints(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `_to_ordered_ints`."""
    wide = torch.float64 if keys.dtype == torch.int64 else torch.float32
    return _flipped(keys).view(wide).to(dtype)


def _flipped(bits: Tensor) -> Tensor:
    """Invert all bits but the sign where the sign is set; an involution."""
    limits = torch.iinfo(bits.dtype)
    return (bits >> (limits.bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bits)
