"""Autograd functions of the adjoint pairs broadcast ↔ reduce_add and scatter ↔ gather.

Every op of this package calls one of the four functions at the end of this module. They bypass
autograd if no tensor requires a gradient, and then return the input tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from gradwire._torch import nested_forward_mode
from gradwire.devices.copying import chunk_copies, concat, copies_coalesced
from gradwire.devices.placement import own_place
from gradwire.devices.summing import summed_coalesced

BUFFER_SIZE = 10 << 20
"""Default number of bytes after which a buffer of coalesced tensors is closed."""

T = TypeVar("T")
Streams: TypeAlias = "Sequence[torch.Stream | None] | None"


def _tangent(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = cast("Any", forward_ad).unpack_dual(tensor).tangent
    return tangent


def _tracked(tensors: Sequence[Tensor]) -> list[bool]:
    """Return, for each tensor, True if it is tracked by autograd, in backward or forward mode."""
    grad = torch.is_grad_enabled()
    if forward_ad._current_level < 0:  # faster than unpacking every tensor's tangent
        return [grad and t.requires_grad for t in tensors]
    return [(grad and t.requires_grad) or _tangent(t) is not None for t in tensors]


def _all_with_tangents(tensors: Sequence[Tensor], tracked: Sequence[bool]) -> Sequence[Tensor]:
    """Return the tensors; if one has a tangent, all other tracked ones get a tangent of zeros.

    If a function returns a view of an input that has no tangent, and its jvp returns a tangent for
    it, autograd drops the tangents of all later results.
    """
    if forward_ad._current_level < 0:
        return tensors
    tangents = [_tangent(t) for t in tensors]
    if all(t is None for t in tangents):
        return tensors
    dual = cast("Callable[[Tensor, Tensor], Tensor]", forward_ad.make_dual)
    return [
        dual(t, torch.zeros_like(t)) if follow and tangent is None else t
        for t, tangent, follow in zip(tensors, tangents, tracked, strict=True)
    ]


def _split(tensors: Sequence[T], n: int) -> list[list[T]]:
    return [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]


class _Broadcast(Function):
    """Broadcast n tensors to k devices; results are ordered by replica."""

    @staticmethod
    def forward(
        buffer_size: int,
        devices: tuple[torch.device, ...],
        tracked: tuple[bool, ...],
        zeros: bool,
        *tensors: Tensor,
    ) -> Any:
        copies = copies_coalesced(tensors, devices, buffer_size)
        return tuple(t for replica in copies for t in replica)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.devices, tracked, zeros, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.like = [(t.shape, t.dtype) for t in tensors] if zeros else None
        ctx.home = tensors[0].device
        ctx.n = n = len(tensors)
        untracked = [i for i, follow in enumerate(tracked) if not follow]
        ctx.mark_non_differentiable(*(r[i] for r in _split(output, n) for i in untracked))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sums = _sums(_split(grads, ctx.n), ctx.home)
        for i, needed in enumerate(ctx.needs_input_grad[4:] if ctx.like else ()):
            if needed and sums[i] is None:
                shape, dtype = ctx.like[i]
                sums[i] = torch.zeros(shape, dtype=dtype, device=ctx.home)
        return None, None, None, None, *sums

    @staticmethod
    def jvp(
        ctx: Any, _size: None, _devices: None, _tracked: None, _zeros: None, *tangents: Any
    ) -> Any:
        given = {i: tangent for i, tangent in enumerate(tangents) if tangent is not None}
        own = own_place(ctx.home, ctx.devices)
        with nested_forward_mode():
            replicas = broadcast_lists(list(given.values()), ctx.devices)
            if own is not None:
                # the tangent of a view of the input must be a view of the input's tangent
                replicas[own] = [t.view_as(t) for t in given.values()]
        found = [dict(zip(given, replica, strict=True)) for replica in replicas]
        return tuple(replica.get(i) for replica in found for i in range(ctx.n))


def _sums(replicas: Sequence[Sequence[Tensor | None]], home: torch.device) -> list[Tensor | None]:
    """Return, for each position, the sum over replicas that have a tensor there, or None."""
    columns = [[t for t in column if t is not None] for column in zip(*replicas, strict=True)]
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


def _followed_sums(
    replicas: Sequence[Sequence[Tensor | None]], home: torch.device
) -> list[Tensor | None]:
    """Compute `_sums` with operations that every transform supports."""
    columns = [[t.to(home) for t in c if t is not None] for c in zip(*replicas, strict=True)]
    return [reduce(torch.add, column) if column else None for column in columns]


class _ReduceAdd(Function):
    """Sum k·n tensors, ordered by replica, to n sums."""

    @staticmethod
    def forward(home: torch.device, buffer_size: int, k: int, *tensors: Tensor) -> Any:
        return tuple(summed_coalesced(_split(tensors, len(tensors) // k), home, buffer_size))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.home, _, k, *tensors = inputs
        ctx.set_materialize_grads(False)
        replicas = _split(tensors, len(tensors) // k)
        ctx.like = [(t.shape, t.dtype) for t in replicas[0]]
        ctx.devices = tuple(replica[0].device for replica in replicas)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        n, needs = len(grads), ctx.needs_input_grad[3:]
        places = [r for r in range(len(ctx.devices)) if any(needs[r * n : (r + 1) * n])]
        given = {i: grad for i, grad in enumerate(grads) if grad is not None}
        result: list[Tensor | None] = [None] * len(needs)
        copies = broadcast_lists(list(given.values()), [ctx.devices[r] for r in places])
        for r, replica in zip(places, copies, strict=True):
            for i, grad in zip(given, replica, strict=True):
                result[r * n + i] = grad
        return None, None, None, *result

    @staticmethod
    def jvp(ctx: Any, _home: None, _size: None, _k: None, *tangents: Any) -> Any:
        n = len(tangents) // len(ctx.devices)
        # The sum of a single tangent is that tangent: clone it, so that in-place ops on one do not
        # affect the other.
        given = {id(tangent) for tangent in tangents}
        with nested_forward_mode():
            replicas = _split(tangents, n)
            if torch._C._are_functorch_transforms_active():  # possibly an outer transform
                sums = _followed_sums(replicas, ctx.home)
            else:
                sums = _sums(replicas, ctx.home)
            sums = [s.clone() if s is not None and id(s) in given else s for s in sums]
        return tuple(
            torch.zeros(shape, dtype=dtype, device=ctx.home)
            if s is None and (dtype.is_floating_point or dtype.is_complex)
            else s
            for s, (shape, dtype) in zip(sums, ctx.like, strict=True)
        )


class _Scatter(Function):
    """Scatter a tensor to its chunks."""

    @staticmethod
    def forward(
        devices: tuple[torch.device, ...],
        sizes: tuple[int, ...],
        dim: int,
        streams: Streams,
        tensor: Tensor,
    ) -> Any:
        return tuple(chunk_copies(tensor, devices, sizes, dim, streams))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.devices, ctx.sizes, ctx.dim, _, tensor = inputs
        ctx.home = tensor.device

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, gather_chunks(grads, ctx.dim, ctx.home)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        with nested_forward_mode():
            return scatter_chunks(tangents[-1], ctx.devices, ctx.sizes, ctx.dim)


class _Gather(Function):
    """Gather chunks to one tensor."""

    @staticmethod
    def forward(home: torch.device, dim: int, *tensors: Tensor) -> Any:
        return concat(tensors, dim, home)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.home, ctx.dim, *tensors = inputs
        ctx.devices = tuple(t.device for t in tensors)
        ctx.sizes = tuple(t.shape[ctx.dim] for t in tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        chunks = scatter_chunks(grad, ctx.devices, ctx.sizes, ctx.dim)
        return None, None, *chunks

    @staticmethod
    def jvp(ctx: Any, _home: None, _dim: None, *tangents: Tensor) -> Any:
        with nested_forward_mode():
            return gather_chunks(tangents, ctx.dim, ctx.home)


def broadcast_lists(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    buffer_size: int = BUFFER_SIZE,
    *,
    zeros: bool = False,
) -> list[list[Tensor]]:
    """Return every tensor for each device. Adjoint: the sum over the devices.

    Args:
        tensors: Tensors on one device.
        devices: List of devices.
        buffer_size: Number of bytes after which a buffer is closed.
        zeros: True to give zero gradients to tensors that no replica used, if others have
            gradients.
    """
    places = tuple(devices)

    tracked = _tracked(tensors)
    if not any(tracked):
        return copies_coalesced(tensors, places, buffer_size)
    tensors = _all_with_tangents(tensors, tracked)
    flat = _Broadcast.apply(  # type: ignore[no-untyped-call]
        buffer_size, places, tuple(tracked), zeros, *tensors
    )
    replicas = _split(flat, len(tensors))
    own = own_place(tensors[0].device, places)
    if own is not None:
        replicas[own] = [
            new if follow else t
            for new, t, follow in zip(replicas[own], tensors, tracked, strict=True)
        ]
    return replicas


def reduce_lists(
    replicas: Sequence[Sequence[Tensor]], home: torch.device, buffer_size: int = BUFFER_SIZE
) -> list[Tensor]:
    """Return, for each position, the sum over the replicas. Adjoint: a copy for each replica."""
    flat = [t for replica in replicas for t in replica]
    if not any(_tracked(flat)):
        return summed_coalesced(replicas, home, buffer_size)
    if len(replicas) == 1:
        return [t.to(home) for t in replicas[0]]
    return list(
        _ReduceAdd.apply(home, buffer_size, len(replicas), *flat)  # type: ignore[no-untyped-call]
    )


def scatter_chunks(
    tensor: Tensor,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    streams: Streams = None,
) -> tuple[Tensor, ...]:
    """Return a chunk for each device. Adjoint: gather of the chunks."""
    if not any(_tracked([tensor])):
        return tuple(chunk_copies(tensor, devices, sizes, dim, streams))
    places, lengths = tuple(devices), tuple(sizes)
    chunks: tuple[Tensor, ...] = _Scatter.apply(places, lengths, dim, streams, tensor)  # type: ignore[no-untyped-call]
    return chunks


def gather_chunks(tensors: Sequence[Tensor], dim: int, home: torch.device) -> Tensor:
    """Concatenate chunks along `dim`. Adjoint: scatter to the chunks' devices."""
    if not any(_tracked(tensors)):
        return concat(tensors, dim, home)
    whole: Tensor = _Gather.apply(home, dim, *tensors)  # type: ignore[no-untyped-call]
    return whole
