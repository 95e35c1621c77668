"""The state of training on its way to a new member: as a whole, so that it is valid or absent.

Bytes that `torch.load(weights_only=True)` reads, which makes nothing but tensors and plain values
of them. A receiver changes nothing before it has all of them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire.ddp.group import broadcast_options
from gradwire.elastic.waiting import Wait
from gradwire.errors import DistributedError, MismatchError

__all__ = ["dump", "exchange", "load"]

PIECE_BYTES = 64 << 20
MAX_BYTES = 1 << 42


def dump(kept: Mapping[str, Any]) -> Tensor:
    """The state of what is kept, as bytes."""
    file = io.BytesIO()
    torch.save({name: value.state_dict() for name, value in kept.items()}, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def load(kept: Mapping[str, Any], data: Tensor) -> None:
    """Put bytes that `dump` made into what is kept.

    Raises:
        MismatchError: Something else is kept here, or a model differs.
    """
    states = torch.load(io.BytesIO(memoryview(data.numpy())), weights_only=True)
    if states.keys() != kept.keys():
        raise MismatchError(
            f"run.keep has {sorted(kept)} here and {sorted(states)} on the member that has the "
            "state: keep the same on all"
        )
    for name, state in states.items():
        try:
            kept[name].load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise MismatchError(
                f"the state of {name!r} does not fit here: {error}; build the same on all members"
            ) from error


def exchange(group: ProcessGroup, data: Tensor | None, wait: Wait) -> Tensor | None:
    """Broadcast bytes from rank 0, which has them; the others receive, and return, them.

    Raises:
        DistributedError: A member is lost, or the length makes no sense.
    """
    length = torch.tensor([0 if data is None else data.numel()])
    wait(_broadcast(group, length))
    size = int(length)
    if not 0 < size <= MAX_BYTES:
        raise DistributedError(f"rank 0 sends a state of {size} bytes")
    received = torch.empty(size, dtype=torch.uint8) if data is None else data
    for piece in received.split(PIECE_BYTES):
        wait(_broadcast(group, piece))
    return received if data is None else None


def _broadcast(group: ProcessGroup, tensor: Tensor) -> Work:
    return group.broadcast([tensor], broadcast_options(0))
