"""Collectives on Python objects, and the barrier."""

from __future__ import annotations

import pickle
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.validation import check_dense, resolve_group
from gradwire.collectives.autograd.linear_collective import apply_linear
from gradwire.collectives.ops.plans import Barrier
from gradwire.collectives.wire.backends import device_of
from gradwire.collectives.wire.movement import gather_ints


def all_gather_object(obj: Any, *, group: ProcessGroup | None = None) -> list[Any]:
    """Gather the Python objects of all ranks, on every rank.

    Objects are pickled: receive them only from ranks that run code you trust.

    Args:
        obj: Object that can be pickled.
        group: Process group; the default group if None.

    Example:
        >>> from gradwire.collectives import all_gather_object
        >>> run_ranks(lambda: all_gather_object({"rank": dist.get_rank()}), world_size=2)
        [[{'rank': 0}, {'rank': 1}], [{'rank': 0}, {'rank': 1}]]
    """
    group = resolve_group(group)
    data = bytearray(pickle.dumps(obj))
    own = torch.frombuffer(data, dtype=torch.uint8).to(device_of(group))
    sizes = [count for (count,) in gather_ints([len(own)], group)]
    pieces = wire.all_gather(own, sizes, group, blocking=True).wait().cpu().split(sizes)
    return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]


@overload
def barrier(x: None = ..., *, group: ProcessGroup | None = ...) -> None: ...
@overload
def barrier(x: Tensor, *, group: ProcessGroup | None = ...) -> Tensor: ...
def barrier(x: Tensor | None = None, *, group: ProcessGroup | None = None) -> Tensor | None:
    """Block until every rank of the group has called this function.

    Args:
        x: Tensor to copy to the result. Computation on the result runs after the barrier in
            forward, and before it in backward.
        group: Process group; the default group if None.

    Adjoint: the identity, after a barrier.

    Example:
        >>> from gradwire.collectives import barrier
        >>> run_ranks(barrier, world_size=2)
        [None, None]
    """
    group = resolve_group(group)
    if x is not None:
        check_dense(x)
        return apply_linear(Barrier(group), x)
    wire.barrier(group)
    return None
