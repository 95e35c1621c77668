"""Copy streams, pinned host memory and NCCL: used for accelerators, never for the CPU.

Between two accelerators torch's own peer copy orders both sides' streams. Between the host and an
accelerator that order is made here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["from_host", "has_streams", "nccl_broadcast", "nccl_takes", "wait_for"]


def has_streams(device: torch.device) -> bool:
    """Whether copies to and from a device can run beside other work."""
    return device.type in ("cuda", "xpu")


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """The one side stream on which a device receives copies from the host."""
    return torch.Stream(device)


def from_host(source: Tensor, target: Tensor, stream: torch.Stream | None) -> None:
    """Copy a CPU tensor into an accelerator's tensor, on a side stream.

    The copy starts after what is queued on the device's current stream, and what is queued there
    afterwards waits for the copy. From pinned memory the call returns before the copy is done: the
    source must not be written until the device has been synchronised.

    Args:
        source: On the CPU.
        target: On an accelerator; written.
        stream: The side stream, one of the target's device; a shared one if None.
    """
    side = stream or _copy_stream(target.device)
    current = torch.accelerator.current_stream(target.device)
    side.wait_stream(current)
    with side:
        target.copy_(source, non_blocking=True)
    # the target was allocated on the current stream: the allocator must not reuse its memory before
    # the side stream is done with it
    target.record_stream(side)
    current.wait_stream(side)


def wait_for(devices: set[torch.device]) -> None:
    """Block the host until the work on each device's current stream is done."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def nccl_takes(tensors: Sequence[Tensor]) -> bool:
    """Whether NCCL can copy these: on different CUDA devices, dense, contiguous and not lazy."""
    return all(
        t.is_cuda and t.numel() and not t.is_conj() and not t.is_neg() for t in tensors
    ) and bool(torch.cuda.nccl.is_available(tensors))


def nccl_broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one GPU's tensor into those of other GPUs through NCCL, on their current streams.

    It travels as bytes: NCCL knows neither complex numbers nor all integers.
    """
    flat = [t.view(-1).view(torch.uint8) for t in (source, *targets)]
    torch.cuda.nccl.broadcast(flat, root=0)
