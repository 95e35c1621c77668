"""broadcast and reduce_add, each the other's adjoint, for one tensor or many tensors at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.devices import checks
from gradwire.devices.checks import check_apart, check_writable, same_place, share_memory
from gradwire.devices.copying import copy_into
from gradwire.devices.functional import BUFFER_SIZE, broadcast_lists, reduce_lists
from gradwire.devices.placement import Device, as_destination, as_devices
from gradwire.devices.summing import sum_into
from gradwire.errors import ArgumentError, ArgumentTypeError


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
    checks.check_tensor(tensor, "tensor")
    checks.check_exactly_one(devices, out)
    if devices is not None:
        replicas = broadcast_lists([tensor], as_devices(devices))
        return tuple(replica[0] for replica in replicas)
    targets = checks.as_tensor_list(() if out is None else out, "out")
    checks.check_out_without_grad(targets, [tensor])
    for i, target in enumerate(targets):
        checks.check_out(target, tensor, tensor.shape, f"out[{i}]")
    places = range(len(targets))
    sources = [tensor] * len(targets)
    check_apart(targets, sources, [f"out[{i}]" for i in places], ["tensor" for _ in places])
    with torch.no_grad():
        copy_into(targets, sources)
    return tuple(targets)


def broadcast_coalesced(
    tensors: Iterable[Tensor],
    devices: Iterable[Device],
    buffer_size: int = BUFFER_SIZE,
    *,
    detach_buffers: bool = False,
) -> list[list[Tensor]]:
    """Copy many tensors to every device, packing small ones into buffers.

    This is a differentiable `torch.nn.parallel.comm.broadcast_coalesced`, within one process.
    Between processes, use `gradwire.ddp.broadcast_coalesced` or
    `gradwire.collectives.broadcast_coalesced`.

    Args:
        tensors: Dense or sparse tensors of any shapes and dtypes, on the first of `devices`.
        devices: List of k devices. A device may be listed several times, for several copies.
        buffer_size: Size in bytes of the buffers that tensors of one dtype share.
        detach_buffers: True to give every copy its own storage. By default, a copy that outlives
            the others keeps its whole buffer, of about `buffer_size`, in memory.

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
    found = checks.as_list(tensors, "tensors")
    if not found:
        return [[] for _ in places]
    checks.as_tensor_list(found, "tensors")
    home = checks.common_device(found, "tensors")
    if home != places[0]:
        raise ArgumentError(
            f"tensors are on {home}, devices[0] is {places[0]}: list the tensors' device first"
        )
    return broadcast_lists(found, places, _buffer_bytes(buffer_size, detach_buffers))


def reduce_add(
    inputs: Iterable[Tensor], destination: Device | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Sum tensors of several devices.

    The inputs are summed in order, so that the bits of the result do not depend on the destination.

    Args:
        inputs: List of k tensors of one shape, dtype and layout, on any devices.
        destination: Device of the sum; the first input's device if None, the CPU if −1.
        out: Tensor to write the sum into instead, on any device; no gradient is recorded. It may be
            the first input, but must not share memory with the others.

    Returns:
        The sum. A single input is returned unchanged if it is on the destination.

    Adjoint: `broadcast` to the inputs' devices.

    Raises:
        ArgumentError: There are no inputs, an input does not match the first, both `out` and
            `destination` are given, or `out` does not match.

    Example:
        >>> reduce_add([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
        tensor([11., 22.])
    """
    found = checks.as_tensor_list(inputs, "inputs")
    checks.check_alike(found, "inputs")
    if out is None:
        home = as_destination(destination, found[0].device)
        return reduce_lists([[t] for t in found], home)[0]
    checks.check_no_destination(destination)
    checks.check_out(out, found[0], found[0].shape, "out")
    checks.check_out_without_grad([out], found)
    check_writable(out, "out")
    for i, tensor in enumerate(found):
        if share_memory(out, tensor) and not (i == 0 and same_place(out, tensor)):
            raise ArgumentError(
                f"out shares memory with inputs[{i}]: that input would be overwritten before it "
                "is read. Give a separate tensor, or inputs[0]"
            )
    with torch.no_grad():
        if len(found) == 1 or out.layout != torch.strided:
            out.copy_(reduce_lists([[t] for t in found], out.device)[0])
        else:
            sum_into(out, found)
    return out


def reduce_add_coalesced(
    inputs: Iterable[Iterable[Tensor]],
    destination: Device | None = None,
    buffer_size: int = BUFFER_SIZE,
    *,
    detach_buffers: bool = False,
) -> tuple[Tensor, ...]:
    """Sum many tensors of several devices, packing small ones into buffers.

    Args:
        inputs: List of k lists of n tensors. The tensors of a list are on one device; those at the
            same position have one shape and dtype. The sum at a position is sparse if the tensors
            of all lists are sparse, and dense if only some are.
        destination: Device of the sums; the first list's device if None, the CPU if −1.
        buffer_size: Size in bytes of the buffers that sums of one dtype share.
        detach_buffers: True to give every sum its own storage. By default, a sum that outlives the
            others keeps its whole buffer, of about `buffer_size`, in memory.

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
        checks.as_list(tensors, f"inputs[{i}]")
        for i, tensors in enumerate(checks.as_list(inputs, "inputs"))
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
        checks.as_tensor_list(tensors, f"inputs[{i}]")
        checks.common_device(tensors, f"inputs[{i}]")
    for j, column in enumerate(zip(*replicas, strict=True)):
        checks.check_alike(column, f"position {j} of inputs", layout=False)
    home = as_destination(destination, replicas[0][0].device)
    return tuple(reduce_lists(replicas, home, _buffer_bytes(buffer_size, detach_buffers)))


def _buffer_bytes(buffer_size: int, detach_buffers: bool) -> int:
    if not isinstance(buffer_size, int):
        raise ArgumentTypeError(f"buffer_size is {buffer_size!r}: give a number of bytes, an int")
    if buffer_size <= 0:
        raise ArgumentError(f"buffer_size is {buffer_size}: give a number of bytes > 0")
    # A buffer of one byte holds one tensor.
    return 1 if detach_buffers else buffer_size
