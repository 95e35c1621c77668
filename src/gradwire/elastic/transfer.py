"""The state of training on its way to a new member: as a whole, so that it is valid or absent.

Bytes that `torch.load(weights_only=True)` reads, which makes nothing but tensors and plain values
of them. A receiver changes nothing before it has all of them.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire.ddp.group import broadcast_options
from gradwire.elastic.waiting import Wait
from gradwire.errors import DistributedError, MismatchError, NotSupportedError

__all__ = ["dump", "exchange", "load"]

PIECE_BYTES = 64 << 20
MAX_BYTES = 1 << 42


def dump(kept: Mapping[str, Any], beside: Any = None) -> bytearray:
    """The state of what is kept, and what belongs to it beside that, as bytes."""
    file = io.BytesIO()
    torch.save(({name: value.state_dict() for name, value in kept.items()}, beside), file)
    return bytearray(file.getbuffer())


def load(kept: Mapping[str, Any], data: bytearray) -> Any:
    """Put bytes that `dump` made into what is kept.

    Returns:
        What is beside it.

    Raises:
        MismatchError: Something else is kept here, or a model differs.
        NotSupportedError: It has more than tensors and plain values.
    """
    try:
        states, beside = torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise NotSupportedError(
            f"the state that is received here has a {kind[1] if kind else 'value'}: members send "
            "each other tensors and plain values alone, so convert it, as by float(lr), or leave "
            f"it out of the state_dict of what is kept ({', '.join(sorted(kept))})"
        ) from error
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
    return beside


def exchange(group: ProcessGroup, data: bytearray | None, wait: Wait) -> bytearray:
    """Broadcast bytes from rank 0, which has them, and return them.

    Raises:
        DistributedError: A member is lost, or the length makes no sense.
    """
    length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    wait(_broadcast(group, length))
    size = int(length)
    if not 0 < size <= MAX_BYTES:
        raise DistributedError(f"rank 0 sends a state of {size} bytes")
    memory = bytearray(size) if data is None else data
    for piece in torch.frombuffer(memory, dtype=torch.uint8).split(PIECE_BYTES):
        wait(_broadcast(group, piece))
    return memory


def _broadcast(group: ProcessGroup, tensor: Tensor) -> Work:
    return group.broadcast([tensor], broadcast_options(0))
