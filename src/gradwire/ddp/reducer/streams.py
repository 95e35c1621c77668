"""Order between autograd's streams, buckets and collectives on accelerators.

Autograd accumulates a gradient on the stream that was current when the parameter's node was made,
and calls the reducer's hooks there. `docs/design/streams.md` has the order for each buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from gradwire.ddp.buckets.bucket import WITH_STREAMS


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of a device; None if it has none."""
    return torch.accelerator.current_stream(device) if device.type in WITH_STREAMS else None


def follow(stream: torch.Stream | None) -> bool:
    """Let the current stream of the same device wait for the work queued on a stream.

    Returns:
        True if it waits: it is another stream, and not a capture that the stream has no part in.
    """
    if stream is None:
        return False
    current = current_stream(stream.device)
    if current is None or current == stream:
        return False
    # in the capture of a CUDA graph, waiting for a stream outside of it is an error
    if _is_capturing(current) and not _is_capturing(stream):
        return False
    current.wait_stream(stream)
    return True


class GradientStreams:
    """Streams on which the gradients of a reducer's parameters are accumulated.

    A node keeps its stream for as long as it exists, so each is looked up once: at every gradient
    this would take 1 µs. With TORCH_DISTRIBUTED_DEBUG=DETAIL, it is looked up and compared each
    time.

    Attributes:
        unknown: Indices of parameters whose stream is not known yet; empty on the CPU.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._devices = [p.device for p in parameters]
        self.unknown = {i for i, d in enumerate(self._devices) if d.type in WITH_STREAMS}
        self._of: dict[int, torch.Stream] = {}
        self._distinct: list[torch.Stream] = []
        self._checks = dist.get_debug_level() == dist.DebugLevel.DETAIL

    def record(self, index: int) -> None:
        """Record the current stream, from the hook of a parameter's gradient."""
        stream = current_stream(self._devices[index])
        assert stream is not None
        if stream not in self._distinct:
            self._distinct.append(stream)
        if not self._checks:
            self.unknown.discard(index)
        elif not _is_capturing(stream):  # PyTorch may move nodes to the stream of a capture
            before = self._of.setdefault(index, stream)
            assert before == stream, f"parameter {index} moved from stream {before} to {stream}"

    def join(self, device: torch.device) -> bool:
        """Let the device's current stream wait for the gradients accumulated so far.

        Needed before a bucket is filled and sent: its gradients may come on several streams, and it
        may be sent from the hook of another bucket's gradient, from a thread for another device or
        after backward.

        Returns:
            True if it waits for any: the bucket must then record its use of the gradients.
        """
        followed = [follow(s) for s in self._distinct if s.device == device]
        return any(followed)


def _is_capturing(stream: torch.Stream) -> bool:
    if stream.device.type != "cuda":
        return False
    with stream:
        return torch.cuda.is_current_stream_capturing()
