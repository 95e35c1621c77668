"""broadcast and reduce_add, each the other's adjoint, for one tensor or many tensors at once.

The public functions check arguments. `broadcast_lists` and `reduce_lists` bypass autograd if no
tensor requires a gradient, and then return the input tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from gradwire._torch import nested_forward_mode
from gradwire.devices import placement
from gradwire.devices.copying import copies_coalesced, copy_into, summed_coalesced
from gradwire.devices.placement import (
    Device,
    as_destination,
    as_devices,
    check_apart,
    own_place,
)
from gradwire.errors import ArgumentError, ArgumentTypeError

BUFFER_SIZE = 10 << 20
"""Default number of bytes after which a buffer of coalesced tensors is closed."""

T = TypeVar("T")


def broadcast(
    tensor: Tensor,
    devices: Iterable[Device] | None = None,
    *,
    out: Iterable[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Copy a tensor to every device.

    Args:
        tensor: Dense or sparse tensor of any dtype, on any device.
        devices: List of k devices. A device may be listed several times, for several copies.
        out: List of k tensors to write into instead, of the tensor's shape, dtype and layout. They
            must not share memory. Exactly one of `devices` and `out` must be given. With `out`, no
            gradient is recorded.

    Returns:
        A tuple of k tensors. The first entry for the tensor's own device is the tensor itself, or a
        view of it if gradients are recorded. All others are copies, with the tensor's strides if
        these leave no gaps.

    Adjoint: `reduce_add` to the tensor's device.

    Raises:
        ArgumentError: Both or neither of `devices` and `out` are given, or an entry is not a valid
            device or does not match; the message has its index.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> a, b = broadcast(x, ["cpu", "cpu"])
        >>> (a.sum() + 3 * b.sum()).backward()
        >>> x.grad
        tensor([4., 4.])
    """
    placement.check_tensor(tensor, "tensor")
    placement.check_exactly_one(devices, out)
    if devices is not None:
        replicas = broadcast_lists([tensor], as_devices(devices))
        return tuple(replica[0] for replica in replicas)
    targets = placement.as_tensor_list(() if out is None else out, "out")
    k = len(targets)
    names, sources = [f"out[{i}]" for i in range(k)], [tensor] * k
    placement.check_out(targets, [tensor.shape] * k, [tensor], names)
    check_apart(targets, sources, names, ["tensor"] * k)
    with torch.no_grad():
        copy_into(targets, sources)
    return tuple(targets)


def broadcast_coalesced(
    tensors: Iterable[Tensor],
    devices: Iterable[Device],
    buffer_size: int = BUFFER_SIZE,
) -> list[list[Tensor]]:
    """Copy many tensors to every device, packing small ones into buffers.

    This is a differentiable `torch.nn.parallel.comm.broadcast_coalesced`, within one process.
    Between processes, use `gradwire.ddp.broadcast_coalesced`.

    Args:
        tensors: Dense or sparse tensors of any shapes and dtypes, on the first of `devices`.
        devices: List of k devices. A device may be listed several times, for several copies.
        buffer_size: Size in bytes of the buffers that tensors of one dtype share. A copy that
            outlives the others keeps its whole buffer in memory: 1 gives every copy its own.

    Returns:
        A list of k lists of copies. The first list holds the tensors themselves, or views of them
        if gradients are recorded. Each copy has its own version counter.

    Adjoint: `reduce_add_coalesced` to the tensors' device.

    Raises:
        ArgumentError: A tensor is not on the first of `devices`, or `buffer_size` is not positive.

    Example:
        >>> broadcast_coalesced([torch.ones(2), torch.arange(3)], ["cpu", "cpu"])[1]
        [tensor([1., 1.]), tensor([0, 1, 2])]
    """
    places = as_devices(devices)
    found = placement.as_list(tensors, "tensors")
    if not found:
        return [[] for _ in places]
    placement.as_tensor_list(found, "tensors")
    placement.check_alike(found, "tensors", ["device"])
    if (home := found[0].device) != places[0]:
        raise ArgumentError(
            f"tensors are on {home}, devices[0] is {places[0]}: list the tensors' device first"
        )
    _check_buffer_size(buffer_size)
    return broadcast_lists(found, places, buffer_size)


def reduce_add(inputs: Iterable[Tensor], destination: Device | None = None) -> Tensor:
    """Sum tensors of several devices.

    The inputs are summed in order, so that the bits of the result do not depend on the destination.

    Args:
        inputs: List of k tensors of one shape, dtype and layout, on any devices.
        destination: Device of the sum; the first input's device if None, the CPU if −1.

    Returns:
        The sum. A single input is returned unchanged if it is on the destination.

    Adjoint: `broadcast` to the inputs' devices.

    Raises:
        ArgumentError: There are no inputs, or an input does not match the first.

    Example:
        >>> reduce_add([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
        tensor([11., 22.])
    """
    found = placement.as_tensor_list(inputs, "inputs")
    placement.check_alike(found, "inputs")
    home = as_destination(destination, found[0].device)
    return reduce_lists([[t] for t in found], home)[0]


def reduce_add_coalesced(
    inputs: Iterable[Iterable[Tensor]],
    destination: Device | None = None,
    buffer_size: int = BUFFER_SIZE,
) -> tuple[Tensor, ...]:
    """Sum many tensors of several devices, packing small ones into buffers.

    Args:
        inputs: List of k lists of n tensors. The tensors of a list are on one device; those at the
            same position have one shape and dtype. The sum at a position is sparse if the tensors
            of all lists are sparse, and dense if only some are.
        destination: Device of the sums; the first list's device if None, the CPU if −1.
        buffer_size: Size in bytes of the buffers that sums of one dtype share. A sum that outlives
            the others keeps its whole buffer in memory: 1 gives every sum its own.

    Returns:
        A tuple of n sums, each with its own version counter. A single list is returned unchanged.

    Adjoint: `broadcast_coalesced` to the lists' devices.

    Raises:
        ArgumentError: Lists have different lengths, tensors at a position do not match, or a list
            is on several devices; the message has the index.

    Example:
        >>> one, two = [torch.ones(2), torch.tensor(1)], [torch.ones(2), torch.tensor(5)]
        >>> reduce_add_coalesced([one, two])
        (tensor([2., 2.]), tensor(6))
    """
    replicas = [
        placement.as_list(tensors, f"inputs[{i}]")
        for i, tensors in enumerate(placement.as_list(inputs, "inputs"))
    ]
    if not replicas:
        raise ArgumentError("inputs is empty: give one list of tensors for each device")
    for i, tensors in enumerate(replicas):
        if len(tensors) != len(replicas[0]):
            raise ArgumentError(
                f"inputs[{i}] has {len(tensors)} tensors, inputs[0] has {len(replicas[0])}: give "
                "every list the same number"
            )
    if not replicas[0]:
        return ()
    for i, tensors in enumerate(replicas):
        placement.as_tensor_list(tensors, f"inputs[{i}]")
        placement.check_alike(tensors, f"inputs[{i}]", ["device"])
    for j, column in enumerate(zip(*replicas, strict=True)):
        placement.check_alike(column, f"position {j} of inputs", ["shape", "dtype"])
    home = as_destination(destination, replicas[0][0].device)
    _check_buffer_size(buffer_size)
    return tuple(reduce_lists(replicas, home, buffer_size))


def _check_buffer_size(buffer_size: object) -> None:
    if not isinstance(buffer_size, int):
        raise ArgumentTypeError(f"buffer_size is {buffer_size!r}: give a number of bytes, an int")
    if buffer_size <= 0:
        raise ArgumentError(f"buffer_size is {buffer_size}: give a number of bytes > 0")


# --- differentiable copies and sums of lists ---


@dataclass(frozen=True)
class LinearOp:
    """Linear op on tensors. Its functions must not refer to the tensors that it is applied to."""

    # Function of the tensors, without gradients.
    run: Callable[[Sequence[Tensor]], Any]
    # Function of the results' gradients, and of the flags that say which tensors need a gradient.
    adjoint: Callable[[Sequence[Any], Sequence[bool]], Sequence[Tensor | None]]
    # Function of the tensors' tangents.
    tangent: Callable[[Sequence[Any]], Any]
    # True if both take zeros in place of missing gradients and tangents, else None.
    zeros: bool = False
    # Indices of results that depend on no tensor that is tracked.
    constant: Sequence[int] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Apply the op, with a node in autograd's graph."""
        return _Linear.apply(self, *tensors)  # type: ignore[no-untyped-call]


class _Linear(Function):
    @staticmethod
    def forward(op: LinearOp, *tensors: Tensor) -> Any:
        return op.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = op = inputs[0]
        ctx.set_materialize_grads(op.zeros)
        ctx.mark_non_differentiable(*(output[i] for i in op.constant))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.op.adjoint(grads, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, _op: None, *tangents: Tensor | None) -> Any:
        with nested_forward_mode():
            return ctx.op.tangent(tangents)


def _tangent(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = cast("Any", forward_ad).unpack_dual(tensor).tangent
    return tangent


def tracked(tensors: Sequence[Tensor]) -> list[bool]:
    """Return, for each tensor, True if it is tracked by autograd, in backward or forward mode."""
    grad = torch.is_grad_enabled()
    if forward_ad._current_level < 0:  # faster than unpacking every tensor's tangent
        return [grad and t.requires_grad for t in tensors]
    return [(grad and t.requires_grad) or _tangent(t) is not None for t in tensors]


def _all_with_tangents(tensors: Sequence[Tensor], follow: Sequence[bool]) -> Sequence[Tensor]:
    """Return the tensors; if one has a tangent, all other tracked ones get a tangent of zeros."""
    # If a function returns a view of an input that has no tangent, and its jvp returns a tangent
    # for it, autograd drops the tangents of all later results.
    if forward_ad._current_level < 0:
        return tensors
    tangents = [_tangent(t) for t in tensors]
    if all(t is None for t in tangents):
        return tensors
    dual = cast("Callable[[Tensor, Tensor], Tensor]", forward_ad.make_dual)
    return [
        dual(t, torch.zeros_like(t)) if tracked and tangent is None else t
        for t, tangent, tracked in zip(tensors, tangents, follow, strict=True)
    ]


def _split(tensors: Sequence[T], n: int) -> list[list[T]]:
    return [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]


def broadcast_lists(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    buffer_size: int = BUFFER_SIZE,
    *,
    zeros: bool = False,
) -> list[list[Tensor]]:
    """Return every tensor for each device. Adjoint: the sum over the devices."""
    follow = tracked(tensors)
    if not any(follow):
        return copies_coalesced(tensors, devices, buffer_size)
    tensors = _all_with_tangents(tensors, follow)
    n, home = len(tensors), tensors[0].device
    own = own_place(home, devices)
    # With `zeros`, tensors that no replica used get zero gradients, if others have gradients.
    like = [(t.shape, t.dtype) for t in tensors] if zeros else []

    def run(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(chain.from_iterable(copies_coalesced(given, devices, buffer_size)))

    def adjoint(grads: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        sums = _sums(_split(grads, n), home)
        for i, (shape, dtype) in enumerate(like):
            if needed[i] and sums[i] is None:
                sums[i] = torch.zeros(shape, dtype=dtype, device=home)
        return sums

    def tangent(tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        given = {i: t for i, t in enumerate(tangents) if t is not None}
        replicas = broadcast_lists(list(given.values()), devices)
        if own is not None:
            # the tangent of a view of the input must be a view of the input's tangent
            replicas[own] = [t.view_as(t) for t in given.values()]
        found = [dict(zip(given, replica, strict=True)) for replica in replicas]
        return tuple(replica.get(i) for replica in found for i in range(n))

    constant = [r * n + i for r in range(len(devices)) for i in range(n) if not follow[i]]
    replicas = _split(LinearOp(run, adjoint, tangent, constant=constant)(tensors), n)
    if own is not None:
        pairs = zip(replicas[own], tensors, follow, strict=True)
        replicas[own] = [new if followed else t for new, t, followed in pairs]
    return replicas


def reduce_lists(
    replicas: Sequence[Sequence[Tensor]], home: torch.device, buffer_size: int = BUFFER_SIZE
) -> list[Tensor]:
    """Return, for each position, the sum over the replicas. Adjoint: a copy for each replica."""
    flat = [t for replica in replicas for t in replica]
    if not any(tracked(flat)):
        return summed_coalesced(replicas, home, buffer_size)
    if len(replicas) == 1:
        return [t.to(home) for t in replicas[0]]
    n, devices = len(replicas[0]), [replica[0].device for replica in replicas]
    like = [(t.shape, t.dtype) for t in replicas[0]]

    def run(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(summed_coalesced(_split(given, n), home, buffer_size))

    def adjoint(grads: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        places = [r for r in range(len(devices)) if any(needed[r * n : (r + 1) * n])]
        given = {i: grad for i, grad in enumerate(grads) if grad is not None}
        result: list[Tensor | None] = [None] * len(needed)
        copies = broadcast_lists(list(given.values()), [devices[r] for r in places])
        for r, replica in zip(places, copies, strict=True):
            for i, grad in zip(given, replica, strict=True):
                result[r * n + i] = grad
        return result

    def tangent(tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        # operations that outer transforms support
        columns = _columns(_split(tangents, n))
        sums = [reduce(torch.add, [t.to(home) for t in c]) if c else None for c in columns]
        # The sum of a single tangent is that tangent: clone it, so that in-place ops on one do not
        # affect the other.
        given = {id(t) for t in tangents}
        sums = [s.clone() if s is not None and id(s) in given else s for s in sums]
        return tuple(
            torch.zeros(shape, dtype=dtype, device=home)
            if s is None and (dtype.is_floating_point or dtype.is_complex)
            else s
            for s, (shape, dtype) in zip(sums, like, strict=True)
        )

    return list(LinearOp(run, adjoint, tangent)(flat))


def _columns(replicas: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor]]:
    """Return, for each position, the tensors that are there."""
    return [[t for t in column if t is not None] for column in zip(*replicas, strict=True)]


def _sums(replicas: Sequence[Sequence[Tensor | None]], home: torch.device) -> list[Tensor | None]:
    """Return, for each position, the sum over replicas that have a tensor there, or None."""
    columns = _columns(replicas)
    users = [tuple(t is not None for t in column) for column in zip(*replicas, strict=True)]
    result: list[Tensor | None] = [None] * len(columns)
    for group in dict.fromkeys(users):
        if not any(group):
            continue
        positions = [i for i, used in enumerate(users) if used == group]
        present = list(zip(*(columns[i] for i in positions), strict=True))
        for i, total in zip(positions, reduce_lists(present, home), strict=True):
            result[i] = total
    return result
