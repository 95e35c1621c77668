"""broadcast and reduce_add, each the other's adjoint, for one tensor and for many at once."""

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
        tensor: On any device; any dtype; dense or sparse.
        devices: The places, k of them; one device several times is several places.
        out: k tensors to write into instead, of the tensor's shape, dtype and layout, that share no
            memory. Exactly one of `devices` and `out` is given; with `out` no gradient is recorded.

    Returns:
        k tensors of the tensor's shape. At its own place (the first entry of its device) it is
        the tensor itself, or a view of it when gradients are recorded; elsewhere a copy, with the
        tensor's strides where those leave no gaps.

    Adjoint: `reduce_add` to the tensor's device.

    Raises:
        ArgumentError: Both or neither of `devices` and `out`; an entry that is no device or does
            not fit, with its index.

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
    """Copy many tensors to every device, the small ones together.

    In one process, differentiable: as `torch.nn.parallel.comm.broadcast_coalesced`. Those between
    processes are `gradwire.ddp.broadcast_coalesced` and `gradwire.collectives.broadcast_coalesced`.

    Args:
        tensors: On the first of `devices`; any shapes and dtypes, dense or sparse.
        devices: The places, k of them; one device several times is several places.
        buffer_size: Bytes. Tensors of one dtype share a buffer until it has this size.
        detach_buffers: Give every copy storage of its own. Otherwise a copy that outlives the
            others keeps the whole buffer it lies in, of about `buffer_size`, in memory.

    Returns:
        k lists of copies; the first holds the tensors themselves, or views of them when gradients
        are recorded. Each copy has a version counter of its own.

    Adjoint: `reduce_add_coalesced` to the tensors' device.

    Raises:
        ArgumentError: A tensor on another device than the first of `devices`; a size that is not
            positive.

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
            f"tensors are on {home}, devices[0] is {places[0]}: the first device is where the "
            "tensors are"
        )
    return broadcast_lists(found, places, _buffer_bytes(buffer_size, detach_buffers))


def reduce_add(
    inputs: Iterable[Tensor], destination: Device | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Add tensors of several devices.

    The sum is taken in the order of the inputs, so that its bits do not depend on the destination.

    Args:
        inputs: k tensors of one shape, dtype and layout, on any devices.
        destination: Where the sum goes; the first input's device if None, the host for −1.
        out: A tensor to write the sum into instead, on any device; no gradient is recorded. It may
            be the first input, and shares no memory with the others.

    Returns:
        The sum. One input alone is returned as it is, if it is at the destination.

    Adjoint: `broadcast` to the inputs' devices.

    Raises:
        ArgumentError: No input; an input that does not match the first; `out` and `destination`;
            an `out` that does not fit.

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
                "is read. Give a tensor of its own, or inputs[0]"
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
    """Add many tensors of several devices, the small ones together.

    Args:
        inputs: k lists of n tensors; those at one position have one shape and dtype, and a list's
            tensors are on one device. A position may be sparse: in all lists, which gives a
            sparse sum, or in some, which gives a dense one.
        destination: Where the sums go; the first list's device if None, the host for −1.
        buffer_size: Bytes. Sums of one dtype share a buffer until it has this size.
        detach_buffers: Give every sum storage of its own. Otherwise a sum that outlives the others
            keeps the whole buffer it lies in, of about `buffer_size`, in memory.

    Returns:
        n sums, each with a version counter of its own. One list alone is returned as it is.

    Adjoint: `broadcast_coalesced` to the lists' devices.

    Raises:
        ArgumentError: Lists of different lengths, tensors of one position that do not match, or a
            list on several devices, each with its index.

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
        raise ArgumentError("inputs is empty: give one list of tensors for each place")
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
        raise ArgumentTypeError(f"buffer_size is {buffer_size!r}: give an int, of bytes")
    if buffer_size <= 0:
        raise ArgumentError(f"buffer_size is {buffer_size}: give bytes, above 0")
    # A buffer that closes after one byte holds one tensor.
    return 1 if detach_buffers else buffer_size
