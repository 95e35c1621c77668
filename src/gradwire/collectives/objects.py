"""What is no tensor: Python objects, and the barrier."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed import ProcessGroup

from gradwire.collectives import agreement, wire
from gradwire.collectives.ranks import member
from gradwire.collectives.sizes import exchange_counts

__all__ = ["all_gather_object", "barrier"]


def all_gather_object(obj: Any, *, group: ProcessGroup | None = None) -> list[Any]:
    """All ranks' objects, on all ranks.

    Objects travel pickled: receive them only from ranks that run code you trust.

    Args:
        obj: Anything that can be pickled.
        group: The default group, if None.

    Example:
        >>> from gradwire.collectives import all_gather_object
        >>> run_ranks(lambda: all_gather_object({"rank": dist.get_rank()}), world_size=2)
        [[{'rank': 0}, {'rank': 1}], [{'rank': 0}, {'rank': 1}]]
    """
    group = member(group)
    data = bytearray(pickle.dumps(obj))
    own = torch.frombuffer(data, dtype=torch.uint8).to(agreement.device_of(group))
    sizes = exchange_counts(len(own), group)
    pieces = wire.all_gather(own, sizes, group).wait().cpu().split(sizes)
    return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]


def barrier(*, group: ProcessGroup | None = None) -> None:
    """Return when every rank of the group has called it.

    Args:
        group: The default group, if None.
    """
    wire.barrier(member(group))
